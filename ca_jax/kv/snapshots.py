"""Stored states of models whose layers keep such in place of KV: a snapshot of each turn's end.

A turn's KV can be used up to any token, a state behind its own alone. So a history is used up to a turn's end of which
there is a snapshot, and is computed from there on; of none it is computed whole.

    turns       1          2          3            a session's entries in the store
    tokens      t t t t t  t t t t t  t t t t t    KV of all of them
    snapshots            ^          ^              two, of the last turns' ends: one replaces the last but one

A snapshot is an entry of its own. Its bytes lie in the rows of as many tokens as they take, whose ids are no tokens: a
mark, and a hash of those that the state stands behind. It is used where that hash is the prompt's and all of it can be
read, with KV of as many tokens; so it moves between the tiers by itself, and whatever is lost is computed.

Not here: states on the device (device.states), blocks and tiers (storage), loads of KV (load).
Source: that states are reused where they were kept, and nowhere else: Marconi (Pan et al., MLSys 2025).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ca_jax.device.states import StatePool
from ca_jax.device.transfer import host_view, to_host_memory
from ca_jax.kv.async_saver import Part
from ca_jax.kv.layer_loader import LoadError
from ca_jax.kv.save import TurnKV, WriteBuffer
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import State
from ca_jax.models.weights import resolve_dtype
from ca_jax.session import Job
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.records import MissReason, Owner, Residency
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tickets import LoadTicket, SaveTicket, TicketState
from ca_jax.storage.tiers.dram import host_array
from ca_jax.turns.conversations import Conversation

NUM_KEPT = 2
"""Turns' ends of a session: the last one, and the one that a rewind goes back to."""
_MARK = -1  # The first id of a snapshot's tokens: no prompt has it.
_NUM_IDS = 10  # The mark, how many tokens the state stands behind, and a SHA-256 of these.
_NAME_DIGITS = 16  # Of the key, in the name that listings show.
_ALIGNMENT = 64  # bytes, of a state's arrays among its bytes.


class Staged:
    """A state as it lies in blocks: in rows of KV of some tokens, `[P, T, K, H]` of each layer.

    Args:
      form: of the state.
    """

    def __init__(self, form: StateForm) -> None:
        self.rows: list[np.ndarray] = []
        """Of each layer that has KV."""
        self.arrays: list[np.ndarray] = []
        """The state's, `[l, *shape]`, in the same memory."""
        layout, start = form.layout, 0
        memory = host_array((form.num_tokens * layout.token_bytes,), np.uint8)
        for layer in range(layout.num_layers):
            of_layer = layout.layer_shape(layer, form.num_tokens)
            stop = start + math.prod(of_layer) * layout.numpy_dtype.itemsize
            self.rows.append(memory[start:stop].view(layout.numpy_dtype).reshape(of_layer))
            start = stop
        for start, shape, dtype in form.places():
            stop = start + math.prod(shape) * dtype.itemsize
            self.arrays.append(memory[start:stop].view(dtype).reshape(shape))


