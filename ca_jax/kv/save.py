"""The way out: new KV is copied into the store's blocks on a thread, while the device computes on.

`WriteBuffer` has the savers of all turns, and bounds what is on the device and not in the store. A `TurnSaver` has what
of one turn is still to be saved, from its first prefilled layer to its last decoded token. KV leaves in order and
without gaps: what the store has no room for ends the saving of this turn, and the next turn prefills from there. Where
room is coming, since others are on their way to SSD, it waits on the device instead.

A turn that ends frees its slot; what is not in the store by then goes on by itself, and the session's next turn waits.

Not here: the thread that copies (async_saver), room (storage).
Source: asynchronous saving with a write buffer, CachedAttention (Gao et al., USENIX ATC 2024), section 3.2.2.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from ca_jax.config import EngineConfig
from ca_jax.device.transfer import own_part
from ca_jax.kv.async_saver import AsyncSaver, Part, SaveAbandonedError
from ca_jax.session import Session
from ca_jax.storage.config import GIB
from ca_jax.storage.records import Owner
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tickets import SaveTicket, TicketState
from ca_jax.telemetry.metrics import EngineMetrics
from ca_jax.telemetry.timeline import SaveTimes


@dataclasses.dataclass(frozen=True)
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
        self.has_ended = False
        """Whether the turn has: what is held then waits for room in the store."""
        self._turn = turn
        self._lineage = turn.lineage
        self._store = store
        self._saver = saver
        self._next_token = turn.start_token  # The first that no ticket was asked for.
        self._num_taken = turn.start_token  # The first that was not handed in.
        self._group_tokens = group_tokens
        self._is_held_back = at_end
        self._active = True
        self._decoded: list[tuple[int, tuple[jax.Array, ...], int]] = []  # Token, the step's KV and its row there.
        self._waiting: collections.deque[_Group] = collections.deque()  # Without a ticket.
        self._prefilling: _Group | None = None

    # Prefill.

    def begin_pass(self, token_ids: Sequence[int], start: int) -> None:
        """A pass over these tokens is about to be dispatched, the first of which is the session's token `start`.

        What is stored already is left out, and so is what stands before token 0.
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

    def add_layer(self, layer: int, kv: jax.Array, first: int = 0) -> None:
        """A layer of the pass was dispatched, which gives `kv [2, T, K, H]`; its first token is T's number `first`."""
        group = self._prefilling
        if group is None:
            return
        part = Part.of_layer(layer, own_part(kv), len(group.token_ids), first + self._first)
        if group.ticket is None:
            group.parts.append(part)
        else:
            self._add(group, group.ticket, part)

    def end_pass(self) -> None:
        """All layers of the pass were added."""
        group, self._prefilling = self._prefilling, None
        if group is not None:
            self._complete(group)

    def add_pass(self, token_ids: Sequence[int], start: int, layers: Iterable[jax.Array], first: int = 0) -> None:
        """A pass over these tokens was dispatched, whose layers give these `[2, T, K, H]`; see `add_layer`."""
        self.begin_pass(token_ids, start)
        for layer, kv in enumerate(layers):
            self.add_layer(layer, kv, first)
        self.end_pass()

    # Decoding.

    def add_decoded(self, token_id: int, kv: tuple[jax.Array, ...], row: int) -> None:
        """Takes the KV of one decoded token, row `row` of `kv [l, 2, n, K, H]` of each group of layers, and submits it
        with those before it.
        """
        if self._active:
            self._decoded.append((token_id, tuple(map(own_part, kv)), row))
            if len(self._decoded) >= self._group_tokens:
                self.flush()

    def flush(self) -> None:
        """Submits decoded tokens that do not fill a group."""
        if not self._decoded:
            return
        tokens, steps, rows = zip(*self._decoded, strict=True)
        self._decoded = []
        self.add_part(tokens, Part.decoded(steps, rows))

    def add_part(self, token_ids: Sequence[int], part: Part) -> None:
        """Submits the next tokens, all of which a part has."""
        group = _Group(token_ids, [part])
        self._num_taken += len(token_ids)
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
        self.has_ended = True
        if self._prefilling is not None:
            self.give_up()
        self._is_held_back = False
        self.submit_so_far()

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
        decoded = sum(each.nbytes // each.shape[2] for _, kv, _ in self._decoded for each in kv)
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


class WriteBuffer:
    """Saves of all turns. Belongs to the engine's thread."""

    def __init__(
        self,
        store: AttentionStore,
        saver: AsyncSaver,
        config: EngineConfig,
        metrics: EngineMetrics,
    ) -> None:
        self._store = store
        self._saver = saver
        self._metrics = metrics
        self._token_bytes = store.layout.token_bytes
        self._max_bytes = int(config.write_buffer_gib * GIB)
        self._group_tokens = config.save_group_tokens
        self._is_async = config.async_save
        self._turns: dict[str, TurnSaver] = {}  # Of turns that run, or whose KV waits for room in the store.
        self._ending: dict[str, TurnSaver] = {}  # Of turns that ended, while what they submitted is being copied.
        self._awaiting: dict[str, list[Callable[[], object]]] = {}  # What is done once a session's KV is saved.
        self._to_pin: set[str] = set()  # Of sessions that were pinned, and of which nothing is stored since.

    @property
    def num_bytes(self) -> int:
        """What is on the device and not in the store."""
        return self._saver.pending_bytes + self._held_bytes

    def begin_turn(self, session: Session, start_token: int) -> TurnSaver | None:
        """Opens the saving of a turn, behind the session's first `start_token` tokens; None where nothing is kept."""
        lineage = session.conversation.kv_lineage
        return self.begin(TurnKV(session.key, owner_of(session), start_token, lineage)) if session.is_kept else None

    def begin_anew(self, session: Session, num_plain: int | None, num_fused: int = 0) -> TurnSaver:
        """Opens the saving of a turn from the session's first token on, in place of what is stored of it.

        What is on SSD stays there until the new KV is.

        Args:
          num_plain: its first tokens whose KV is what computing them would give, unless what is stored has fewer;
            None: all.
          num_fused: tokens whose KV is that of chunks: a mark, so that it is not taken for other KV of the session.
        """
        known = (self._store.leave_dram(session.key), num_plain)
        num_plain = min((count for count in known if count is not None), default=None)
        session.resume(session.conversation.stored_anew(num_fused))
        return self.begin(TurnKV(session.key, owner_of(session), 0, session.conversation.kv_lineage, num_plain))

    def begin(self, turn: TurnKV) -> TurnSaver:
        """Opens the saving of a turn, or of a chunk."""
        saver = TurnSaver(self._store, self._saver, turn, self._group_tokens, at_end=not self._is_async)
        self._store.pin(turn.key)  # What this turn builds on must not be evicted under it.
        self._turns[turn.key] = saver
        return saver

    def end(self, saver: TurnSaver) -> None:
        """Submits what is left of a turn, or holds it until the store has room. Blocking saves are waited for."""
        saver.end()
        if not saver.is_held:
            self._close(saver)
        if not self._is_async:
            self.collect(wait=True)

    def finish_so_far(self, saver: TurnSaver) -> None:
        """Has all that a running turn handed in published, or its saving given up where it waits for room."""
        saver.submit_so_far()
        self.collect(wait=True, key=saver.key)
        if saver.is_held:
            saver.give_up()

    def is_running(self, key: str) -> bool:
        """Whether a turn of a session runs."""
        return key in self._turns and not self._turns[key].has_ended

    def is_unsaved(self, key: str) -> bool:
        """Whether KV of a session's ended turns is not in the store yet, or something waits for that it is."""
        return key in self._awaiting or self._is_on_its_way(key)

    def when_saved(self, key: str, act: Callable[[], object]) -> None:
        """Does something once the KV of a session's ended turns is in the store or given up: now, or in a `collect`."""
        if self.is_unsaved(key):
            self._awaiting.setdefault(key, []).append(act)
        else:
            act()

    def pin_saved(self, key: str) -> None:
        """Pins a session, as `AttentionStore.set_pinned`, once something of it is stored again. Ends with `give_up`."""
        self._to_pin.add(key)

    def give_up(self, key: str) -> None:
        """Gives up what of a session is not in the store yet, and what waits for it. No turn of it may run.

        Waits for no more than a copy under way.
        """
        self._awaiting.pop(key, None)
        self._to_pin.discard(key)
        for saver in self._held:
            if saver.key == key:
                self._give_up(saver)
        self._store.abort_saves(key)

    def admits(self, num_tokens: int) -> bool:
        """Whether there is room for the KV of so many more tokens, or nothing waits."""
        num_bytes = self.num_bytes
        return not num_bytes or num_bytes + num_tokens * self._token_bytes <= self._max_bytes

    def make_room(self, num_tokens: int) -> None:
        """Waits until there is room for the KV of so many more tokens, or nothing waits.

        What waits for room in the store is given up, oldest first, where nothing else is left.
        """
        if self.admits(num_tokens) or not self._is_async:
            return
        started_s = time.perf_counter()
        self.collect()  # What waits for room in the store may have some now.
        self._saver.wait_until_pending(max(self._max_bytes - num_tokens * self._token_bytes - self._held_bytes, 0))
        for saver in self._held:
            if not self.admits(num_tokens):
                self._give_up(saver)
        self._metrics.write_stall_s += time.perf_counter() - started_s

    def collect(self, wait: bool = False, key: str | None = None) -> None:
        """Publishes the saves that are done and gives up those that failed.

        Args:
          wait: for all that were submitted.
          key: with `wait`, for those of this session only.
        """
        for saver in self._held:
            saver.submit_held()
            if not saver.is_held:
                self._close(saver)
        results = self._saver.poll(wait, key)
        for result in results:
            saved = result.ticket.key
            if result.error is None:
                turn = self._turns.get(saved) or self._ending.get(saved)  # The next turn waits for this one's saves.
                if self._store.complete_save(result.ticket) and turn is not None:
                    turn.times.published_s = time.perf_counter()
                    turn.times.num_published += len(result.ticket.token_ids)
                if saved in self._to_pin and self._store.set_pinned(saved, True):
                    self._to_pin.discard(saved)
            else:
                self._metrics.failed_saves += not isinstance(result.error, SaveAbandonedError)
                if result.ticket.state is TicketState.OPEN:  # Else it is of a state of the session that was given up.
                    self._store.abort_save(result.ticket)
                    if saved in self._turns:
                        self._turns[saved].give_up()
        for saved in {result.ticket.key for result in results} & self._ending.keys():
            if not self._saver.is_open(saved):
                self._ending.pop(saved).times.ended = True
        for saved in tuple(self._awaiting):
            if not self._is_on_its_way(saved):
                for act in self._awaiting.pop(saved):
                    act()

    def settle(self) -> None:
        """Has all saves published or given up, those included that wait for room. Waits for the store."""
        self.collect(wait=True)
        for saver in self._held:
            while saver.is_held and self._store.settle():  # Others get to SSD, and make room.
                self.collect(wait=True)
            if saver.is_held:
                self._give_up(saver)
        self.collect()  # What waited for those that were given up.

    def _is_on_its_way(self, key: str) -> bool:
        return self._saver.is_open(key) or (key in self._turns and self._turns[key].has_ended)

    @property
    def _held(self) -> list[TurnSaver]:
        """Of turns that ended before the store had room for all of their KV, oldest first."""
        return [saver for saver in self._turns.values() if saver.has_ended]

    @property
    def _held_bytes(self) -> int:
        return sum(saver.held_bytes for saver in self._turns.values())

    def _give_up(self, saver: TurnSaver) -> None:
        saver.give_up()
        self._close(saver)

    def _close(self, saver: TurnSaver) -> None:
        self._store.unpin(saver.key)
        del self._turns[saver.key]
        if self._saver.is_open(saver.key):
            self._ending[saver.key] = saver
        else:
            saver.times.ended = True


def owner_of(session: Session) -> Owner:
    """Whose the stored KV of a session is. No listing shows that of one that nobody can go on with."""
    variant = session.conversation.adapter_weights
    if not session.is_kept or not session.is_noted:
        return Owner(tenant=session.tenant, variant=variant)
    return Owner(tenant=session.tenant, session_id=session.session_id, ttl_s=session.ttl_s, variant=variant)
