"""What every checkpoint format is turned into: a `Checkpoint` whose parameters are a tree of arrays; reading it.

The tree is the one of the linen modules: `{"params": {"embed": {"embedding"}, "layer_0": {"attn_norm": {"scale"},
"attn": {"wq", "wk", "wv", "wo"}, ...}, ..., "final_norm": {"scale"}, "head": {"kernel"}}}`, kernels `[in, out...]`.

Leaves are read a few at a time, handed to a `Destination` and let go of, so that the host never holds more of a model
than its largest leaf beside what the destination keeps. Files store linear layers `[out, in]`; rows are read a chunk at
a time and written straight into their final place, since the first touch of fresh memory costs more than the
arithmetic.

Not here: file formats (`gguf`, `huggingface`, `orbax`), which model a name means (`checkpoint`), devices.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import flax.traverse_util
import ml_dtypes
import numpy as np

from ca_jax.errors import CheckpointError, check
from ca_jax.models.config import ModelConfig
from ca_jax.models.families.names import Fused, Names
from ca_jax.models.stored import StoredTensor
from ca_jax.models.tokenizer import Tokenizer

ProgressFn = Callable[[str, int, int], None]
"""Called as (what is being done, bytes done, bytes in all), always on the thread that loads."""

Params = dict[str, Any]
"""Nested dictionaries with arrays as leaves."""

_ALIGNMENT_BYTES = 64  # XLA's CPU client takes arrays so aligned as they are, without a copy.
_CHUNK_ELEMENTS = 1 << 18  # 1 MiB of f32: read, dequantised and transposed while it is in the cache.
_MAX_STEP = 2  # Rows that take turns with those of one other leaf are read with these.
_MAX_WORKERS = 8
_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

_Result = TypeVar("_Result")


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
    """The path without the layer, `attn.wq` for instance, and of experts `experts.w_up`: how the formats' tables of
    names are indexed."""
    layer: int | None
    """Which layer, or None outside the layers."""
    stored_shape: tuple[int, ...]
    """Shape in files, of one tensor; linear layers `[out, in]`."""
    shape: tuple[int, ...]
    """Shape in the tree."""
    axes: tuple[str | None, ...]
    """A name for each axis in the tree: vocab, embed, heads, kv_heads, head_dim, mlp, experts, channels, or None. By
    these names axes are mapped to those of a mesh."""
    transposed: bool
    """Whether the file holds the transpose of what the tree holds."""
    num_stacked: int | None = None
    """How many tensors of `stored_shape` lie one behind the other along the leaf's first axis; None: it is one."""
    num_inputs: int | None = None
    """Of a linear layer: how many of its axes, the first ones behind those stacked, are inputs; None: it is none."""

    def of_outputs(self, parts: tuple[_Result, ...]) -> tuple[_Result, ...]:
        """Of what a matrix has for each axis, as `shape` and `axes`: those stacked, and those of outputs.

        Rows of a table are its outputs.
        """
        if self.num_inputs is None:
            return parts[:1]
        first = int(self.num_stacked is not None)
        return parts[:first] + parts[first + self.num_inputs :]


def resolve_dtype(dtype: str) -> np.dtype:
    """The numpy dtype of that name; ValueError unless float32, bfloat16 or float16."""
    check(dtype in _DTYPES, "dtype", f"one of {', '.join(_DTYPES)}", dtype)
    return np.dtype(_DTYPES[dtype])


