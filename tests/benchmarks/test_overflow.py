"""`overflow` has every method do the same turns, and says what truncation took of each. No number is judged here."""

import dataclasses
import types

import numpy as np
import pytest

from benchmarks import overflow_costs
from benchmarks.conversations import Scripts
from benchmarks.harness import Run
from benchmarks.overflow_rows import BookkeepingRow, ConversationsRow, GapRow, NextTurnRow, OverflowBenchConfig
from benchmarks.overflow_store import measure_bookkeeping
from benchmarks.replay.workload import Exchange
from benchmarks.suites import overflow as suite
from benchmarks.suites.overflow import engine_config, overflowing_scripts, summarize
from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.overflow.config import OverflowConfig
from ca_jax.serving import batch
from ca_jax.storage.config import StoreConfig
from tests.benchmarks.conftest import recorded, steps

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
def result(measure, model, scripts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "make_scripts", lambda *_: Scripts(source="here", each=scripts))
        return measure("overflow", CONFIG, model)


@pytest.mark.parametrize("method", ["ca", "of"])
def test_conversations_are_counted_as_arithmetic_has_them(result, scripts, method):
    (row,) = [row for row in result.rows if isinstance(row, ConversationsRow) and row.method == method]
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
    found = result
    kinds = [type(row) for row in found.rows]
    assert kinds == [ConversationsRow] * 2 + [GapRow] * 4 + [NextTurnRow] * 9 + [BookkeepingRow] * 2
    assert (found.summary["conversations"], found.summary["same_turns"]) == ("here", True)
    compiled = [row for row in found.rows if getattr(row, "recompiles", 0)]
    assert all(row.measured == "conversations" and row.repaired_tokens for row in compiled), (
        "repairs of other sizes alone"
    )
    assert found.summary["recompiles"] == sum(row.recompiles for row in compiled)
    assert found.summary["recomputed_tokens"]["ca"] == 0
    ca, of, *others = found.rows
    assert found.summary["of_over_ca"] == {
        "hit_rate_drop_points": 100 * (ca.hit_rate - of.hit_rate),
        "total_s_of_groups": sorted(of_s / ca_s for of_s, ca_s in zip(of.group_s, ca.group_s, strict=True)),
        **{name: getattr(of, name) / getattr(ca, name) for name in ("total_s", "prefill_tokens", "prefill_s")},
        "ttft_mean_s": of.ttft_mean_s / ca.ttft_mean_s,
    }
    assert ca.hit_rate > of.hit_rate
    assert found.summary["paper_hit_rate_drop_points"] == [17.6, 41.5, 18.1, 18.4]
    assert found.summary["extra_decode_steps"] == {
        way: max(row.extra_steps for row in others[:4] if row.method == way) for way in ("ca", "tt")
    }
    assert not summarize([ca, dataclasses.replace(of, prompt_tokens=of.prompt_tokens + 1)])["same_turns"]
    assert found.summary["first_truncation_compiles"].keys() == {"ca", "of", "tt"}
    for what, total in {"conversations": 4, "decode_gap": 8, "next_turn": 18, "bookkeeping": 4}.items():
        assert found.told(what) == steps(total)


def test_an_answer_overflows_beside_others(result):
    rows = [row for row in result.rows if isinstance(row, GapRow)]
    assert [(row.method, row.sessions) for row in rows] == [("ca", 1), ("tt", 1), ("ca", 2), ("tt", 2)]
    for row in rows:
        assert (row.context_tokens, row.dropped_tokens) == (WINDOW, SHARE)
        assert row.gap_ratio == pytest.approx(row.gap_s / row.tpot_s)
        assert row.extra_steps == pytest.approx(row.gap_ratio - 1)


def test_the_turn_behind_a_truncation_recomputes_what_its_method_says(result):
    rows = {(row.method, row.overflowed): row for row in result.rows if isinstance(row, NextTurnRow)}
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
    gap = overflow_costs.gap_sample(served, 2, np.random.default_rng(0))
    assert 1000 < gap["gap_s"] < 1100
    assert 0 < gap["tpot_s"] < 100
    assert served.sessions == ()


# Bookkeeping.


def test_discards_are_timed_in_both_tiers(tmp_path):
    config = dataclasses.replace(CONFIG, ssd_dir=str(tmp_path))
    rows = list(measure_bookkeeping(Run(config=config)))
    assert [row.tier for row in rows] == ["dram", "ssd"]
    for row in rows:
        assert (row.blocks, row.tokens, row.sessions) == (6, 6 * 128, 2)
        assert row.kept_blocks == 4, "the first for its first tokens, half a one less, and three whole ones"
        assert row.spread.keys() == {"discard_s", "conversation_s"}
        for name, (least, largest) in row.spread.items():
            assert 0 < least <= getattr(row, name) <= largest
        assert row.discard_s <= row.discard_p99_s
    assert list(tmp_path.iterdir()) == []


# What is said.


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
