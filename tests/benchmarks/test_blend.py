"""`blend` and `blend_throughput` serve the same contexts in each way, and say what that took. No number is judged."""

import collections
import dataclasses
import json

import numpy as np
import pytest

from benchmarks.apart import ApartEngine
from benchmarks.contexts import Contexts, make_contexts
from benchmarks.engines import send_turn
from benchmarks.harness import BenchError
from benchmarks.suites import blend_throughput as streams
from benchmarks.suites.blend import BlendBenchConfig, Way, summarize
from benchmarks.suites.blend_throughput import BlendThroughputConfig, stream_turns
from ca_jax.config import BLEND_MODES, BlendConfig, EngineConfig
from ca_jax.engine import Engine
from ca_jax.storage.config import StoreConfig
from tests.benchmarks.conftest import check_spread, steps

ENGINE = EngineConfig(
    compile_cache_dir=None, max_batch_size=2, prefill_chunk_tokens=64, store=StoreConfig(block_tokens=16)
)
CONFIG = BlendBenchConfig(
    num_chunks=(3,),
    chunk_tokens=(40,),
    recompute_ratios=(0.6, 1.0),
    blend_tiers=("dram", "ssd_warm"),
    repeats=2,
    engine=ENGINE,
)
STREAM = BlendThroughputConfig(
    stream_chunks=6,
    context_chunks=3,
    context_chunk_tokens=32,
    stream_ratio=0.6,
    dram_share=1.5,
    ssd_shares=(2.5,),
    concurrent_turns=2,
    round_turns=3,
    fill_turns=2,
    context_answer_tokens=2,
    repeats=2,
    engine=ENGINE,
)
MEASURED = {
    *("ttft_s", "ttft_recompute_s", "speedup", "fetch_s", "load_s", "load_stall_s"),
    *("cached_tokens", "recomputed_tokens"),
}
BLENDED = {"ttft_reuse_s", "ideal_s", "over_ideal", "load_alone_s"}


# Time to the first token.


def test_every_ratio_and_tier_is_a_row_beside_what_it_is_compared_with(measure, wordless, disk):
    config = dataclasses.replace(CONFIG, blend_tiers=("dram", "ssd_warm", "ssd"), ssd_dir=str(disk), repeats=1)
    result = measure("blend", config, wordless)
    rows = result.rows
    assert [(row.mode, row.tier, row.recompute_ratio) for row in rows] == [
        ("recompute", None, None),
        ("prefix", "dram", None),
        *(
            ("blend" if ratio else "reuse", tier, ratio)
            for tier in ("dram", "ssd_warm", "ssd")
            for ratio in (0.0, 0.6, 1.0)
        ),
    ]
    for row in rows:
        is_blend = row.recompute_ratio is not None
        assert (row.num_chunks, row.chunk_tokens, row.repeats) == (3, 40, 1)
        assert row.spread.keys() == (MEASURED | BLENDED if is_blend else MEASURED)
        assert (row.selection, row.check_layers) == (("hkvd", 1) if is_blend else (None, None))
    assert [row.cached_tokens for row in rows] == [0, 40, *[120] * 9]
    anew = {row.recompute_ratio: row.recomputed_tokens for row in rows if row.recompute_ratio is not None}
    assert anew[0.0] == 0 < anew[0.6] < anew[1.0] == 80, "the first chunk is as it would be computed"
    assert all(row.same_token_share == 1 for row in rows if row.recompute_ratio in (None, 1.0))
    for row in rows[2:]:
        assert row.ttft_recompute_s == rows[0].ttft_s
        assert row.speedup == pytest.approx(rows[0].ttft_s / row.ttft_s)
        assert row.over_ideal == pytest.approx(row.ttft_s / row.ideal_s)
    assert result.summary == {"texts": "random", **summarize(rows)}
    assert result.summary["speedup_0.6_ssd"] == rows[-2].speedup
    assert result.told("blend") == steps(2)
    result.check_spreads()
    assert list(disk.iterdir()) == [], "what was written is removed"


def test_chunks_that_did_not_come_from_ssd_are_no_row(measure, wordless, monkeypatch):
    monkeypatch.setattr(Way, "push_out", lambda *_: None)
    with pytest.raises(BenchError, match=r"from ssd_warm of 120 .* must load 120 tokens from ssd, got 120 .* dram"):
        measure("blend", CONFIG, wordless)


