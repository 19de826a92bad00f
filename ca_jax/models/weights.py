"""What every checkpoint format is turned into: a `Checkpoint` whose parameters are a tree of numpy arrays.

The tree is the one of the linen modules: `{"params": {"embed": {"embedding"}, "layer_0": {"attn_norm": {"scale"},
"attn": {"wq", "wk", "wv", "wo"}, ...}, ..., "final_norm": {"scale"}, "head": {"kernel"}}}`, kernels `[in, out...]`.
Files store linear layers `[out, in]`; rows are read a chunk at a time and written straight into their final place,
since the first touch of fresh memory costs more than the arithmetic.

Not here: file formats (`gguf`, `huggingface`, `orbax`), which model a name means (`checkpoint`), devices.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ca_jax.errors import CheckpointError
from ca_jax.models.config import ModelConfig
from ca_jax.models.families.family import Fused, Names
from ca_jax.models.tokenizer import Tokenizer

ProgressFn = Callable[[str, int, int], None]
"""Called as (what is being done, bytes done, bytes in all), always on the thread that loads."""

Params = dict[str, Any]
"""Nested dictionaries with numpy arrays as leaves."""

_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_ALIGNMENT_BYTES = 64  # XLA's CPU client takes arrays so aligned as they are, without a copy.
_CHUNK_ELEMENTS = 1 << 18  # 1 MiB of f32: read, dequantised and transposed while it is in the cache.
_MAX_WORKERS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model as loaded: everything that is needed to run it."""

    config: ModelConfig
    """Its architecture."""
    params: Params
    """Its weights, numpy arrays of one dtype; treat as read-only, on CPU a device array may alias them."""
    tokenizer: Tokenizer | None
    """Its tokenizer, or None where the checkpoint has none: such a model takes and gives token ids only."""
    name: str
    """What to call it."""
    fingerprint: str
    """Hex SHA-256 that differs wherever the weights, their dtype or the config differ; part of the key of stored KV."""
    stop_token_ids: tuple[int, ...]
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a checkpoint file, read by rows."""

    shape: tuple[int, ...]
    """Its shape, outermost first."""
    read_rows: Callable[[int, int], np.ndarray]
    """Rows `[start, stop)` along the first axis, as floating point numbers of any dtype; called by several threads."""


def resolve_dtype(dtype: str) -> np.dtype:
    """The numpy dtype of that name; ValueError unless float32, bfloat16 or float16."""
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, found {dtype!r}")
    return np.dtype(_DTYPES[dtype])


def parameter_slots(config: ModelConfig) -> Iterator[Slot]:
    """Every leaf of the parameter tree of `config`, in the order in which a forward pass reads them."""
    c = config
    embed, heads, kv_heads, mlp = c.embed_dim, (c.num_heads, c.head_dim), (c.num_kv_heads, c.head_dim), c.mlp_dim
    of_heads, of_kv_heads = ("heads", "head_dim"), ("kv_heads", "head_dim")

    def leaf(key: str, layer: int | None, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Slot:
        stored = (math.prod(shape),) if key.startswith("attn.b") else shape
        return Slot(
            path=_path(key, layer), key=key, layer=layer, stored_shape=stored, shape=shape, axes=axes, transposed=False
        )

    def linear(key: str, layer: int | None, shape: tuple[int, ...], axes: tuple[str, ...], num_inputs: int = 1) -> Slot:
        out_by_in = (math.prod(shape[num_inputs:]), math.prod(shape[:num_inputs]))
        return Slot(
            path=_path(key, layer),
            key=key,
            layer=layer,
            stored_shape=out_by_in,
            shape=shape,
            axes=axes,
            transposed=True,
        )

    def experts(key: str, layer: int, shape: tuple[int, int], axes: tuple[str, str]) -> Slot:
        return Slot(
            path=_path(key, layer),
            key=key,
            layer=layer,
            stored_shape=shape[::-1],
            shape=(c.num_experts, *shape),
            axes=("experts", *axes),
            transposed=True,
            num_stacked=c.num_experts,
        )

    def norm(key: str, layer: int | None) -> Iterator[Slot]:
        yield leaf(f"{key}.scale", layer, (embed,), ("embed",))
        if c.norm == "layer":
            yield leaf(f"{key}.bias", layer, (embed,), ("embed",))

    def attention(i: int) -> Iterator[Slot]:
        yield linear("attn.wq", i, (embed, *heads), ("embed", *of_heads))
        yield linear("attn.wk", i, (embed, *kv_heads), ("embed", *of_kv_heads))
        yield linear("attn.wv", i, (embed, *kv_heads), ("embed", *of_kv_heads))
        if c.qkv_bias:
            yield leaf("attn.bq", i, heads, of_heads)
            yield leaf("attn.bk", i, kv_heads, of_kv_heads)
            yield leaf("attn.bv", i, kv_heads, of_kv_heads)
        if c.qk_norm:
            yield leaf("attn.q_norm.scale", i, (c.head_dim,), (None,))
            yield leaf("attn.k_norm.scale", i, (c.head_dim,), (None,))
        yield linear("attn.wo", i, (*heads, embed), (*of_heads, "embed"), num_inputs=2)
        if c.out_bias:
            yield leaf("attn.bo", i, (embed,), ("embed",))

    def feed_forward(i: int) -> Iterator[Slot]:
        if c.num_experts:
            yield linear("mlp.router", i, (embed, c.num_experts), ("embed", "experts"))
            yield experts("mlp.w_gate", i, (embed, mlp), ("embed", "mlp"))
            yield experts("mlp.w_up", i, (embed, mlp), ("embed", "mlp"))
            yield experts("mlp.w_down", i, (mlp, embed), ("mlp", "embed"))
            return
        names = ("gate", "up") if c.mlp == "swiglu" else ("up",)
        for name in names:
            yield linear(f"mlp.w_{name}", i, (embed, mlp), ("embed", "mlp"))
        if c.mlp_bias:
            for name in names:
                yield leaf(f"mlp.b_{name}", i, (mlp,), ("mlp",))
        yield linear("mlp.w_down", i, (mlp, embed), ("mlp", "embed"))
        if c.mlp_bias:
            yield leaf("mlp.b_down", i, (embed,), ("embed",))

    yield leaf("embed.embedding", None, (c.vocab_size, embed), ("vocab", "embed"))
    for i in range(c.num_layers):
        yield from norm("attn_norm", i)
        yield from attention(i)
        if not c.shares_norm:
            yield from norm("mlp_norm", i)
        yield from feed_forward(i)
    yield from norm("final_norm", None)
    if not c.tie_embeddings:
        yield linear("head.kernel", None, (embed, c.vocab_size), ("embed", "vocab"))


def build_params(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    names: Names,
    *,
    dtype: np.dtype,
    source: str,
    progress: ProgressFn | None = None,
) -> Params:
    """Reads every weight of `config` out of a checkpoint file's tensors. Blocks; reads on a few threads.

    Args:
      config: the architecture, which decides the tree and every shape.
      tensors: what the file holds, by its own names. Each must be used: a tensor nobody asked for (a bias, an expert)
        is a different model.
      names: where the file holds each leaf.
      dtype: of the arrays returned.
      source: the checkpoint's path, for messages.
      progress: told of bytes written.

    Returns:
      `{"params": tree}`, each leaf C-contiguous and 64-byte aligned.

    Raises:
      CheckpointError: a tensor is missing, misshaped, or belongs to no parameter.
    """
    wanted = [(slot, _origin(slot, names)) for slot in parameter_slots(config)]
    _require_exactly(wanted, tensors, source)
    total_bytes = sum(math.prod(slot.shape) for slot, _ in wanted) * dtype.itemsize
    done_bytes = 0
    tree: Params = {}
    with concurrent.futures.ThreadPoolExecutor(min(_MAX_WORKERS, os.cpu_count() or 1)) as pool:
        futures = {
            pool.submit(_read, [tensors[name] for name in origin.names], origin.rows, slot, dtype): slot
            for slot, origin in wanted
        }
        try:
            for future in concurrent.futures.as_completed(futures):
                array = future.result()
                _put(tree, futures[future].path, array)
                done_bytes += array.nbytes
                if progress is not None:
                    progress("reading weights", done_bytes, total_bytes)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return {"params": tree}


def check_params(config: ModelConfig, params: Params, source: str) -> None:
    """Raises CheckpointError unless `params` has exactly the leaves and shapes of `config`."""
    wanted = {"/".join(slot.path): slot.shape for slot in parameter_slots(config)}
    found = {"/".join(path): leaf.shape for path, leaf in _leaves(params["params"])}
    for name in wanted.keys() ^ found.keys():
        raise CheckpointError(f"{source}: parameter {name}: wanted {wanted.get(name)}, found {found.get(name)}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise CheckpointError(f"{source}: parameter {name}: wanted shape {shape}, found {found[name]}")


def cast_params(params: Params, dtype: np.dtype) -> Params:
    """The same tree in another dtype; leaves that have it already are not copied."""
    return {k: cast_params(v, dtype) if isinstance(v, dict) else v.astype(dtype, copy=False) for k, v in params.items()}


def params_bytes(params: Params) -> int:
    """How many bytes the leaves take."""
    return sum(leaf.nbytes for _, leaf in _leaves(params))


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


def _path(key: str, layer: int | None) -> tuple[str, ...]:
    parts = tuple(key.split("."))
    return parts if layer is None else (f"layer_{layer}", *parts)


def _put(tree: Params, path: tuple[str, ...], leaf: np.ndarray) -> None:
    *parents, last = path
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[last] = leaf


def _leaves(tree: Params, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


@dataclasses.dataclass(frozen=True)
class _Origin:
    """Where a leaf is read from."""

    names: tuple[str, ...]
    """The file's tensors: one, or as many as are stacked."""
    shape: tuple[int, ...]
    """Of each of them."""
    rows: np.ndarray | None
    """Which of their rows are the leaf's; None: all."""


