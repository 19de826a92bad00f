"""What files call the leaves of the parameter tree, and in which rows of which tensor they lie.

Not here: which family calls what how.
Source: names in GGUF files are those of llama.cpp, whose converter wrote such files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ca_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Fused:
    """Rows of a file's tensor that holds several leaves of the parameter tree."""

    name: str
    """The file's name, with `{layer}` where the layer's number goes."""
    num_rows: int
    """Rows of the whole tensor."""
    rows: np.ndarray
    """i64, which rows are the leaf's, in its order."""
    columns: np.ndarray | None = None
    """i64, the columns of a row in the leaf's order; None: as they lie."""


Names = Mapping[str, str | Fused]
"""From `Slot.key` to where a file holds the leaf: in the tensor of that name, with `{layer}`, and `{expert}` where each
expert has one of its own; or in some rows of one. Names of parts that a model does not have are not looked at."""


def fused_rows(rows: Mapping[str, np.ndarray], names: Mapping[str, str]) -> dict[str, Fused]:
    """Queries, keys and values that are rows of one tensor, or of a weight and a bias.

    Args:
      rows: those of `q`, `k` and `v`.
      names: the file's names of the weight `w` and, if there is one, the bias `b`.
    """
    num_rows = sum(each.size for each in rows.values())
    return {
        f"attn.{kind}{part}": Fused(name, num_rows, each.reshape(-1))
        for part, each in rows.items()
        for kind, name in names.items()
    }


def wide_mlp(config: ModelConfig, name: str) -> dict[str, Fused]:
    """Of the feed-forward block's one tensor: the gate, and what it gates behind it."""
    return parts_of(name, {"mlp.w_gate": config.mlp_dim, "mlp.w_up": config.mlp_dim})


def wide_experts(config: ModelConfig, name: str) -> dict[str, Fused]:
    """Of one tensor of all experts, with `[{expert}]` in its name: the gate, and what it gates behind it."""
    return parts_of(name, {"experts.w_gate": config.mlp_dim, "experts.w_up": config.mlp_dim})


def parts_of(name: str, sizes: Mapping[str, int]) -> dict[str, Fused]:
    """Leaves that lie one behind the other in one tensor.

    Args:
      name: the file's name of the tensor.
      sizes: the rows of each leaf, by their keys and in their order.
    """
    stops = np.cumsum([*sizes.values()])
    rows = np.split(np.arange(stops[-1]), stops[:-1])
    return {key: Fused(name, int(stops[-1]), each) for key, each in zip(sizes, rows, strict=True)}


def split_rows(config: ModelConfig) -> dict[str, np.ndarray]:
    """The rows of queries, keys and values that lie one behind the other in one tensor."""
    stops = np.cumsum([config.num_heads, config.num_kv_heads, config.num_kv_heads]) * config.head_dim
    return dict(zip("qkv", np.split(np.arange(stops[-1]), stops[:-1]), strict=True))


def half_split_rows(num_heads: int, head_dim: int, rotary_dim: int | None = None) -> np.ndarray:
    """For each row of queries or keys in half-split order, its row in interleaved order.

    One head of H = 6, pairs a b c:   file  a0 a1 b0 b1 c0 c1   ->   half-split  a0 b0 c0 a1 b1 c1

    Args:
      num_heads: of queries or keys.
      head_dim: H.
      rotary_dim: how many of a head's first rows are rotated, the others stay where they are; None: all.
    """
    rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim)
    turned, others = np.split(rows, [head_dim if rotary_dim is None else rotary_dim], axis=1)
    halves = turned.reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(num_heads, -1)
    return np.concatenate([halves, others], axis=1).reshape(-1)


def module_names(weight: str, name: str) -> dict[str, str]:
    """A file's names of a module's weight and bias, by their keys in the parameter tree.

    Args:
      weight: the key of the weight: `attn.wq`, `attn_norm.scale`.
      name: the file's name of the module.
    """
    bias = weight.replace(".scale", ".bias").replace(".w", ".b")
    return {weight: f"{name}.weight", bias: f"{name}.bias"}


_LAYER = "blk.{layer}."
GGUF_NAMES: dict[str, Any] = {
    "embed.embedding": "token_embd.weight",
    **module_names("attn_norm.scale", _LAYER + "attn_norm"),
    **module_names("attn.wq", _LAYER + "attn_q"),
    **module_names("attn.wk", _LAYER + "attn_k"),
    **module_names("attn.wv", _LAYER + "attn_v"),
    **module_names("attn.q_norm.scale", _LAYER + "attn_q_norm"),
    **module_names("attn.k_norm.scale", _LAYER + "attn_k_norm"),
    **module_names("attn.wo", _LAYER + "attn_output"),
    **module_names("mlp_norm.scale", _LAYER + "ffn_norm"),
    **module_names("mlp.w_gate", _LAYER + "ffn_gate"),
    **module_names("mlp.w_up", _LAYER + "ffn_up"),
    **module_names("mlp.w_down", _LAYER + "ffn_down"),
    "mlp.router": _LAYER + "ffn_gate_inp.weight",
    "mlp.choice_bias": _LAYER + "exp_probs_b.bias",
    **{
        f"experts.{kind}_{name}": f"{_LAYER}ffn_{name}_exps.{part}[{{expert}}]"
        for kind, part in (("w", "weight"), ("b", "bias"))
        for name in ("gate", "up", "down")
    },
    **{f"shared.w_{name}": f"{_LAYER}ffn_{name}_shexp.weight" for name in ("gate", "up", "down")},
    "shared.w_share": _LAYER + "ffn_gate_inp_shexp.weight",
    "attn_post_norm.scale": _LAYER + "post_attention_norm.weight",
    "mlp_post_norm.scale": _LAYER + "post_ffw_norm.weight",
    **module_names("final_norm.scale", "output_norm"),
    "head.kernel": "output.weight",
}
"""Names of tensors, which all families share as far as they have the parts."""
