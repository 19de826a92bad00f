"""Which session in DRAM begins with the same tokens for longest, token by token.

    tokens as big-endian bytes, sorted      a b c d
                                            a b c e f     <- of a b c e x: four tokens in common
                                            a x           <- one
    a b c e x would stand between the two

The longest prefix that a sequence shares with any of a sorted list, it shares with one of the two that it would stand
between: one binary search finds it, however many there are.

Saves of decoded tokens publish often, and searches are rare: what changes is only marked, and put in its place by the
next search.

Not here: what is on SSD (catalog_reader, by hashes of blocks), or which tokens count (books).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable

import numpy as np

from ca_jax.storage.catalog_records import PrefixMatch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Published:
    """What a session has to share."""

    tenant: str
    """Whose it is."""
    token_ids: np.ndarray
    """int32 `[T]`; another array whenever they are others."""
    num_plain: int
    """How many of them, from the first on, others may have the KV of."""


class PrefixIndex:
    """Sequences of each tenant, sorted. Belongs to the thread that keeps the books.

    A search costs O(log n) comparisons, and for each session that changed since the last one a copy of its token ids
    and a move of up to 8n bytes within a list. A change costs an entry in a dict.

    Args:
      published: what a session has to share by its key; None if it has nothing (any more).
      min_tokens: shorter prefixes are not found.
    """

    def __init__(self, published: Callable[[str], Published | None], min_tokens: int) -> None:
        self._published = published
        self._min_tokens = min_tokens
        self._changed: dict[str, None] = {}
        self._sorted: dict[str, list[tuple[bytes, str]]] = {}  # By tenant: tokens and key; no list is empty.
        self._indexed: dict[str, tuple[Published, bytes]] = {}

    def __len__(self) -> int:
        """Sessions that can be found."""
        self._catch_up()
        return len(self._indexed)

    def changed(self, key: str) -> None:
        """What a session has to share is perhaps something else now, or it is gone."""
        self._changed[key] = None

    def find(self, tenant: str, token_ids: np.ndarray) -> PrefixMatch | None:
        """Finds the tenant's session that agrees with `token_ids` for longest, at least for `min_tokens`.

        Args:
          tenant: whose sessions; others' are never found.
          token_ids: `[T]`, integers that fit int32.
        """
        self._catch_up()
        sequences = self._sorted.get(tenant, [])
        wanted = _as_bytes(token_ids)
        behind = bisect.bisect_left(sequences, (wanted,))
        best: PrefixMatch | None = None
        for tokens, key in sequences[max(behind - 1, 0) : behind + 1]:
            num_tokens = _common_tokens(tokens, wanted)
            if num_tokens >= max(self._min_tokens, 1) and (best is None or num_tokens > best.num_tokens):
                best = PrefixMatch(key=key, num_tokens=num_tokens)
        return best

    def _catch_up(self) -> None:
        changed, self._changed = self._changed, {}
        for key in changed:
            now, known = self._published(key), self._indexed.get(key)
            if known is not None:
                before, tokens = known
                if now is not None and now.token_ids is before.token_ids and now.num_plain == before.num_plain:
                    continue
                self._remove(before.tenant, tokens, key)
            if now is not None and now.num_plain >= self._min_tokens:
                tokens = _as_bytes(now.token_ids[: now.num_plain])
                bisect.insort(self._sorted.setdefault(now.tenant, []), (tokens, key))
                self._indexed[key] = now, tokens

    def _remove(self, tenant: str, tokens: bytes, key: str) -> None:
        sequences = self._sorted[tenant]
        del sequences[bisect.bisect_left(sequences, (tokens, key))]
        if not sequences:
            del self._sorted[tenant]
        del self._indexed[key]


def _as_bytes(token_ids: np.ndarray) -> bytes:
    """Most significant bytes first, so that bytes sort as tokens do."""
    return np.ascontiguousarray(token_ids, ">u4").tobytes()


def _common_tokens(a: bytes, b: bytes) -> int:
    length = min(len(a), len(b)) // 4
    differs = np.frombuffer(a, "<u4", length) != np.frombuffer(b, "<u4", length)
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
