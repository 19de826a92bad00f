"""What suites make of samples, by hand; what they say in conversations; links and peers that they measure with."""

import collections
import dataclasses
import importlib.util
import json
import types

import numpy as np
import pytest

from benchmarks import conversations, overflow_costs
from benchmarks.conversations import ServedRound, ServedTurn, make_contexts
from benchmarks.harness import NOISE, BenchError
from benchmarks.overflow_rows import OverflowBenchConfig
from benchmarks.peers import TransformersPeer
from benchmarks.servers import Sizes, is_installed, serving
from benchmarks.suites import overflow, throughput
from benchmarks.suites import preload as preloads
from benchmarks.suites.blend_throughput import BlendThroughputConfig, stream_turns
from benchmarks.suites.preload import COMPUTE, PreloadCell
from benchmarks.suites.save import save_row
from benchmarks.suites.throughput import ThroughputConfig, fitting_scripts, make_scripts
from ca_jax import session
from ca_jax.engine import Engine
from ca_jax.kv import costs
from ca_jax.kv.costs import PrefillRate, Rates, TransferRate
from ca_jax.overflow.config import OverflowConfig
from ca_jax.pretrained import load_model
from ca_jax.serving import batch
from ca_jax.simulate.traces.sharegpt import Conversation, Turn
from ca_jax.testing import tiny
from tests.benchmarks.suite_checks import ENGINE
from tests.launch.conftest import usage

# Loads beside computing, and saves.


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
    rows = equal.rows(rounds)
    depth = equal.depth_row(rows, rates_of(2.0, 4.0), (100, 10))
    rows += cell_of(8.0).rows(one_round(off=12.0, all=3.6, compute=4.0))
    for num_history, all_s in ((50, 8.0), (60, 6.0), (70, 5.0)):
        turns = one_round(off=10.0, all=all_s, recompute=30.0, compute=4.0)
        rows += cell_of(9.0, None, num_history).rows(turns)
    found = preloads.summarize([*rows, depth])
    assert (found["load_hidden"], found["real_load_hidden"]) == pytest.approx((0.9, 1 - 4 / 6))
    assert (found["best_ttft_vs_ideal"], found["worst_ttft_vs_ideal"]) == pytest.approx((0.9, 1.1))
    assert (found["worst_depth_error"], found["ttft_saved_by_read_buffer"]) == (1, {"all": pytest.approx(0.4)})
    assert (found["same_tokens"], found["recompiles"]) == (True, 2), "of a cell, not of each of its rows"


def saved(*rounds, answers=("a", "a", "a")):
    """A row of rounds of seconds without a store, with saves beside the turn, and at its end."""
    ways = ("off", "async", "blocking")
    made = [
        {
            way: {"seconds": seconds, "answers": answer, "recompiles": 0}
            for way, seconds, answer in zip(ways, each, answers, strict=True)
        }
        for each in rounds
    ]
    return save_row(made, save_ratio=1.0, prompt_tokens=40, answer_tokens=4)


def test_what_saving_adds_by_hand():
    # The machine slows down from round to round: shares are of a round, what is hidden is of the medians.
    row = saved((10.0, 11.0, 20.0), (20.0, 24.0, 40.0), (40.0, 40.0, 50.0))
    assert (row.turn_off_s, row.turn_async_s, row.turn_blocking_s) == (20, 24, 40)
    assert (row.async_overhead, row.blocking_overhead) == pytest.approx((0.1, 1.0))
    assert (row.async_gain, row.hidden) == pytest.approx((0.4, 1 - 4 / 20))
    assert row.spread["async_overhead"] == pytest.approx((0, 0.2))
    assert saved((10.0, 11.0, 10.0)).hidden is None
    assert saved((10.0, 11.0, 10.2)).hidden is None, "that is noise"


# Conversations.

CONFIG = ThroughputConfig(
    concurrent_sessions=3,
    num_turns=3,
    answer_tokens=4,
    context_window=200,
    engine=dataclasses.replace(ENGINE, recompute_if_faster=False),
)
OVERFLOW = OverflowBenchConfig(
    num_sessions=3,
    concurrent_sessions=2,
    context_window=128,
    conversation_tokens=240,
    max_answer_tokens=6,
    gap_sessions=(1, 2),
    next_turn_tokens=20,
    engine=dataclasses.replace(ENGINE, overflow=OverflowConfig(keep_first_tokens=4)),
)