def parameter_slots(config: ModelConfig) -> Iterator[Slot]:
    """Every leaf of the parameter tree of `config`, in the order in which a forward pass reads them."""
    c = config
    # Each axis as its name and its size.
    vocab, embed = ("vocab", c.vocab_size), ("embed", c.embed_dim)
    heads, experts = ("heads", c.num_heads), ("experts", c.num_experts)
    given: tuple[str | None, int] = (None, c.layer_input_dim)
    of_layers: tuple[str | None, int] = (None, c.num_layers * c.layer_input_dim)

    def slot(
        key: str,
        layer: int | None,
        *axes: tuple[str | None, int],
        num_inputs: int | None = None,
        is_stacked: bool = False,
    ) -> Slot:
        """A leaf; of a linear layer, which files hold as `[out, in]`, with the number of axes that are inputs.

        Where experts are stacked these are behind the axis of experts.
        """
        shape, path = tuple(size for _, size in axes), tuple(key.split("."))
        if is_stacked:
            key = key.replace("mlp.", "experts.")
        inner = shape[1:] if is_stacked else shape
        stored = (math.prod(inner),) if key.startswith("attn.") else inner  # Files know no heads.
        if num_inputs is not None:
            stored = (math.prod(inner[num_inputs:]), math.prod(inner[:num_inputs]))
        return Slot(
            path=path if layer is None else (f"layer_{layer}", *path),
            key=key,
            layer=layer,
            stored_shape=stored,
            shape=shape,
            axes=tuple(name for name, _ in axes),
            transposed=num_inputs is not None,
            num_stacked=shape[0] if is_stacked else None,
            num_inputs=num_inputs,
        )

    def norm(key: str, layer: int | None) -> Iterator[Slot]:
        yield slot(f"{key}.scale", layer, embed)
        if c.norm == "layer" and c.norm_bias:
            yield slot(f"{key}.bias", layer, embed)

    def feed_forward(key: str, layer: int, width: int, has_bias: bool, is_stacked: bool = False) -> Iterator[Slot]:
        mlp, stack = ("mlp", width), (experts,) if is_stacked else ()
        matrices = (("gate", embed, mlp), ("up", embed, mlp), ("down", mlp, embed))
        for name, before, behind in matrices if c.has_gate else matrices[1:]:
            yield slot(f"{key}.w_{name}", layer, *stack, before, behind, num_inputs=1, is_stacked=is_stacked)
            if has_bias:
                yield slot(f"{key}.b_{name}", layer, *stack, behind, is_stacked=is_stacked)

    def latent_attention(layer: int) -> Iterator[Slot]:
        made_of: tuple[str | None, int] = embed
        latent = (None, c.latent_dim)
        if c.query_rank:
            made_of = (None, c.query_rank)
            yield slot("attn.wq_a", layer, embed, made_of, num_inputs=1)
            yield slot("attn.q_a_norm.scale", layer, made_of)
        yield slot("attn.wq", layer, made_of, heads, ("head_dim", c.rotary_dim + c.nope_dim), num_inputs=1)
        yield slot("attn.wkv_a", layer, embed, (None, c.head_dim), num_inputs=1)
        yield slot("attn.kv_norm.scale", layer, latent)
        yield slot("attn.wuk", layer, latent, heads, ("head_dim", c.nope_dim), num_inputs=1)
        yield slot("attn.wuv", layer, latent, heads, ("head_dim", c.value_dim), num_inputs=1)

    def mixer(layer: int) -> Iterator[Slot]:
        for each in () if c.recurrence is None else c.recurrence.parameters(c.embed_dim):
            sizes = zip(each.axes, each.shape, strict=True)
            found = slot(f"mixer.{each.name}", layer, *sizes, num_inputs=each.num_inputs)
            yield dataclasses.replace(found, stored_shape=each.stored_shape or found.stored_shape)

    def attention(layer: int) -> Iterator[Slot]:
        kind = c.kind_of(layer)
        kv_heads, head_dim = ("kv_heads", kind.num_kv_heads), ("head_dim", kind.head_dim)
        inputs = (("q", heads), ("k", kv_heads), ("v", kv_heads))[: 1 + kind.has_kv + (kind.has_kv and kind.has_values)]
        if c.latent_dim:
            yield from latent_attention(layer)
        else:
            yield from (slot(f"attn.w{name}", layer, embed, each, head_dim, num_inputs=1) for name, each in inputs)
        if c.qkv_bias:
            yield from (slot(f"attn.b{name}", layer, each, head_dim) for name, each in inputs)
        if c.qk_norm:
            of_heads = {"q": (heads,), "k": (kv_heads,)} if c.qk_norm_is_whole else {"q": (), "k": ()}
            normed, size = "qk" if kind.has_kv else "q", (None, kind.head_dim)
            yield from (slot(f"attn.{name}_norm.scale", layer, *of_heads[name], size) for name in normed)
        if c.gates_heads:
            yield slot("attn.wg", layer, embed, heads, head_dim, num_inputs=1)
        yield slot("attn.wo", layer, heads, ("head_dim", c.value_dim or kind.head_dim), embed, num_inputs=2)
        if c.out_bias:
            yield slot("attn.bo", layer, embed)
        if c.has_sinks:
            yield slot("attn.sinks", layer, heads)

    yield slot("embed.embedding", None, vocab, embed)
    if c.layer_input_dim:
        yield slot("inputs.embedding", None, vocab, of_layers)
        yield slot("inputs.w", None, embed, of_layers, num_inputs=1)
        yield slot("inputs.norm.scale", None, given)
    for i in range(c.num_layers):
        kind, has_experts = c.kind_of(i), c.kind_of(i).has_experts
        if c.norms_before:
            yield from norm("attn_norm", i)
        yield from mixer(i) if c.is_recurrent(i) else attention(i)
        if c.norms_behind:
            yield from norm("attn_post_norm", i)
        if c.norms_before and not c.shares_norm:
            yield from norm("mlp_norm", i)
        if has_experts:
            if c.norms_experts:
                yield from norm("experts_norm", i)
                yield slot("mlp.router_scale", i, embed)
                yield slot("mlp.share_scale", i, experts)
            yield slot("mlp.router", i, embed, experts, num_inputs=1)
            if c.router_bias:
                yield slot("mlp.b_router", i, experts)
            if c.choice_bias:
                yield slot("mlp.choice_bias", i, experts)
        yield from feed_forward("mlp", i, c.mlp_dim_of(kind), c.mlp_bias, is_stacked=has_experts)
        if has_experts and c.shared_mlp_dim:
            yield from feed_forward("shared", i, c.shared_mlp_dim, c.mlp_bias)
            if c.gates_shared:
                yield slot("shared.w_share", i, embed, (None, 1), num_inputs=1)
        if has_experts and c.norms_experts:
            yield from norm("experts_post_norm", i)
            yield from norm("shared_post_norm", i)
        if c.norms_behind:
            yield from norm("mlp_post_norm", i)
        if c.layer_input_dim:
            yield slot("w_given_gate", i, embed, given, num_inputs=1)
            yield slot("w_given_out", i, given, embed, num_inputs=1)
            yield from norm("given_norm", i)
        if c.has_layer_scale:
            yield slot("out_scale", i, (None, 1))
    yield from norm("final_norm", None)
    if not c.tie_embeddings:
        yield slot("head.kernel", None, embed, vocab, num_inputs=1)


