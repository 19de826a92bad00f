"""Every family on a mesh of eight virtual devices, against one. `tests/test_mesh.py` starts the process."""

from __future__ import annotations

import dataclasses

import flax.traverse_util
import jax
import numpy as np
import pytest

from ca_jax.device.transfer import params_to_device
from ca_jax.models.config import RopeConfig
from ca_jax.models.recurrence import RecurrenceConfig
from ca_jax.models.small_weights import Int4Matrix
from ca_jax.models.transformer import Transformer
from ca_jax.models.weights import parameter_slots
from tests import engine_kit as kit
from tests.on_mesh import SHORT, config_of, engine_of, expect_greedy, model_of, talk

BEHIND = {"norms_before": False, "norms_behind": True, "qk_norm": True, "qk_norm_is_whole": True}
SOFTMAX = {"num_experts": 4, "num_experts_per_token": 2, "normalizes_shares": False}
SIGMOID = {"num_experts": 6, "num_experts_per_token": 2, "routing": "sigmoid", "choice_bias": True}
DENSE_FIRST = {"dense_layers": (0,), "dense_mlp_dim": 40, "num_expert_groups": 3, "num_chosen_groups": 2}
LATENT = {"num_kv_heads": 1, "head_dim": 28, "latent_dim": 20, "nope_dim": 12, "value_dim": 10}
LATENT |= {"rope": RopeConfig(rotary_dim=8)}
UNBIASED = {"norm": "layer", "norm_bias": False, "is_parallel": True, "shares_norm": True}
LONGROPE = RopeConfig(scaling="longrope", short_factors=(1.0,) * 4, long_factors=(1.0, 2.0, 3.0, 4.0))
GELU = {"norm": "layer", "mlp": "gelu", "is_parallel": True}
GEMMA = {
    **{"norms_behind": True, "mlp": "geglu_tanh", "tie_embeddings": True, "sliding_window": 40, "full_layers": (1,)},
    **{"norm_offset": 1.0, "embed_scale": 32**0.5, "attention_scale": 0.3},
}
GPT_OSS = {
    **{"mlp": "swiglu_clipped", "mlp_bias": True, "router_bias": True, "has_sinks": True},
    **{"sliding_window": 40, "full_layers": (1,)},
}
GEMMA4 = {
    **{"norms_behind": True, "mlp": "geglu_tanh", "tie_embeddings": True, "sliding_window": 40, "qk_norm": True},
    **{"value_norm": True, "attention_scale": 1.0, "embed_scale": 32**0.5, "has_layer_scale": True},
    **{"local_rope": RopeConfig(theta=300.0), "rope": RopeConfig(scaling="proportional", num_turning=2)},
    **{"full_head_dim": 12},
}
NEXT = {"qk_norm": True, "norm_offset": 1.0, "gates_heads": True, "rope": RopeConfig(rotary_dim=4), "num_kv_heads": 2}
HEADS = {"layers": (0, 2), "conv_width": 4, "num_key_heads": 2, "num_value_heads": 4, "key_dim": 6, "value_dim": 10}
ALL_ALIKE = {**HEADS, "num_key_heads": 4, "key_dim": 10}
GATED_DELTA = {"num_layers": 4, "recurrence": RecurrenceConfig(kind="gated_delta", **HEADS)}
SHORT_CONV = RecurrenceConfig(kind="short_conv", layers=(0, 1), conv_width=3, has_bias=True)
ALIKE = {"num_kv_heads": 4, "full_kv_heads": 2, "full_keys_are_values": True}
FAMILIES = {
    "mixtral": {"num_experts": 4, "num_experts_per_token": 2, "num_kv_heads": 4},
    "qwen3": {"qkv_bias": True, "qk_norm": True, "sliding_window": 40, "full_layers": (0,)},
    "falcon-7b": {**GELU, "num_kv_heads": 1, "shares_norm": True},
    "gpt_neox": {**GELU, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "rope": RopeConfig(rotary_dim=4)},
    "olmo3": {**BEHIND, "sliding_window": 40, "full_layers": (0,), "local_rope": RopeConfig(theta=100.0)},
    "glm4": {"norms_behind": True, "qkv_bias": True, "rope": RopeConfig(rotary_dim=4)},
    "glm4_moe": {**SIGMOID, **DENSE_FIRST, "shared_mlp_dim": 24, "num_kv_heads": 4, "rope": RopeConfig(rotary_dim=4)},
    "cohere2": {**UNBIASED, "sliding_window": 40, "full_layers": (1,), "nope_layers": (1,), "logit_scale": 0.5},
    "gemma2": {**GEMMA, "score_cap": 3.0, "logit_cap": 8.0},
    "gemma3": {**GEMMA, "qk_norm": True, "local_rope": RopeConfig(theta=300.0)},
    "gemma4": {**GEMMA4, "num_layers": 4, "full_layers": (1, 3), "num_readers": 2, "layer_input_dim": 6},
    "gemma4-alike": {**GEMMA4, **ALIKE, "full_layers": (1,)},
    "gemma4-experts": {**GEMMA4, **SOFTMAX, "normalizes_shares": True, "shared_mlp_dim": 24, "norms_experts": True},
    "gpt_oss": {**GPT_OSS, "num_experts": 4, "num_experts_per_token": 2, "qkv_bias": True, "out_bias": True},
    "llama": {"num_kv_heads": 4},
    "deepseek_v3": {**SIGMOID, **DENSE_FIRST, **LATENT, "shared_mlp_dim": 24, "query_rank": 24},
    "deepseek_v2": {**SOFTMAX, **LATENT, "num_group_shares": 1, "num_expert_groups": 2},
    "mistral4": {**SOFTMAX, **LATENT, "query_beta": 0.3, "query_span": 16},
    "qwen2_moe": {**SOFTMAX, "qkv_bias": True, "shared_mlp_dim": 24, "gates_shared": True},
    "qwen3_moe": {**SOFTMAX, "qk_norm": True, "dense_layers": (1,)},
    "minimax_m2": {**SIGMOID, "qk_norm": True, "qk_norm_is_whole": True, "rope": RopeConfig(rotary_dim=4)},
    "smollm3": {"nope_layers": (1,)},
    "granite": {"embed_scale": 3.0, "residual_scale": 0.7, "attention_scale": 0.2, "logit_scale": 0.5},
    "ministral3": {"query_beta": 0.3, "query_span": 16},
    "olmo2": BEHIND,
    "phi3": {"rope": LONGROPE},
    "mistral": {"sliding_window": 40},
    "qwen2": {"qkv_bias": True, "sliding_window": 40, "full_layers": (0,)},
    "falcon-40b": {**GELU, "num_kv_heads": 2},
    "lfm2": {"num_layers": 3, "qk_norm": True, "tie_embeddings": True, "recurrence": SHORT_CONV},
    "qwen3_next": {**NEXT, **GATED_DELTA, **SOFTMAX, "shared_mlp_dim": 24, "gates_shared": True},
    "qwen3_5": {**NEXT, **GATED_DELTA},
    "qwen3_5_moe": {**NEXT, **GATED_DELTA, **SOFTMAX, "shared_mlp_dim": 24, "gates_shared": True},
    "granite4": {
        **{"num_layers": 4, "embed_scale": 3.0, "residual_scale": 0.7, "attention_scale": 0.2, "logit_scale": 0.5},
        **{**SOFTMAX, "normalizes_shares": True, "shared_mlp_dim": 24, "nope_layers": (1, 3)},
        "recurrence": RecurrenceConfig(kind="state_space", has_bias=True, **HEADS),
    },
    "kimi_linear": {
        **{**SIGMOID, **LATENT, "dense_layers": (0,), "dense_mlp_dim": 40, "num_layers": 4, "shared_mlp_dim": 24},
        "rope": RopeConfig(scaling="proportional", num_turning=0, rotary_dim=8),
        "recurrence": RecurrenceConfig(kind="channel_delta", **ALL_ALIKE),
    },
}
HAVE_NOTHING_ELSE = (
    *("llama", "mistral", "qwen2", "falcon-40b", "qwen2_moe", "qwen3_moe", "minimax_m2", "smollm3", "granite"),
    *("ministral3", "olmo2", "phi3", "deepseek_v2", "mistral4", "qwen3", "gemma3", "qwen3_5", "qwen3_5_moe", "glm4"),
)
"""All that these have, others have too."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in HAVE_NOTHING_ELSE else []) for name in FAMILIES],
)
def test_every_family_on_a_mesh(name):
    model = random_model(name)
    with engine_of(2, 2, model) as engine:
        expect_greedy(talk(engine, SHORT), model, SHORT)
        assert engine.sessions[0].usage.num_cached_tokens > 0
        matrices = [leaf for leaf in jax.tree.leaves(engine.model.params) if leaf.ndim > 1]
        num_divided = sum(leaf.addressable_shards[0].data.shape != leaf.shape for leaf in matrices)
        assert num_divided >= 2 + 4 * model.config.num_layers  # Of one KV head keys and values are whole.


@pytest.mark.parametrize("mlp_dim", [64, 96])  # Of the latter two devices have three groups together: each has all.
def test_experts_in_4_bits_on_a_mesh(mlp_dim):
    model = kit.held_small(random_model("qwen3_moe", embed_dim=64, mlp_dim=mlp_dim, head_dim=32), "int4")
    with engine_of(2, 2, model, weight_dtype="int4") as engine:
        expect_greedy(talk(engine, SHORT), kit.spelled_out(model), SHORT)
        params = engine.model.params["params"]
        down, num_parts = params["layer_0"]["mlp"]["w_down"], 2 if mlp_dim == 64 else 1
        assert isinstance(down, Int4Matrix)
        assert all(leaf.addressable_shards[0].data.shape[1] * num_parts == leaf.shape[1] for leaf in down)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma4", "deepseek_v3"])
def test_weights_in_8_bits_on_a_mesh(name):
    model = kit.held_small(random_model(name), "int8")
    with engine_of(2, 2, model, weight_dtype="int8") as engine:
        expect_greedy(talk(engine, SHORT), kit.spelled_out(model), SHORT)
        assert engine.sessions[0].usage.num_cached_tokens > 0
        params = engine.model.params["params"]
        mlp = params["layer_1"]["mlp"]
        tables = params["embed"]["embedding"] if model.config.tie_embeddings else params["head"]["kernel"]
        divided = (*mlp["w_gate"], *mlp["w_up"], mlp["w_down"].numbers, *tables)
        assert all(leaf.addressable_shards[0].data.size * 2 == leaf.size for leaf in divided)
        assert mlp["w_down"].scales.is_fully_replicated, "outputs of a sum are whole on each device"


def random_model(name, **changes):
    config = config_of(**FAMILIES[name], **changes)
    rng, leaves = np.random.default_rng(0), {}
    for slot in parameter_slots(config):
        shape = slot.shape
        numbers = rng.standard_normal(shape).astype(np.float32)
        is_norm, is_bias = slot.key.endswith("norm.scale"), len(shape) < 2 or slot.key.startswith("attn.b")
        scale = 0.2 if is_norm or is_bias else 2 / np.sqrt(shape[-2] if len(shape) == 2 else 32)
        leaves["params", *slot.path] = np.float32(is_norm and 1 - config.norm_offset) + numbers * np.float32(scale)
    params = params_to_device(flax.traverse_util.unflatten_dict(leaves))
    return dataclasses.replace(model_of(), config=config, model=Transformer(config), params=params)
