"""`overflow` has every method do the same turns, and says what truncation took of each. No number is judged here."""

import dataclasses
import json
import os
import subprocess
import sys
import types

import jax
import matplotlib.image
import numpy as np
import pytest

from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.launch import bench_overflow, bench_overflow_costs, bench_scripts
from ca_jax.launch.bench_overflow import engine_config, run_overflow_suite, summarize_overflow
from ca_jax.launch.bench_overflow_bookkeeping import measure_bookkeeping
from ca_jax.launch.bench_overflow_plot import plot_overflow
from ca_jax.launch.bench_overflow_schema import (
    BookkeepingRow,
    ConversationsRow,
    GapRow,
    NextTurnRow,
    OverflowBenchConfig,
)
from ca_jax.launch.bench_overflow_scripts import make_overflow_scripts, overflowing_scripts
from ca_jax.launch.bench_schema import BenchError
from ca_jax.launch.bench_scripts import Scripts
from ca_jax.overflow.config import OverflowConfig
from ca_jax.pretrained import LoadedModel, load_model
from ca_jax.replay.scripts import Exchange
from ca_jax.serving import batch
from ca_jax.storage.config import StoreConfig
from ca_jax.storage.store import AttentionStore
from ca_jax.traces.sharegpt import Conversation, Turn

WINDOW = 128
SHARE = WINDOW // 2
KEEP_FIRST = 4
CONFIG = OverflowBenchConfig(
    num_sessions=3,
    concurrent_sessions=2,
    context_window=WINDOW,
    conversation_tokens=240,
    max_answer_tokens=6,
    bookkeeping_blocks=6,
    bookkeeping_sessions=2,
    gap_sessions=(1, 2),
    next_turn_tokens=20,
    repeats=1,
    engine=EngineConfig(
        compile_cache_dir=None,
        max_batch_size=2,
        prefill_chunk_tokens=64,
        overflow=OverflowConfig(keep_first_tokens=KEEP_FIRST),
        store=StoreConfig(block_tokens=16),
    ),
)


@pytest.fixture(scope="module")
def model(tiny_model) -> LoadedModel:
    return load_model(str(tiny_model), dtype="float32")


@pytest.fixture(scope="module")
def wordless(model) -> LoadedModel:
    """The same without a tokenizer: its conversations are random tokens."""
    return dataclasses.replace(model, tokenizer=None)


def message(model, num_tokens):
    """The same tokens nowhere else."""
    return tuple(np.random.default_rng(num_tokens).integers(model.config.vocab_size, size=num_tokens).tolist())


@pytest.fixture(scope="module")
def scripts(model):
    """Overflows by a message and in the middle of an answer, and by a message that leaves room for nothing else."""
    sizes = ([60, 50, 40, 20], [100, 25, 70], [30, 120])  # The second's second answer is to fill the window.
    return tuple(tuple(Exchange(message(model, size), 6) for size in each) for each in sizes)


@dataclasses.dataclass
class Expected:
    """What a method should do."""

    history_turns: int = 0
    hits: int = 0
    prompt_overflows: int = 0
    answer_overflows: int = 0
    prefill_tokens: int = 0
    history_tokens: int = 0
    loaded_tokens: int = 0


def expected(scripts, *, recomputes):
    """By arithmetic alone: tokens of a context, and how many of the first of them are stored."""
    found = Expected()
    for script in scripts:
        held = stored = 0
        for turn in script:
            found.history_turns += held > 0
            if held + len(turn.message) >= WINDOW:
                found.prompt_overflows += 1
                stop = min(KEEP_FIRST + SHARE, held)  # Of what leaves; the last token held may be among it.
                left = held - stop + KEEP_FIRST
                fits = left + len(turn.message) + 1 <= WINDOW
                stored = KEEP_FIRST + max(stored - stop, 0) if fits and not recomputes else 0
                held = left if fits else 0
            found.hits += stored > KEEP_FIRST
            found.history_tokens += held
            found.loaded_tokens += stored
            found.prefill_tokens += held - stored + len(turn.message)
            held += len(turn.message) + turn.answer_tokens
            if held > WINDOW:  # It was full before its last token was drawn.
                found.answer_overflows += 1
                held -= SHARE
                in_slot = WINDOW - 1 - SHARE
                found.prefill_tokens += in_slot if recomputes else 0
            stored = held - 1  # The last token was drawn and never run.
    return found


# The suite.


@pytest.fixture(scope="module")
def result(model, scripts):
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_overflow, "make_overflow_scripts", lambda *_: Scripts(source="here", each=scripts))
        return run_overflow_suite(model, CONFIG, lambda *call: calls.append(call)), calls


