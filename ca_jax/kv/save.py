"""Asynchronous saving: a turn's new KV is copied into the store's blocks on a thread, while the device computes on.

`TurnSaver` has what of one turn is still to be saved, from its first prefilled layer to its last decoded token. KV
leaves in order and without gaps: what the store has no room for ends the saving of this turn, and the next turn
prefills from there. Where room is coming, since others are on their way to SSD, it waits on the device instead.
`AsyncSaver` copies. Fresh device buffers are handed to it, never donated ones. What has been handed in and is not in
the store yet is the write buffer; the engine bounds it.

Not here: savers of all turns (write_buffer), crossing from the device (transfer), room (storage).
Source: asynchronous saving with a write buffer, CachedAttention (Gao et al., USENIX ATC 2024), section 3.2.2.
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from ca_jax.device.transfer import host_view, own_part, to_host_memory
from ca_jax.session import SaveTimes
from ca_jax.storage.records import Owner
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tickets import SaveTicket
from ca_jax.telemetry.timeline import NO_TIMELINE, Timeline

_SAMPLE_BYTES = 1 << 16  # Smaller copies say more about the thread than about the memory.


@dataclasses.dataclass(frozen=True)
class LayerPart:
    """One layer's new KV `[2, T, K, H]`: `num_tokens` from `first` on are the ticket's from `token_offset` on."""

    layer: int
    kv: jax.Array
    num_tokens: int
    token_offset: int
    first: int = 0

    @property
    def num_bytes(self) -> int:
        """What it holds on the device."""
        return self.kv.nbytes

    def on_host(self) -> LayerPart:
        """The same, its KV on its way to memory that the host reads."""
        return dataclasses.replace(self, kv=to_host_memory(self.kv))

    def write(self, ticket: SaveTicket) -> bool:
        """Waits for the KV and copies it into the store; as `SaveTicket.write`."""
        kv = host_view(self.kv)[:, self.first : self.first + self.num_tokens]
        return ticket.write(self.layer, kv, self.token_offset)


@dataclasses.dataclass(frozen=True)
class DecodedPart:
    """KV of a group of decode steps: row `rows[i]` of `steps[i]` `[L, 2, n, K, H]` is the ticket's i-th token."""

    steps: tuple[jax.Array, ...]
    rows: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """This session's share of what they hold on the device."""
        return sum(step.nbytes // step.shape[2] for step in self.steps)

    def on_host(self) -> DecodedPart:
        """The same, its KV on its way to memory that the host reads."""
        return dataclasses.replace(self, steps=tuple(to_host_memory(step) for step in self.steps))

    def write(self, ticket: SaveTicket) -> bool:
        """Waits for the KV and copies it into the store; as `SaveTicket.write_all`."""
        rows = [host_view(step)[:, :, row] for step, row in zip(self.steps, self.rows, strict=True)]
        return ticket.write_all(np.stack(rows, axis=2))


Part = LayerPart | DecodedPart


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
        self.busy_s = 0.0
        """Seconds the thread has spent copying, and waiting for what it copies."""
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
        self._added_bytes += part.num_bytes
        self._work.put((ticket, on_host))

    def end(self, ticket: SaveTicket, error: Exception | None = None) -> None:
        """Says that nothing more is added to a save: `poll` returns it then, with that error if there is one."""
        self._open[ticket.key] += 1
        self._work.put((ticket, error))

    def submit(self, ticket: SaveTicket, parts: Iterable[Part]) -> None:
        """Has all of a save written."""
        for part in parts:
            self.add(ticket, part)
        self.end(ticket)

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
                started_s = time.perf_counter()
                try:
                    if ticket not in errors:
                        self._write(ticket, part)
                except Exception as failure:  # Whatever it is, the save is given up and the turn goes on.
                    errors[ticket] = failure
                self.busy_s += time.perf_counter() - started_s
                with self._written:
                    self._written_bytes += part.num_bytes
                    self._written.notify_all()
            del item, ticket, part

    def _write(self, ticket: SaveTicket, part: Part) -> None:
        is_layer = isinstance(part, LayerPart)
        jax.block_until_ready(part.kv if isinstance(part, LayerPart) else part.steps)
        name = f"save {part.layer}" if isinstance(part, LayerPart) else f"save {len(part.steps)} decoded"
        started_s = time.perf_counter()
        with self._timeline.annotate("save", name, key=ticket.key[:12]):
            part.write(ticket)
        if is_layer and part.num_bytes >= _SAMPLE_BYTES:
            self._on_sample(part.num_bytes, time.perf_counter() - started_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnKV:
    """What of a session is saved with a turn."""

    key: str
    """Of the session, in the store."""
    owner: Owner
    """Whose it is."""
    start_token: int
    """Tokens of the session that are stored already."""
    lineage: int = 0
    """Of the session, see `Conversation.lineage`."""
    num_plain: int | None = None
    """Its first tokens whose KV has seen no dropped token, where `start_token` is 0; None: all."""


@dataclasses.dataclass(eq=False)
class _Group:
    """Tokens that are saved together: parts wait here until there is a ticket, and go on from there."""

    token_ids: Sequence[int]
    parts: list[Part] = dataclasses.field(default_factory=list)
    ticket: SaveTicket | None = None
    is_complete: bool = False


class TurnSaver:
    """Saves one turn. Belongs to the engine's thread.

    Args:
      at_end: whether nothing is saved before `end`.
    """

    def __init__(
        self, store: AttentionStore, saver: AsyncSaver, turn: TurnKV, group_tokens: int, *, at_end: bool = False
    ) -> None:
        self.key = turn.key
        """Of the session, in the store."""
        self.times = SaveTimes()
        """When it was saved, to be shown."""
        self._turn = turn
        self._lineage = turn.lineage
        self._store = store
        self._saver = saver
        self._next_token = turn.start_token  # The first that no ticket was asked for.
        self._num_taken = turn.start_token  # The first that was not handed in.
        self._group_tokens = group_tokens
        self._is_held_back = at_end
        self._active = True
        self._decoded: list[tuple[int, jax.Array, int]] = []  # Token, the step's KV and its row there.
        self._waiting: collections.deque[_Group] = collections.deque()  # Without a ticket.
        self._prefilling: _Group | None = None

    # Prefill.

    def begin_pass(self, token_ids: Sequence[int], start: int) -> None:
        """A pass over these tokens is about to be dispatched, the first of which is the session's token `start`.

        What is stored already is left out.
        """
        if not self._active:
            return
        self._first = self._num_taken - start
        new_ids = list(token_ids[self._first :])
        if not new_ids:
            return
        self._prefilling = _Group(new_ids)
        self._num_taken += len(new_ids)
        self._waiting.append(self._prefilling)
        self.submit_held()

    def add_layer(self, layer: int, kv: jax.Array) -> None:
        """A layer of the pass was dispatched, which gives `kv [2, T, K, H]`."""
        group = self._prefilling
        if group is None:
            return
        part = LayerPart(layer, own_part(kv), len(group.token_ids), 0, self._first)
        if group.ticket is None:
            group.parts.append(part)
        else:
            self._add(group, group.ticket, part)

    def end_pass(self) -> None:
        """All layers of the pass were added."""
        group, self._prefilling = self._prefilling, None
        if group is not None:
            self._complete(group)

    # Decoding.

    def add_decoded(self, token_id: int, kv: jax.Array, row: int) -> None:
        """Takes the KV of one decoded token, row `row` of `kv [L, 2, n, K, H]`, and submits it with its group."""
        if self._active:
            self._decoded.append((token_id, own_part(kv), row))
            if len(self._decoded) >= self._group_tokens:
                self.flush()

    def flush(self) -> None:
        """Submits decoded tokens that do not fill a group."""
        if not self._decoded:
            return
        tokens, steps, rows = zip(*self._decoded, strict=True)
        self._decoded = []
        group = _Group(tokens, [DecodedPart(steps, rows)])
        self._num_taken += len(tokens)
        if self._active:
            self._waiting.append(group)
            self.submit_held()
            self._complete(group)

    # Truncation.

    def submit_so_far(self) -> None:
        """Submits all that was handed in, what is held back for the end of the turn too."""
        self.flush()
        is_held_back, self._is_held_back = self._is_held_back, False
        self.submit_held()
        self._is_held_back = is_held_back

    def cut(self, discarded: np.ndarray, lineage: int) -> None:
        """Tokens of the session were dropped from the store: what comes follows those that stay.

        What was handed in must have been saved, or given up.

        Args:
          discarded: bool `[T]`, of all tokens that were handed in or stored.
          lineage: of the session from now on.
        """
        self._next_token -= int(discarded[: self._next_token].sum())
        self._num_taken -= int(discarded[: self._num_taken].sum())
        self._lineage = lineage

    # To its end.

    def end(self) -> None:
        """The turn has ended: submits what is left. A pass that was not ended is given up."""
        if self._prefilling is not None:
            self.give_up()
        self.flush()
        self._is_held_back = False
        self.submit_held()

    def give_up(self) -> None:
        """Saves nothing more of this turn: what the store has now would leave a gap."""
        self._active = False
        self._waiting.clear()
        self._decoded = []
        group, self._prefilling = self._prefilling, None
        if group is not None and group.ticket is not None:
            error = SaveAbandonedError(f"the pass over {len(group.token_ids)} tokens was given up")
            self._saver.end(group.ticket, error)

    @property
    def is_held(self) -> bool:
        """Whether KV waits for room in the store."""
        return bool(self._waiting)

    @property
    def held_bytes(self) -> int:
        """What waits for its group to be full, or for room, as it is held on the device."""
        decoded = sum(kv.nbytes // kv.shape[2] for _, kv, _ in self._decoded)
        return decoded + sum(part.num_bytes for group in self._waiting for part in group.parts)

    def submit_held(self) -> None:
        """Submits what waits for room, as far as there is some."""
        while self._waiting and not self._is_held_back:
            group = self._waiting[0]
            if self._store.room_is_coming(self.key, len(group.token_ids), self._turn.owner):
                return
            self._waiting.popleft()
            group.ticket = self._store.prepare_save(
                self.key,
                self._next_token,
                group.token_ids,
                self._turn.owner,
                num_dropped=self._lineage,
                num_plain=self._turn.num_plain,
            )
            if group.ticket is None:
                self.give_up()
                return
            self._next_token += len(group.token_ids)
            for part in group.parts:
                if group.ticket is not None:
                    self._add(group, group.ticket, part)
            group.parts.clear()
            if group.is_complete:
                self._complete(group)

    def _add(self, group: _Group, ticket: SaveTicket, part: Part) -> None:
        """Hands a part on. Where that breaks (no memory for it on the host) the saving of the turn is given up."""
        self.times.begun_s = self.times.begun_s or time.perf_counter()
        try:
            self._saver.add(ticket, part)
        except Exception as error:
            group.ticket = None
            self._saver.end(ticket, error)
            self.give_up()

    def _complete(self, group: _Group) -> None:
        group.is_complete = True
        if group.ticket is not None:
            self._saver.end(group.ticket)
