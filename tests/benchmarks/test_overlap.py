"""`preload` and `save` measure what their rows say, on a tiny model; what samples come to, by hand."""

import collections
import dataclasses
import math

import pytest

from benchmarks import links
from benchmarks.harness import NOISE, BenchError
from benchmarks.links import CALIBRATIONS, AdjustableLink
from benchmarks.paced import Transfer
from benchmarks.suites import preload as preloads
from benchmarks.suites.preload import COMPUTE, DepthRow, PreloadCell, PreloadConfig, PreloadRow
from benchmarks.suites.save import SaveConfig, save_row
from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.kv import costs
from ca_jax.kv.costs import PrefillRate, Rates, TransferRate
from ca_jax.kv.layout import kv_layout
from ca_jax.storage.config import StoreConfig
from tests import engine_kit as kit
from tests.benchmarks.conftest import Measured, check_spread, steps
from tests.transfers_kit import ManualTimer

ENGINE = EngineConfig(
    prefill_chunk_tokens=64, save_group_tokens=8, compile_cache_dir=None, store=StoreConfig(block_tokens=16)
)
PRELOAD = PreloadConfig(
    preload_prompt_tokens=60,
    preload_history_tokens=(50,),
    preload_read_buffers=(0, 15),
    paced_history_tokens=90,
    paced_new_tokens=9,
    load_ratios=(1.0, 2.0),
    read_buffers=(0, 1, 5),
    ahead_tokens=30,
    engine=ENGINE,
    repeats=2,
)
SAVE = SaveConfig(
    save_prompt_tokens=(40,),
    save_answer_tokens=4,
    paced_prompt_tokens=40,
    save_ratios=(0.5, 1.0),
    stream_prompt_tokens=30,
    stream_turns=5,
    engine=ENGINE,
    repeats=3,
)
REAL_ONLY = dataclasses.replace(PRELOAD, load_ratios=(), repeats=1)
MODEL = kit.tiny_model()
TOKEN_BYTES = kv_layout(MODEL, ENGINE).token_bytes


@dataclasses.dataclass
class Recorded:
    """What a suite has left, made and moved: engines' configs, and links with what went over them at which pace."""

    found: Measured
    configs: list[EngineConfig]
    moved: list[tuple[float, Transfer]]


def recorded(measure, suite, config):
    """A suite that is run once."""
    configs, moved, paces = [], [], {}
    make, set_pace, submit = links.make_engine, AdjustableLink.set_pace, AdjustableLink.submit

    def record_engine(model, config, **options):
        configs.append(config)
        return make(model, config, **options)

    def record_pace(link, bytes_per_s=math.inf):
        paces[link] = bytes_per_s
        set_pace(link, bytes_per_s)

    def record_transfer(link, transfer, copy):
        moved.append((paces.get(link, math.inf), transfer))
        return submit(link, transfer, copy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "make_engine", record_engine)
        patch.setattr(AdjustableLink, "set_pace", record_pace)
        patch.setattr(AdjustableLink, "submit", record_transfer)
        return Recorded(measure(suite, config, MODEL), configs, moved)


# preload


@pytest.fixture(scope="module")
def preloaded(measure):
    return recorded(measure, "preload", PRELOAD)


def test_every_way_to_load_is_a_row(preloaded):
    found = preloaded.found
    turns = [row for row in found.rows if isinstance(row, PreloadRow)]
    real, paced = ["off", "0", "all", "recompute"], ["off", "0", "1", "all", "auto"]
    assert [(row.link, row.load_ratio, row.history_tokens, row.new_tokens, row.read_buffer) for row in turns] == [
        *(("real", None, 50, 10, way) for way in real),
        *(("paced", ratio, 90, 9, way) for ratio in (1, 2) for way in paced),
    ]
    assert found.told("preload") == steps(1 + 2 + 1 + 2 * (1 + 2))
    assert [config.read_buffer for config in preloaded.configs] == ["off", 0, "all", "all", "off", 0, 1, "all", "auto"]
    assert {(config.max_batch_size, config.recompute_if_faster) for config in preloaded.configs} == {(1, False)}
    for row in turns:
        assert (row.same_tokens, row.recompiles) == (True, 0)
        assert row.head_start_s > 0
        check_spread(row)
        if row.read_buffer == "recompute":
            assert (row.ideal_s, row.ratio, row.hidden) == (None, None, None)
        else:
            assert row.ideal_s > 0 < row.ratio
        if row.read_buffer == "all":
            assert row.compute_s != row.ttft_s, "it is held against an engine of its own"
    depths = [row for row in found.rows if isinstance(row, DepthRow)]
    assert [row.load_ratio for row in depths] == [1, 2]
    for row in depths:
        assert 1 <= row.by_rates <= 3
        assert row.measured_best in (0, 1, 3)


