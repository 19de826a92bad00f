"""Configs of every family that were drawn at random, against `transformers`: sizes, windows, biases, ropes, experts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ca_jax
from tests import families_kit as kit
from tests.tolerances import LOGITS_ATOL

LENGTHS = (1, 7, 50)
ROOM = 64
NUM_VARIANTS = 12
ATOL = 4 * LOGITS_ATOL["float32"]  # What is drawn may make scores larger than models have them.

Draw = np.random.Generator
Fields = dict[str, Any]


def one(draw: Draw, *choices: Any) -> Any:
    return choices[draw.integers(len(choices))]


def sizes(draw: Draw, *, has_head_dim: bool = True) -> Fields:
    """Of a model: what most families say alike."""
    num_kv = int(one(draw, 1, 2, 3))
    num_heads = num_kv * int(one(draw, 1, 2, 3))
    head_dim = int(one(draw, 4, 8, 10, 16))
    return {
        "vocab_size": kit.VOCAB_SIZE,
        "hidden_size": num_heads * (int(one(draw, 4, 8)) if has_head_dim else head_dim),
        **({"head_dim": head_dim} if has_head_dim else {}),
        "intermediate_size": one(draw, 17, 48),
        "num_hidden_layers": int(draw.integers(1, 6)),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv,
        "max_position_embeddings": 256,
        "rms_norm_eps": one(draw, 1e-5, 1e-6, 1e-3),
        "tie_word_embeddings": bool(one(draw, True, False)),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def rope(draw: Draw, *more: str) -> Fields:
    kind = one(draw, "default", "linear", "llama3", "yarn", *more)
    theta = {"rope_type": kind, "rope_theta": one(draw, 500.0, 10000.0, 1e6)}
    if kind == "linear":
        theta["factor"] = one(draw, 1.5, 8.0)
    if kind == "llama3":
        theta |= {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": one(draw, 2.0, 4.0)}
    if kind in ("llama3", "yarn"):
        theta["original_max_position_embeddings"] = one(draw, 16, 64)
    if kind == "yarn":
        theta |= {"factor": one(draw, 2.0, 16.0), "beta_fast": one(draw, 32.0, 4.0), "beta_slow": 1.0}
    return {"rope_parameters": theta}


def window(draw: Draw) -> int:
    return int(one(draw, 1, 7, 30))


def flag(draw: Draw) -> bool:
    return bool(draw.integers(2))


def layer_types(draw: Draw, num_layers: int) -> list[str]:
    return [one(draw, "sliding_attention", "full_attention") for _ in range(num_layers)]


def experts(draw: Draw, key: str) -> Fields:
    num = int(one(draw, 1, 3, 5, 8))
    return {
        key: num,
        "num_experts_per_tok": int(draw.integers(1, num + 1)),
        "moe_intermediate_size": one(draw, 9, 24),
        "norm_topk_prob": flag(draw),
    }


def smollm3(draw: Draw) -> Fields:
    found = sizes(draw, has_head_dim=False) | rope(draw)
    slides = {"use_sliding_window": True, "sliding_window": window(draw)} if flag(draw) else {}
    return found | slides | {"no_rope_layer_interval": one(draw, 1, 2, 3), "attention_bias": flag(draw)}


def granite(draw: Draw) -> Fields:
    scales = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
    biases = {"attention_bias": flag(draw), "mlp_bias": flag(draw)}
    return sizes(draw, has_head_dim=False) | rope(draw) | {name: one(draw, 0.3, 1.0, 2.0) for name in scales} | biases


def ministral3(draw: Draw) -> Fields:
    found = sizes(draw) | {"sliding_window": one(draw, None, 7)}
    beta = {"llama_4_scaling_beta": one(draw, 0.0, 0.1, 0.5), "original_max_position_embeddings": 16}
    return found | {"rope_parameters": rope(draw)["rope_parameters"] | beta}


def olmo2(draw: Draw) -> Fields:
    return sizes(draw, has_head_dim=False) | rope(draw) | {"attention_bias": flag(draw)}


def olmo3(draw: Draw) -> Fields:
    found = sizes(draw, has_head_dim=False) | {"sliding_window": window(draw), "attention_bias": flag(draw)}
    types = {} if flag(draw) else {"layer_types": layer_types(draw, found["num_hidden_layers"])}
    both = {"full_attention": rope(draw)["rope_parameters"], "sliding_attention": {"rope_type": "default"}}
    both["sliding_attention"]["rope_theta"] = both["full_attention"]["rope_theta"]
    return found | types | ({"rope_parameters": both} if flag(draw) else {})


def cohere2(draw: Draw) -> Fields:
    found = sizes(draw, has_head_dim=False) | rope(draw) | {"sliding_window": window(draw)}
    found |= {"attention_bias": flag(draw), "logit_scale": one(draw, 0.0625, 1.0)}
    return found | ({} if flag(draw) else {"layer_types": layer_types(draw, found["num_hidden_layers"])})


def phi3(draw: Draw) -> Fields:
    found = sizes(draw, has_head_dim=False)
    head_dim = found["hidden_size"] // found["num_attention_heads"]
    share = one(draw, 0.5, 1.0) if head_dim % 4 == 0 else 1.0
    half = int(head_dim * share) // 2
    theta: Fields = {
        "rope_type": one(draw, "default", "longrope"),
        "rope_theta": 5000.0,
        "partial_rotary_factor": share,
    }
    if theta["rope_type"] == "longrope":
        theta |= {"short_factor": [1.0 + i / 4 for i in range(half)], "long_factor": [1.0 + i for i in range(half)]}
    original = one(draw, 16, 128)  # Every text is beyond it, or none.
    return found | {
        "rope_parameters": theta,
        "original_max_position_embeddings": original,
        "sliding_window": one(draw, None, 7),
    }


def qwen2_moe(draw: Draw) -> Fields:
    found = sizes(draw, has_head_dim=False) | rope(draw) | experts(draw, "num_experts")
    found |= {"shared_expert_intermediate_size": one(draw, 12, 20), "qkv_bias": flag(draw)}
    slides = {"use_sliding_window": True, "sliding_window": window(draw), "max_window_layers": one(draw, 1, 3, 28)}
    return found | (slides if flag(draw) else {}) | {"decoder_sparse_step": one(draw, 1, 2)}


def qwen3_moe(draw: Draw) -> Fields:
    found = sizes(draw) | rope(draw) | experts(draw, "num_experts") | {"attention_bias": flag(draw)}
    slides = {"use_sliding_window": True, "sliding_window": window(draw)} if flag(draw) else {}
    return found | slides | {"mlp_only_layers": [0] if flag(draw) else [], "decoder_sparse_step": one(draw, 1, 2, 3)}


def groups(draw: Draw, found: Fields) -> Fields:
    """Of experts, two in each at least."""
    num = one(draw, 2, 3)
    found |= {"n_group": num, "topk_group": int(draw.integers(1, num + 1)), "n_routed_experts": 2 * num}
    found["num_experts_per_tok"] = min(found["num_experts_per_tok"], 2 * found["topk_group"])
    return found


def sparse(draw: Draw) -> Fields:
    found = groups(draw, experts(draw, "n_routed_experts"))
    shared = {"n_shared_experts": one(draw, 1, 2), "routed_scaling_factor": one(draw, 1.0, 2.5)}
    return found | shared | {"first_k_dense_replace": one(draw, 0, 1, 3)}


def glm4(draw: Draw) -> Fields:
    found = sizes(draw) | rope(draw)
    found["head_dim"] = one(draw, 8, 12, 16)  # Half of it is rotated.
    return found | {"attention_bias": flag(draw)}


def glm4_moe(draw: Draw) -> Fields:
    found = sizes(draw) | rope(draw) | sparse(draw)
    found["head_dim"] = one(draw, 8, 16)  # Half of it is rotated.
    return found | {"use_qk_norm": flag(draw), "attention_bias": flag(draw)}


def minimax_m2(draw: Draw) -> Fields:
    found = sizes(draw) | rope(draw) | experts(draw, "num_local_experts")
    return found | ({"rotary_dim": found["head_dim"] // 4 * 2} if flag(draw) else {})


def latent(draw: Draw) -> Fields:
    found = sizes(draw, has_head_dim=False) | sparse(draw)
    found["num_key_value_heads"] = found["num_attention_heads"]
    dims = {"kv_lora_rank": one(draw, 6, 16), "qk_rope_head_dim": one(draw, 4, 8), "qk_nope_head_dim": one(draw, 6, 12)}
    return found | dims | {"v_head_dim": one(draw, 3, 10), "q_lora_rank": one(draw, None, 8)}


def deepseek_v2(draw: Draw) -> Fields:
    return latent(draw) | rope(draw) | {"topk_method": one(draw, "greedy", "group_limited_greedy")}


def deepseek_v3(draw: Draw) -> Fields:
    found = latent(draw) | rope(draw)
    found["rope_parameters"] |= {"mscale": one(draw, 0.5, 1.0), "mscale_all_dim": one(draw, 0.0, 0.7)}
    return found


def gemma(draw: Draw) -> Fields:
    found = sizes(draw) | {"sliding_window": window(draw), "attention_bias": flag(draw)}
    caps = {"final_logit_softcapping": one(draw, None, 5.0, 30.0), "query_pre_attn_scalar": one(draw, 4, 16, 50)}
    return found | caps | {"layer_types": layer_types(draw, found["num_hidden_layers"])}


def gemma2(draw: Draw) -> Fields:
    return gemma(draw) | rope(draw) | {"attn_logit_softcapping": one(draw, None, 3.0, 50.0)}


def gemma3(draw: Draw) -> Fields:
    kinds = {"full_attention": rope(draw)["rope_parameters"]}
    kinds["sliding_attention"] = {"rope_type": "default", "rope_theta": one(draw, 300.0, 10000.0)}
    return gemma(draw) | {"rope_parameters": kinds}


def gpt_oss(draw: Draw) -> Fields:
    found = sizes(draw) | rope(draw) | experts(draw, "num_local_experts")
    found |= {"sliding_window": window(draw), "attention_bias": flag(draw)}
    return found | {"layer_types": layer_types(draw, found["num_hidden_layers"])}


def mistral4(draw: Draw) -> Fields:
    found = latent(draw) | {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": one(draw, 2.0, 8.0)}
    }
    beta = {"llama_4_scaling_beta": one(draw, 0.0, 0.3), "original_max_position_embeddings": 16}
    return found | {"rope_parameters": found["rope_parameters"] | beta}


def states(draw: Draw, found: Fields) -> Fields:
    """Some layers keep states, and some not. What these give may be small before it is normed, and rounding large."""
    found = found | {"rms_norm_eps": one(draw, 1e-3, 1e-2)}
    kinds = "linear_attention", "full_attention"
    return found | {
        "num_hidden_layers": 4,
        "layer_types": [*draw.permutation([*kinds, *(one(draw, *kinds) for _ in "ab")])],
    }


def granite4(draw: Draw) -> Fields:
    found, groups = states(draw, granite(draw)), int(one(draw, 1, 2))
    del found["mlp_bias"], found["logits_scaling"]
    found |= {"mamba_expand": 2, "mamba_n_heads": groups * int(one(draw, 1, 2))}
    found |= {"mamba_n_groups": groups, "mamba_d_state": int(one(draw, 1, 8)), "mamba_d_conv": int(one(draw, 2, 4))}
    found |= {"num_local_experts": int(one(draw, 0, 3)), "num_experts_per_tok": 2, "mamba_conv_bias": flag(draw)}
    rope_or_none = {"position_embedding_type": one(draw, "rope", None)}
    return found | rope_or_none | {"shared_intermediate_size": int(one(draw, 9, 24))}


def qwen3_5_moe(draw: Draw) -> Fields:
    found, keys = states(draw, sizes(draw) | experts(draw, "num_experts")), int(one(draw, 1, 2))
    del found["norm_topk_prob"]
    found |= {"head_dim": int(one(draw, 8, 16)), "shared_expert_intermediate_size": int(one(draw, 9, 24))}
    found |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * int(one(draw, 1, 3))}
    found |= {"linear_key_head_dim": int(one(draw, 4, 9)), "linear_value_head_dim": int(one(draw, 4, 9))}
    return found | {"linear_conv_kernel_dim": int(one(draw, 2, 4))}


VARIANTS: dict[str, tuple[str, Callable[[Draw], Fields]]] = {
    "smollm3": ("SmolLM3", smollm3),
    "granite": ("Granite", granite),
    "ministral3": ("Ministral3", ministral3),
    "olmo2": ("Olmo2", olmo2),
    "olmo3": ("Olmo3", olmo3),
    "cohere2": ("Cohere2", cohere2),
    "phi3": ("Phi3", phi3),
    "qwen2_moe": ("Qwen2Moe", qwen2_moe),
    "qwen3_moe": ("Qwen3Moe", qwen3_moe),
    "glm4": ("Glm4", glm4),
    "glm4_moe": ("Glm4Moe", glm4_moe),
    "minimax_m2": ("MiniMaxM2", minimax_m2),
    "deepseek_v2": ("DeepseekV2", deepseek_v2),
    "deepseek_v3": ("DeepseekV3", deepseek_v3),
    "mistral4": ("Mistral4", mistral4),
    "gemma2": ("Gemma2", gemma2),
    "gemma3": ("Gemma3", gemma3),
    "gpt_oss": ("GptOss", gpt_oss),
    "granite4": ("GraniteMoeHybrid", granite4),
    "qwen3_5_moe": ("Qwen3_5Moe", qwen3_5_moe),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_VARIANTS))
@pytest.mark.parametrize("name", VARIANTS)
def test_a_config_that_was_drawn_computes_what_transformers_does(monkeypatch, name, seed):
    kind, fields_of = VARIANTS[name]
    fields = fields_of(np.random.default_rng((seed, len(name), ord(name[0]))))
    monkeypatch.setitem(kit.CASES, "drawn", (kind, fields))
    with tempfile.TemporaryDirectory() as directory:
        theirs = kit.make("drawn", Path(directory), seed)
        pair = kit.Pair(ca_jax.load_model(directory, dtype="float32"), theirs)
    for length in LENGTHS:
        ids = kit.prompt(length, seed)
        expected = pair.their_logits(ids)
        context = length if name == "phi3" else ROOM  # Frequencies are by the length of the text.
        found = kit.our_logits(pair.model, ids, room=ROOM, context=context)
        np.testing.assert_allclose(found, expected, atol=ATOL, rtol=0, err_msg=str(fields))