@pytest.mark.parametrize("method", ["ca", "of"])
def test_conversations_are_counted_as_arithmetic_has_them(result, scripts, method):
    (row,) = [row for row in result[0].rows if isinstance(row, ConversationsRow) and row.method == method]
    wanted = expected(scripts, recomputes=method == "of")
    assert min(wanted.answer_overflows, wanted.prompt_overflows) > 0, "what is served has both"
    assert (row.sessions, row.turns, row.history_turns) == (3, 9, wanted.history_turns)
    assert row.answer_overflows == wanted.answer_overflows
    assert row.overflows == row.metrics["truncations"] == wanted.answer_overflows + wanted.prompt_overflows
    assert (row.hits, row.hit_rate) == (wanted.hits, wanted.hits / wanted.history_turns)
    assert row.prefill_tokens == wanted.prefill_tokens
    assert row.history_tokens == wanted.history_tokens
    assert row.loaded_share == pytest.approx(wanted.loaded_tokens / wanted.history_tokens)
    assert row.metrics["invalidated_histories"] == (row.overflows if method == "of" else 0)
    assert len(row.group_s) == 2, "of two conversations, and of one"
    assert row.total_s == sum(row.group_s)
    assert 0 < row.prefill_s < row.total_s
    assert 0 < row.ttft_p50_s <= row.ttft_p99_s
    assert row.overflow_ttft_p50_s > 0


def test_rows_and_summary_are_of_all_parts(result):
    found, calls = result
    kinds = [type(row) for row in found.rows]
    assert kinds == [ConversationsRow] * 2 + [GapRow] * 4 + [NextTurnRow] * 6 + [BookkeepingRow] * 2
    assert (found.summary["conversations"], found.summary["same_turns"]) == ("here", True)
    assert found.summary["recompiles"] == 0
    assert found.summary["recomputed_tokens"]["ca"] == 0
    assert found.summary["of_over_ca"]["hit_rate_drop_points"] > 0
    assert found.summary["first_truncation_compiles"].keys() == {"ca", "of", "tt"}
    for what, total in {"conversations": 4, "decode_gap": 8, "next_turn": 12, "bookkeeping": 4}.items():
        assert [call for call in calls if call[0] == what] == [(what, done, total) for done in range(total + 1)]


def test_an_answer_overflows_beside_others(result):
    rows = [row for row in result[0].rows if isinstance(row, GapRow)]
    assert [(row.method, row.sessions) for row in rows] == [("ca", 1), ("tt", 1), ("ca", 2), ("tt", 2)]
    for row in rows:
        assert (row.context_tokens, row.dropped_tokens) == (WINDOW, SHARE)
        assert row.gap_ratio == pytest.approx(row.gap_s / row.tpot_s)
        assert row.extra_steps == pytest.approx(row.gap_ratio - 1)


def test_the_turn_behind_a_truncation_recomputes_what_its_method_says(result):
    rows = {(row.method, row.overflowed): row for row in result[0].rows if isinstance(row, NextTurnRow)}
    history_tokens = WINDOW - 10 - SHARE
    for method in ("ca", "of", "tt"):
        by_message, by_answer = rows[method, "prompt"], rows[method, "answer"]
        assert by_message.history_tokens == history_tokens
        assert by_message.recomputed_tokens == (0 if method == "ca" else history_tokens)
        assert by_answer.history_tokens == WINDOW + 16 - SHARE - 1
        assert by_answer.recomputed_tokens == 0
        for row in (by_message, by_answer):
            assert (row.new_tokens, row.prefill_tokens) == (20, 20 + row.recomputed_tokens)
            assert row.ratio == pytest.approx(row.ttft_s / rows["ca", row.overflowed].ttft_s)


def test_parts_may_be_left_out(wordless):
    config = dataclasses.replace(
        CONFIG, num_sessions=0, bookkeeping_sessions=0, gap_methods=(), next_turn_methods=("tt",)
    )
    result = run_overflow_suite(wordless, config, lambda *_: None)
    assert [(row.method, row.overflowed, row.ratio) for row in result.rows] == [
        ("tt", "prompt", None),
        ("tt", "answer", None),
    ]
    assert result.summary.keys() == {"recomputed_tokens", "recompiles", "first_truncation_compiles"}