def test_paced_histories_come_over_a_link_as_slow_as_the_turns_own_compute_says(preloaded):
    rows = [row for row in preloaded.found.rows if isinstance(row, PreloadRow) and row.link == "paced"]
    layer_bytes = 30 * TOKEN_BYTES  # Of 90 tokens in one of three layers; what measures rates is longer.
    loads = collections.Counter(pace for pace, transfer in preloaded.moved if transfer.num_bytes == layer_bytes)
    assert {transfer.direction for _, transfer in preloaded.moved} == {"load"}
    of_compute = len(PRELOAD.load_ratios) * (CALIBRATIONS + PRELOAD.repeats)
    assert loads.pop(math.inf) == 3 * (5 + of_compute), "all ways once, and those whose history is to be there"
    assert list(loads.values()) == [3 * 5 * PRELOAD.repeats] * 2
    load_s = dict.fromkeys(row.load_s for row in rows)
    assert [3 * layer_bytes / pace for pace in loads] == pytest.approx(list(load_s))


def test_a_recompute_that_finds_kv_is_no_row(measure, monkeypatch):
    monkeypatch.setattr(Engine, "drop_stored", lambda *_: None)
    with pytest.raises(BenchError, match=r"recompute of 50 \+ 10 tokens must load 0 from the store, got 50"):
        measure("preload", REAL_ONLY, MODEL)


def one_round(**ttft_s):
    """A round of the ways of those names, and of read buffers `_0`, `_1`, ...; each takes that long."""
    fixed = {"head_start_s": 10.0, "load_stall_s": 0.5, "load_s": 0.25, "tokens": 1, "recompiles": 0}
    return [{name.removeprefix("_"): {"ttft_s": time_s, **fixed} for name, time_s in ttft_s.items()}]


def cell_of(load_s, load_ratio=2.0, history_tokens=100):
    return PreloadCell(4, history_tokens, 10, load_s, load_ratio)


def test_ideals_and_what_is_hidden_by_hand():
    # Of 4 layers each is loaded in 2 s and computed in 1 s.
    rounds = one_round(off=12.5, _0=9.9, _1=7.0, _2=7.0, all=4.85, auto=4.0, recompute=20.0, compute=4.0)
    rounds[0]["2"]["head_start_s"] = 3.0
    rows = {row.read_buffer: row for row in cell_of(8.0).rows(rounds)}
    assert {name: row.ideal_s for name, row in rows.items()} == {
        "off": 12.0,
        "0": 9.0,  # L0 arrives at 2, L3 at 8.
        "1": 7.0,  # L0 is there, L1..L3 are loaded from 0 on.
        "2": 6.0,  # L0 arrives before 0 and L1 at 1: L2 and L3 by 5.
        "all": 4.0,
        "auto": 4.0,
        "recompute": None,
    }
    assert {name: row.ratio for name, row in rows.items()} == pytest.approx(
        {"off": 12.5 / 12, "0": 1.1, "1": 1, "2": 7 / 6, "all": 4.85 / 4, "auto": 1, "recompute": None}
    )
    assert {name: row.hidden for name, row in rows.items()} == pytest.approx(
        {"off": 0, "0": 1 - 5.9 / 8.5, "1": 1 - 3 / 8.5, "2": 1 - 3 / 8.5, "all": 0.9, "auto": 1, "recompute": None}
    )
    assert (rows["2"].head_start_s, rows["2"].load_stall_s, rows["2"].load_s, rows["2"].compute_s) == (3, 0.5, 8, 4)


