"""Published architectures by name, in their exact sizes.

Random weights of them: `random_weights`; what they take of devices: `launch.plan`. Trained models go by other names
(`checkpoint`), or by those of their files.

Not here: what the numbers mean (`config`).
Source: each model's config.json as released, the sizes of LLaMA and Llama 2 also in Touvron et al. (2023, table 2) and
Touvron et al. (2023b, table 1); Llama 3: Grattafiori et al. (2024); Mistral and Mixtral: Jiang et al. (2023, 2024);
Falcon: Almazrouei et al. (2023); SmolLM2: Allal et al. (2025).
"""

from __future__ import annotations

from typing import Any

from ca_jax.models.config import ModelConfig, RopeConfig

_SIZES = ("vocab_size", "embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_positions")


def _sized(sizes: tuple[int, int, int, int, int, int, int, int], theta: float = 1e4, **others: Any) -> ModelConfig:
    """A config by its sizes V, F, D, L, N, K, H and `max_positions`, and by what it has otherwise than most."""
    fields: dict[str, Any] = dict(zip(_SIZES, sizes, strict=True))
    return ModelConfig(**{**fields, "rope": RopeConfig(theta=theta), **others})


_FALCON: dict[str, Any] = {
    "architecture": "falcon",
    "tie_embeddings": True,
    "norm": "layer",
    "mlp": "gelu",
    "is_parallel": True,
}
_PYTHIA: dict[str, Any] = {
    "architecture": "gpt_neox",
    "rope": RopeConfig(rotary_dim=32),
    "norm": "layer",
    "mlp": "gelu",
    "is_parallel": True,
    **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True),
}
_SMOL: dict[str, Any] = {"tie_embeddings": True}
_QWEN: dict[str, Any] = {"theta": 1e6, "norm_eps": 1e-6}
_MISTRAL = (32000, 4096, 14336, 32, 32, 8, 128, 32768)  # Of each expert of Mixtral, too.
_MIXTRAL: dict[str, Any] = {"architecture": "mixtral", "num_experts": 8, "num_experts_per_token": 2}

PRESETS = {
    "llama-7b": _sized((32000, 4096, 11008, 32, 32, 32, 128, 2048), norm_eps=1e-6),
    "llama-13b": _sized((32000, 5120, 13824, 40, 40, 40, 128, 2048), norm_eps=1e-6),
    "llama-65b": _sized((32000, 8192, 22016, 80, 64, 64, 128, 2048)),
    "llama2-7b": _sized((32000, 4096, 11008, 32, 32, 32, 128, 4096)),
    "llama2-13b": _sized((32000, 5120, 13824, 40, 40, 40, 128, 4096)),
    "llama2-70b": _sized((32000, 8192, 28672, 80, 64, 8, 128, 4096)),
    "llama3-8b": _sized((128256, 4096, 14336, 32, 32, 8, 128, 8192), 5e5),
    "llama3-70b": _sized((128256, 8192, 28672, 80, 64, 8, 128, 8192), 5e5),
    "yi-34b": _sized((64000, 7168, 20480, 60, 56, 8, 128, 4096), 5e6),
    "mistral-7b": _sized(_MISTRAL, architecture="mistral", sliding_window=4096),
    "mixtral-8x7b": _sized(_MISTRAL, 1e6, **_MIXTRAL),
    "falcon-7b": _sized((65024, 4544, 18176, 32, 71, 1, 64, 2048), shares_norm=True, **_FALCON),
    "falcon-40b": _sized((65024, 8192, 32768, 60, 128, 8, 64, 2048), **_FALCON),
    "qwen2.5-7b": _sized((152064, 3584, 18944, 28, 28, 4, 128, 131072), architecture="qwen2", qkv_bias=True, **_QWEN),
    "qwen3-8b": _sized((151936, 4096, 12288, 36, 32, 8, 128, 40960), architecture="qwen3", qk_norm=True, **_QWEN),
    "pythia-1.4b": _sized((50304, 2048, 8192, 24, 16, 16, 128, 2048), **_PYTHIA),
    "smollm2-135m": _sized((49152, 576, 1536, 30, 9, 3, 64, 8192), 1e5, **_SMOL),
    "smollm2-360m": _sized((49152, 960, 2560, 32, 15, 5, 64, 8192), 1e5, **_SMOL),
    "smollm2-1.7b": _sized((49152, 2048, 8192, 24, 32, 32, 64, 8192), 1.3e5, **_SMOL),
}
"""Architectures by name."""