def recorded(*texts: str) -> Conversation:
    """A conversation that the user begins."""
    turns = tuple(Turn(role=("user", "assistant")[i % 2], text=text) for i, text in enumerate(texts))
    return Conversation(id=texts[0], turns=turns)


def took(prompt_tokens, cached_tokens, *token_times_s):
    tokens = {"prompt_tokens": prompt_tokens, "cached_tokens": {"dram": cached_tokens}}
    times = {"ttft_s": token_times_s[0], "token_times_s": token_times_s}
    return usage(**tokens, **times, completion_tokens=len(token_times_s))


def test_what_a_row_says_of_a_round():
    turns = (
        (ServedTurn(0, (1, 2), took(10, 0, 1.0, 1.5)), ServedTurn(12, (3, 4, 5), took(20, 11, 2.0, 2.25, 4.0))),
        (ServedTurn(0, (6, 7), took(30, 8, 3.0, 3.125)),),  # Of a prefix that others had: no history of its own.
    )
    measured = throughput.measure(ServedRound(elapsed_s=30.0, conversations=turns))
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


def test_the_first_conversations_that_fit_are_taken(model, monkeypatch):
    said = [recorded(f"hi {i}", "yes", "and", "no", "or", "ok") for i in range(5)]
    monkeypatch.setattr(conversations, "dataset_path", lambda: None)
    monkeypatch.setattr(conversations, "load_sharegpt", lambda: iter(said))
    assert make_scripts(model, CONFIG).each == tuple(fitting_scripts(model, CONFIG, said[:3]))
    del said[2:]
    with pytest.raises(BenchError, match=r"must have 3 conversations of 3 turns that fit in a window of 200 .* got 2"):
        make_scripts(model, CONFIG)


def test_conversations_are_taken_that_outgrow_the_window_and_cut_before_their_cap(model):
    long = recorded(*("so it is " * 2,) * 14)
    short = recorded("hi", "yes")
    too_wide = recorded("hi", "yes", "no " * 200, "oh", *("so it is " * 2,) * 14)
    (script,) = overflow.overflowing_scripts(model, OVERFLOW, [short, long, too_wide])
    num_tokens = sum(turn.num_tokens for turn in script)
    assert 128 < num_tokens <= OVERFLOW.conversation_tokens
    assert 2 < len(script) < 7
    assert {turn.answer_tokens for turn in script} == {6}
    assert not list(overflow.overflowing_scripts(model, dataclasses.replace(OVERFLOW, max_turns=1), [long]))
    answer_ids = model.tokenizer.encode("so it is " * 2, add_bos=False)
    assert list(script[1].message[: len(answer_ids) - 6]) == answer_ids[6:], "what the cap cut off comes with the next"


def test_the_gap_is_where_the_truncation_is(wordless, monkeypatch):
    now = 0.0

    def perf_counter():
        nonlocal now
        now += 1
        return now

    with Engine(wordless, overflow.engine_config(OVERFLOW, wordless, "ca")) as engine:
        cut = engine._truncator.cut_running

        def cut_slowly(*arguments):
            nonlocal now
            now += 1000
            return cut(*arguments)

        for module in (batch, session):
            monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=perf_counter))
        monkeypatch.setattr(engine._truncator, "cut_running", cut_slowly)
        gap = overflow_costs.gap_sample(engine, 2, np.random.default_rng(0))
        assert engine.sessions == ()
    assert 1000 < gap["gap_s"] < 1100
    assert 0 < gap["tpot_s"] < 100


def test_a_gap_is_not_taken_of_steps_that_give_several_tokens(wordless, monkeypatch):
    config = overflow.engine_config(OVERFLOW, wordless, "ca")
    assert config.max_draft_tokens == 0
    with Engine(wordless, config) as engine:
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda: [step() for _ in range(2)])
        with pytest.raises(BenchError, match="a step must give an answer one token"):
            overflow_costs.gap_sample(engine, 1, np.random.default_rng(0))