def test_a_ratio_is_of_the_rounds_and_times_are_medians():
    # The machine slows down from round to round, and then computing takes longer than loading.
    rounds = one_round(off=12.0, all=5.0, compute=4.0)
    rounds += one_round(off=16.0, all=16.8, compute=16.0)
    rounds += one_round(off=40.0, all=24.0, compute=24.0)
    off, deep = cell_of(8.0).rows(rounds)
    assert (off.ttft_s, off.compute_s, off.ideal_s) == (16, 16, 24)
    assert off.ratio == pytest.approx(1.0)
    assert off.spread["ratio"] == pytest.approx((16 / 24, 40 / 32))
    assert deep.ratio == pytest.approx(1.05)
    assert deep.spread["ttft_s"] == (5, 24)
    assert (off.hidden, deep.hidden) == (None, None), "blocking took no longer than computing alone"


def rates_of(layer_load_s, compute_s):
    """Of 4 layers: that long for each of 100 tokens, and for 10 new ones."""
    rate = TransferRate(bytes_per_s=100 * 8 / layer_load_s)
    return Rates(num_layers=4, layer_token_bytes=8, load=rate, save=rate, prefill=PrefillRate(token_s=compute_s / 10))


def test_depths_by_rates_by_arithmetic_and_by_trial():
    cell, second = cell_of(8.0), 5.0 * (1 + NOISE / 2)
    rows = cell.rows(one_round(off=12.0, _0=9.0, _1=7.0, _2=second, _3=5.0, all=5.0, auto=1.0, compute=4.0))
    found = cell.depth_row(rows, rates_of(2.0, 4.0), (100, 10))
    assert (found.by_rates, found.best, found.measured_best) == (2, 3, 2)
    shortest_s = costs.pipeline_s(2.0, 1.0, 4, 3, 10.0)
    assert shortest_s == costs.pipeline_s(2.0, 1.0, 4, 4, 10.0) < costs.pipeline_s(2.0, 1.0, 4, 2, 10.0)
    assert (found.rates_load_s, found.rates_compute_s) == pytest.approx((8, 4))
    assert (found.load_s, found.compute_s, found.load_ratio) == (8, 4, 2)
    padded = cell.depth_row(rows, rates_of(2.0, 4.0), (100, 20))
    assert (padded.by_rates, padded.rates_compute_s) == (1, pytest.approx(8)), "one layer, where nothing has to be"


def test_preload_summary_by_hand():
    equal = cell_of(4.0, 1.0)
    rounds = one_round(off=8.0, all=4.4, auto=4.0, compute=4.0)
    rounds[0][COMPUTE]["recompiles"] = 2
    equal_rows = equal.rows(rounds)
    slow_rows = cell_of(8.0).rows(one_round(off=12.0, all=3.6, compute=4.0))
    real_rows = [
        row
        for num_history, all_s in ((50, 8.0), (60, 6.0), (70, 5.0))
        for row in cell_of(9.0, None, num_history).rows(one_round(off=10.0, all=all_s, recompute=30.0, compute=4.0))
    ]
    depth = equal.depth_row(equal_rows, rates_of(2.0, 4.0), (100, 10))
    assert (depth.by_rates, depth.best) == (2, 1)
    summary = preloads.summarize([*real_rows, *equal_rows, depth, *slow_rows])
    assert list(summary)[:3] == ["ttft_saved_by_read_buffer", "real_load_hidden", "load_hidden"], "real speed first"
    assert summary["load_hidden"] == pytest.approx(0.9)
    assert summary["real_load_hidden"] == pytest.approx(1 - 4 / 6)
    assert summary["worst_ttft_vs_ideal"] == pytest.approx(1.1)
    assert summary["best_ttft_vs_ideal"] == pytest.approx(0.9)
    assert summary["worst_depth_error"] == 1
    assert summary["ttft_saved_by_read_buffer"] == {"all": pytest.approx(0.4)}
    assert (summary["same_tokens"], summary["recompiles"]) == (True, 2), "of a cell, not of each of its rows"
    other = preloads.summarize(slow_rows)
    assert (other["load_hidden"], other["real_load_hidden"], other["worst_depth_error"]) == (None, None, None)


