"""New KV on its way to the store: the savers of all turns, those that wait for room, and a cap on what waits.

A turn's saver is opened by its prefill and ended with the turn; what is not in the store by then goes on by itself, and
its slot is free. The next turn of the session waits for it.

Not here: one turn's groups and copies (save), room (storage).
Source: asynchronous saving with a write buffer, CachedAttention (Gao et al., USENIX ATC 2024), section 3.2.2.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ca_jax.config import EngineConfig
from ca_jax.kv.save import AsyncSaver, SaveAbandonedError, TurnKV, TurnSaver
from ca_jax.storage.config import GIB
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tickets import TicketState
from ca_jax.telemetry.metrics import EngineMetrics


class WriteBuffer:
    """Saves of all turns. Belongs to the engine's thread.

    Args:
      config: the engine's: how much may be on the device and not in the store, how many decoded tokens are saved
        together, whether saving goes on while others compute.
    """

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
        self._turns: dict[str, TurnSaver] = {}
        self._ending: dict[str, TurnSaver] = {}  # Of turns that ended, while what they submitted is being copied.
        self._held: dict[str, TurnSaver] = {}  # Of turns that ended before the store had room for all of their KV.
        self._awaiting: dict[str, list[Callable[[], object]]] = {}  # What is done once a session's KV is saved.

    @property
    def num_bytes(self) -> int:
        """What is on the device and not in the store."""
        return self._saver.pending_bytes + self._held_bytes

    def begin(self, turn: TurnKV) -> TurnSaver:
        """Opens the saving of a turn."""
        saver = TurnSaver(self._store, self._saver, turn, self._group_tokens, at_end=not self._is_async)
        self._store.pin(turn.key)  # What this turn builds on must not be evicted under it.
        self._turns[turn.key] = saver
        return saver

    def end(self, saver: TurnSaver) -> None:
        """Submits what is left of a turn, or holds it until the store has room. Blocking saves are waited for."""
        saver.end()
        if saver.is_held:
            self._held[saver.key] = saver
        else:
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
        return key in self._turns and key not in self._held

    def is_unsaved(self, key: str) -> bool:
        """Whether KV of a session's ended turns is not in the store yet, or something waits for that it is."""
        return key in self._awaiting or self._is_on_its_way(key)

    def when_saved(self, key: str, act: Callable[[], object]) -> None:
        """Does something once the KV of a session's ended turns is in the store or given up: now, or in a `collect`."""
        if self.is_unsaved(key):
            self._awaiting.setdefault(key, []).append(act)
        else:
            act()

    def give_up(self, key: str) -> None:
        """Gives up what of a session is not in the store yet, and what waits for it. No turn of it may run.

        Waits for no more than a copy under way.
        """
        self._awaiting.pop(key, None)
        if key in self._held:
            self._held[key].give_up()
            self._close(self._held[key])
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
        for saver in tuple(self._held.values()):
            if not self.admits(num_tokens):
                saver.give_up()
                self._close(saver)
        self._metrics.write_stall_s += time.perf_counter() - started_s

    def collect(self, wait: bool = False, key: str | None = None) -> None:
        """Publishes the saves that are done and gives up those that failed.

        Args:
          wait: for all that were submitted.
          key: with `wait`, for those of this session only.
        """
        for saver in tuple(self._held.values()):
            saver.submit_held()
            if not saver.is_held:
                self._close(saver)
        results = self._saver.poll(wait, key)
        for result in results:
            saved = result.ticket.key
            if result.error is None:
                if self._store.complete_save(result.ticket):
                    self._note_published(saved, len(result.ticket.token_ids))
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
        for held in tuple(self._held):
            while held in self._held and self._store.settle():  # Others get to SSD, and make room.
                self.collect(wait=True)
            if held in self._held:
                self._held[held].give_up()
                self._close(self._held[held])
        self.collect()  # What waited for those that were given up.

    def _is_on_its_way(self, key: str) -> bool:
        return key in self._held or self._saver.is_open(key)

    @property
    def _held_bytes(self) -> int:
        return sum(saver.held_bytes for saver in self._turns.values())

    def _note_published(self, key: str, num_tokens: int) -> None:
        saver = self._turns.get(key) or self._ending.get(key)  # A session's next turn waits for its last one's saves.
        if saver is not None:
            saver.times.published_s = time.perf_counter()
            saver.times.num_published += num_tokens

    def _close(self, saver: TurnSaver) -> None:
        self._held.pop(saver.key, None)
        self._store.unpin(saver.key)
        del self._turns[saver.key]
        if self._saver.is_open(saver.key):
            self._ending[saver.key] = saver
        else:
            saver.times.ended = True
