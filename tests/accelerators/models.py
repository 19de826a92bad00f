"""Architectures that steps are compiled of: presets, and one of each kind of layer that no preset has.

Not here: their steps (serving).
"""

from __future__ import annotations

from typing import Any

from ca_jax.models.config import ModelConfig
from ca_jax.models.huggingface import config_from_hf
from ca_jax.models.presets import PRESETS

_GEMMA_4: dict[str, Any] = {
    "model_type": "gemma4_text",
    **{"vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_kv_shared_layers": 0},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512},
    **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "sliding_window": 512},
    **{"max_position_embeddings": 131072, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"},
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
"""Sizes that `transformers` has by default. Of the releases some have layers that read others' KV and are given inputs
of their own, and some have full layers that keep values alone."""

_DESCRIBED: dict[str, dict[str, Any]] = {
    "gpt-oss-20b, 4 layers": {
        "model_type": "gpt_oss",
        **{"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 4},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True},
        **{"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "rms_norm_eps": 1e-5},
        **{"max_position_embeddings": 131072, "rope_theta": 150000.0, "hidden_act": "silu"},
    },
    "qwen3-moe, 4 layers": {
        "model_type": "qwen3_moe",
        **{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "hidden_act": "silu"},
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
        **{"decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 40960, "rms_norm_eps": 1e-6},
        **{"rope_theta": 1e6, "tie_word_embeddings": False},
    },
    "deepseek-v2-lite, 4 layers": {
        "model_type": "deepseek_v2",
        **{"vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 4},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840},
        **{"moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6},
        **{"first_k_dense_replace": 1, "topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0},
        **{"n_group": 1, "topk_group": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
        "rope_scaling": {
            **{"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
            "original_max_position_embeddings": 4096,
        },
    },
    "gemma-4, 4 layers": {
        **_GEMMA_4,
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma-4 with values alone, 2 layers": {
        **_GEMMA_4,
        **{"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        **{"attention_k_eq_v": True, "num_global_key_value_heads": 4, "hidden_size_per_layer_input": 0},
    },
    "qwen3-next, 4 layers": {
        "model_type": "qwen3_next",
        **{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 4},
        **{"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "hidden_act": "silu"},
        **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "decoder_sparse_step": 1, "mlp_only_layers": []},
        **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512},
        **{"num_experts_per_tok": 10, "norm_topk_prob": True, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6},
        **{"rope_theta": 1e7, "partial_rotary_factor": 0.25, "tie_word_embeddings": False},
    },
}
"""By name, what releases say in their config.json, but for the number of layers: of each kind there are some."""

KINDS = tuple(_DESCRIBED)
"""Names of these."""
MODELS: dict[str, ModelConfig] = {**PRESETS, **{name: config_from_hf(each) for name, each in _DESCRIBED.items()}}
"""By name."""
