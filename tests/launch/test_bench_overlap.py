"""The suites of overlap measure what their rows say, on a tiny model. No number is judged here."""

import collections
import dataclasses
import json
import math

import pytest

from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.launch import bench_overlap, bench_preload, bench_save
from ca_jax.launch.bench_overlap import AdjustableLink, engine_for, in_turn, token_bytes
from ca_jax.launch.bench_overlap_rows import summarize_preload, summarize_save
from ca_jax.launch.bench_overlap_schema import (
    DepthRow,
    PreloadBenchConfig,
    PreloadRow,
    SaveBenchConfig,
    SaveRow,
    StreamRow,
)
from ca_jax.launch.bench_preload import run_preload_suite
from ca_jax.launch.bench_save import run_save_suite
from ca_jax.launch.bench_schema import BenchError
from ca_jax.pretrained import LoadedModel
from ca_jax.storage.config import StoreConfig
from ca_jax.testing.paced import Transfer
from ca_jax.testing.timers import ManualTimer
from tests import engine_kit as kit

ENGINE = EngineConfig(prefill_chunk_tokens=64, save_group_tokens=8, store=StoreConfig(block_tokens=16))
PRELOAD = PreloadBenchConfig(
    preload_prompt_tokens=60,
    preload_history_tokens=(50, 20),
    preload_read_buffers=(0, 15),
    paced_history_tokens=90,
    paced_new_tokens=9,
    load_ratios=(1.0, 2.0),
    read_buffers=(0, 1, 5),
    ahead_tokens=30,
    engine=ENGINE,
    repeats=2,
)
SAVE = SaveBenchConfig(
    save_prompt_tokens=(40, 70),
    save_answer_tokens=4,
    paced_prompt_tokens=40,
    save_ratios=(0.5, 1.0),
    stream_prompt_tokens=30,
    stream_turns=5,
    engine=ENGINE,
    repeats=3,
)
REAL_ONLY = dataclasses.replace(PRELOAD, preload_history_tokens=(50,), load_ratios=(), repeats=1)
SHORT_SAVE = dataclasses.replace(SAVE, save_prompt_tokens=(40,), save_ratios=(), stream_turns=0, repeats=1)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return kit.tiny_model()


def ignore(*_: object) -> None:
    """No progress is shown."""


