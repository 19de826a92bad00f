"""KV of several stored entries, read as one history: each in its place, with room between for what is not stored.

    places     0 .. 120   120 .. 140   140 .. 652   652 .. 1164   1164 .. 1676
    read from  session    nothing      chunk        nothing       chunk

Not here: which entries (chunk_kv), staging (load), what is computed in the room between (recompute).
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from ca_jax.storage.tickets import LoadTicket


class FusedTicket:
    """Open loads of a store, read together. To a `LayerLoader` it is one load.

    Args:
      parts: loads, each with the place of its first token: in order, not overlapping, at least one.
    """

    def __init__(self, parts: Sequence[tuple[LoadTicket, int]]) -> None:
        self.parts = tuple(parts)
        """Loads and where they go."""
        self.broken: set[str] = set()
        """Keys of what could not be read."""

    @property
    def num_tokens(self) -> int:
        """Places, what is not read included."""
        ticket, start = self.parts[-1]
        return start + ticket.num_tokens

    @property
    def num_read(self) -> int:
        """Tokens that are read."""
        return sum(ticket.num_tokens for ticket, _ in self.parts)

    @property
    def from_ssd(self) -> bool:
        """Whether any of it was fetched from SSD for this load."""
        return any(ticket.from_ssd for ticket, _ in self.parts)

    def read(self, layer: int, dst: np.ndarray) -> concurrent.futures.Future[None]:
        """Copies one layer's KV into places of `dst [2, S, K, H]`, and touches no others. Does not wait.

        Returns:
          A future, done when all of it is in place; failed if any of it is not.
        """
        joined = _Joined(len(self.parts))
        for ticket, start in self.parts:
            try:
                future = ticket.read(layer, dst[:, start : start + ticket.num_tokens])
            except Exception as error:  # Raised where the layer is taken: copies into it may be under way.
                self._ended(ticket, error, joined)
                continue
            future.add_done_callback(functools.partial(self._done, ticket, joined))
        return joined.future

    def _done(self, ticket: LoadTicket, joined: _Joined, done: ts.Future) -> None:
        self._ended(ticket, done.exception(), joined)

    def _ended(self, ticket: LoadTicket, error: BaseException | None, joined: _Joined) -> None:
        if error is not None:
            self.broken.add(ticket.key)
        joined.one_ended(error)


class _Joined:
    """A future that is done with the last of several."""

    def __init__(self, count: int) -> None:
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._num_left = count
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def one_ended(self, error: BaseException | None) -> None:
        """One of them is done, or has failed."""
        with self._lock:
            self._num_left -= 1
            self._error = self._error or error
            is_last = not self._num_left
        if is_last and self._error is not None:
            self.future.set_exception(self._error)
        elif is_last:
            self.future.set_result(None)