def test_other_truncations_than_turns_tell_of_are_no_row(wordless, monkeypatch):
    true_counts = bench_overflow._counts
    monkeypatch.setattr(bench_overflow, "_counts", lambda engine: {**true_counts(engine), "truncations": 0})
    config = dataclasses.replace(CONFIG, bookkeeping_sessions=0, gap_methods=(), next_turn_methods=())
    with pytest.raises(BenchError, match=r"wanted \d+ truncations of ca, found 0"):
        run_overflow_suite(wordless, config, lambda *_: None)


def test_what_no_engine_can_hold_is_said(wordless):
    config = dataclasses.replace(CONFIG, context_window=9000, conversation_tokens=10000)
    with pytest.raises(BenchError, match=r"no engine for overflow at this size: .*context_window"):
        run_overflow_suite(wordless, config, lambda *_: None)


def test_engines_differ_in_their_method_alone(model):
    ca, of = (engine_config(CONFIG, model, method) for method in ("ca", "of"))
    assert (ca.overflow.method, of.overflow.method) == ("ca", "of")
    assert dataclasses.replace(of, overflow=ca.overflow) == ca
    assert (ca.context_window, ca.recompute_if_faster) == (WINDOW, False)
    block_bytes = 16 * model.config.kv_bytes_per_token(itemsize=4)
    assert ca.store.dram_bytes >= 2 * (WINDOW // 16) * block_bytes


# The gap.


@pytest.fixture
def served(wordless):
    with Engine(wordless, engine_config(CONFIG, wordless, "ca")) as engine:
        yield engine


def test_the_gap_is_where_the_truncation_is(served, monkeypatch):
    now = 0.0

    def perf_counter():
        nonlocal now
        now += 1
        return now

    cut = served._truncator.cut_running

    def cut_slowly(*arguments):
        nonlocal now
        now += 1000
        return cut(*arguments)

    monkeypatch.setattr(batch, "time", types.SimpleNamespace(perf_counter=perf_counter))
    monkeypatch.setattr(served._truncator, "cut_running", cut_slowly)
    gap = bench_overflow_costs._gap_sample(served, 2, np.random.default_rng(0))
    assert 1000 < gap.gap_s < 1100
    assert 0 < gap.tpot_s < 100
    assert served.sessions == ()


def test_an_answer_that_does_not_overflow_is_no_sample(wordless):
    config = dataclasses.replace(engine_config(CONFIG, wordless, "ca"), overflow=None)
    with Engine(wordless, config) as engine, pytest.raises(BenchError, match="found 0 tokens dropped"):
        bench_overflow_costs._gap_sample(engine, 1, np.random.default_rng(0))


def test_what_the_first_truncation_compiles_is_counted(served, monkeypatch):
    served.warmup()
    cut = served._truncator.cut_running

    def cut_and_compile(*arguments):
        jax.jit(lambda x: x + 1)(1.0)  # A function that nobody has seen.
        return cut(*arguments)

    assert bench_overflow_costs.first_truncations(served, CONFIG, np.random.default_rng(0)) == 0
    monkeypatch.setattr(served._truncator, "cut_running", cut_and_compile)
    assert bench_overflow_costs.first_truncations(served, CONFIG, np.random.default_rng(0)) >= 2, "two answers overflow"


# Bookkeeping.


@pytest.mark.parametrize("driver", ["zarr3", "raw"])
def test_discards_are_timed_in_both_tiers(tmp_path, driver):
    config = dataclasses.replace(CONFIG, ssd_dir=str(tmp_path), ssd_driver=driver)
    rows = measure_bookkeeping(config, lambda *_: None)
    assert [row.tier for row in rows] == ["dram", "ssd"]
    for row in rows:
        assert (row.blocks, row.tokens, row.sessions) == (6, 6 * 128, 2)
        assert row.kept_blocks == 4, "the first for its first tokens, half a one less, and three whole ones"
        assert row.spread.keys() == {"discard_s", "conversation_s"}
        for name, (least, largest) in row.spread.items():
            assert 0 < least <= getattr(row, name) <= largest
        assert row.discard_s <= row.discard_p99_s
    assert list(tmp_path.iterdir()) == []


def test_a_discard_that_keeps_other_tokens_is_no_row(monkeypatch):
    true_discard = AttentionStore.discard

    def discard_nothing(store, key, discarded, note=None):
        return true_discard(store, key, np.zeros_like(discarded), note=note)

    monkeypatch.setattr(AttentionStore, "discard", discard_nothing)
    with pytest.raises(BenchError, match="wanted 384 tokens of 768 after a discard, found 768"):
        measure_bookkeeping(CONFIG, lambda *_: None)


# What the rows come to.


def conversations_row(method, **changes):
    values = {
        "sessions": 60,
        "turns": 300,
        "overflows": 70,
        "answer_overflows": 3,
        "history_turns": 240,
        "hits": 180,
        "hit_rate": 0.75,
        "history_tokens": 100_000,
        "loaded_share": 0.7,
        "prompt_tokens": 150_000,
        "prefill_tokens": 60_000,
        "repaired_tokens": 0,
        "prefill_s": 30.0,
        "ttft_mean_s": 0.5,
        "ttft_p50_s": 0.4,
        "ttft_p99_s": 2.0,
        "overflow_ttft_p50_s": None,
        "total_s": 60.0,
        "group_s": (20.0, 40.0),
        "metrics": {"truncations": 70},
        "recompiles": 1,
    }
    return ConversationsRow(method=method, **(values | changes))


def gap_row(method, sessions, extra_steps):
    times = {"tpot_s": 0.04, "gap_s": 0.04 * (1 + extra_steps), "gap_ratio": 1 + extra_steps}
    return GapRow(
        method=method,
        sessions=sessions,
        context_tokens=1024,
        dropped_tokens=512,
        extra_steps=extra_steps,
        recompiles=0,
        spread={},
        **times,
    )


def test_methods_are_held_against_ca():
    rows = [
        conversations_row("ca", hit_rate=1.0, prefill_tokens=40_000, prefill_s=20.0, ttft_mean_s=0.25),
        conversations_row("of", total_s=90.0, group_s=(40.0, 50.0)),
        *(gap_row("ca", 1, 0.5), gap_row("tt", 1, 9.0), gap_row("ca", 4, 0.25)),
    ]
    summary = summarize_overflow(rows)
    assert summary["of_over_ca"] == {
        "hit_rate_drop_points": 25.0,
        "total_s": 1.5,
        "total_s_of_groups": [1.25, 2.0],
        "prefill_tokens": 1.5,
        "prefill_s": 1.5,
        "ttft_mean_s": 2.0,
    }
    assert summary["paper_hit_rate_drop_points"] == [17.6, 41.5, 18.1, 18.4]
    assert summary["extra_decode_steps"] == {"ca": 0.5, "tt": 9.0}
    assert (summary["same_turns"], summary["recompiles"]) == (True, 2)


def test_methods_that_had_other_turns_show():
    rows = [conversations_row("ca"), conversations_row("tt", prompt_tokens=150_001)]
    assert summarize_overflow(rows)["same_turns"] is False


def test_a_figure_has_the_conversations(tmp_path):
    rows = [dataclasses.asdict(row) for row in (conversations_row("ca"), conversations_row("of"), gap_row("ca", 1, 0))]
    path = tmp_path / "new" / "overflow.png"
    plot_overflow(path, rows, title="tiny", caption="here")
    assert matplotlib.image.imread(path).ndim == 3
    with pytest.raises(ValueError, match="wanted rows of conversations to draw, found none"):
        plot_overflow(path, rows[2:], title="tiny", caption="here")


# What is said.


def recorded(*texts):
    """A conversation that the user begins."""
    return tuple(Turn(role=("user", "assistant")[i % 2], text=text) for i, text in enumerate(texts))


def test_conversations_are_taken_that_outgrow_the_window_and_cut_before_their_cap(model):
    long = recorded(*("so it is " * 2,) * 14)
    short = recorded("hi", "yes")
    too_wide = recorded("hi", "yes", "no " * 200, "oh", *("so it is " * 2,) * 14)
    (script,) = overflowing_scripts(model, CONFIG, [short, long, too_wide])
    num_tokens = sum(turn.num_tokens for turn in script)
    assert WINDOW < num_tokens <= CONFIG.conversation_tokens
    assert 2 < len(script) < 7
    assert {turn.answer_tokens for turn in script} == {6}
    assert not list(overflowing_scripts(model, dataclasses.replace(CONFIG, max_turns=1), [long]))
    answer_ids = model.tokenizer.encode("so it is " * 2, add_bos=False)
    assert list(script[1].message[: len(answer_ids) - 6]) == answer_ids[6:], "what the cap cut off comes with the next"


def test_too_few_conversations_are_no_rows(model, monkeypatch):
    conversation = Conversation(id="x", turns=recorded(*("so it is " * 2,) * 14))
    monkeypatch.setattr(bench_scripts, "is_installed", lambda: True)
    monkeypatch.setattr(bench_scripts, "load_sharegpt", lambda min_turns: iter([conversation] * 2))
    found = make_overflow_scripts(model, dataclasses.replace(CONFIG, num_sessions=2))
    assert (found.source, len(found.each)) == ("sharegpt", 2)
    with pytest.raises(BenchError, match="wanted 3 conversations that outgrow a window of 128 tokens, found 2"):
        make_overflow_scripts(model, CONFIG)


def test_without_data_set_or_tokenizer_conversations_are_random_and_outgrow_the_window(model, wordless, monkeypatch):
    monkeypatch.setattr(bench_scripts, "is_installed", lambda: False)
    config = dataclasses.replace(CONFIG, num_sessions=20, conversation_tokens=140)
    found = make_overflow_scripts(model, config)
    assert found == make_overflow_scripts(wordless, config)
    assert found != make_overflow_scripts(wordless, dataclasses.replace(config, seed=1))
    assert (found.source, len(found.each)) == ("random", 20)
    for script in found.each:
        assert WINDOW < sum(turn.num_tokens for turn in script) <= 140
        assert all(turn.message and turn.answer_tokens == 6 for turn in script)


# The command.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overflow_methods": ("ca", "kept")}, "overflow_methods wanted different ones of ca, tt, of, nkvt"),
        ({"gap_methods": ("ca", "ca")}, "gap_methods wanted different ones of"),
        ({"overflow_methods": ()}, "overflow_methods wanted at least one, found none"),
        (
            {"num_sessions": 0, "bookkeeping_sessions": 0, "gap_methods": (), "next_turn_methods": ()},
            "to measure, found none",
        ),
        ({"conversation_tokens": 134}, "conversation_tokens wanted at least 135, a window and another turn, found 134"),
        ({"gap_sessions": (1, 3)}, r"gap_sessions wanted numbers from 1 to the max_batch_size of 2, found \[1, 3\]"),
        ({"max_answer_tokens": 65}, "max_answer_tokens wanted at most the 64 tokens that leave at once, found 65"),
        ({"next_turn_tokens": 3}, "next_turn_tokens wanted at least 4, found 3"),
        ({"context_window": 100}, "context_window wanted at least 128, found 100"),
        ({"repeats": 0}, "repeats wanted at least 1, found 0"),
        ({"engine": EngineConfig(overflow=None)}, "engine.overflow wanted an OverflowConfig, found None"),
    ],
)
def test_config_refuses_what_cannot_be_measured(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def bench(tiny_model, cache_dir, *arguments):
    """Runs the command itself: flags of two launch modules cannot be defined in one process."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache_dir), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "ca_jax.launch.bench", f"--model={tiny_model}", "--suite=overflow", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_command_writes_json_table_and_figure(tiny_model, tmp_path):
    out, plot = tmp_path / "new" / "overflow.json", tmp_path / "figures" / "overflow.png"
    sizes = ["--context_window=128", "--conversation_tokens=240", "--prefill_chunk_tokens=64", "--max_batch_size=2"]
    counts = ["--num_sessions=2", "--bookkeeping_sessions=1", "--bookkeeping_blocks=4", "--gap_sessions=1"]
    counts += ["--next_turn_methods=ca", "--next_turn_tokens=20", "--repeats=1", "--keep_first_tokens=2"]
    written = [f"--json_out={out}", f"--plot_out={plot}"]
    done = bench(tiny_model, tmp_path / "cache", *sizes, *counts, *written)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["config"].keys() == {field.name for field in dataclasses.fields(OverflowBenchConfig)}
    assert report["config"]["engine"]["overflow"]["keep_first_tokens"] == 2
    kinds = {"conversations": ConversationsRow, "decode_gap": GapRow, "next_turn": NextTurnRow}
    kinds["bookkeeping"] = BookkeepingRow
    assert {row["measured"] for row in report["rows"]} == kinds.keys()
    for row in report["rows"]:
        assert row.keys() == {field.name for field in dataclasses.fields(kinds[row["measured"]])}
    assert report["summary"]["same_turns"] is True
    for kind in kinds:
        assert f"{kind}, {tiny_model.name}" in done.stdout
    assert matplotlib.image.imread(plot).ndim == 3
    assert f"written to {out}, {plot}" in done.stdout.replace("\n", "")


def test_command_draws_no_figure_without_conversations(tiny_model, tmp_path):
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    done = bench(tiny_model, tmp_path / "cache", "--num_sessions=0", f"--json_out={out}", f"--plot_out={plot}")
    assert done.returncode == 1
    assert "error: plot_out wanted num_sessions of at least 1 to draw, found 0" in done.stderr
    assert not out.exists()
