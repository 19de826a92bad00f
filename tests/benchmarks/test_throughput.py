"""`throughput` serves the same conversations in both ways, and says what they took. No number is judged here."""

import dataclasses

import numpy as np
import pytest

from benchmarks import conversations
from benchmarks.conversations import Scripts, ServedRound, ServedTurn, serve
from benchmarks.harness import BenchError
from benchmarks.replay.workload import Exchange
from benchmarks.suites.throughput import MODES, ThroughputConfig, engine_config, fitting_scripts, make_scripts
from benchmarks.suites.throughput import measure as measured_of
from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.turns.requests import SamplingParams, Usage
from tests.benchmarks.conftest import recorded, steps

CONFIG = ThroughputConfig(
    concurrent_sessions=3,
    num_turns=3,
    answer_tokens=4,
    context_window=200,
    repeats=2,
    engine=EngineConfig(compile_cache_dir=None, max_batch_size=2, prefill_chunk_tokens=64, recompute_if_faster=False),
)


# The suite.


def test_both_ways_do_the_same_work_but_for_what_is_loaded(measure, wordless):
    result = measure("throughput", CONFIG, wordless)
    scripts = make_scripts(wordless, CONFIG).each
    new_tokens = sum(len(turn.message) for script in scripts for turn in script)
    prompt_tokens, history_tokens, hits = 0, 0, 0
    for script in scripts:
        history = 0
        for turn in script:
            prompt_tokens += history + len(turn.message)
            history_tokens += history
            hits += max(history - 1, 0)  # All but the last answer's last token.
            history += turn.num_tokens
    store, recompute = result.rows
    assert [row.mode for row in result.rows] == list(MODES)
    for row in result.rows:
        assert (row.concurrent_sessions, row.turns, row.prompt_tokens) == (3, 9, prompt_tokens)
        assert 0 < row.ttft_p50_s <= row.ttft_p99_s
        assert 0 < row.tpot_p50_s <= row.tpot_p99_s
    assert (recompute.prefill_tokens, recompute.hit_share) == (prompt_tokens, 0)
    assert store.prefill_tokens == prompt_tokens - hits > new_tokens
    assert store.hit_share == pytest.approx(hits / history_tokens)
    assert result.summary.keys() == {
        *("speedup", "tpot_p99_ratio", "same_tokens", "same_answer_share", "recompiles", "conversations")
    }
    assert (result.summary["same_tokens"], result.summary["same_answer_share"]) == (True, 1)
    assert (result.summary["recompiles"], result.summary["conversations"]) == (0, "random")
    assert result.told("throughput") == steps(3)
    result.check_spreads()


def test_ratios_are_of_the_same_round_and_answers_that_differ_show(measure, wordless, monkeypatch):
    minutes = iter([1.0, 2.0, 8.0, 2.0, 1.0, 1.0])  # store, recompute; recompute, store; store, recompute

    def serve_otherwise(engine, scripts):
        served = true_serve(engine, scripts)
        if len(scripts[0]) == 1:
            return served
        if not engine.config.store.dram_gib:
            first, *others = served.conversations
            wrong = dataclasses.replace(first[0], answer_ids=(-1,))
            served = dataclasses.replace(served, conversations=((wrong, *first[1:]), *others))
        return dataclasses.replace(served, elapsed_s=60 * next(minutes))

    true_serve = conversations.serve
    monkeypatch.setattr(conversations, "serve", serve_otherwise)
    result = measure("throughput", dataclasses.replace(CONFIG, repeats=3), wordless)
    assert result.summary["speedup"] == 2, "the median of 2, 4 and 1"
    assert (result.summary["same_tokens"], result.summary["same_answer_share"]) == (False, pytest.approx(8 / 9))
    assert [row.turns_per_minute for row in result.rows] == [9, 4.5]


def test_the_store_holds_all_conversations_or_none(model):
    store, recompute = (engine_config(CONFIG, model, mode) for mode in MODES)
    block_bytes = store.store.block_tokens * model.config.kv_bytes_per_token(itemsize=4)
    assert store.store.dram_bytes == 3 * 2 * block_bytes
    assert recompute.store.dram_bytes == 0
    assert dataclasses.replace(store, store=recompute.store) == recompute
    assert store.max_batch_size == 2


# Serving.


