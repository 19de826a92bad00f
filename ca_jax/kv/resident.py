"""Contexts whose pages are still on the device between their turns: a tier above DRAM, of what running jobs leave free.

What is here is in the store as well, or on its way there, which alone says what may be used: pages save the load. They
go when running jobs need room: those of sessions without a turn that waits first, the least recently used first, then
those whose turn comes last.

Not here: the pages' books (device.pages), what is loaded (load).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ca_jax.device.pages import Holding, PagePool
from ca_jax.storage.tokens import num_common


@dataclasses.dataclass(frozen=True)
class _Kept:
    holding: Holding
    token_ids: np.ndarray  # i32 [T], of all tokens whose KV is in the pages.
    state: tuple[int, int]  # Of the conversation: its KV's lineage, and the first tokens that are not in the pages.
    domain: str  # `Owner.domain`


class ResidentPages:
    """Pages that are kept between turns, by the key of their session. Belongs to the engine's thread.

    Args:
      position: where a key's turn is in the queue, from 0; None: none waits.
    """

    def __init__(self, pool: PagePool, position: Callable[[str], int | None]) -> None:
        self._pool = pool
        self._position = position
        self._kept: collections.OrderedDict[str, _Kept] = collections.OrderedDict()  # Least recently used first.
        pool.evict = self._evict

    @property
    def busy_share(self) -> float:
        """Share of the pool's pages that running jobs hold. All others are free, or given back where one is needed."""
        return self._pool.usage

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: str) -> bool:
        return key in self._kept

    def keep(self, key: str, row: int, token_ids: np.ndarray, state: tuple[int, int], domain: str) -> None:
        """Keeps what a row holds, which ends with that.

        Args:
          token_ids: i32 `[T]`, of all tokens whose KV is in its pages.
          state: of the session's conversation.
          domain: whose that is, see `Owner.domain`.
        """
        self.drop(key)
        self._pool.shorten(row, len(token_ids))
        if (holding := self._pool.hand_over(row)) is not None:
            self._kept[key] = _Kept(holding, token_ids, state, domain)

    def num_tokens(self, key: str, token_ids: np.ndarray, state: tuple[int, int]) -> int:
        """How many first tokens of a context a session's pages hold the KV of."""
        kept = self._kept.get(key)
        if kept is None or kept.state != state:
            return 0
        return num_common(kept.token_ids, token_ids)

    def has_seen(self, key: str, first_seen: Sequence[int]) -> bool:
        """Whether a session's pages have, of each layer, the KV from such a token on."""
        found = self._kept[key].holding.first_seen
        return all(own <= wanted for own, wanted in zip(found, first_seen, strict=bool(found)))

    def like(self, domain: str, token_ids: np.ndarray) -> str | None:
        """The session of a domain whose pages hold most of the first tokens of a context, none of which has seen any
        leave; None where none holds any.
        """
        plain = (key for key, kept in self._kept.items() if kept.domain == domain and kept.state == (0, 0))
        found = {key: self.num_tokens(key, token_ids, (0, 0)) for key in plain}
        return max(found, key=found.__getitem__) if any(found.values()) else None

    def is_near(self, key: str, row: int | None) -> bool:
        """Whether a row may take a key's pages: one of the same part; None may not."""
        return row is not None and self._pool.size.part_of(row) == self._kept[key].holding.part

    def take(self, key: str, num_tokens: int) -> Holding:
        """The pages of a session's first tokens, as their new holder's; they are kept here no longer."""
        kept = self._kept.pop(key)
        held = self._pool.share(kept.holding, num_tokens)
        self._pool.release(kept.holding)
        return held

    def share(self, key: str, num_tokens: int) -> Holding:
        """The same for another holder beside this one."""
        self._kept.move_to_end(key)
        return self._pool.share(self._kept[key].holding, num_tokens)

    def drop(self, key: str) -> None:
        """Gives a session's pages back, if there are any."""
        if (kept := self._kept.pop(key, None)) is not None:
            self._pool.release(kept.holding)

    def clear(self) -> None:
        """Gives all pages back."""
        for key in tuple(self._kept):
            self.drop(key)

    def _evict(self, part: int) -> bool:
        """Gives back the pages of the session that is the next to go in a part; whether there was one."""
        keys = [key for key, kept in self._kept.items() if kept.holding.part == part]
        if not keys:
            return False
        places = {key: self._position(key) for key in keys}
        idle = next((key for key in keys if places[key] is None), None)
        self.drop(idle if idle is not None else max(keys, key=lambda key: places[key] or 0))
        return True
