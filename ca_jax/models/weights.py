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
    """Shape in files; linear layers `[out, in]`."""
    shape: tuple[int, ...]
    """Shape in the tree."""
    transposed: bool
    """Whether the file holds the transpose of what the tree holds."""


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
    q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def linear(key: str, layer: int | None, shape: tuple[int, ...], out_by_in: tuple[int, int]) -> Slot:
        return Slot(path=_path(key, layer), key=key, layer=layer, stored_shape=out_by_in, shape=shape, transposed=True)

    def plain(key: str, layer: int | None, shape: tuple[int, ...]) -> Slot:
        return Slot(path=_path(key, layer), key=key, layer=layer, stored_shape=shape, shape=shape, transposed=False)

    yield plain("embed.embedding", None, (c.vocab_size, c.embed_dim))
    for i in range(c.num_layers):
        yield plain("attn_norm.scale", i, (c.embed_dim,))
        yield linear("attn.wq", i, (c.embed_dim, c.num_heads, c.head_dim), (q_rows, c.embed_dim))
        yield linear("attn.wk", i, (c.embed_dim, c.num_kv_heads, c.head_dim), (kv_rows, c.embed_dim))
        yield linear("attn.wv", i, (c.embed_dim, c.num_kv_heads, c.head_dim), (kv_rows, c.embed_dim))
        yield linear("attn.wo", i, (c.num_heads, c.head_dim, c.embed_dim), (c.embed_dim, q_rows))
        yield plain("mlp_norm.scale", i, (c.embed_dim,))
        yield linear("mlp.w_gate", i, (c.embed_dim, c.mlp_dim), (c.mlp_dim, c.embed_dim))
        yield linear("mlp.w_up", i, (c.embed_dim, c.mlp_dim), (c.mlp_dim, c.embed_dim))
        yield linear("mlp.w_down", i, (c.mlp_dim, c.embed_dim), (c.embed_dim, c.mlp_dim))
    yield plain("final_norm.scale", None, (c.embed_dim,))
    if not c.tie_embeddings:
        yield linear("head.kernel", None, (c.embed_dim, c.vocab_size), (c.vocab_size, c.embed_dim))


def build_params(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    names: Mapping[str, str],
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
      names: from `Slot.key` to the file's name, with `{layer}` where the layer's number goes.
      dtype: of the arrays returned.
      source: the checkpoint's path, for messages.
      progress: told of bytes written.

    Returns:
      `{"params": tree}`, each leaf C-contiguous and 64-byte aligned.

    Raises:
      CheckpointError: a tensor is missing, misshaped, or belongs to no parameter.
    """
    wanted = {names[slot.key].format(layer=slot.layer): slot for slot in parameter_slots(config)}
    _require_exactly(wanted, tensors, source)
    total_bytes = sum(math.prod(slot.shape) for slot in wanted.values()) * dtype.itemsize
    done_bytes = 0
    tree: Params = {}
    with concurrent.futures.ThreadPoolExecutor(min(_MAX_WORKERS, os.cpu_count() or 1)) as pool:
        futures = {pool.submit(_read, tensors[name], slot, dtype): slot for name, slot in wanted.items()}
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


def _require_exactly(wanted: Mapping[str, Slot], found: Mapping[str, StoredTensor], source: str) -> None:
    for name, slot in wanted.items():
        if name not in found:
            raise CheckpointError(f"{source}: tensor {name} is missing; wanted shape {slot.stored_shape}")
        if found[name].shape != slot.stored_shape:
            raise CheckpointError(
                f"{source}: tensor {name}: wanted shape {slot.stored_shape}, found {found[name].shape}"
            )
    unused = sorted(found.keys() - wanted.keys())
    if unused:
        shown = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
        raise CheckpointError(
            f"{source}: {len(unused)} tensors belong to no parameter of this architecture: {shown}; "
            "leaving them out would give another model"
        )


def _read(tensor: StoredTensor, slot: Slot, dtype: np.dtype) -> np.ndarray:
    """Reads one tensor into a fresh array of its final layout, a chunk of rows at a time."""
    out = _empty_aligned(slot.shape, dtype)
    num_rows = slot.stored_shape[0]
    if not slot.transposed:
        target = out
    else:
        target = out.reshape(slot.stored_shape[::-1]).T
    row_elements = math.prod(slot.stored_shape[1:])
    step = max(1, _CHUNK_ELEMENTS // row_elements)
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        target[start:stop] = tensor.read_rows(start, stop)
    return out


def _empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    offset = -buffer.ctypes.data % _ALIGNMENT_BYTES
    return buffer[offset : offset + num_bytes].view(dtype).reshape(shape)