class Recorded:
    """What the suites have made and moved: engines' configs, and links with what went over them at which pace."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.configs: list[EngineConfig] = []
        self.moved: list[tuple[float, Transfer]] = []
        make, set_pace, submit = bench_overlap.make_engine, AdjustableLink.set_pace, AdjustableLink.submit
        paces: dict[AdjustableLink, float] = {}

        def record_engine(model, config, **options):
            self.configs.append(config)
            return make(model, config, **options)

        def record_pace(link, bytes_per_s=math.inf):
            paces[link] = bytes_per_s
            set_pace(link, bytes_per_s)

        def record_transfer(link, transfer, copy):
            self.moved.append((paces.get(link, math.inf), transfer))
            return submit(link, transfer, copy)

        monkeypatch.setattr(bench_overlap, "make_engine", record_engine)
        monkeypatch.setattr(AdjustableLink, "set_pace", record_pace)
        monkeypatch.setattr(AdjustableLink, "submit", record_transfer)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


def check_spread(row: PreloadRow | SaveRow | StreamRow) -> None:
    assert row.spread
    for name, (least, largest) in row.spread.items():
        assert least <= getattr(row, name) <= largest


# preload


def test_every_way_to_load_is_a_row(model: LoadedModel, recorded: Recorded) -> None:
    calls = []
    result = run_preload_suite(model, PRELOAD, lambda *call: calls.append(call))
    turns = [row for row in result.rows if isinstance(row, PreloadRow)]
    real, paced = ["off", "0", "all", "recompute"], ["off", "0", "1", "all", "auto"]
    assert [(row.link, row.load_ratio, row.history_tokens, row.new_tokens, row.read_buffer) for row in turns] == [
        *(("real", None, num_history, 60 - num_history, way) for num_history in (50, 20) for way in real),
        *(("paced", ratio, 90, 9, way) for ratio in (1, 2) for way in paced),
    ]
    total = 2 * (1 + 2) + 1 + 2 * (1 + 2)
    assert calls == [("preload", done, total) for done in range(total + 1)]
    assert [config.read_buffer for config in recorded.configs] == ["off", 0, "all", "off", 0, 1, "all", "auto"]
    assert {(config.max_batch_size, config.recompute_if_faster) for config in recorded.configs} == {(1, False)}
    for row in turns:
        assert (row.same_tokens, row.recompiles) == (True, 0)
        assert row.head_start_s > 0
        check_spread(row)
        if row.read_buffer == "recompute":
            assert (row.ideal_s, row.ratio, row.hidden) == (None, None, None)
        else:
            assert row.ideal_s > 0 < row.ratio
    depths = [row for row in result.rows if isinstance(row, DepthRow)]
    assert [row.load_ratio for row in depths] == [1, 2]
    for row in depths:
        assert 1 <= row.by_rates <= 3
        assert row.measured_best in (0, 1, 3)
    assert result.summary == summarize_preload(result.rows)
    json.dumps([dataclasses.asdict(row) for row in result.rows], allow_nan=False)


def test_paced_histories_come_over_a_link_as_slow_as_the_turns_own_compute_says(
    model: LoadedModel, recorded: Recorded
) -> None:
    config = dataclasses.replace(PRELOAD, preload_history_tokens=())
    rows = [row for row in run_preload_suite(model, config, ignore).rows if isinstance(row, PreloadRow)]
    layer_bytes = 30 * token_bytes(model, ENGINE)  # Of 90 tokens in one of three layers; what measures rates is longer.
    loads = collections.Counter(pace for pace, transfer in recorded.moved if transfer.num_bytes == layer_bytes)
    assert {transfer.direction for _, transfer in recorded.moved} == {"load"}
    of_compute = len(config.load_ratios) * (bench_preload.CALIBRATIONS + config.repeats)
    assert loads.pop(math.inf) == 3 * (5 + of_compute), "all ways once, and those whose history is to be there"
    assert list(loads.values()) == [3 * 5 * config.repeats] * 2
    load_s = dict.fromkeys(row.load_s for row in rows)
    assert [3 * layer_bytes / pace for pace in loads] == pytest.approx(list(load_s))


def test_a_way_that_draws_other_tokens_shows(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    take = bench_preload._sample

    def take_wrong(name, *args):
        (ahead, first), times = take(name, *args)
        return (ahead, first + (name == "all")), times

    monkeypatch.setattr(bench_preload, "_sample", take_wrong)
    result = run_preload_suite(model, REAL_ONLY, ignore)
    assert [row.same_tokens for row in result.rows] == [False] * 4
    assert result.summary["same_tokens"] is False


def test_a_history_that_was_not_loaded_is_no_row(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_store(config, model, stored_tokens, *, context_window):
        return engine_for(config, model, [], context_window=context_window)

    monkeypatch.setattr(bench_preload, "engine_for", without_store)
    with pytest.raises(BenchError, match=r"off of 50 \+ 10 tokens wanted 50 from the store, found 0"):
        run_preload_suite(model, REAL_ONLY, ignore)


def test_a_recompute_that_finds_kv_is_no_row(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "drop_stored", lambda *_: None)
    with pytest.raises(BenchError, match=r"recompute of 50 \+ 10 tokens wanted 0 from the store, found 50"):
        run_preload_suite(model, REAL_ONLY, ignore)


def test_a_size_the_model_is_not_for_is_no_suite(model: LoadedModel) -> None:
    with pytest.raises(BenchError, match="no engine for preload at this size: context_window wanted at most"):
        run_preload_suite(model, dataclasses.replace(PRELOAD, preload_prompt_tokens=5000), ignore)
    with pytest.raises(BenchError, match="no engine for save at this size: context_window wanted at most"):
        run_save_suite(model, dataclasses.replace(SAVE, save_prompt_tokens=(5000,)), ignore)


# save


def test_every_prompt_and_ratio_is_a_row_and_so_is_the_stream(model: LoadedModel, recorded: Recorded) -> None:
    calls = []
    result = run_save_suite(model, SAVE, lambda *call: calls.append(call))
    *turns, stream = result.rows
    assert [(row.link, row.save_ratio, row.prompt_tokens, row.answer_tokens) for row in turns] == [
        ("real", None, 40, 4),
        ("real", None, 70, 4),
        ("paced", 0.5, 40, 4),
        ("paced", 1.0, 40, 4),
    ]
    total = 2 * (1 + 3) + 1 + 2 * (1 + 3) + 1 + 3
    assert calls == [("save", done, total) for done in range(total + 1)]
    three = [(False, True), (True, True), (True, False)]  # Whether there is a store, and saves beside the turn.
    assert [(config.store.dram_gib > 0, config.async_save) for config in recorded.configs] == [
        *three,
        *three,
        (False, True),
        (True, True),
    ]
    for row in result.rows:
        assert (row.same_tokens, row.recompiles) == (True, 0)
        check_spread(row)
    assert (stream.prompt_tokens, stream.answer_tokens, stream.num_turns) == (30, 4, 5)
    assert result.summary == summarize_save(result.rows)
    json.dumps([dataclasses.asdict(row) for row in result.rows], allow_nan=False)


def test_paced_saves_go_over_a_link_as_slow_as_the_turn_without_a_store_says(
    model: LoadedModel, recorded: Recorded
) -> None:
    config = dataclasses.replace(SAVE, save_prompt_tokens=(), stream_turns=0)
    rows = run_save_suite(model, config, ignore).rows
    saved_bytes = (40 + 4 - 1) * token_bytes(model, ENGINE)
    assert {transfer.direction for _, transfer in recorded.moved} == {"save"}
    moved_bytes = dict.fromkeys((pace for pace, _ in recorded.moved), 0)
    for pace, transfer in recorded.moved:
        moved_bytes[pace] += transfer.num_bytes
    assert moved_bytes.pop(math.inf) == 2 * saved_bytes  # By the two ways that save, in the round for nothing.
    assert list(moved_bytes.values()) == [2 * config.repeats * saved_bytes] * 2
    assert [saved_bytes / pace for pace in moved_bytes] == pytest.approx([row.save_s for row in rows])


def test_a_way_that_answers_otherwise_shows(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = bench_save._Bench._answer

    def answer_wrong(bench, name, *args, **options):
        answers, elapsed_s = answer(bench, name, *args, **options)
        return (answers[:-1] if name == "blocking" else answers), elapsed_s

    monkeypatch.setattr(bench_save._Bench, "_answer", answer_wrong)
    result = run_save_suite(model, SHORT_SAVE, ignore)
    assert [row.same_tokens for row in result.rows] == [False]
    assert result.summary["same_tokens"] is False


def test_a_turn_that_was_not_saved_is_no_row(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_small(config, model, stored_tokens, *, context_window):
        return engine_for(config, model, stored_tokens and [20], context_window=context_window)

    monkeypatch.setattr(bench_save, "engine_for", too_small)
    with pytest.raises(BenchError, match="async of 44 tokens wanted 43 in the store afterwards, found"):
        run_save_suite(model, SHORT_SAVE, ignore)


# What they share.


def test_the_pace_of_a_link_is_of_what_is_submitted_after_it_was_set() -> None:
    timer = ManualTimer()
    transfer = Transfer("load", "session", 0, 1, 20)
    with AdjustableLink(timer) as link:
        at_once = link.submit(transfer, lambda: "endless")
        timer.advance(0)
        assert at_once.result(0) == "endless"
        link.set_pace(10.0)
        slow = link.submit(transfer, lambda: "slow")
        timer.advance(1.9)
        assert not slow.done()
        timer.advance(0.2)
        assert slow.result(0) == "slow"
        link.set_pace()
        at_once = link.submit(transfer, lambda: "endless")
        timer.advance(0)
        assert at_once.done()
        with pytest.raises(ValueError, match="bytes_per_s wanted a positive number"):
            link.set_pace(0.0)


def test_each_way_has_every_place_in_turn() -> None:
    ways = {"a": 1, "b": 2, "c": 3}
    assert ["".join(name for name, _ in in_turn(ways, nth)) for nth in range(4)] == ["abc", "bca", "cab", "abc"]
    assert dict(in_turn(ways, 5)) == ways


def test_a_link_copies_only_what_does_not_lie_there_already() -> None:
    timer = ManualTimer()
    link = AdjustableLink(timer)
    copied: list[str] = []

    def load(key: str, start: int, stop: int) -> None:
        link.submit(Transfer("load", key, 0, 1, 8, memory=(start, stop)), lambda: copied.append(key))
        timer.advance()

    for key in ("a", "a", "b", "a", "a"):
        load(key, 100, 110)
    assert copied == ["a", "b", "a"]
    load("c", 109, 120)
    load("a", 100, 110)
    assert copied == ["a", "b", "a", "c", "a"], "what overlaps is not there any more"
    load("c", 109, 120)
    assert copied[-1] == "c"