def _origin(slot: Slot, names: Names) -> _Origin:
    place = names[slot.key]
    if isinstance(place, Fused):
        return _Origin((place.name.format(layer=slot.layer),), (place.num_rows, *slot.stored_shape[1:]), place.rows)
    stacked = tuple(place.format(layer=slot.layer, expert=i) for i in range(slot.num_stacked or 1))
    return _Origin(stacked, slot.stored_shape, None)


def _require_exactly(wanted: list[tuple[Slot, _Origin]], found: Mapping[str, StoredTensor], source: str) -> None:
    names = set()
    for _, origin in wanted:
        for name in origin.names:
            if name not in found:
                raise CheckpointError(f"{source}: tensor {name} is missing; wanted shape {origin.shape}")
            if found[name].shape != origin.shape:
                raise CheckpointError(
                    f"{source}: tensor {name}: wanted shape {origin.shape}, found {found[name].shape}"
                )
            names.add(name)
    unused = sorted(found.keys() - names)
    if unused:
        shown = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
        raise CheckpointError(
            f"{source}: {len(unused)} tensors belong to no parameter of this architecture: {shown}; "
            "leaving them out would give another model"
        )


def _read(tensors: list[StoredTensor], rows: np.ndarray | None, slot: Slot, dtype: np.dtype) -> np.ndarray:
    """Reads one leaf into a fresh array of its final layout, a chunk of rows at a time."""
    out = _empty_aligned(slot.shape, dtype)
    num_rows = slot.stored_shape[0]
    step = max(1, _CHUNK_ELEMENTS // math.prod(slot.stored_shape[1:]))
    for tensor, part in zip(tensors, [out] if slot.num_stacked is None else out, strict=True):
        target = part.reshape(slot.stored_shape[::-1]).T if slot.transposed else part.reshape(slot.stored_shape)
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            if rows is None:
                target[start:stop] = tensor.read_rows(start, stop)
            else:
                _read_runs(tensor, rows[start:stop], target[start:stop])
    return out


def _read_runs(tensor: StoredTensor, rows: np.ndarray, target: np.ndarray) -> None:
    """Reads some rows of a tensor, those that follow each other at once."""
    starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        target[start:stop] = tensor.read_rows(int(rows[start]), int(rows[stop - 1]) + 1)


def _empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    offset = -buffer.ctypes.data % _ALIGNMENT_BYTES
    return buffer[offset : offset + num_bytes].view(dtype).reshape(shape)
