"""Small random checkpoints of every architecture, made and written by `transformers`, and what it says of them.

Weights are scaled so that every part moves the logits: an error in any one shows.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

import ca_jax
from ca_jax.models.transformer import Transformer
from ca_jax.pretrained import LoadedModel

VOCAB_SIZE = 96
MAX_POSITIONS = 512

_LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_FALCON = {name: value for name, value in _LLAMA.items() if "intermediate" not in name and "key_value" not in name}
_NEOX = {name: value for name, value in _LLAMA.items() if "key_value" not in name} | {"hidden_size": 64}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **parameters}}


_ORIGINAL = {"factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = _rope("llama3", **_ORIGINAL | {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0})
_YARN = {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5}
_SLIDING = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
_NOT_PARALLEL = {"use_parallel_residual": False, "hidden_act": "gelu_new"}
_GEMMA = {**_LLAMA, "head_dim": 12, "query_pre_attn_scalar": 12, "tie_word_embeddings": True, "num_hidden_layers": 3}
_GEMMA2 = {**_GEMMA, "sliding_window": 7, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
_GEMMA3 = {**_GEMMA, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_GEMMA4 = {**_LLAMA, "head_dim": 12, "global_head_dim": 20, "tie_word_embeddings": True, "num_hidden_layers": 6}
_GEMMA4 |= {"sliding_window": 20, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE}
_GEMMA4 |= {"layer_types": [*["sliding_attention", "full_attention"] * 3], "final_logit_softcapping": 4.0}
_ALIKE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
_GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24}
_BY_LAYER = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
}
_GPT_OSS = {
    **_LLAMA,
    **{"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 14, "sliding_window": 11},
    **{"intermediate_size": 44, "num_hidden_layers": 3},
}
_SHORT_YARN = _rope("yarn", **_ORIGINAL, beta_fast=16.0, beta_slow=2.0, truncate=False)

_LONG = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 1.5, 4.0, 8.0]}
_LONGROPE = _rope("longrope", **_LONG)
_NOPE = {"no_rope_layers": [1, 0]}
_MULTIPLIED = {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.7}
_MULTIPLIED |= {"attention_multiplier": 0.2}
_MINISTRAL_ROPE = _rope("yarn", **_ORIGINAL, llama_4_scaling_beta=0.3)["rope_parameters"]
_OLMO_ROPE = {
    "full_attention": _rope("yarn", **_ORIGINAL)["rope_parameters"],
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
_QWEN_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GLM_MOE = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2}
_GLM_MOE |= {"num_hidden_layers": 3, "routed_scaling_factor": 1.7}
_GROUPS = {"n_group": 3, "topk_group": 2}
_BY_GROUP = {**_GROUPS, "topk_method": "group_limited_greedy"}
_MLA = {"kv_lora_rank": 20, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
_MLA |= {"num_key_value_heads": 4}
_MLA_YARN = _rope("yarn", **_ORIGINAL, mscale=1.0, mscale_all_dim=0.8)
_MISTRAL4_YARN = _rope("yarn", **_ORIGINAL, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3)
_LFM2 = {**_LLAMA, "num_hidden_layers": 4, "block_multiple_of": 16}
_LFM2 |= {"layer_types": ["conv", "full_attention", "conv", "conv"]}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
_DELTA |= {"head_dim": 16, "num_hidden_layers": 4}
_NEXT = {**_LLAMA, **_DELTA, **_QWEN_MOE, "shared_expert_intermediate_size": 20}
_NEXT_MIXED = {"mlp_only_layers": [2], "linear_conv_kernel_dim": 2, "norm_topk_prob": False}
_NEXT_MIXED |= {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]}
_MAMBA = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_d_conv": 4}
_GRANITE4 = {**_LLAMA, **_MULTIPLIED, **_EXPERTS, **_MAMBA, "num_hidden_layers": 4, "shared_intermediate_size": 20}
_GRANITE4 |= {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}
_GRANITE4_DENSE = {"num_local_experts": 0, "mamba_n_groups": 1, "mamba_conv_bias": False, "attention_bias": True}
_ATTENTION_ALONE = {"layer_types": ["full_attention"] * 4, "position_embedding_type": "rope"}
_KIMI = {**_LLAMA, **_MLA, **_EXPERTS, **_GROUPS, "q_lora_rank": None, "num_hidden_layers": 4}
_KIMI |= {"moe_intermediate_size": 24, "n_shared_experts": 2, "routed_scaling_factor": 1.7}
_KIMI |= {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
_KIMI |= {
    "linear_head_dim": 16,
    "linear_num_heads": 3,
    "rms_norm_eps": 1e-2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**_LLAMA, "num_key_value_heads": 4}),
    "llama3_rope": ("Llama", {**_LLAMA, "tie_word_embeddings": True, **_LLAMA3}),
    "yi": ("Llama", {**_LLAMA, "num_attention_heads": 8, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
    "linear_rope": ("Llama", {**_LLAMA, **_rope("linear", factor=2.5)}),
    "dynamic_rope": ("Llama", {**_LLAMA, **_rope("dynamic", factor=4.0)}),
    "yarn_rope": ("Llama", {**_LLAMA, **_rope("yarn", **_ORIGINAL)}),
    "yarn_rope_all": ("Qwen2", {**_LLAMA, **_rope("yarn", **_ORIGINAL, **_YARN)}),
    "mistral": ("Mistral", {**_LLAMA, "sliding_window": 24, "head_dim": 16}),
    "mixtral": ("Mixtral", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", _LLAMA),
    "qwen2_sliding": ("Qwen2", {**_LLAMA, **_SLIDING, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**_LLAMA, "head_dim": 16}),
    "falcon_7b": ("Falcon", {**_FALCON, "tie_word_embeddings": True}),
    "falcon_40b": ("Falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_sequential": ("Falcon", {**_FALCON, "parallel_attn": False, "multi_query": False, "bias": True}),
    "neox": ("GPTNeoX", _NEOX),
    "phi3": ("Phi3", {**_LLAMA, "sliding_window": 24, **_rope("default", partial_rotary_factor=0.5)}),
    "phi3_long": ("Phi3", {**_LLAMA, **_LONGROPE, "original_max_position_embeddings": 160}),
    "smollm3": ("SmolLM3", {**_LLAMA, "num_hidden_layers": 4, "tie_word_embeddings": True}),
    "smollm3_sliding": ("SmolLM3", {**_LLAMA, "use_sliding_window": True, "sliding_window": 7, **_NOPE}),
    "granite": ("Granite", {**_LLAMA, **_MULTIPLIED, "attention_bias": True, "mlp_bias": True}),
    "ministral3": ("Ministral3", {**_LLAMA, "head_dim": 16, "rope_parameters": _MINISTRAL_ROPE}),
    "olmo2": ("Olmo2", {**_LLAMA, "attention_bias": True}),
    "olmo3": ("Olmo3", {**_LLAMA, "num_hidden_layers": 4, "sliding_window": 9, "rope_parameters": _OLMO_ROPE}),
    "olmo3_default": ("Olmo3", {**_LLAMA, "sliding_window": 1, "num_hidden_layers": 5}),
    "cohere2": ("Cohere2", {**_LLAMA, "num_hidden_layers": 4, "sliding_window": 20, "tie_word_embeddings": True}),
    "cohere2_biased": ("Cohere2", {**_LLAMA, "sliding_window": 3, "attention_bias": True, "logit_scale": 0.5}),
    "qwen2_moe": ("Qwen2Moe", {**_LLAMA, **_QWEN_MOE, "shared_expert_intermediate_size": 20}),
    "qwen2_moe_sliding": ("Qwen2Moe", {**_LLAMA, **_QWEN_MOE, **_SLIDING, "norm_topk_prob": True, "qkv_bias": False}),
    "qwen3_moe": ("Qwen3Moe", {**_LLAMA, **_QWEN_MOE, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe_mixed": ("Qwen3Moe", {**_LLAMA, **_QWEN_MOE, "decoder_sparse_step": 2, "attention_bias": True}),
    "glm4": ("Glm4", {**_LLAMA, "head_dim": 16, "attention_bias": True}),
    "glm4_moe": ("Glm4Moe", {**_LLAMA, **_GLM_MOE, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe_groups": ("Glm4Moe", {**_LLAMA, **_GLM_MOE, "n_group": 3, "topk_group": 2, "norm_topk_prob": False}),
    "minimax_m2": ("MiniMaxM2", {**_LLAMA, **_EXPERTS, "head_dim": 16, "rotary_dim": 8}),
    "deepseek_v2": ("DeepseekV2", {**_LLAMA, **_MLA, **_GLM_MOE, "q_lora_rank": None, "first_k_dense_replace": 1}),
    "deepseek_v2_groups": ("DeepseekV2", {**_LLAMA, **_MLA, **_GLM_MOE, **_BY_GROUP, "num_key_value_heads": 4}),
    "deepseek_v3": ("DeepseekV3", {**_LLAMA, **_MLA, **_GLM_MOE, **_GROUPS, **_MLA_YARN, "first_k_dense_replace": 1}),
    "deepseek_v3_plain": ("DeepseekV3", {**_LLAMA, **_MLA, **_GLM_MOE, "n_group": 1, "topk_group": 1}),
    "mistral4": ("Mistral4", {**_LLAMA, **_MLA, **_GLM_MOE, **_MISTRAL4_YARN}),
    "gemma2": ("Gemma2", _GEMMA2),
    "gemma2_window_1": ("Gemma2", {**_GEMMA2, "sliding_window": 1, "query_pre_attn_scalar": 20}),
    "gemma3": ("Gemma3", _GEMMA3),
    "gemma3_scaled_rope": ("Gemma3", {**_GEMMA3, "rope_parameters": _BY_LAYER, "final_logit_softcapping": 4.0}),
    "gemma4": ("Gemma4", {**_GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "gemma4_keys_are_values": ("Gemma4", {**_GEMMA4, **_ALIKE}),
    "gemma4_experts": ("Gemma4", {**_GEMMA4, **_ALIKE, **_GEMMA4_EXPERTS}),
    "gpt_oss": ("GptOss", {**_GPT_OSS, **_SHORT_YARN}),
    "gpt_oss_plain_rope": ("GptOss", {**_GPT_OSS, **_rope("default"), "sliding_window": 1}),
    "neox_sequential": ("GPTNeoX", {**_NEOX, **_NOT_PARALLEL, **_rope("default", partial_rotary_factor=0.5)}),
    "lfm2": ("Lfm2", _LFM2),
    "lfm2_biased": ("Lfm2", {**_LFM2, "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}),
    "qwen3_next": ("Qwen3Next", _NEXT),
    "qwen3_next_mixed": ("Qwen3Next", {**_NEXT, **_NEXT_MIXED}),
    "qwen3_5": ("Qwen3_5", {**_LLAMA, **_DELTA}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**_LLAMA, **_DELTA, **_QWEN_MOE, "shared_expert_intermediate_size": 20}),
    "granite4": ("GraniteMoeHybrid", _GRANITE4),
    "granite4_dense": ("GraniteMoeHybrid", {**_GRANITE4, **_GRANITE4_DENSE}),
    "granite4_attention": ("GraniteMoeHybrid", {**_GRANITE4, **_ATTENTION_ALONE, "num_local_experts": 0}),
    "kimi_linear": ("KimiLinear", _KIMI),
}
"""Each architecture and each rope scaling: what `transformers` calls it, and its config."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same checkpoint here and there."""

    model: LoadedModel
    """As ca_jax loads it."""
    theirs: Any
    """As `transformers` does."""

    def their_logits(self, token_ids: list[int]) -> np.ndarray:
        """Of all tokens, f32 `[T, V]`."""
        import torch

        with torch.no_grad():
            return self.theirs(torch.tensor([token_ids]), use_cache=False).logits[0].float().numpy()

    def their_answer(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """Greedy tokens by a full pass each."""
        ids = list(token_ids)
        for _ in range(num_tokens):
            ids.append(int(self.their_logits(ids)[-1].argmax()))
        return ids[len(token_ids) :]


def make(name: str, directory: Path, seed: int = 0, **changes: Any) -> Any:
    """Writes a checkpoint of a case with random weights into a directory; the model of `transformers`.

    Args:
      name: of the case.
      directory: where to.
      seed: of the weights.
      **changes: to the case's config.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    kind, fields = CASES[name]
    of_kind = getattr(transformers, f"{kind}ForCausalLM")
    own = copy.deepcopy({**fields, **changes})  # Configs write into what they are given.
    config = of_kind.config_class(**own, attn_implementation="eager")
    config._experts_implementation = "eager"  # The other one needs sizes that are multiples of 4.
    model = of_kind(config).eval()
    generator = torch.Generator().manual_seed(seed)
    plus_one = kind.startswith(("Qwen3Next", "Qwen3_5")) or kind in ("Gemma2", "Gemma3")
    scale = 0.0 if plus_one else 1.0  # Of norms, as files hold it.
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            numbers = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(0.2 * numbers + (scale if key.endswith("weight") else 0.0))
                if kind == "Gemma4" and key.endswith("q_norm.weight"):  # Nothing else scales its scores down.
                    parameter.mul_(parameter.shape[0] ** -0.5)
            else:
                gain = 2.0 if "embed" in key or "lm_head" in key else 1.3
                if kind == "GptOss" and "gate_up" in key:
                    gain = 5.0  # So that some numbers are clipped.
                parameter.copy_(numbers * gain / math.sqrt(parameter.shape[-1]))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):  # By which experts are chosen, and not weighed.
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            if key.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(directory)
    if kind == "KimiLinear":  # It calls dense blocks otherwise than the release, which it reads, does.
        path = directory / "model.safetensors"
        tensors = safetensors.numpy.load_file(path)
        own = {re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name): each for name, each in tensors.items()}
        safetensors.numpy.save_file(own, path)
    return model


@functools.cache
def pair(name: str, **changes: Any) -> Pair:
    """A case's checkpoint, its config changed so far, loaded by both."""
    with tempfile.TemporaryDirectory() as directory:
        theirs = make(name, Path(directory), **changes)
        return Pair(ca_jax.load_model(directory, dtype="float32"), theirs)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return np.random.default_rng((num_tokens, seed)).integers(0, VOCAB_SIZE, num_tokens).tolist()


@functools.partial(jax.jit, static_argnames=("model", "context"))
def _run(model: Transformer, params: Any, tokens: jax.Array, context: int) -> jax.Array:
    positions = jax.numpy.arange(tokens.shape[1])[None]
    return model.apply(params, tokens, positions, None, context)[0]  # type: ignore[index]


def our_logits(model: LoadedModel, token_ids: list[int], *, room: int, context: int) -> np.ndarray:
    """Of all tokens without any cache, f32 `[T, V]`; computed with so many places, so that it compiles once."""
    padded = np.zeros((1, room), np.int32)
    padded[0, : len(token_ids)] = token_ids
    return np.asarray(_run(model.model, model.params, padded, context))[0, : len(token_ids)]