# Reading.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Leaf:
    """One leaf of the parameter tree that is not read yet."""

    slot: Slot
    """Which."""
    dtype: np.dtype
    """Of what is read."""
    tensors: tuple[StoredTensor, ...]
    """The file's tensors that hold it: one, or as many as are stacked."""
    rows: np.ndarray | None = None
    """Which rows of them are the leaf's; None: all."""
    columns: np.ndarray | None = None
    """Which columns of these, in its order; None: all."""

    @property
    def shape(self) -> tuple[int, ...]:
        """In the tree."""
        return self.slot.shape

    @property
    def nbytes(self) -> int:
        """Of the whole leaf, read."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """Reads the leaf into fresh memory. Blocks; any thread may call it. Beside it there is one chunk of rows.

        Returns:
          An array in the layout of the tree, C-contiguous and 64-byte aligned.
        """
        out = _empty_aligned(self.shape, self.dtype)
        for tensor, part in zip(self.tensors, [out] if self.slot.num_stacked is None else out, strict=True):
            self._read_tensor(tensor, part)
        return out

    def _read_tensor(self, tensor: StoredTensor, out: np.ndarray) -> None:
        """Reads what one tensor holds of the leaf into its place `out`, a chunk of rows at a time."""
        num_rows, num_columns = self.slot.stored_shape[0], math.prod(self.slot.stored_shape[1:])
        target = out.reshape(num_columns, num_rows).T if self.slot.transposed else out.reshape(num_rows, num_columns)
        step = tensor.chunk_rows or max(1, _CHUNK_ELEMENTS // num_columns)
        for start in range(0, num_rows, step):
            for at, rows in self._read_runs(tensor, start, min(start + step, num_rows)):
                found = rows.reshape(len(rows), num_columns)
                target[start + at : start + at + len(rows)] = found if self.columns is None else found[:, self.columns]

    def _read_runs(self, tensor: StoredTensor, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """Reads rows `[start, stop)` of the leaf, those that follow each other in the file, or nearly so, at once."""
        if self.rows is None:
            yield 0, tensor.read_rows(start, stop)
            return
        rows = self.rows[start:stop]
        steps = np.diff(rows, prepend=rows[0] - _MAX_STEP - 1)
        starts = np.flatnonzero((steps < 1) | (steps > _MAX_STEP))
        for first, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            before = int(rows[first])
            found = tensor.read_rows(before, int(rows[end - 1]) + 1)
            yield int(first), found if len(found) == end - first else found[rows[first:end] - before]


Destination = Callable[[Leaf], Any]
"""Reads a leaf, puts it where it belongs and gives what the parameter tree holds for it; waits until the host's memory
for it is no longer needed. Called on several threads at once."""

Destinations = Callable[[ModelConfig], Destination]
"""Gives the destination of a model's leaves once its architecture is known, before any is read. What it raises ends the
loading."""


def to_host(config: ModelConfig) -> Destination:
    """Keeps leaves as numpy arrays."""
    return lambda leaf: leaf.read()


def unread(config: ModelConfig) -> Destination:
    """Reads nothing: the tree holds each `Leaf`, to be read later. Its file must stay as it is until then."""
    return lambda leaf: leaf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint that was opened: what it says of its model, and how its weights are read."""

    path: str
    """Where it is, for messages."""
    name: str
    """What to call the model."""
    config: ModelConfig
    """Its architecture, which decides the tree and every shape."""
    tensors: Mapping[str, StoredTensor]
    """What it holds, by its own names. Each must be used: a tensor nobody asked for (a bias, an expert) is a different
    model."""
    names: Names
    """Under which of these names it holds each leaf."""
    fingerprint: Callable[[np.dtype], str]
    """Reads all files and gives the fingerprint of their weights in a dtype; runs beside the reading."""
    tokenizer: Tokenizer | None
    """None where it has none."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a reply, ascending."""
    is_tree: bool = False
    """Whether it holds leaves in the layout of the tree, and not in that of other frameworks."""


