"""`blend` and `blend_throughput` serve the same contexts in each way, and say what that took. No number is judged."""

import collections
import dataclasses
import json

import numpy as np
import pytest

from ca_jax.config import BLEND_MODES, BlendConfig, EngineConfig
from ca_jax.engine import Engine
from ca_jax.launch import bench_blend_throughput
from ca_jax.launch.bench_apart import ApartEngine
from ca_jax.launch.bench_blend import _Way, run_blend_suite, summarize_blend
from ca_jax.launch.bench_blend_schema import BlendBenchConfig, BlendThroughputBenchConfig
from ca_jax.launch.bench_blend_texts import Contexts, make_contexts
from ca_jax.launch.bench_blend_throughput import run_blend_throughput_suite, stream_turns
from ca_jax.launch.bench_disk import can_drop
from ca_jax.launch.bench_schema import BenchError
from ca_jax.launch.bench_suites import send_turn
from ca_jax.pretrained import LoadedModel, load_model
from ca_jax.storage.config import StoreConfig

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
STREAM = BlendThroughputBenchConfig(
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
MEASURED = {"ttft_s", "ttft_recompute_s", "speedup", "fetch_s", "load_s", "load_stall_s"}
BLENDED = {"ttft_reuse_s", "ideal_s", "over_ideal", "load_alone_s"}


@pytest.fixture(scope="module")
def model(tiny_model) -> LoadedModel:
    return load_model(str(tiny_model), dtype="float32")


@pytest.fixture(scope="module")
def wordless(model) -> LoadedModel:
    """The same without a tokenizer: its chunks are random tokens."""
    return dataclasses.replace(model, tokenizer=None)


@pytest.fixture
def disk(tmp_path):
    if not can_drop(tmp_path):
        pytest.skip("wants temporary files on a disk whose page cache can be emptied")
    return str(tmp_path / "disk")


def measure(model, config, progress=lambda *_: None):
    return run_blend_suite(model, config, progress)


# Time to the first token.


def test_every_ratio_and_tier_is_a_row_beside_what_it_is_compared_with(wordless, disk, tmp_path):
    calls = []
    config = dataclasses.replace(CONFIG, blend_tiers=("dram", "ssd_warm", "ssd"), ssd_dir=disk)
    result = measure(wordless, config, lambda *call: calls.append(call))
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
        assert (row.num_chunks, row.chunk_tokens, row.repeats) == (3, 40, 2)
        assert row.recompiles == 0
        assert row.spread.keys() == (MEASURED | BLENDED if is_blend else MEASURED)
        for name, (least, largest) in row.spread.items():
            assert 0 <= least <= getattr(row, name) <= largest
        assert (row.selection, row.check_layers) == (("hkvd", 1) if is_blend else (None, None))
    assert [row.cached_tokens for row in rows] == [0, 40, *[120] * 9]
    anew = {row.recompute_ratio: row.recomputed_tokens for row in rows if row.recompute_ratio is not None}
    assert anew[0.0] == 0 < anew[0.6] < anew[1.0] == 80, "the first chunk is as it would be computed"
    assert all(row.same_token_share == 1 for row in rows if row.recompute_ratio in (None, 1.0))
    assert rows[0].speedup == 1
    assert result.summary == {"texts": "random", **summarize_blend(rows)}
    assert result.summary["speedup_0.6_ssd"] == rows[-2].speedup
    assert [call for call in calls if call[0] == "blend"] == [("blend", done, 3) for done in range(4)]
    assert list((tmp_path / "disk").iterdir()) == [], "what was written is removed"


def test_ratios_are_of_a_round(wordless):
    rows = measure(wordless, dataclasses.replace(CONFIG, blend_tiers=("dram",), repeats=1)).rows
    recompute, _, reuse, *blends = rows
    for row in (reuse, *blends):
        assert row.ttft_recompute_s == recompute.ttft_s
        assert row.speedup == pytest.approx(recompute.ttft_s / row.ttft_s)
        assert row.over_ideal == pytest.approx(row.ttft_s / row.ideal_s)
        assert row.ttft_reuse_s == reuse.ttft_s


def test_chunks_that_did_not_come_from_ssd_are_no_row(wordless, monkeypatch):
    monkeypatch.setattr(_Way, "push_out", lambda *_: None)
    with pytest.raises(
        BenchError, match=r"reuse from ssd_warm of 120 .* wanted 120 tokens from ssd, found 120 .* dram"
    ):
        measure(wordless, CONFIG)


def test_a_way_that_draws_another_token_shows(wordless, monkeypatch):
    def drawn(engine, session, new_ids, context=None):
        token, ttft_s = send_turn(engine, session, new_ids, context)
        return token + (engine.config.blend.mode == "prefix"), ttft_s

    monkeypatch.setattr("ca_jax.launch.bench_blend.send_turn", drawn)
    rows = measure(wordless, dataclasses.replace(CONFIG, blend_tiers=("dram",))).rows
    assert {row.mode: row.same_token_share for row in rows if row.mode != "reuse"} == {
        **{"recompute": 1, "prefix": 0},
        "blend": rows[-1].same_token_share,
    }


def test_what_no_engine_can_hold_is_said(wordless):
    with pytest.raises(BenchError, match=r"no engine for blend at this size: .*context_window"):
        measure(wordless, dataclasses.replace(CONFIG, num_chunks=(300,)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_chunks": ()}, "num_chunks wanted one or more"),
        ({"chunk_tokens": (0,)}, "chunk_tokens wanted one or more"),
        ({"recompute_ratios": (0.1, 1.5)}, "recompute_ratios wanted one or more shares"),
        ({"blend_tiers": ("dram", "tape")}, "blend_tiers wanted some of dram, ssd_warm, ssd; found dram, tape"),
        ({"repeats": 0}, "repeats wanted at least 1, found 0"),
    ],
)
def test_config_refuses_what_cannot_be_measured(changes, message):
    with pytest.raises(ValueError, match=message):
        BlendBenchConfig(**changes)


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
            pytest.raises(BenchError, match="a load of 2 chunks wanted all of them in DRAM, found 1"),
            apart.loaded_context([chunks[0], question]),
        ):
            pytest.fail("wanted no context")
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
    with pytest.raises(BenchError, match="wanted 5 chunks of 20 tokens, found 4 such texts"):
        make_contexts(model, 5, 20, data=str(path), seed=0)


