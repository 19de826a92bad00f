"""Asynchronous saving: a thread that copies new KV from the device into the store's blocks.

Fresh device buffers are handed to it, never donated ones.

Not here: what of a turn is saved when (save), crossing from the device (transfer).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from ca_jax.device.transfer import host_view, to_host_memory
from ca_jax.storage.tickets import SaveTicket
from ca_jax.telemetry.timeline import NO_TIMELINE, Timeline

_SAMPLE_BYTES = 1 << 16  # Smaller copies say more about the thread than about the memory.


@dataclasses.dataclass(frozen=True)
class Part:
    """New KV of a save: of one layer, `[2, T, K, H]`, or of some decode steps, each `[l, 2, n, K, H]` of each group of
    layers."""

    arrays: tuple[tuple[jax.Array, ...], ...]
    """In the order of the tokens; those side by side are of the same tokens."""
    tokens: tuple[slice, ...]
    """Which tokens of each."""
    layer: int | None = None
    """Which layer; None: all."""

    @classmethod
    def of_layer(cls, layer: int, kv: jax.Array, num_tokens: int, first: int = 0) -> Part:
        """Of one layer's `[2, T, K, H]`: `num_tokens` tokens from `first` on."""
        return cls(((kv,),), (slice(first, first + num_tokens),), layer)

    @classmethod
    def decoded(cls, steps: Sequence[tuple[jax.Array, ...]], rows: Sequence[int]) -> Part:
        """Of decode steps: row `rows[i]` of `steps[i]` is the i-th token."""
        return cls(tuple(steps), tuple(slice(row, row + 1) for row in rows))

    @functools.cached_property
    def num_bytes(self) -> int:
        """Its share of what the arrays hold on the device."""
        sizes = ((array, tokens) for each, tokens in zip(self.arrays, self.tokens, strict=True) for array in each)
        return sum(array.nbytes * (tokens.stop - tokens.start) // array.shape[-3] for array, tokens in sizes)

    def on_host(self) -> Part:
        """The same, its KV on its way to memory that the host reads."""
        return Part(tuple(tuple(map(to_host_memory, each)) for each in self.arrays), self.tokens, self.layer)

    def write(self, ticket: SaveTicket) -> bool:
        """Waits for the KV and copies it into the store; as `SaveTicket.write`."""
        of_groups = list[np.ndarray]()
        for arrays in zip(*self.arrays, strict=True):
            taken = [host_view(array)[..., tokens, :, :] for array, tokens in zip(arrays, self.tokens, strict=True)]
            of_groups.append(taken[0] if len(taken) == 1 else np.concatenate(taken, axis=-3))
        return ticket.write_all(of_groups) if self.layer is None else ticket.write(self.layer, of_groups[0])


@dataclasses.dataclass(frozen=True)
class SaveResult:
    """A save whose bytes are in place, or that failed."""

    ticket: SaveTicket
    error: Exception | None


class SaveAbandonedError(RuntimeError):
    """A save was ended before all of it was computed."""


class AsyncSaver:
    """Copies new KV from the device into the store's blocks on a thread of its own, in the order it comes.

    `add` never waits. What is done comes back by `poll`, so that the store's books are kept by one thread. Buffers
    handed in must never be donated to a computation.

    Args:
      on_done: called, from the thread, when `poll` has something new.
      on_sample: called, from the thread, with bytes and seconds of a larger copy.
    """

    def __init__(
        self,
        on_done: Callable[[], None] = lambda: None,
        *,
        on_sample: Callable[[int, float], None] = lambda num_bytes, seconds: None,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self._on_done = on_done
        self._on_sample = on_sample
        self._timeline = timeline
        self._work: queue.SimpleQueue[tuple[SaveTicket, Part | Exception | None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[SaveResult] = queue.SimpleQueue()
        self._open = collections.Counter[str]()  # Ended saves that `poll` has not returned, by key.
        self._added_bytes = 0  # By the engine's thread.
        self._written_bytes = 0  # By ours.
        self._written = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="ca_jax-saver", daemon=True)
        self._thread.start()

    def is_open(self, key: str) -> bool:
        """Whether a save of a session was ended and not yet returned by `poll`."""
        return key in self._open

    @property
    def pending_bytes(self) -> int:
        """What was added and is not written yet, as it is held on the device."""
        return self._added_bytes - self._written_bytes

    def add(self, ticket: SaveTicket, part: Part) -> None:
        """Has a part of a save written. On an accelerator its copy to the host begins at once."""
        on_host = part.on_host()  # Whatever this raises, nothing is pending then.
        self._added_bytes += on_host.num_bytes
        self._work.put((ticket, on_host))

    def end(self, ticket: SaveTicket, error: Exception | None = None) -> None:
        """Says that nothing more is added to a save: `poll` returns it then, with that error if there is one."""
        self._open[ticket.key] += 1
        self._work.put((ticket, error))

    def poll(self, wait: bool = False, key: str | None = None) -> list[SaveResult]:
        """Saves that ended since the last call, in the order they were ended.

        Args:
          wait: also those that have not ended yet, up to the last that was to.
          key: with `wait`, no longer than until the last of this session.
        """
        results = []
        while self._open:
            try:
                result = self._done.get(block=wait and (key is None or key in self._open))
            except queue.Empty:
                break
            results.append(result)
            self._open[result.ticket.key] -= 1
            if not self._open[result.ticket.key]:
                del self._open[result.ticket.key]
        return results

    def wait_until_pending(self, num_bytes: int) -> None:
        """Returns when at most so many bytes are pending."""
        with self._written:
            self._written.wait_for(lambda: self.pending_bytes <= num_bytes)

    def close(self) -> None:
        """Finishes what was added and ends the thread."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        errors: dict[SaveTicket, Exception] = {}
        while (item := self._work.get()) is not None:
            ticket, part = item
            if part is None or isinstance(part, Exception):  # Behind the last part of a save.
                self._done.put(SaveResult(ticket, errors.pop(ticket, part)))
                self._on_done()
            else:
                try:
                    if ticket not in errors:
                        self._write(ticket, part)
                except Exception as failure:  # Whatever it is, the save is given up and the turn goes on.
                    errors[ticket] = failure
                with self._written:
                    self._written_bytes += part.num_bytes
                    self._written.notify_all()
            del item, ticket, part

    def _write(self, ticket: SaveTicket, part: Part) -> None:
        jax.block_until_ready(part.arrays)
        name = f"save {len(part.arrays)} decoded" if part.layer is None else f"save {part.layer}"
        started_s = time.perf_counter()
        with self._timeline.annotate("save", name, key=ticket.key[:12]):
            part.write(ticket)
        if part.layer is not None and part.num_bytes >= _SAMPLE_BYTES:
            self._on_sample(part.num_bytes, time.perf_counter() - started_s)
