"""Reading weights: from tensors of a checkpoint file to leaves of the parameter tree, each where it belongs.

Leaves are read a few at a time, handed to a `Destination` and let go of, so that the host never holds more of a model
than its largest leaf beside what the destination keeps. Files store linear layers `[out, in]`; rows are read a chunk at
a time and written straight into their final place, since the first touch of fresh memory costs more than the
arithmetic.

Not here: which leaves there are (`weights`), file formats (`gguf`, `huggingface`, `orbax`), devices.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import flax.traverse_util
import numpy as np

from ca_jax.errors import CheckpointError
from ca_jax.models import weights
from ca_jax.models.config import ModelConfig
from ca_jax.models.families.family import Fused, Names
from ca_jax.models.tokenizer import Tokenizer
from ca_jax.models.weights import Checkpoint, ProgressFn, Slot, parameter_slots

_ALIGNMENT_BYTES = 64  # XLA's CPU client takes arrays so aligned as they are, without a copy.
_CHUNK_ELEMENTS = 1 << 18  # 1 MiB of f32: read, dequantised and transposed while it is in the cache.
_MAX_WORKERS = 8

Index = tuple[slice, ...]
"""A part of a leaf: a slice of step one for each of its axes, as shardings give them."""

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a checkpoint file, read by rows."""

    shape: tuple[int, ...]
    """Its shape, outermost first."""
    read_rows: Callable[[int, int], np.ndarray]
    """Rows `[start, stop)` along the first axis, as floating point numbers of any dtype; called by several threads."""
    chunk_rows: int | None = None
    """Rows that the file can only read together, from a multiple of this on; None: each by itself."""


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

    @property
    def shape(self) -> tuple[int, ...]:
        """In the tree."""
        return self.slot.shape

    @property
    def nbytes(self) -> int:
        """Of the whole leaf, read."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, index: Index | None = None) -> np.ndarray:
        """Reads the leaf, or a part of it, into fresh memory. Blocks; any thread may call it.

        Beside what it returns it holds one chunk of rows. It reads every row of the file that the part has a number of.

        Returns:
          An array in the layout of the tree, C-contiguous and 64-byte aligned.
        """
        box = _box(self.shape, index)
        out = _empty_aligned(tuple(stop - start for start, stop in box), self.dtype)
        if self.slot.num_stacked is None:
            self._read_part(self.tensors[0], box, out)
            return out
        (start, stop), *inner = box
        for tensor, part in zip(self.tensors[start:stop], out, strict=True):
            self._read_part(tensor, inner, part)
        return out

    def is_rows(self, index: Index) -> bool:
        """Whether a part of the leaf is whole rows of the file, so that reading it reads nothing else."""
        box = _box(self.shape, index)
        inner = box if self.slot.num_stacked is None else box[1:]
        _, of_columns, _, num_columns = self._axes(len(inner))
        return _span(inner[of_columns], self._inner_shape[of_columns]) == (0, num_columns)

    @property
    def _inner_shape(self) -> tuple[int, ...]:
        """Of what one tensor holds of the leaf."""
        return self.shape if self.slot.num_stacked is None else self.shape[1:]

    def _axes(self, num_axes: int) -> tuple[slice, slice, int, int]:
        """Which axes of the tree are the file's rows and which its columns, and how many rows and columns those are."""
        num_rows, num_columns = self.slot.stored_shape[0], math.prod(self.slot.stored_shape[1:])
        front = num_columns if self.slot.transposed else num_rows
        split = next(k for k in range(1, num_axes + 1) if math.prod(self._inner_shape[:k]) == front)
        first, second = slice(0, split), slice(split, num_axes)
        of_rows, of_columns = (second, first) if self.slot.transposed else (first, second)
        return of_rows, of_columns, num_rows, num_columns

    def _read_part(self, tensor: StoredTensor, box: Sequence[tuple[int, int]], out: np.ndarray) -> None:
        """Reads what one tensor holds of a part into its place `out`, a chunk of rows at a time."""
        of_rows, of_columns, _, num_columns = self._axes(len(box))
        start_row, stop_row = _span(box[of_rows], self._inner_shape[of_rows])
        columns = slice(*_span(box[of_columns], self._inner_shape[of_columns]))
        sizes = (columns.stop - columns.start, stop_row - start_row)
        target = out.reshape(sizes).T if self.slot.transposed else out.reshape(sizes[::-1])
        step = tensor.chunk_rows or max(1, _CHUNK_ELEMENTS // num_columns)
        start = start_row
        while start < stop_row:
            stop = min(start - start % step + step, stop_row)
            place = target[start - start_row : stop - start_row]
            for at, rows in self._read_runs(tensor, start, stop):
                place[at : at + len(rows)] = rows.reshape(len(rows), num_columns)[:, columns]
            start = stop

    def _read_runs(self, tensor: StoredTensor, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """Reads rows `[start, stop)` of the leaf, those that follow each other in the file at once."""
        if self.rows is None:
            yield 0, tensor.read_rows(start, stop)
            return
        rows = self.rows[start:stop]
        starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
        for first, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            yield int(first), tensor.read_rows(int(rows[first]), int(rows[end - 1]) + 1)


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
    hash_content: Callable[[], str]
    """Gives the SHA-256 of what its files hold; runs beside the reading."""
    tokenizer: Tokenizer | None
    """None where it has none."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a reply, ascending."""
    is_tree: bool = False
    """Whether it holds leaves in the layout of the tree, and not in that of other frameworks."""
    fingerprint: Callable[[str, np.dtype], str] | None = None
    """Gives the fingerprint of weights from that hash, for a dtype; None: as `weights.fingerprint`."""


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
    config, wanted = source.config, []
    for slot in parameter_slots(config):
        if source.is_tree:
            slot = dataclasses.replace(slot, stored_shape=slot.shape, transposed=False, num_stacked=None)
        wanted.append((slot, _origin(slot, source.names)))
    _require_exactly(wanted, source.tensors, source.path)
    leaves = [
        Leaf(slot=slot, dtype=dtype, tensors=tuple(source.tensors[name] for name in origin.names), rows=origin.rows)
        for slot, origin in wanted
    ]
    destination = destinations(config)
    total_bytes, done_bytes = sum(leaf.nbytes for leaf in leaves), 0
    tree: dict[tuple[str, ...], Any] = {}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        hashing = pool.submit(source.hash_content)
        for leaf, result in stream(leaves, destination):
            tree[leaf.slot.path] = result
            done_bytes += leaf.nbytes
            if progress is not None:
                progress("reading weights", done_bytes, total_bytes)
        content_sha256 = hashing.result()
    if source.fingerprint is not None:
        fingerprint = source.fingerprint(content_sha256, dtype)
    else:
        fingerprint = weights.fingerprint(content_sha256, config, dtype)
    return Checkpoint(
        config=config,
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


class _Origin(NamedTuple):
    """Where a leaf is read from: the file's tensors, one or as many as are stacked; their shape; the leaf's rows."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    rows: np.ndarray | None


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
                raise CheckpointError(f"{source}: tensor {name} is missing; its shape must be {origin.shape}")
            if found[name].shape != origin.shape:
                raise CheckpointError(
                    f"{source}: tensor {name}: the shape must be {origin.shape}, got {found[name].shape}"
                )
            names.add(name)
    unused = sorted(found.keys() - names)
    if unused:
        shown = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
        raise CheckpointError(
            f"{source}: {len(unused)} tensors belong to no parameter of this architecture: {shown}; "
            "leaving them out would give another model"
        )


def _box(shape: tuple[int, ...], index: Index | None) -> list[tuple[int, int]]:
    """First and last but one of each axis."""
    return [part.indices(size)[:2] for part, size in zip(index or (slice(None),) * len(shape), shape, strict=True)]


def _span(box: Sequence[tuple[int, int]], shape: Sequence[int]) -> tuple[int, int]:
    """The part of a flattened group of axes that a box of them is; its inner axes must be whole.

    Raises:
      ValueError: they are not.
    """
    if not shape:
        return 0, 1
    if any(range_ != (0, size) for range_, size in zip(box[1:], shape[1:], strict=True)):
        raise ValueError(f"the part must be of the first of axes {tuple(shape)}, got {list(box)}")
    inner = math.prod(shape[1:])
    return box[0][0] * inner, box[0][1] * inner


def _empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    offset = -buffer.ctypes.data % _ALIGNMENT_BYTES
    return buffer[offset : offset + num_bytes].view(dtype).reshape(shape)
