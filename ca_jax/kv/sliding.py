"""Forgetting the KV that no layer looks back to, where all layers of a model slide.

What is left is exactly what the next token sees: no answer changes by it, and what a session stores is bounded.

Not here: windows in attention (models.attention), blocks (storage), what a turn makes of it (histories, jobs).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ca_jax.device.processes import Processes, least
from ca_jax.kv.kept_conversations import KeptConversations
from ca_jax.kv.write_buffer import WriteBuffer
from ca_jax.storage.store import AttentionStore
from ca_jax.turns.jobs import TurnSession


class SlidingKV:
    """Keeps what is stored of sessions within a window. Belongs to the engine's thread.

    Args:
      store: where it is.
      write_buffer: what is on its way there.
      conversations: what is kept beside it.
      processes: what is kept is the same on all of them.
      window: how far all layers look back, tokens, the one that looks among them; None: nothing is ever forgotten.
    """

    def __init__(
        self,
        store: AttentionStore,
        write_buffer: WriteBuffer,
        conversations: KeptConversations,
        processes: Processes,
        window: int | None,
    ) -> None:
        self._store = store
        self._write_buffer = write_buffer
        self._conversations = conversations
        self._processes = processes
        self._window = window
        self._ended: dict[str, TurnSession] = {}  # By key, those with turns since they were looked at.

    def ended(self, key: str, session: TurnSession) -> None:
        """A turn of a session has ended: once its KV is stored, some of it may go."""
        if self._window is not None:
            self._ended[key] = session

    def stays(self, key: str, session: TurnSession, num_tokens: int) -> int:
        """How many of what is stored of a session is of use for its first tokens, which alone are to be left.

        Args:
          key: of the session.
          session: whose.
          num_tokens: that are to be left; what is stored begins behind those that slid.
        """
        self._ended.pop(key, None)
        num_slid = session.conversation.num_slid
        num_stored = num_tokens - num_slid
        if num_slid and num_stored < (self._window or 0) - 1:
            return 0  # The next token looks back to what is not there.
        return max(num_stored, 0)

    def forget(self, key: str) -> None:
        """A session was cut: it is looked at again when its next turn has ended."""
        self._ended.pop(key, None)

    def slide_all(self, queued: Collection[str]) -> None:
        """Looks at all sessions whose turns have ended, but for those that have another one queued.

        Where several processes serve as one this waits for the next turn, which all are given.
        """
        if self._processes.count > 1:
            return
        for key, session in tuple(self._ended.items()):
            if key not in queued:
                self.slide(key, session)

    def slide(self, key: str, session: TurnSession) -> None:
        """Forgets what no layer looks back to of a session, if that is a block or more and nothing is on its way."""
        if self._window is None:
            return
        num_leaving = 0
        if not self._write_buffer.is_running(key) and not self._write_buffer.is_unsaved(key):
            least_kept = max(self._window - 1, 1)  # One at least: a conversation is kept with its KV.
            num_leaving = max(self._store.num_readable(key) - least_kept, 0)
            self._ended.pop(key, None)
        [num_leaving] = least(self._processes, "what slides", [num_leaving])
        if num_leaving < self._store.layout.block_tokens:
            return
        left = session.conversation.slid(session.conversation.num_slid + num_leaving)
        self._store.discard(key, np.ones(num_leaving, bool), note=self._conversations.pack(key, left))
        session.resume(left)
