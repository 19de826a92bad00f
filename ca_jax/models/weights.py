"""What every checkpoint format is turned into: a `Checkpoint` whose parameters are a tree of arrays.

The tree is the one of the linen modules: `{"params": {"embed": {"embedding"}, "layer_0": {"attn_norm": {"scale"},
"attn": {"wq", "wk", "wv", "wo"}, ...}, ..., "final_norm": {"scale"}, "head": {"kernel"}}}`, kernels `[in, out...]`.

Not here: reading it out of files (`reading`), file formats (`gguf`, `huggingface`, `orbax`), which model a name means
(`checkpoint`), devices.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ca_jax.models.config import ModelConfig
from ca_jax.models.tokenizer import Tokenizer

ProgressFn = Callable[[str, int, int], None]
"""Called as (what is being done, bytes done, bytes in all), always on the thread that loads."""

Params = dict[str, Any]
"""Nested dictionaries with arrays as leaves."""

_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model as loaded: everything that is needed to run it."""

    config: ModelConfig
    """Its architecture."""
    params: Params
    """Its weights, of one dtype: numpy arrays, or whatever else their destination makes of them. Treat as read-only, on
    CPU a device array may alias them."""
    tokenizer: Tokenizer | None
    """Its tokenizer, or None where the checkpoint has none: such a model takes and gives token ids only."""
    name: str
    """What to call it."""
    fingerprint: str
    """Hex SHA-256 that differs wherever the weights, their dtype or the config differ; part of the key of stored KV."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a reply, ascending."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """One leaf of the parameter tree and what a file must hold for it."""

    path: tuple[str, ...]
    """Keys from the root to the leaf, without "params"."""
    key: str
    """The path without the layer, `attn.wq` for instance: how the formats' tables of names are indexed."""
    layer: int | None
    """Which layer, or None outside the layers."""
    stored_shape: tuple[int, ...]
    """Shape in files, of one tensor; linear layers `[out, in]`."""
    shape: tuple[int, ...]
    """Shape in the tree."""
    axes: tuple[str | None, ...]
    """A name for each axis in the tree: vocab, embed, heads, kv_heads, head_dim, mlp, experts, or None. By these names
    axes are mapped to those of a mesh."""
    transposed: bool
    """Whether the file holds the transpose of what the tree holds."""
    num_stacked: int | None = None
    """How many tensors of `stored_shape` lie one behind the other along the leaf's first axis; None: it is one."""


def resolve_dtype(dtype: str) -> np.dtype:
    """The numpy dtype of that name; ValueError unless float32, bfloat16 or float16."""
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    return np.dtype(_DTYPES[dtype])


def parameter_slots(config: ModelConfig) -> Iterator[Slot]:
    """Every leaf of the parameter tree of `config`, in the order in which a forward pass reads them."""
    c = config
    embed, heads, kv_heads, mlp = c.embed_dim, (c.num_heads, c.head_dim), (c.num_kv_heads, c.head_dim), c.mlp_dim
    of_heads, of_kv_heads = ("heads", "head_dim"), ("kv_heads", "head_dim")

    def slot(
        key: str, layer: int | None, shape: tuple[int, ...], axes: tuple[str | None, ...], num_inputs: int | None = None
    ) -> Slot:
        """A leaf; of a linear layer, which files hold as `[out, in]`, with the number of axes that are inputs."""
        stored, path = shape, tuple(key.split("."))
        if num_inputs is not None:
            stored = (math.prod(shape[num_inputs:]), math.prod(shape[:num_inputs]))
        elif key.startswith("attn.b"):
            stored = (math.prod(shape),)
        return Slot(
            path=path if layer is None else (f"layer_{layer}", *path),
            key=key,
            layer=layer,
            stored_shape=stored,
            shape=shape,
            axes=axes,
            transposed=num_inputs is not None,
        )

    def norm(key: str, layer: int | None) -> Iterator[Slot]:
        yield slot(f"{key}.scale", layer, (embed,), ("embed",))
        if c.norm == "layer":
            yield slot(f"{key}.bias", layer, (embed,), ("embed",))

    def attention(i: int) -> Iterator[Slot]:
        inputs = (("q", heads, of_heads), ("k", kv_heads, of_kv_heads), ("v", kv_heads, of_kv_heads))
        for name, shape, axes in inputs:
            yield slot(f"attn.w{name}", i, (embed, *shape), ("embed", *axes), 1)
        if c.qkv_bias:
            yield from (slot(f"attn.b{name}", i, shape, axes) for name, shape, axes in inputs)
        if c.qk_norm:
            yield from (slot(f"attn.{name}_norm.scale", i, (c.head_dim,), (None,)) for name in "qk")
        yield slot("attn.wo", i, (*heads, embed), (*of_heads, "embed"), 2)
        if c.out_bias:
            yield slot("attn.bo", i, (embed,), ("embed",))

    def feed_forward(i: int) -> Iterator[Slot]:
        if c.num_experts:
            yield slot("mlp.router", i, (embed, c.num_experts), ("embed", "experts"), 1)
        names = ("gate", "up") if c.mlp == "swiglu" else ("up",)
        wide = [(name, (embed, mlp), ("embed", "mlp")) for name in names]
        for group in (wide, [("down", (mlp, embed), ("mlp", "embed"))]):
            for name, shape, axes in group:
                each = slot(f"mlp.w_{name}", i, shape, axes, 1)
                if c.num_experts:
                    num = c.num_experts
                    each = dataclasses.replace(each, shape=(num, *shape), axes=("experts", *axes), num_stacked=num)
                yield each
            if c.mlp_bias:
                yield from (slot(f"mlp.b_{name}", i, shape[1:], axes[1:]) for name, shape, axes in group)

    yield slot("embed.embedding", None, (c.vocab_size, embed), ("vocab", "embed"))
    for i in range(c.num_layers):
        yield from norm("attn_norm", i)
        yield from attention(i)
        if not c.shares_norm:
            yield from norm("mlp_norm", i)
        yield from feed_forward(i)
    yield from norm("final_norm", None)
    if not c.tie_embeddings:
        yield slot("head.kernel", None, (embed, c.vocab_size), ("embed", "vocab"), 1)


def hash_file(path: Path) -> str:
    """Hex SHA-256 of a file's contents; its name is no part of it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(root: Path, files: Iterable[Path]) -> str:
    """Hex SHA-256 over the names (relative to `root`) and contents of `files`, whatever their order."""
    lines = (f"{path.relative_to(root).as_posix()} {hash_file(path)}\n" for path in sorted(files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def fingerprint(content_sha256: str, config: ModelConfig, dtype: np.dtype) -> str:
    """Hex SHA-256 of weights as they are served: what the files hold, how it is understood, and in which dtype."""
    described = json.dumps(
        {"content": content_sha256, "config": dataclasses.asdict(config), "dtype": dtype.name}, sort_keys=True
    )
    return hashlib.sha256(described.encode()).hexdigest()
