"""Layer-wise pre-loading: histories stream from the store through the read buffer to the device, ahead of compute.

Layers are staged in order, several copies at once. How far ahead of the layer that computes is the load's depth:

    layers below the depth   from when the load is opened, while the job before still runs
    layer i behind them      once the job has begun and layer i - depth - 2 is computed: two regions are for execution

A layer that is read from elsewhere while the load is open is staged once it has come.

The read buffer is a ring: a region is rewritten only once nothing reads it any more. On CPU a region *is* the device
array, read until its layer is in the pages.

Everything happens on the engine's thread; only the store's own threads copy.

Not here: crossing to the device (transfer), which KV and how deep (load, costs), computing (runner).
Source: layer-wise pre-loading with a read buffer, CachedAttention (Gao et al., USENIX ATC 2024), section 3.2.1.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ca_jax import backend
from ca_jax.device import transfer
from ca_jax.kv.chunk_kv import FusedTicket
from ca_jax.kv.layout import EXECUTION_REGIONS
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.tickets import BrokenOffError
from ca_jax.storage.tiers.dram import host_array, touch
from ca_jax.telemetry.timeline import NO_TIMELINE, Timeline

_ALIGNMENT = 128  # bytes: copies of unaligned memory run at half the speed, and CPU arrays would be copies.


class ReadBuffer:
    """Staging memory that is allocated once. Its regions are spans of bytes, taken and given back in order."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = host_array((num_bytes,), np.uint8)
        """All of it."""
        self._regions: collections.deque[slice] = collections.deque()

    def take(self, num_bytes: int) -> slice | None:
        """The next free piece of that size; None where it lies in one that was not given back.

        Raises:
          ValueError: more than there is.
        """
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if size > self.memory.nbytes:
            raise ValueError(f"a piece must be at most the {self.memory.nbytes} bytes of the read buffer, got {size}")
        if not self._regions:
            start, room = 0, self.memory.nbytes
        else:
            oldest, newest = self._regions[0], self._regions[-1]
            start = newest.stop
            has_wrapped = newest.start < oldest.start
            room = (oldest.start if has_wrapped else self.memory.nbytes) - start
            if room < size and not has_wrapped:
                start, room = 0, oldest.start
        if room < size:
            return None
        self._regions.append(slice(start, start + size))
        return self._regions[-1]

    def give_back(self) -> slice:
        """Frees the oldest piece, and says which that was."""
        return self._regions.popleft()

    def view(self, region: slice, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A piece as an array of that shape and dtype, which fits in it."""
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        return self.memory[region.start : region.start + num_bytes].view(dtype).reshape(shape)


_LOOK_S = 5e-3
"""While waiting for a copy, how often to look whether the device computes still. Stalls are known to that, a layer; on
CPU each look takes a core from what computes."""


class LoadError(RuntimeError):
    """What is stored could not be read."""


class StagingInUseError(RuntimeError):
    """Staging was wanted that another load holds, and that nothing will free."""


@dataclasses.dataclass(eq=False)
class _Stage:
    """One layer of a load, from its place in the read buffer to its last reader."""

    layer: int
    view: np.ndarray
    future: Any
    issued_s: float
    done_s: float | None = None  # Set by the thread that copied.
    array: jax.Array | None = None
    computed: jax.Array | None = None  # Ready when what reads the region is done.
    is_free: bool = False

    def is_idle(self) -> bool:
        """Whether nothing reads or writes the region any more."""
        return self.is_free or (self.computed is not None and transfer.is_ready(self.computed))


class LayerLoad:
    """One history on its way. Made by `LayerLoader.open`; belongs to the engine's thread.

    Take `layer(0)`, `layer(1)`, … after `begin`, and say of each when it is `computed` before the next one is taken.
    `release` in any case.
    """

    def __init__(
        self,
        loader: LayerLoader,
        ticket: FusedTicket,
        reads: Sequence[tuple[int, int]],
        depth: int,
        all_at_once: bool,
        job: int,
        max_wait_s: float,
    ) -> None:
        self.ticket = ticket
        """The store's."""
        self.depth = depth
        """Layers that may be staged before the job begins."""
        self.stall_s = 0.0
        """Seconds in which the device waited for its copies."""
        self._loader = loader
        self._job = job
        self._reads = reads  # Of each layer the first token that is read, and S.
        self._dtype = loader.layout.numpy_dtype
        self._all_at_once = all_at_once
        self._wait_left_s = max_wait_s  # For layers that are yet to come.
        self._has_begun = False
        self._stages: list[_Stage] = []

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return self._loader.layout.num_layers

    def num_places(self, layer: int) -> int:
        """S of a layer's array."""
        return self._reads[layer][1]

    @property
    def num_issued(self) -> int:
        """Layers whose copies have begun."""
        return len(self._stages)

    @property
    def layer_times_s(self) -> list[float]:
        """Seconds that each layer's copy took that is done, without waiting for the one before it."""
        times, last_s = [], 0.0
        for stage in self._stages:
            if stage.done_s is None:
                break
            times.append(max(stage.done_s - max(stage.issued_s, last_s), 0.0))
            last_s = max(last_s, stage.done_s)
        return times

    @property
    def span_s(self) -> tuple[float, float] | None:
        """When the first copy began and when the last that ended did, of `time.perf_counter`; None before one did."""
        ends = [stage.done_s for stage in self._stages if stage.done_s is not None]
        return (self._stages[0].issued_s, max(ends)) if ends else None

    def begin(self) -> None:
        """Says that the device is free for the job."""
        self._has_begun = True
        self._loader.pump()

    def layer(self, layer: int) -> jax.Array:
        """A layer's unrotated KV on the device, `[2, S, K, H]`, from the first token on that is read of it.

        Places behind the ticket's tokens hold anything.

        Waits until its bytes are in staging.

        Raises:
          LoadError: they could not be read, or did not come in time.
          StagingInUseError: there is no room for them.
        """
        self._loader.pump()
        last = self.num_layers - 1
        ahead = min(layer + min(self._loader.device_ahead, self.depth + 1), last)
        wanted = last if self._all_at_once else ahead
        before = self._stages[layer - 1].computed if layer else None
        while self.num_issued <= wanted:
            if not self.ticket.has(self.num_issued):
                if self.num_issued > layer and not self._all_at_once:
                    break  # It is not needed yet.
                self._wait_until_it_comes(self.num_issued, before)
            self._wait_for_turn(self.num_issued)
            try:
                self._issue(self._loader.wait_for_room(self._num_bytes))
            except StagingInUseError:
                if self.num_issued > layer and not self._all_at_once:
                    break  # Those in front have their room once this one is dispatched.
                raise
        for stage in self._stages[layer : wanted + 1]:
            self._wait_for_copy(stage, before)
        self._put(ahead + 1)
        array = self._stages[layer].array
        if array is None:
            raise RuntimeError(f"layer {layer} is staged and is not on the device")
        return array

    def computed(self, layer: int, result: jax.Array) -> None:
        """Says that all that reads a layer was dispatched, which gives `result`; that must not be donated."""
        stage = self._stages[layer]
        stage.computed, stage.array = result, None  # Its memory on the device is free once that is done.

    def release(self) -> None:
        """Ends the load, however far it is. Waits for copies under way."""
        for stage in self._stages:
            stage.future.exception()  # Waits. An error has been raised by `layer`, or the load was given up.
            if stage.computed is None:
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # What broke reads nothing any more.
                    jax.block_until_ready(stage.array)
                stage.is_free = True
        self._loader.forget(self)

    # For the loader.

    def advance(self) -> bool:
        """Begins every copy whose turn it is and that has room; whether all have begun.

        What is in staging is copied on to an accelerator, before more is dispatched there.
        """
        while self.num_issued < self.num_layers and self._may_issue(self.num_issued):
            region = self._loader.room(self._num_bytes)
            if region is None:
                break
            self._issue(region)
        if self._loader.device_ahead:
            self._put(self.num_issued)
        return self.num_issued == self.num_layers

    @property
    def _num_bytes(self) -> int:
        """Of the layer whose copy begins next."""
        return math.prod(self._shape(self.num_issued)) * self._dtype.itemsize

    def _shape(self, layer: int) -> tuple[int, ...]:
        return self._loader.layout.layer_shape(layer, self._reads[layer][1])

    def _computed_before(self, layer: int) -> int:
        """The layer that must be computed before this one is loaded, two regions being for execution; below 0: none."""
        return -1 if layer < self.depth else layer - self.depth - EXECUTION_REGIONS

    def _may_issue(self, layer: int) -> bool:
        if not self.ticket.has(layer):
            return False
        before = self._computed_before(layer)
        if before < 0:
            return self._has_begun or layer < self.depth
        computed = self._stages[before].computed
        return self._has_begun and computed is not None and transfer.is_ready(computed)

    def _wait_for_turn(self, layer: int) -> None:
        before = self._computed_before(layer)
        if before < 0:
            return
        computed = self._stages[before].computed
        if computed is None:
            raise StagingInUseError(f"layer {before} must be dispatched before layer {layer} is loaded, and is not")
        computed.block_until_ready()

    def _wait_until_it_comes(self, layer: int, before: jax.Array | None) -> None:
        """Waits for a layer that is read from elsewhere, as long as the load may."""
        with self._waiting(before) as look:
            started_s = time.perf_counter()
            try:
                while not self.ticket.wait_for(layer, _LOOK_S):
                    look()
                    if time.perf_counter() - started_s > self._wait_left_s:
                        raise LoadError(f"layer {layer} must come within {self._wait_left_s:.3g} s, and did not")
            except BrokenOffError as error:
                raise LoadError(f"layer {layer} could not be read: {error}") from error
            self._wait_left_s -= time.perf_counter() - started_s

    def _wait_for_copy(self, stage: _Stage, before: jax.Array | None) -> None:
        """Waits for a layer's bytes."""
        with self._waiting(before) as look:
            while not stage.future.done():
                look()
                with contextlib.suppress(TimeoutError):
                    stage.future.exception(_LOOK_S)
        error = stage.future.exception()
        if error is not None:
            raise LoadError(f"layer {stage.layer} could not be read: {error}") from error

    @contextlib.contextmanager
    def _waiting(self, before: jax.Array | None) -> Iterator[Callable[[], None]]:
        """Counts the time in which the device had nothing left to compute; that is looked at with what this gives."""
        idle_since_s: float | None = None

        def look() -> None:
            nonlocal idle_since_s
            if idle_since_s is None and (before is None or transfer.is_ready(before)):
                idle_since_s = time.perf_counter()

        try:
            yield look
        finally:
            if idle_since_s is not None:
                self.stall_s += time.perf_counter() - idle_since_s

    def _issue(self, region: slice) -> None:
        layer = self.num_issued
        view = self._loader.buffer.view(region, self._shape(layer), self._dtype)
        stage = _Stage(layer, view, None, time.perf_counter())
        self._stages.append(stage)
        self._loader.staged.append(stage)
        try:
            first = self._reads[layer][0]
            stage.future = self.ticket.read(layer, view, first) if first else self.ticket.read(layer, view)
        except Exception as error:  # Raised where the layer is taken.
            stage.future = concurrent.futures.Future()
            stage.future.set_exception(error)
        stage.future.add_done_callback(lambda _: self._done(stage))

    def _done(self, stage: _Stage) -> None:
        stage.done_s = time.perf_counter()
        timeline = self._loader.timeline
        if timeline.enabled:
            before = self._stages[stage.layer - 1].done_s if stage.layer else None
            start_s = min(max(stage.issued_s, before or 0.0), stage.done_s)
            timeline.add("load", f"load {stage.layer}", start_s, stage.done_s, layer=stage.layer, job=self._job)

    def _put(self, stop: int) -> None:
        """Puts layers up to `stop` on the device whose bytes are there."""
        for stage in self._stages[:stop]:
            if stage.array is None and stage.computed is None and stage.future.done():
                heads = self._loader.heads[stage.layer] if self._loader.heads else None
                stage.array = transfer.staging_to_device(stage.view, self._loader.sharding, heads)


class LayerLoader:
    """Brings histories to the device, one after the other, the next one's first layers behind the last of this.

    Args:
      sharding: of a layer's KV `[2, S, K, H]`; None: all on the default device.
      heads: of each layer, which of its heads the store has, where other processes have the others; None, or nothing
        said: all.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_bytes: int,
        *,
        sharding: jax.sharding.Sharding | None = None,
        heads: Sequence[transfer.HeldHeads | None] = (),
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self.layout = layout
        self.buffer = ReadBuffer(num_bytes)
        self.sharding = sharding
        self.heads = heads
        self.timeline = timeline
        self.device_ahead = backend.here().layers_ahead
        self.staged: collections.deque[_Stage] = collections.deque()  # All that hold a region.
        self._loads: list[LayerLoad] = []
        self._is_pinned = False
        self._pinning = threading.Lock()  # Between the thread that touches and the one that closes.
        self._closed = threading.Event()

    def touch(self) -> float:
        """Makes staging resident and registers it for DMA; seconds it took. Any thread may call it, once.

        Ends early, and registers nothing, when the loader is closed.
        """
        started_s = time.perf_counter()
        touch(self.buffer.memory, stopped=self._closed.is_set)
        with self._pinning:
            if self.device_ahead and not self._closed.is_set():
                self._is_pinned = transfer.pin_host_memory(self.buffer.memory)
        return time.perf_counter() - started_s

    def close(self) -> None:
        """Ends what is open and lets go of pinned memory."""
        for load in tuple(self._loads):
            load.release()
        self._closed.set()
        with self._pinning:
            if self._is_pinned:
                self._is_pinned = False
                transfer.unpin_host_memory(self.buffer.memory)

    def open(
        self,
        ticket: FusedTicket,
        padded_tokens: int,
        depth: int,
        *,
        all_at_once: bool = False,
        job: int = -1,
        reads: Sequence[tuple[int, int]] = (),
        max_wait_s: float = 0.0,
    ) -> LayerLoad:
        """Begins to load: as many layers as the depth allows and there is room for. Does not wait.

        Args:
          padded_tokens: S of the arrays, at least the ticket's tokens.
          all_at_once: `layer` waits for all layers, as without pre-loading.
          reads: of each layer the first token that is read, and S of its array; nothing said: the first, and that.
          max_wait_s: longest that its job waits, of all layers together, for what is read from elsewhere meanwhile.
        """
        reads = reads or [(0, padded_tokens)] * self.layout.num_layers
        load = LayerLoad(self, ticket, reads, depth, all_at_once, job, max_wait_s)
        self._loads.append(load)
        try:
            self.pump()
        except Exception:
            load.release()
            raise
        return load

    def pump(self) -> None:
        """Begins whatever copies may begin. Never waits; called whenever time has passed."""
        self._free()
        for load in self._loads:
            if not load.advance():
                return  # Loads behind it would take the room that it is about to need.

    # For loads.

    def room(self, num_bytes: int) -> slice | None:
        """A free region; None if there is none."""
        self._free()
        return self.buffer.take(num_bytes)

    def wait_for_room(self, num_bytes: int) -> slice:
        """A free region, once whatever reads the oldest ones is done.

        Raises:
          StagingInUseError: nothing is dispatched that would free the oldest one.
        """
        while (region := self.room(num_bytes)) is None:
            stage = self.staged[0]
            if stage.computed is None:
                raise StagingInUseError(f"{num_bytes} bytes of staging must be free, and other loads hold all of it")
            jax.block_until_ready(stage.computed)
        return region

    def forget(self, load: LayerLoad) -> None:
        """Takes a load out; its regions are free when what reads them is done."""
        if load in self._loads:
            self._loads.remove(load)
        self._free()

    def _free(self) -> None:
        while self.staged and self.staged[0].is_idle():
            self.staged.popleft()
            self.buffer.give_back()