def test_conversations_go_on_together_and_are_answered_as_alone(model):
    rng = np.random.default_rng(0)
    scripts = [
        tuple(
            Exchange(tuple(rng.integers(model.config.vocab_size, size=size).tolist()), answer_tokens)
            for size in (5 + 7 * index, 3, 20)
        )
        for index, answer_tokens in enumerate((2, 9, 5))
    ]
    with Engine(model, engine_config(CONFIG, model, "store")) as engine:
        served = serve(engine, scripts)
        assert engine.sessions == ()
        assert [info.session_id for info in engine.stored.list()] == []
        decode_steps = engine.metrics.decode_steps
        assert decode_steps < sum(turn.answer_tokens - 1 for script in scripts for turn in script)
        for script, turns in zip(scripts, served.conversations, strict=True):
            token_ids: list[int] = []
            for said, turn in zip(script, turns, strict=True):
                assert turn.history_tokens == len(token_ids)
                token_ids += said.message
                params = SamplingParams(max_tokens=said.answer_tokens, ignore_eos=True)
                (alone,) = engine.generate([token_ids], params)
                assert list(turn.answer_ids) == alone.token_ids
                token_ids += alone.token_ids


def usage(prompt_tokens, cached_tokens, *token_times_s):
    return Usage(
        prompt_tokens=prompt_tokens,
        cached_tokens={"dram": cached_tokens},
        completion_tokens=len(token_times_s),
        ttft_s=token_times_s[0],
        queued_s=0.0,
        load_s=0.0,
        load_stall_s=0.0,
        decode_s=0.0,
        token_times_s=token_times_s,
    )


def test_what_a_row_says_of_a_round():
    turns = (
        (ServedTurn(0, (1, 2), usage(10, 0, 1.0, 1.5)), ServedTurn(12, (3, 4, 5), usage(20, 11, 2.0, 2.25, 4.0))),
        (ServedTurn(0, (6, 7), usage(30, 8, 3.0, 3.125)),),  # Of a prefix that others had: no history of its own.
    )
    measured = measured_of(ServedRound(elapsed_s=30.0, conversations=turns))
    assert measured == {
        "turns_per_minute": 6.0,
        "prompt_tokens": 60,
        "prefill_tokens": 41,
        "hit_share": 11 / 12,
        "ttft_p50_s": 2.0,
        "ttft_p99_s": pytest.approx(2.98),
        "tpot_p50_s": pytest.approx((0.25 + 0.5) / 2),
        "tpot_p99_s": pytest.approx(1.75 - 0.03 * 1.25),
    }


# What is said.


def test_a_recorded_conversation_keeps_its_lengths(model):
    answer = "the quick brown fox jumps over the lazy dog"
    turns = recorded("hello", answer, "and then?", "ok", "so", answer, "left out", answer)
    ((first, second, third),) = fitting_scripts(model, CONFIG, [turns])
    answer_ids = model.tokenizer.encode(answer, add_bos=False)
    assert len(answer_ids) > 4
    assert [turn.answer_tokens for turn in (first, second, third)] == [4, min(len(model.tokenizer.encode("ok")), 4), 4]
    assert "hello" in model.tokenizer.decode(first.message)
    assert list(second.message[: len(answer_ids) - 4]) == answer_ids[4:], "what the cap cut off comes with the next"
    assert "and then?" in model.tokenizer.decode(second.message)
    assert "fox" not in model.tokenizer.decode(third.message)
    uncapped = next(fitting_scripts(model, dataclasses.replace(CONFIG, answer_tokens=100), [turns]))
    assert [turn.answer_tokens for turn in uncapped][::2] == [len(answer_ids)] * 2
    assert sum(turn.num_tokens for turn in uncapped[:2]) == first.num_tokens + second.num_tokens
    assert uncapped[0].message == first.message


@pytest.fixture
def sharegpt(monkeypatch):
    """Puts conversations in ShareGPT's place."""

    def put(*said):
        monkeypatch.setattr(conversations, "dataset_path", lambda: None)
        monkeypatch.setattr(conversations, "load_sharegpt", lambda min_turns: iter(said))

    return put


def test_the_first_conversations_that_fit_are_taken(model, sharegpt):
    conversations = [recorded(f"hi {i}", "yes", "and", "no", "or", "ok") for i in range(5)]
    sharegpt(*conversations)
    found = make_scripts(model, CONFIG)
    assert found == Scripts(source="sharegpt", each=tuple(fitting_scripts(model, CONFIG, conversations[:3])))
    sharegpt(*conversations[:2])
    with pytest.raises(BenchError, match=r"must have 3 conversations of 3 turns that fit in a window of 200 .* got 2"):
        make_scripts(model, CONFIG)