def load(
    source: Source, *, dtype: np.dtype, progress: ProgressFn | None = None, destinations: Destinations = to_host
) -> Checkpoint:
    """Reads every weight of a checkpoint. Blocks; reads on a few threads.

    Beside what the destination keeps, the leaves being read take no more than the largest one, and a chunk each.

    Args:
      source: the checkpoint.
      dtype: of the weights.
      progress: is called with the bytes read.
      destinations: where the leaves go; the tree holds what they return.

    Raises:
      CheckpointError: a tensor is missing, misshaped, or belongs to no parameter. Nothing is read then.
    """
    leaves = _leaves(source, dtype)
    destination = destinations(source.config)
    total_bytes, done_bytes = sum(leaf.nbytes for leaf in leaves), 0
    tree: dict[tuple[str, ...], Any] = {}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        hashing = pool.submit(source.fingerprint, dtype)
        for leaf, result in stream(leaves, destination):
            tree[leaf.slot.path] = result
            done_bytes += leaf.nbytes
            if progress is not None:
                progress("reading weights", done_bytes, total_bytes)
        fingerprint = hashing.result()
    return Checkpoint(
        config=source.config,
        params={"params": flax.traverse_util.unflatten_dict(tree)},
        tokenizer=source.tokenizer,
        name=source.name,
        fingerprint=fingerprint,
        stop_token_ids=source.stop_token_ids,
    )


def stream(leaves: Sequence[Leaf], do: Callable[[Leaf], _Result]) -> Iterator[tuple[Leaf, _Result]]:
    """Does something with every leaf on a few threads, with as many at once as together are no larger than the largest.

    Yields:
      Each leaf and what came of it, as they are done, on the caller's thread.
    """
    max_bytes = max((leaf.nbytes for leaf in leaves), default=0)
    num_workers = min(_MAX_WORKERS, os.cpu_count() or 1)
    pending: dict[concurrent.futures.Future[_Result], Leaf] = {}
    waiting = list(reversed(leaves))
    with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:
        try:
            while waiting or pending:
                in_flight = sum(leaf.nbytes for leaf in pending.values())
                if waiting and len(pending) < num_workers and in_flight + waiting[-1].nbytes <= max_bytes:
                    leaf = waiting.pop()
                    pending[pool.submit(do, leaf)] = leaf
                    continue
                done, _ = concurrent.futures.wait(pending, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    yield pending.pop(future), future.result()
                del done, future  # They hold what was read.
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _leaves(source: Source, dtype: np.dtype) -> list[Leaf]:
    """Every leaf of the tree, with the tensors of the checkpoint that hold it.

    Raises:
      CheckpointError: a tensor is missing, misshaped, or belongs to no leaf.
    """
    leaves, used, path = [], set(), source.path
    for slot in parameter_slots(source.config):
        if source.is_tree:
            slot = dataclasses.replace(slot, stored_shape=slot.shape, transposed=False, num_stacked=None)
        place, shape = source.names[slot.key], slot.stored_shape
        form, rows, columns = place if isinstance(place, str) else place.name, None, None
        if isinstance(place, Fused):
            rows, columns, shape = place.rows, place.columns, (place.num_rows, *shape[1:])
        names = [form.format(layer=slot.layer, expert=i) for i in range(slot.num_stacked or 1)]
        for name in names:
            if name not in source.tensors:
                raise CheckpointError(f"{path}: tensor {name} is missing; its shape must be {shape}")
            if (found := source.tensors[name].shape) != shape:
                raise CheckpointError(f"{path}: tensor {name}: the shape must be {shape}, got {found}")
        used.update(names)
        tensors = tuple(source.tensors[name] for name in names)
        leaves.append(Leaf(slot=slot, dtype=dtype, tensors=tensors, rows=rows, columns=columns))
    if unused := sorted(name for name in source.tensors.keys() - used if not source.tensors[name].is_optional):
        shown = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
        raise CheckpointError(
            f"{path}: {len(unused)} tensors belong to no parameter of this architecture: {shown}; "
            "leaving them out would give another model"
        )
    return leaves


def _empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    offset = -buffer.ctypes.data % _ALIGNMENT_BYTES
    return buffer[offset : offset + num_bytes].view(dtype).reshape(shape)


# What weights are known by.


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
        {"content": content_sha256, "config": config.described(), "dtype": dtype.name}, sort_keys=True
    )
    return hashlib.sha256(described.encode()).hexdigest()
