"""Published architectures by name, in their exact sizes.

Random weights of them: `random_weights`; what they take of devices: `launch.plan`. Trained models go by other names
(`checkpoint`), or by those of their files.

Not here: what the numbers mean (`config`).
Source: each model's config.json as released, the sizes of LLaMA and Llama 2 also in Touvron et al. (2023, table 2) and
Touvron et al. (2023b, table 1).
"""

from __future__ import annotations

from typing import Any

from ca_jax.models.config import ModelConfig, RopeConfig


def _llama(*, embed_dim: int, mlp_dim: int, num_layers: int, num_heads: int, **others: Any) -> ModelConfig:
    """One of LLaMA, Llama 2, Llama 3 or Yi: heads of 128, all of them KV heads unless it is said."""
    sizes = {"vocab_size": 32000, "num_kv_heads": num_heads, "head_dim": 128, "max_positions": 4096, **others}
    return ModelConfig(embed_dim=embed_dim, mlp_dim=mlp_dim, num_layers=num_layers, num_heads=num_heads, **sizes)


def _llama3(**sizes: int) -> ModelConfig:
    """One of Llama 3 (Grattafiori et al., 2024)."""
    return _llama(**sizes, vocab_size=128256, num_kv_heads=8, max_positions=8192, rope=RopeConfig(theta=500000.0))


def _mistral_sizes() -> dict[str, Any]:
    """What Mistral 7B (Jiang et al., 2023) and Mixtral 8x7B (Jiang et al., 2024) share: each expert is of that size."""
    return {
        "vocab_size": 32000,
        "embed_dim": 4096,
        "mlp_dim": 14336,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "max_positions": 32768,
    }


def _falcon(**sizes: Any) -> ModelConfig:
    """One of Falcon (Almazrouei et al., 2023), head tied to the embedding."""
    return ModelConfig(
        architecture="falcon",
        vocab_size=65024,
        head_dim=64,
        max_positions=2048,
        tie_embeddings=True,
        norm="layer",
        mlp="gelu",
        is_parallel=True,
        **sizes,
    )


def _smollm2(
    *, embed_dim: int, mlp_dim: int, num_layers: int, num_heads: int, num_kv_heads: int, theta: float
) -> ModelConfig:
    """One of SmolLM2 (Allal et al., 2025)."""
    return ModelConfig(
        vocab_size=49152,
        embed_dim=embed_dim,
        mlp_dim=mlp_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=64,
        max_positions=8192,
        tie_embeddings=True,
        rope=RopeConfig(theta=theta),
    )


_SIZE_7B = {"embed_dim": 4096, "mlp_dim": 11008, "num_layers": 32, "num_heads": 32}
_SIZE_13B = {"embed_dim": 5120, "mlp_dim": 13824, "num_layers": 40, "num_heads": 40}
_SIZE_70B = {"embed_dim": 8192, "mlp_dim": 28672, "num_layers": 80, "num_heads": 64}

PRESETS = {
    "llama-7b": _llama(**_SIZE_7B, max_positions=2048, norm_eps=1e-6),
    "llama-13b": _llama(**_SIZE_13B, max_positions=2048, norm_eps=1e-6),
    "llama-65b": _llama(embed_dim=8192, mlp_dim=22016, num_layers=80, num_heads=64, max_positions=2048),
    "llama2-7b": _llama(**_SIZE_7B),
    "llama2-13b": _llama(**_SIZE_13B),
    "llama2-70b": _llama(**_SIZE_70B, num_kv_heads=8),
    "llama3-8b": _llama3(embed_dim=4096, mlp_dim=14336, num_layers=32, num_heads=32),
    "llama3-70b": _llama3(**_SIZE_70B),
    "yi-34b": _llama(
        embed_dim=7168,
        mlp_dim=20480,
        num_layers=60,
        num_heads=56,
        num_kv_heads=8,
        vocab_size=64000,
        rope=RopeConfig(theta=5e6),
    ),
    "mistral-7b": ModelConfig(architecture="mistral", **_mistral_sizes(), sliding_window=4096),
    "mixtral-8x7b": ModelConfig(
        architecture="mixtral",
        **_mistral_sizes(),
        rope=RopeConfig(theta=1e6),
        num_experts=8,
        num_experts_per_token=2,
    ),
    "falcon-7b": _falcon(embed_dim=4544, mlp_dim=18176, num_layers=32, num_heads=71, num_kv_heads=1, shares_norm=True),
    "falcon-40b": _falcon(embed_dim=8192, mlp_dim=32768, num_layers=60, num_heads=128, num_kv_heads=8),
    "qwen2.5-7b": ModelConfig(
        architecture="qwen2",
        vocab_size=152064,
        embed_dim=3584,
        mlp_dim=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        max_positions=131072,
        norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        qkv_bias=True,
    ),
    "qwen3-8b": ModelConfig(
        architecture="qwen3",
        vocab_size=151936,
        embed_dim=4096,
        mlp_dim=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_positions=40960,
        norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        qk_norm=True,
    ),
    "pythia-1.4b": ModelConfig(
        architecture="gpt_neox",
        vocab_size=50304,
        embed_dim=2048,
        mlp_dim=8192,
        num_layers=24,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        max_positions=2048,
        rope=RopeConfig(rotary_dim=32),
        norm="layer",
        mlp="gelu",
        is_parallel=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    ),
    "smollm2-135m": _smollm2(embed_dim=576, mlp_dim=1536, num_layers=30, num_heads=9, num_kv_heads=3, theta=100000.0),
    "smollm2-360m": _smollm2(embed_dim=960, mlp_dim=2560, num_layers=32, num_heads=15, num_kv_heads=5, theta=100000.0),
    "smollm2-1.7b": _smollm2(
        embed_dim=2048, mlp_dim=8192, num_layers=24, num_heads=32, num_kv_heads=32, theta=130000.0
    ),
}
"""Architectures by name."""