# save


@pytest.fixture(scope="module")
def saves(measure):
    return recorded(measure, "save", SAVE)


def test_every_prompt_and_ratio_is_a_row_and_so_is_the_stream(saves):
    found = saves.found
    *turns, stream = found.rows
    assert [(row.link, row.save_ratio, row.prompt_tokens, row.answer_tokens) for row in turns] == [
        ("real", None, 40, 4),
        ("paced", 0.5, 40, 4),
        ("paced", 1.0, 40, 4),
    ]
    assert found.told("save") == steps(1 + 3 + 1 + 2 * (1 + 3) + 1 + 3)
    three = [(False, True), (True, True), (True, False)]  # Whether there is a store, and saves beside the turn.
    assert [(config.store.dram_gib > 0, config.async_save) for config in saves.configs] == [
        *three,
        *three,
        (False, True),
        (True, True),
    ]
    assert all(row.same_tokens for row in found.rows)
    found.check_spreads()
    assert (stream.prompt_tokens, stream.answer_tokens, stream.num_turns) == (30, 4, 5)


def test_paced_saves_go_over_a_link_as_slow_as_the_turn_without_a_store_says(saves):
    rows = [row for row in saves.found.rows if getattr(row, "link", None) == "paced"]
    saved_bytes = (40 + 4 - 1) * TOKEN_BYTES
    assert {transfer.direction for _, transfer in saves.moved} == {"save"}
    moved_bytes = dict.fromkeys((pace for pace, _ in saves.moved), 0)
    for pace, transfer in saves.moved:
        moved_bytes[pace] += transfer.num_bytes
    assert moved_bytes.pop(math.inf) == 2 * saved_bytes  # By the two ways that save, in the round for nothing.
    assert list(moved_bytes.values()) == [2 * SAVE.repeats * saved_bytes] * 2
    assert [saved_bytes / pace for pace in moved_bytes] == pytest.approx([row.save_s for row in rows])


def saved(*rounds, link="paced", save_ratio=1.0, answers=("a", "a", "a")):
    """A row of rounds of seconds without a store, with saves beside the turn, and at its end."""
    ways = ("off", "async", "blocking")
    made = [
        {
            way: {"seconds": seconds, "answers": answer, "recompiles": 0}
            for way, seconds, answer in zip(ways, each, answers, strict=True)
        }
        for each in rounds
    ]
    return save_row(made, link=link, save_ratio=save_ratio, prompt_tokens=40, answer_tokens=4, save_s=None)


def test_what_saving_adds_by_hand():
    # The machine slows down from round to round: shares are of a round, what is hidden is of the medians.
    row = saved((10.0, 11.0, 20.0), (20.0, 24.0, 40.0), (40.0, 40.0, 50.0))
    assert (row.turn_off_s, row.turn_async_s, row.turn_blocking_s) == (20, 24, 40)
    assert (row.async_overhead, row.blocking_overhead) == pytest.approx((0.1, 1.0))
    assert (row.async_gain, row.hidden) == pytest.approx((0.4, 1 - 4 / 20))
    assert row.spread["async_overhead"] == pytest.approx((0, 0.2))
    assert saved((10.0, 11.0, 10.0)).hidden is None
    assert saved((10.0, 11.0, 10.2)).hidden is None, "that is noise"


# Links.


def test_the_pace_of_a_link_is_of_what_is_submitted_after_it_was_set():
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
        with pytest.raises(ValueError, match="bytes_per_s"):
            link.set_pace(0.0)


def test_a_link_copies_only_what_does_not_lie_there_already():
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
