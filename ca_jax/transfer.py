"""The only module that crosses host and device: tokens in and out, KV loaded layer by layer, KV saved by a worker.

`LayerLoader` is the read buffer: staging memory, one region per layer, filled from the store while earlier layers
compute. `AsyncSaver` is the write path: fresh device buffers, never donated ones, copied into the store's blocks on a
thread.

On the CPU backend a staging region *is* the device array (`jax.device_put` of aligned host memory makes no copy), so a
region is rewritten only once everything computed from it is done: `release` waits for exactly that.

Not here: which KV is loaded or saved (engine), where it lies (storage).
Source: layer-wise pre-loading and asynchronous saving, CachedAttention (Gao et al., USENIX ATC 2024), section 3.2.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from ca_jax.storage.host_memory import host_array, touch
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.tickets import LoadTicket, SaveTicket


def to_device(value: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> jax.Array:
    """Copies small host data (tokens, lengths, parameters of the sampler) to the device. Does not wait."""
    return jax.device_put(np.array(value, dtype))


def to_host(array: jax.Array) -> np.ndarray:
    """Waits for a small device array (tokens) and copies it to the host."""
    return np.asarray(jax.device_get(array))


def params_to_device(params: Any) -> Any:
    """Puts a tree of host arrays on the device. On CPU aligned ones are not copied: they must not be written to."""
    return jax.device_put(params)


class StagingInUseError(RuntimeError):
    """A load was started while arrays of the last one may still be read."""


class LayerLoader:
    """Brings a session's KV to the device layer by layer, through staging memory that is allocated once.

    One load at a time: `start`, then `layer(0)`, `layer(1)`, …, then `release`. Belongs to the engine's thread.

    Args:
      layout: of the store.
      max_tokens: most tokens a load may be padded to.
    """

    def __init__(self, layout: KVLayout, max_tokens: int) -> None:
        self._layout = layout
        shape = (layout.num_layers, 2 * max_tokens * layout.num_kv_heads * layout.head_dim)
        self._staging = host_array(shape, layout.numpy_dtype)
        self._views: list[np.ndarray] = []
        self._futures: list[Any] = []
        self._arrays: list[jax.Array] = []
        self._started_s = 0.0
        self._finished_s: list[float] = []
        self.stall_s = 0.0
        """Seconds the current load has made its caller wait."""

    def touch(self) -> float:
        """Makes staging resident; seconds it took. Any thread may call it."""
        return touch(self._staging)

    @property
    def load_s(self) -> float:
        """Seconds from the start of the current load to its last finished layer."""
        return max(self._finished_s, default=self._started_s) - self._started_s

    def start(self, ticket: LoadTicket, padded_tokens: int) -> None:
        """Issues the copies of all layers into staging and returns at once.

        Args:
          ticket: an open load of the store.
          padded_tokens: S of the arrays `layer` gives, at least the ticket's tokens.

        Raises:
          StagingInUseError: the last load was not released.
        """
        if self._futures:
            raise StagingInUseError("wanted the last load released, found its staging still in use")
        self.stall_s = 0.0
        self._finished_s = []
        self._started_s = time.perf_counter()
        shape = (2, padded_tokens, self._layout.num_kv_heads, self._layout.head_dim)
        size = int(np.prod(shape))
        for layer in range(self._layout.num_layers):
            view = self._staging[layer, :size].reshape(shape)
            future = ticket.read(layer, view)
            future.add_done_callback(lambda _: self._finished_s.append(time.perf_counter()))
            self._views.append(view)
            self._futures.append(future)

    def layer(self, layer: int) -> jax.Array:
        """The layer's unrotated KV on the device, `[2, S, K, H]`; places behind the ticket's tokens hold anything.

        Waits until its bytes are in staging, and lets a failed read's exception through.
        """
        waiting_since_s = time.perf_counter()
        self._futures[layer].result()
        self.stall_s += time.perf_counter() - waiting_since_s
        array = jax.device_put(self._views[layer])
        self._arrays.append(array)
        return array

    def release(self, consumers: Any = ()) -> None:
        """Frees staging for the next load, once its copies and everything computed from its arrays are done.

        Args:
          consumers: results of all computations that read the arrays.
        """
        for future in self._futures:
            future.exception()  # Waits. An error has been raised by `layer`, or the load was given up.
        jax.block_until_ready((self._arrays, consumers))
        self._views, self._futures, self._arrays = [], [], []


@dataclasses.dataclass(frozen=True)
class LayerPart:
    """One layer's new KV: the first `num_tokens` of `kv` `[2, T, K, H]` are the ticket's from `token_offset` on."""

    layer: int
    kv: jax.Array
    num_tokens: int
    token_offset: int


@dataclasses.dataclass(frozen=True)
class DecodedPart:
    """KV of a group of decode steps: row `rows[i]` of `steps[i]` `[L, 2, n, K, H]` is the ticket's i-th token."""

    steps: tuple[jax.Array, ...]
    rows: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SaveResult:
    """A save whose bytes are in place, or that failed."""

    ticket: SaveTicket
    error: Exception | None


class AsyncSaver:
    """Copies new KV from the device into the store's blocks on a thread of its own.

    `submit` never waits. What is done comes back by `poll`, so that the store's books are kept by one thread.
    Buffers handed in must never be donated to a computation.

    Args:
      on_done: called, from the thread, when `poll` has something new.
    """

    def __init__(self, on_done: Callable[[], None] = lambda: None) -> None:
        self._on_done = on_done
        self._work: queue.SimpleQueue[tuple[SaveTicket, Sequence[LayerPart | DecodedPart]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[SaveResult] = queue.SimpleQueue()
        self._num_open = 0
        self.busy_s = 0.0
        """Seconds the thread has spent copying."""
        self._thread = threading.Thread(target=self._run, name="ca_jax-saver", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Saves submitted and not yet returned by `poll`."""
        return self._num_open

    def submit(self, ticket: SaveTicket, parts: Sequence[LayerPart | DecodedPart]) -> None:
        """Queues everything a ticket is to be written with."""
        self._num_open += 1
        self._work.put((ticket, parts))

    def poll(self, wait: bool = False) -> list[SaveResult]:
        """Saves that ended since the last call, in order of submission; with `wait`, all that are open."""
        results = []
        while self._num_open:
            try:
                results.append(self._done.get(block=wait))
            except queue.Empty:
                break
            self._num_open -= 1
        return results

    def close(self) -> None:
        """Finishes what was submitted and ends the thread."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            ticket, parts = item
            error: Exception | None = None
            started_s = time.perf_counter()
            try:
                for part in parts:
                    _write(ticket, part)
            except Exception as failure:  # Whatever it is, the save is given up and the turn goes on.
                error = failure
            self.busy_s += time.perf_counter() - started_s
            self._done.put(SaveResult(ticket, error))
            del item, parts, ticket
            self._on_done()


def _write(ticket: SaveTicket, part: LayerPart | DecodedPart) -> None:
    if isinstance(part, LayerPart):
        ticket.write(part.layer, np.asarray(part.kv)[:, : part.num_tokens], part.token_offset)
        return
    rows = [np.asarray(step)[:, :, row] for step, row in zip(part.steps, part.rows, strict=True)]
    ticket.write_all(np.stack(rows, axis=2))