def test_without_data_and_tokenizer_chunks_are_random(wordless):
    contexts = make_contexts(wordless, 5, 20, data=None, seed=3)
    assert contexts == make_contexts(wordless, 5, 20, data=None, seed=3)
    assert contexts.source == "random"
    assert len(set(contexts.chunks)) == 5
    assert contexts.longest_question == len(contexts.questions[0]) > 0


# Throughput.


def test_every_mode_serves_the_same_stream(wordless):
    calls = []
    result = run_blend_throughput_suite(wordless, STREAM, lambda *call: calls.append(call))
    assert [row.mode for row in result.rows] == list(BLEND_MODES)
    by_mode = {row.mode: row for row in result.rows}
    for row in result.rows:
        assert (row.turns, row.dram_share, row.ssd_share) == (3, 1.5, 2.5)
        for name, (least, largest) in row.spread.items():
            assert 0 <= least <= getattr(row, name) <= largest
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
    assert [call for call in calls if call[0] == "blend_throughput"] == [
        ("blend_throughput", done, 3) for done in range(4)
    ]


def test_without_a_mode_nothing_is_held_against_it(wordless):
    config = dataclasses.replace(STREAM, stream_modes=("reuse", "recompute"), repeats=1)
    result = run_blend_throughput_suite(wordless, config, lambda *_: None)
    assert [(row.mode, row.speedup_over_prefix) for row in result.rows] == [("reuse", None), ("recompute", None)]
    assert (result.summary["blend_over_prefix"], result.summary["blend_over_recompute"]) == (None, None)


def test_sessions_stay_only_where_others_begin_with_their_kv(wordless, monkeypatch):
    left = {}
    serve = bench_blend_throughput.serve

    def served(engine, turns, config):
        measured = serve(engine, turns, config)
        left[engine.config.blend.mode] = len(engine.sessions)
        return measured

    monkeypatch.setattr(bench_blend_throughput, "serve", served)
    run_blend_throughput_suite(wordless, dataclasses.replace(STREAM, repeats=1), lambda *_: None)
    assert left == {"blend": 0, "reuse": 0, "recompute": 0, "prefix": 5}


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stream_modes": ("blend", "best")}, r"stream_modes wanted some of .*, found .*best"),
        ({"stream_ratio": 1.5}, "stream_ratio wanted a share"),
        ({"zipf_exponent": -1.0}, "zipf_exponent wanted at least 0"),
        ({"ssd_shares": ()}, "dram_share and ssd_shares wanted shares above 0"),
        ({"dram_share": 0.0}, "dram_share and ssd_shares wanted shares above 0"),
        ({"fill_turns": 0}, "fill_turns wanted at least 1, found 0"),
        ({"stream_chunks": 5}, "stream_chunks wanted at least the 6 of a context, found 5"),
    ],
)
def test_stream_refuses_what_cannot_be_measured(changes, message):
    with pytest.raises(ValueError, match=message):
        BlendThroughputBenchConfig(**changes)