# Contexts.


def test_chunks_of_data_are_the_whole_ones_each_once(model, tmp_path):
    texts = [{"text": letter * 30} for letter in "abcab"] + [{"text": "short"}]
    item = {"ctxs": texts, "question": "Who?", "answers": ["I"]}
    path = tmp_path / "items.json"
    path.write_text(json.dumps([item, item | {"ctxs": [{"text": "d" * 30}], "question": "What?"}]))
    contexts = make_contexts(model, 4, 20, data=str(path), seed=0)
    assert contexts.source == "data"
    assert [model.tokenizer.decode(list(chunk)) for chunk in contexts.chunks] == [letter * 20 for letter in "abcd"]
    assert ["Who?" in model.tokenizer.decode(list(ids)) for ids in contexts.questions] == [True, False]
    with pytest.raises(BenchError, match="texts must have 5 chunks of 20 tokens, got 4"):
        make_contexts(model, 5, 20, data=str(path), seed=0)


def test_without_data_and_tokenizer_chunks_are_random_and_some_are_drawn_oftener(wordless):
    contexts = make_contexts(wordless, 20, 20, data=None, seed=3)
    assert contexts == make_contexts(wordless, 20, 20, data=None, seed=3)
    assert (contexts.source, len(set(contexts.chunks))) == ("random", 20)
    config = BlendThroughputConfig(
        stream_chunks=20, context_chunks=3, fill_turns=2, round_turns=100, repeats=2, zipf_exponent=1.5
    )
    turns = stream_turns(config, contexts)
    assert len(turns) == 2 + 2 * 100
    assert all(len(set(turn.chunks)) == 3 for turn in turns), "none twice in a turn"
    counts = sorted(collections.Counter(chunk for turn in turns for chunk in turn.chunks).values())
    assert counts[-1] > 4 * counts[0]


# What is measured beside.


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "transformers"))), reason="wants torch: make setup-parity"
)
@pytest.mark.parametrize("overrides", [{}, {"tie_embeddings": True, "num_kv_heads": 4}], ids=["untied", "tied"])
def test_transformers_peer_is_the_same_model(tmp_path, overrides):
    config = tiny.tiny_config(**overrides)
    tiny.write_tiny_hf(tmp_path, config, tiny.tiny_params(config, seed=3))
    model = load_model(str(tmp_path), dtype="float32")
    peer = TransformersPeer(model)
    rng = np.random.default_rng(0)
    for length in (1, 30, 90):
        prompt = rng.integers(config.vocab_size, size=length).tolist()
        token, elapsed_s = peer.prefill(prompt)
        assert token == int(np.argmax(model.logits(prompt)[-1]))
        assert elapsed_s > 0
    with pytest.raises(RuntimeError, match="start_decode"):
        peer.decode(1)
    peer.start_decode(rng.integers(config.vocab_size, size=(2, 20)).tolist())
    assert peer.decode(3) > 0
    peer.end_decode()


def test_a_server_that_does_not_start_says_why():
    sizes = Sizes(slots=1, context_window=64, threads=1, dram_gib=0.1)
    for system, message in (
        ("ca_jax", r"ca_jax must become ready, got: .*nonesuch"),
        ("llama.cpp", "model must be an installed preset, a file or a directory, got nonesuch"),
    ):
        with pytest.raises(BenchError, match=message), serving(system, "nonesuch", sizes):
            pytest.fail("there must be no server")


def test_vllm_may_be_in_an_environment_of_its_own(tmp_path):
    """Where it is asked for and is not there, that is an error: it is not left out like what was not asked for."""
    python = tmp_path / "python"
    with pytest.raises(BenchError, match=rf"vllm_python must be an interpreter, got {python}"):
        is_installed("vllm", str(python))
    for code, has_vllm in ((1, False), (0, True)):
        python.write_text(f"#!/bin/sh\nexit {code}\n")
        python.chmod(0o755)
        if has_vllm:
            assert is_installed("vllm", str(python))
        else:
            with pytest.raises(BenchError, match=rf"of an environment with vllm, got {python}"):
                is_installed("vllm", str(python))
