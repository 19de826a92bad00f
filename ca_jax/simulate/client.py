"""A session in a simulation: what its context holds, what of it is stored, and the turn that it is at.

Tokens are told apart by when they were made: the ids of a context are increasing integers, and what was dropped from it
is what is missing.

Not here: when anything happens (simulator).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ca_jax.simulate.workload import SimSession, SimTurn
from ca_jax.storage.tickets import SaveTicket


@dataclasses.dataclass(eq=False, slots=True)
class Client:
    """A session that is being served."""

    session: SimSession
    """What it asks."""
    num_done: int = 0
    """Turns that have ended."""
    is_served: bool = False
    """Whether one runs, or is being saved."""
    num_dropped: int = 0
    """Tokens that overflows dropped, as the store counts them."""
    num_offered: int = 0
    """Tokens of the context that the store has, or is being given."""
    gives_up: bool = False
    """Whether the store had no room for the KV of this turn."""
    tickets: list[SaveTicket] = dataclasses.field(default_factory=list)
    """Saves under way, in order."""
    answer_left: int = 0
    """Tokens of the answer that are to be generated."""
    answers: bool = False
    """Whether some of it is: then the last token has no KV, since nothing was computed behind it."""
    is_counted: bool = False
    """Whether the turn is none of the warm-up."""
    next_arrival_s: float | None = None
    """When the next turn comes, where that is known; None where it has come, or there is none."""
    _held_ids: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    _num_grown: int = 0  # Tokens behind these: the last that were made.
    _num_made: int = 0  # Tokens ever: the next one's id.

    @property
    def key(self) -> str:
        """Its name in the store."""
        return self.session.session_id

    @property
    def num_tokens(self) -> int:
        """Of the context."""
        return len(self._held_ids) + self._num_grown

    @property
    def num_computed(self) -> int:
        """Tokens of the context that have KV."""
        return self.num_tokens - self.answers

    @property
    def token_ids(self) -> np.ndarray:
        """Of the context, int32 `[num_tokens]`."""
        if self._num_grown:
            new_ids = np.arange(self._num_made - self._num_grown, self._num_made, dtype=np.int32)
            self._held_ids, self._num_grown = np.concatenate([self._held_ids, new_ids]), 0
        return self._held_ids

    @property
    def turn(self) -> SimTurn | None:
        """The one that is to be served, or is."""
        turns = self.session.turns
        return turns[self.num_done] if self.num_done < len(turns) else None

    def grow(self, num_tokens: int) -> None:
        """Puts new tokens behind the context."""
        self._num_grown += num_tokens
        self._num_made += num_tokens

    def keep(self, kept: np.ndarray) -> None:
        """Keeps some tokens of the context, bool `[num_tokens]`."""
        self._held_ids = self.token_ids[kept]

    def keep_first(self, num_tokens: int) -> None:
        """Keeps the first tokens of the context."""
        self._held_ids = self.token_ids[:num_tokens]
        self.num_offered = min(self.num_offered, num_tokens)
