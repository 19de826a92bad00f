"""What of one turn's KV is still to be saved, from its first prefilled layer to its last decoded token.

KV leaves in order and without gaps: what the store has no room for ends the saving of this turn, and the next turn
prefills from there. Where room is coming, since others are on their way to SSD, it waits on the device instead.

Not here: copies (async_saver), room (storage), when a turn ends (engine).
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np

from ca_jax.device.transfer import own_part
from ca_jax.kv.async_saver import AsyncSaver, DecodedPart, LayerPart, Part, SaveAbandonedError
from ca_jax.storage.records import Owner
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tickets import SaveTicket
from ca_jax.turns.jobs import SaveTimes


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


class _Group:
    """Tokens that are saved together: parts wait here until there is a ticket, and go on from there."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self.ticket: SaveTicket | None = None
        self.parts: list[Part] = []
        self.is_complete = False


class TurnSaver:
    """Saves one turn. Belongs to the engine's thread.

    Args:
      store: where to.
      saver: who copies.
      turn: what is saved.
      group_tokens: decoded tokens that are saved together.
      at_end: whether nothing is saved before `end`.
    """

    def __init__(
        self,
        store: AttentionStore,
        saver: AsyncSaver,
        turn: TurnKV,
        group_tokens: int,
        *,
        at_end: bool = False,
    ) -> None:
        self.key = turn.key
        """Of the session, in the store."""
        self.times = SaveTimes()
        """When it was saved; for whoever shows that."""
        self._owner = turn.owner
        self._store = store
        self._saver = saver
        self._next_token = turn.start_token  # The first that no ticket was asked for.
        self._num_taken = turn.start_token  # The first that was not handed in.
        self._group_tokens = group_tokens
        self._is_held_back = at_end
        self._lineage = turn.lineage
        self._num_plain = turn.num_plain
        self._active = True
        self._tokens: list[int] = []
        self._steps: list[jax.Array] = []
        self._rows: list[int] = []
        self._decoded_bytes = 0  # Of those.
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
        if not self._active:
            return
        kv = own_part(kv)
        self._tokens.append(token_id)
        self._steps.append(kv)
        self._rows.append(row)
        self._decoded_bytes += kv.nbytes // kv.shape[2]
        if len(self._tokens) >= self._group_tokens:
            self.flush()

    def flush(self) -> None:
        """Submits decoded tokens that do not fill a group."""
        if not self._tokens:
            return
        group = _Group(self._tokens)
        group.parts.append(DecodedPart(tuple(self._steps), tuple(self._rows)))
        self._num_taken += len(self._tokens)
        self._tokens, self._steps, self._rows, self._decoded_bytes = [], [], [], 0
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
        self._tokens, self._steps, self._rows, self._decoded_bytes = [], [], [], 0
        group, self._prefilling = self._prefilling, None
        if group is not None and group.ticket is not None:
            self._saver.end(
                group.ticket, SaveAbandonedError(f"the pass over {len(group.token_ids)} tokens was given up")
            )

    @property
    def is_held(self) -> bool:
        """Whether KV waits for room in the store."""
        return bool(self._waiting)

    @property
    def held_bytes(self) -> int:
        """What waits for its group to be full, or for room, as it is held on the device."""
        return self._decoded_bytes + sum(part.num_bytes for group in self._waiting for part in group.parts)

    def submit_held(self) -> None:
        """Submits what waits for room, as far as there is some."""
        while self._waiting and not self._is_held_back:
            group = self._waiting[0]
            if self._store.room_is_coming(self.key, len(group.token_ids), self._owner):
                return
            self._waiting.popleft()
            group.ticket = self._store.prepare_save(
                self.key,
                self._next_token,
                group.token_ids,
                self._owner,
                num_dropped=self._lineage,
                num_plain=self._num_plain,
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