@dataclasses.dataclass(frozen=True)
class StateForm:
    """How a state's bytes lie in blocks of KV."""

    shapes: tuple[tuple[tuple[int, ...], np.dtype], ...]
    """Of its arrays, `[l, *shape]`; none where no layer keeps one."""
    layout: KVLayout
    """Of the blocks."""

    @classmethod
    def of(cls, config: ModelConfig, dtype: str, layout: KVLayout) -> StateForm:
        """Of a model, with weights of that dtype."""
        found = () if config.recurrence is None else config.recurrence.state_shapes(config.embed_dim)
        return cls(tuple(((config.num_states, *shape), resolve_dtype(of or dtype)) for shape, of in found), layout)

    def places(self) -> Iterator[tuple[int, tuple[int, ...], np.dtype]]:
        """Of each array its first byte, its shape and its dtype."""
        start = 0
        for shape, dtype in self.shapes:
            yield start, shape, dtype
            start += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    @functools.cached_property
    def num_tokens(self) -> int:
        """Tokens in whose rows a state lies."""
        num_bytes = max((start + math.prod(shape) * dtype.itemsize for start, shape, dtype in self.places()), default=0)
        return max(-(-num_bytes // self.layout.token_bytes), _NUM_IDS)


@dataclasses.dataclass(frozen=True)
class StatePart(Part):
    """A state on its way to the store: arrays `[l, *shape]`."""

    form: StateForm | None = None
    """How it lies there."""

    @property
    def state(self) -> State:
        """The arrays."""
        return self.arrays[0]

    @functools.cached_property
    def num_bytes(self) -> int:
        """As it is held on the device."""
        return sum(array.nbytes for array in self.state)

    def on_host(self) -> StatePart:
        """The same, on its way to memory that the host reads."""
        return dataclasses.replace(self, arrays=(tuple(map(to_host_memory, self.state)),))

    def write(self, ticket: SaveTicket) -> bool:
        """Waits for the state and copies it into the store; as `SaveTicket.write`."""
        if self.form is None:
            raise ValueError("a state must have a form to be written, got none")
        staged = Staged(self.form)
        for array, place in zip(self.state, staged.arrays, strict=True):
            np.copyto(place, host_view(array))
        return all(ticket.write(layer, rows) for layer, rows in enumerate(staged.rows))


class Snapshot:
    """A stored state on its way to the device. Belongs to the engine's thread.

    Args:
      store: that has it.
      ticket: an open load of all of it.
      form: of the state.
      num_tokens: that it stands behind.
    """

    def __init__(self, store: AttentionStore, ticket: LoadTicket, form: StateForm, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        """That it stands behind."""
        self._store, self._ticket = store, ticket
        self._staged = Staged(form)
        self._reads: list[Any] = []
        self._failure: Exception | None = None

    def begin(self) -> None:
        """Begins to copy it out of the store. Does not wait; what breaks is told by `restore`."""
        try:
            self._reads = [self._ticket.read(layer, rows) for layer, rows in enumerate(self._staged.rows)]
        except Exception as error:
            self._failure = error

    def restore(self, states: StatePool, row: int) -> LoadError | None:
        """Has a row of the pool stand where it does; what broke, if it could not be read. Waits for the copy."""
        try:
            if self._failure is not None:
                raise self._failure
            for read in self._reads:
                read.result()
        except Exception as error:
            self.give_up()
            failure = LoadError(f"the state behind {self.num_tokens} tokens could not be read")
            failure.__cause__ = error
            return failure
        self._store.complete_load(self._ticket)
        states.restore(row, self._staged.arrays, self.num_tokens)
        return None

    def give_up(self) -> None:
        """Ends a load that was not completed; else does nothing."""
        if self._ticket.state is TicketState.OPEN:
            self._store.abort_load(self._ticket, MissReason.ABORTED)


class Snapshots:
    """The snapshots in a store. Belongs to the engine's thread.

    Args:
      form: of states.
      salt: tells weights and layouts apart.
    """

    def __init__(self, store: AttentionStore, write_buffer: WriteBuffer, form: StateForm, salt: bytes) -> None:
        self._store = store
        self._write_buffer = write_buffer
        self._form = form
        self._salt = salt

    @property
    def are_none(self) -> bool:
        """Whether the model keeps no states: then histories are used up to any token."""
        return not self._form.shapes

    def keys(self, key: str) -> tuple[str, ...]:
        """The store's keys of what there may be of a session, by its own."""
        return () if self.are_none else tuple(self._key(key, slot) for slot in range(NUM_KEPT))

    def wanted(self, key: str, conversation: Conversation) -> tuple[str, ...]:
        """The key of the snapshot that a turn would begin with, if there may be one."""
        for index, _ in self._ends(conversation):
            found = self._key(key, index % NUM_KEPT)
            if self._write_buffer.is_unsaved(found) or self._store.residency(found) is not Residency.ABSENT:
                return (found,)
        return ()

    def open(self, key: str, conversation: Conversation, prompt_ids: np.ndarray, most: int) -> Snapshot | None:
        """Begins to load the latest snapshot of a session that stands behind first tokens of a prompt.

        Args:
          key: of the session.
          conversation: of it, before the prompt's turn.
          prompt_ids: i32 `[T]`.
          most: of how many of them there is KV.
        """
        for index, num_tokens in self._ends(conversation):
            if not 0 < num_tokens <= most:
                continue
            found = self._key(key, index % NUM_KEPT)
            if self._store.residency(found) is not Residency.DRAM:
                continue
            ticket = self._store.prepare_load(found, self._ids(prompt_ids[:num_tokens]))
            if ticket is None:
                continue
            if ticket.num_tokens < self._form.num_tokens:  # It stands behind others.
                self._store.abort_load(ticket, MissReason.MISMATCH)
                continue
            snapshot = Snapshot(self._store, ticket, self._form, num_tokens)
            snapshot.begin()
            return snapshot
        return None

    def share(self, source: str, key: str, conversation: Conversation, prompt_ids: np.ndarray, owner: Owner) -> None:
        """Has a session that goes on with what another one has, all of whose turns it had, share its snapshots too."""
        for index, num_tokens in self._ends(conversation):
            at, own = self._key(source, index % NUM_KEPT), self._key(key, index % NUM_KEPT)
            is_there = self._store.residency(at) is Residency.DRAM and self._store.residency(own) is Residency.ABSENT
            if is_there and 0 < num_tokens <= len(prompt_ids):
                self._store.copy_prefix(at, own, self._ids(prompt_ids[:num_tokens]), self._owner(own, owner))

    def keep(self, job: Job, states: StatePool) -> None:
        """A turn ends: has its row's state stored, in place of that of the last but one. Its conversation is to come.

        Nothing is stored of a session that nobody goes on with, of a turn without an answer, or where its row stands
        elsewhere.
        """
        session = job.session
        if self.are_none or session is None or job.slot is None or not (session.is_noted and job.output_ids):
            return
        token_ids = np.fromiter(job.token_ids[:-1], np.int32)
        state = states.state(job.slot, len(token_ids))
        if state is None:
            return
        key = self._key(session.key, len(session.conversation.states) % NUM_KEPT)
        self._drop(key)
        of = Owner(tenant=session.tenant, ttl_s=session.ttl_s, variant=session.conversation.adapter_weights)
        ids = self._ids(token_ids)
        saver = self._write_buffer.begin(TurnKV(key, self._owner(key, of), 0))
        saver.add_part(ids.tolist(), StatePart((state,), (), form=self._form))
        self._write_buffer.end(saver)

    def drop(self, key: str) -> None:
        """Forgets all of a session, what is on its way to the store too."""
        for each in self.keys(key):
            self._drop(each)

    def _drop(self, key: str) -> None:
        self._write_buffer.give_up(key)
        self._store.drop(key)

    def _ends(self, conversation: Conversation) -> list[tuple[int, int]]:
        """Of the last turns that have ended, the last first, which it was and of how many tokens there was KV."""
        ends = [(index, num_tokens - 1) for index, (_, num_tokens) in enumerate(conversation.states)]
        return [] if self.are_none else ends[: -NUM_KEPT - 1 : -1]

    def _key(self, key: str, slot: int) -> str:
        return hashlib.sha256(self._salt + f"state {slot} {key}".encode()).hexdigest()

    def _ids(self, token_ids: npt.ArrayLike) -> np.ndarray:
        """The ids of a snapshot's tokens, of a state behind these."""
        hashed = hashlib.sha256(np.ascontiguousarray(token_ids, "<i4").tobytes()).digest()
        ids = np.zeros(self._form.num_tokens, np.int32)
        ids[:_NUM_IDS] = [_MARK, np.size(token_ids), *np.frombuffer(hashed, "<i4")]
        return ids

    @staticmethod
    def _owner(key: str, owner: Owner) -> Owner:
        """As of a session, by a name that no session has."""
        return dataclasses.replace(owner, session_id=f"state-{key[:_NAME_DIGITS]}")
