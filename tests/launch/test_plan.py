"""Size on paper: against the paper's figures, and against what an engine of this machine takes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ca_jax.config import EngineConfig
from ca_jax.device.buckets import history_buckets
from ca_jax.device.passes import RunnerSizes
from ca_jax.device.runner import Runner
from ca_jax.device.transfer import params_to_device
from ca_jax.engine import Engine
from ca_jax.kv.layout import pool_size, staging_bytes
from ca_jax.kv.snapshots import NUM_KEPT
from ca_jax.launch.plan import make_plan
from ca_jax.models.config import RopeConfig
from ca_jax.models.presets import PRESETS
from ca_jax.models.recurrence import RecurrenceConfig
from ca_jax.models.sharding import bytes_per_device
from ca_jax.models.small_weights import Int8Matrix
from ca_jax.pretrained import load_model
from ca_jax.serving.core import adapter_sizes
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.tiers.dram import DramTier
from ca_jax.storage.tiers.formats import FORMATS
from ca_jax.testing import tiny
from tests import engine_kit as kit

A100 = 80 * 10**9
NO_BUFFERS = {"read_buffer_gib": 0.0, "write_buffer_gib": 0.0, "overflow": None}


def plan(name, *, device_bytes=A100, dtype="float16", session_tokens=None, **engine):
    engine = EngineConfig(**{"overflow": None, **engine})
    return make_plan(PRESETS[name], engine, dtype=dtype, device_bytes=device_bytes, session_tokens=session_tokens)


def hbm(planned):
    return next(tier for tier in planned.tiers if tier.name == "HBM")


def test_llama_65b_on_four_a100_is_as_in_the_paper():
    # CachedAttention, section 2.3: 4 A100 of 80 GB, 130 GB for the model, 190 GB for KV; 2K tokens of it take 5 GB.
    planned = plan("llama-65b", tensor_parallel_size=4, max_batch_size=1, **NO_BUFFERS)
    assert planned.total_weight_bytes == pytest.approx(130e9, rel=0.01)
    assert 4 * planned.parts["the weights"] == pytest.approx(130e9, rel=0.01)
    assert hbm(planned).num_bytes == pytest.approx(190e9, rel=0.01)
    assert planned.token_bytes * 2048 == pytest.approx(5e9, rel=0.1)
    assert hbm(planned).num_tokens == hbm(planned).num_bytes // planned.token_bytes


def test_int8_is_what_dram_and_ssd_hold_and_not_the_pool():
    plain, int8 = (plan("llama2-7b", kv_rest_dtype=dtype, dtype="bfloat16") for dtype in ("model", "int8"))
    assert int8.stored_token_bytes * 256 == plain.stored_token_bytes * 130  # 128 numbers and the two bytes of a scale
    assert (int8.token_bytes, int8.parts["the pool of KV"]) == (plain.token_bytes, plain.parts["the pool of KV"])
    assert int8.parts["the read buffer"] * 256 == plain.parts["the read buffer"] * 130
    for before, after in zip(plain.tiers[1:], int8.tiers[1:], strict=True):
        assert after.num_tokens == pytest.approx(before.num_tokens * 256 / 130, rel=0.01)


def test_a_draft_model_counts_with_its_pool():
    model, draft, sizes = kit.tiny_model(), kit.model_of(num_layers=2), {"context_window": 256, "page_tokens": 16}
    engine = EngineConfig(overflow=None, dtype="float32", compile_cache_dir=None, **sizes)
    planned, plain = (
        make_plan(model.config, engine, dtype="float32", device_bytes=A100, draft=each) for each in (draft.config, None)
    )
    with Engine(model, engine, draft_model=draft) as served:
        found = served._core._draft_model
        assert planned.parts["the draft model"] == bytes_per_device(draft.params) + found.runner.pool.num_bytes
    assert plain.left_bytes - planned.left_bytes == planned.parts["the draft model"]


EXPERTS = {"num_experts": 4, "num_experts_per_token": 2, "tie_embeddings": True}
LATENT = {"num_kv_heads": 1, "head_dim": 28, "latent_dim": 20, "nope_dim": 12, "value_dim": 10, "query_rank": 24}


@pytest.mark.parametrize(
    "changes", [EXPERTS, {**LATENT, "rope": RopeConfig(rotary_dim=8)}], ids=["experts, tied", "latents"]
)
@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_small_weights_count_as_they_are_held_of_every_kind(changes, weight_dtype):
    model = kit.held_small(kit.model_of(**changes), weight_dtype)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf, model.params)
    engine = EngineConfig(overflow=None, weight_dtype=weight_dtype, context_window=256)
    planned = make_plan(model.config, engine, dtype="bfloat16", device_bytes=A100)
    num_scales = sum(leaf.scales.size for leaf in jax.tree.leaves(params, is_leaf=is_int8) if is_int8(leaf))
    assert planned.total_weight_bytes == bytes_per_device(params) + 2 * num_scales  # These are float32.


def is_int8(leaf):
    return isinstance(leaf, Int8Matrix)


def test_small_weights_count_as_a_model_that_was_loaded_with_them_takes(tmp_path):
    config = tiny.tiny_config(num_layers=3)
    tiny.write_tiny_hf(tmp_path, config, tiny.tiny_params(config))
    for dtype, weight_dtype in (("bfloat16", "model"), ("bfloat16", "int8"), ("bfloat16", "int4"), ("float32", "int4")):
        loaded = load_model(str(tmp_path), dtype=dtype, weight_dtype=weight_dtype)
        engine = EngineConfig(overflow=None, weight_dtype=weight_dtype, context_window=256)
        planned = make_plan(loaded.config, engine, dtype=dtype, device_bytes=A100)
        assert planned.total_weight_bytes == bytes_per_device(loaded.params)
        assert planned.parts["the weights"] == planned.total_weight_bytes


def test_a_sliding_window_bounds_what_is_stored_of_a_session():
    sliding = dataclasses.replace(PRESETS["llama2-7b"], sliding_window=1024)
    engine = EngineConfig(context_window=4096, kv_rest_dtype="model")
    long, short = (
        make_plan(sliding, engine, dtype="bfloat16", device_bytes=A100, session_tokens=tokens).tiers[1].num_sessions
        for tokens in (4096, 1024 + 128 - 2)
    )
    assert long == short > 0


def test_what_is_whole_on_each_device_counts_on_each():
    planned = plan("llama2-70b", tensor_parallel_size=4)
    norms = (2 * 80 + 1) * 8192 * 2
    assert 4 * planned.parts["the weights"] == planned.total_weight_bytes + 3 * norms
    planned, half = (plan("llama3-8b", tensor_parallel_size=size) for size in (16, 8))  # Of 8 KV heads.
    keys_and_values = 32 * 2 * 4096 * 8 * 128 * 2  # wk and wv in 8 parts, on 16 devices.
    norms = (2 * 32 + 1) * 4096 * 2
    assert 16 * planned.parts["the weights"] == planned.total_weight_bytes + 15 * norms + keys_and_values
    assert (planned.parts["the pool of KV"], planned.parts["the read buffer"]) == (
        half.parts["the pool of KV"],
        half.parts["the read buffer"],
    )
    one, two = (plan("llama3-8b", tensor_parallel_size=2, data_parallel_size=size) for size in (1, 2))
    assert (two.num_devices, hbm(two).num_tokens) == (4, 2 * hbm(one).num_tokens)
    assert two.parts["the pool of KV"] * 2 == one.parts["the pool of KV"]
    for part in ("the weights", "the read buffer"):
        assert two.parts[part] == one.parts[part]


@pytest.mark.parametrize("max_adapters", [0, 3])
def test_a_runner_of_that_config_takes_what_is_planned(max_adapters):
    config = tiny.tiny_config()
    engine = EngineConfig(context_window=256, max_batch_size=3, overflow=None, max_adapters=max_adapters)
    planned = make_plan(config, engine, dtype="float32", device_bytes=2 * GIB)
    params = params_to_device(tiny.tiny_params(config))
    pool = pool_size(config, "float32", engine, planned.window)
    sizes = RunnerSizes(pool=pool, chunk_tokens=engine.max_num_batched_tokens, adapters=adapter_sizes(engine))
    runner = Runner(config, params, sizes)
    of_adapters = 3 * max_adapters * 16 * (7 * 64 + 3 * 128 + 2 * 64 + 2 * 32) * 4  # Inputs and outputs, in 3 layers.
    assert planned.parts["the weights"] == planned.total_weight_bytes + of_adapters == runner.param_bytes
    assert planned.parts["the pool of KV"] == runner.pool.num_bytes == 3 * 256 * planned.token_bytes
    layout = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=16, dtype="float32", block_tokens=128)
    assert planned.parts["the read buffer"] == staging_bytes(layout, engine, history_buckets(256)[-1])


@pytest.mark.parametrize("driver", ["zarr3", "raw"])
def test_tiers_hold_as_many_blocks_as_planned(tmp_path, driver):
    config = tiny.tiny_config()
    layout = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=16, dtype="bfloat16", block_tokens=16)
    store = StoreConfig(dram_gib=0.003, ssd_gib=0.005, ssd_driver=driver, block_tokens=16)
    engine = EngineConfig(overflow=None, store=store)
    planned = make_plan(config, engine, dtype="bfloat16", device_bytes=2 * GIB, session_tokens=40)
    _, dram, ssd = planned.tiers
    blocks = DramTier(layout, store.dram_bytes).num_blocks
    assert (dram.num_tokens, dram.num_sessions) == (blocks * 16, blocks // 3)
    tier = FORMATS[driver](layout, tmp_path, store.ssd_bytes)
    assert (ssd.num_tokens, ssd.num_sessions) == (tier.num_blocks * 16, tier.num_blocks // 3)
    tier.close()


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("llama2-70b", {"tensor_parallel_size": 3}, r"tensor_parallel_size .* 1, 2, 4, 8, .* 3"),
        ("llama2-70b", {}, r"must be 14\d.*128\.48 for the weights.* got 74\.51; ten.*=2 would"),
        ("llama2-70b", {"device_bytes": GIB}, "no tensor_parallel_size would do"),
        ("llama2-7b", {"context_window": 8192}, "context_window must be at most the model's 4096 tokens, got 8192"),
        ("llama2-7b", {"max_batch_size": 3, "data_parallel_size": 2}, "multiple of data_parallel_size=2"),
        ("llama2-7b", {"session_tokens": 0}, "session_tokens must be positive, got 0"),
        ("llama2-7b", {"dtype": "int4"}, "int4"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_and_what_would_do_is_said(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        plan(name, **wrong)


def test_the_window_is_the_engines():
    assert plan("llama2-70b", tensor_parallel_size=2).left_bytes > 0
    assert (plan("qwen3-8b").window, plan("llama-7b").window) == (4096, 2048)
    assert plan("qwen3-8b", context_window=1024).session_tokens == 1024


SHORT_CONV = RecurrenceConfig(kind="short_conv", layers=(0, 1), conv_width=3)
DELTA = {"conv_width": 4, "num_key_heads": 2, "num_value_heads": 4, "key_dim": 6, "value_dim": 10}


@pytest.mark.parametrize(
    "recurrence", [SHORT_CONV, RecurrenceConfig(kind="gated_delta", layers=(0, 2), **DELTA)], ids=["lfm2", "qwen3_next"]
)
def test_states_count_as_an_engine_has_and_stores_them(recurrence):
    model = kit.model_of(num_layers=4, recurrence=recurrence)
    with kit.small_engine(model, overflow=None) as engine:
        planned = make_plan(model.config, engine.config, dtype="float32", device_bytes=A100)
        states, session = engine._runner.states, engine.session()
        for seed in range(3):
            kit.say(session, kit.prompt(30, seed))
        engine.wait_for_saves()
        snapshots = [info for info in engine.stored.list() if info.session_id.startswith("state-")]
        stored = [info.num_bytes for info in snapshots]
        one = sum(part.nbytes // len(part) for part in jax.tree.leaves(states.buffers))
    assert planned.parts["the states of rows"] == states.num_bytes
    assert planned.state_bytes == one
    assert stored == [planned.snapshot_bytes] * NUM_KEPT


def test_states_count_on_each_device_and_in_each_tier():
    config = dataclasses.replace(
        tiny.tiny_config(num_heads=8, num_kv_heads=4, num_layers=4),
        recurrence=RecurrenceConfig(kind="gated_delta", layers=(0, 2), **DELTA),
    )
    engine = EngineConfig(overflow=None, max_batch_size=4, context_window=256)
    one, mesh = (
        make_plan(config, dataclasses.replace(engine, **sizes), dtype="bfloat16", device_bytes=A100)
        for sizes in ({}, {"tensor_parallel_size": 2, "data_parallel_size": 2})
    )
    assert one.parts["the states of rows"] == 2 * 4 * one.state_bytes
    assert mesh.parts["the states of rows"] * 4 == one.parts["the states of rows"], "by rows, and by heads and channels"
    plain = make_plan(dataclasses.replace(config, recurrence=None), engine, dtype="bfloat16", device_bytes=A100)
    assert "the states of rows" not in plain.parts
    assert (plain.state_bytes, plain.snapshot_bytes) == (0, 0)
    block = one.tiers[1].num_bytes // (one.tiers[1].num_tokens // 128)
    of_session = 2 * block + 2 * one.snapshot_bytes
    assert one.tiers[1].num_sessions == one.tiers[1].num_bytes // of_session