@pytest.mark.parametrize("ratio", [0.0, 0.6, 1.0])
def test_compute_alone_is_the_engines_own(wordless, ratio):
    rng = np.random.default_rng(1)
    chunks = [rng.integers(wordless.config.vocab_size, size=40).tolist() for _ in range(3)]
    question, stores = chunks.pop(), []
    config = dataclasses.replace(
        ENGINE,
        context_window=256,
        blend=BlendConfig(recompute_ratio=ratio),
        store=StoreConfig(dram_gib=0.01, block_tokens=16),
    )
    with Engine(wordless, config, store_wrapper=lambda store: stores.append(store) or store) as engine:
        engine.precompute(chunks)
        engine.wait_for_saves()
        apart = ApartEngine(engine, stores[0], max_history_tokens=80)
        with apart.loaded_context(chunks) as context:
            token, elapsed_s = apart.blend(context, question, ratio)
            assert context.num_tokens == 80
        assert elapsed_s > 0 < context.load_s
        answer, _ = send_turn(engine, engine.session(), question, chunks)
        assert token == answer
        if ratio == 1:
            assert token == int(np.argmax(wordless.logits([*chunks[0], *chunks[1], *question])[-1]))
        with (
            pytest.raises(BenchError, match="a load of 2 chunks must find all of them in DRAM, got 1"),
            apart.loaded_context([chunks[0], question]),
        ):
            pytest.fail("there must be no context")
        for chunk in chunks:
            assert stores[0].drop(engine._kv.chunks.key(chunk, "")), "it is there, and not in use"
        apart.close()


# Texts.


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


def test_without_data_and_tokenizer_chunks_are_random(wordless):
    contexts = make_contexts(wordless, 5, 20, data=None, seed=3)
    assert contexts == make_contexts(wordless, 5, 20, data=None, seed=3)
    assert contexts.source == "random"
    assert len(set(contexts.chunks)) == 5
    assert contexts.questions[0]


# Throughput.


def test_every_mode_serves_the_same_stream(measure, wordless, monkeypatch):
    left, serve = {}, streams.serve

    def served(engine, turns, config):
        measured = serve(engine, turns, config)
        left[engine.config.blend.mode] = len(engine.sessions)
        return measured

    monkeypatch.setattr(streams, "serve", served)
    result = measure("blend_throughput", STREAM, wordless)
    assert left == {"blend": 0, "reuse": 0, "recompute": 0, "prefix": 8}, "those whose KV others begin with stay"
    assert [row.mode for row in result.rows] == list(BLEND_MODES)
    by_mode = {row.mode: row for row in result.rows}
    for row in result.rows:
        assert (row.turns, row.dram_share, row.ssd_share) == (3, 1.5, 2.5)
        check_spread(row)
        assert 0 < row.ttft_p50_s <= row.ttft_p95_s
        assert (row.recompute_ratio, row.selection) == ((0.6, "hkvd") if row.mode == "blend" else (None, None))
    recompute, reuse = by_mode["recompute"], by_mode["reuse"]
    assert (recompute.hit_share, recompute.computed_share, recompute.speedup) == (0, 1, 1)
    assert by_mode["prefix"].speedup_over_prefix == 1
    assert reuse.hit_share > 0
    assert reuse.computed_share < by_mode["blend"].computed_share < 1
    assert result.summary == {
        "texts": "random",
        "blend_over_prefix": by_mode["blend"].speedup_over_prefix,
        "blend_over_recompute": by_mode["blend"].speedup,
        "recompiles": sum(row.recompiles for row in result.rows),
    }
    assert result.told("blend_throughput") == steps(3)


def test_some_chunks_are_drawn_oftener_and_none_twice_in_a_turn():
    contexts = Contexts(source="random", chunks=tuple((i,) for i in range(20)), questions=((98,), (99,)))
    config = dataclasses.replace(STREAM, stream_chunks=20, round_turns=100, zipf_exponent=1.5)
    turns = stream_turns(config, contexts)
    assert len(turns) == 2 + 2 * 100
    assert all(len(set(turn.chunks)) == 3 for turn in turns)
    assert [turn.question for turn in turns[:3]] == [(98,), (99,), (98,)]
    counts = sorted(collections.Counter(chunk for turn in turns for chunk in turn.chunks).values())
    assert counts[-1] > 4 * counts[0]
    assert turns == stream_turns(config, contexts)
