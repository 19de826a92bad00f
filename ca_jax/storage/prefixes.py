"""Which session begins like a sequence for longest, unit by unit: tokens in DRAM, hashes of blocks on SSD.

    units as bytes, sorted       a b c d
                                 a b c e f     <- of a b c e x: four units in common
                                 a x           <- one
    a b c e x would stand between the two

The longest prefix that a sequence shares with any of a sorted list, it shares with one of the two that it would stand
between: one binary search finds it, however many there are, and however many of them begin alike.

Saves of decoded tokens publish often, and searches are rare: what changes is only marked, and put in its place by the
next search.

Not here: hashes of blocks (tokens), or which units count (sessions).
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from sortedcontainers import SortedList

_MAX_CHANGED = 64  # Sessions that a search puts in their place, at most: a millisecond or two.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Published:
    """What a session has to share."""

    tenant: str
    """Whose it is."""
    units: np.ndarray | bytes
    """Token ids, int32 `[T]`, or hashes of blocks, joined; another object whenever they are others."""
    num_units: int
    """How many of them, from the first on, others may have the KV of."""


class _Indexed(NamedTuple):
    """An item of the sorted list."""

    tenant: str
    sequence: bytes
    key: str
    units: np.ndarray | bytes


class PrefixIndex:
    """Sequences of all tenants, sorted. Belongs to the bookkeeping thread.

    A search costs O(log n) comparisons, and for each session that changed since the last one a copy of its units if
    they are token ids. A change costs an entry in a dict.

    Args:
      published: what a session has to share by its key; None if it has nothing (any more).
      unit_bytes: of one unit.
      min_units: shorter prefixes are not found.
    """

    def __init__(self, published: Callable[[str], Published | None], unit_bytes: int, min_units: int = 1) -> None:
        self._published = published
        self._unit_bytes = unit_bytes
        self._min_units = max(min_units, 1)
        self._max_changed = _MAX_CHANGED
        self._changed: dict[str, None] = {}
        self._sorted = SortedList()
        self._indexed: dict[str, _Indexed] = {}

    def changed(self, key: str) -> None:
        """What a session has to share is perhaps something else now, or it is gone."""
        self._changed[key] = None
        if len(self._changed) > self._max_changed:
            self._catch_up()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Puts what changes in a `with` block in its place at the end of it: faster for very many."""
        self._max_changed = sys.maxsize
        yield
        self._max_changed = _MAX_CHANGED
        self._catch_up()

    def find(self, tenant: str, wanted: bytes) -> tuple[int, str]:
        """Finds the tenant's session that agrees with a sequence for longest, at least for `min_units`.

        Args:
          tenant: whose sessions; others' are never found.
          wanted: the sequence's units.

        Returns:
          How many units agree, and its key; 0 and an empty one where there is none.
        """
        self._catch_up()
        place = tenant, wanted
        around = (self._sorted.irange(maximum=place, reverse=True), self._sorted.irange(minimum=place))
        neighbours = [item for item in (next(items, None) for items in around) if item is not None]
        found = [
            (_num_common_bytes(item.sequence, wanted) // self._unit_bytes, item.key)
            for item in neighbours
            if item.tenant == tenant
        ]
        return max([agreeing for agreeing in found if agreeing[0] >= self._min_units], default=(0, ""))

    def _catch_up(self) -> None:
        changed, self._changed = self._changed, {}
        added: list[_Indexed] = []
        for key in changed:
            now, known = self._published(key), self._indexed.get(key)
            num_bytes = 0 if now is None else now.num_units * self._unit_bytes
            if known is not None:
                if now is not None and now.units is known.units and num_bytes == len(known.sequence):
                    continue
                self._sorted.remove(known)
                del self._indexed[key]
            if now is not None and now.num_units >= self._min_units:
                units = now.units if isinstance(now.units, bytes) else as_units(now.units)
                sequence = units[:num_bytes]
                self._indexed[key] = _Indexed(now.tenant, sequence, key, now.units)
                added.append(self._indexed[key])
        self._sorted.update(added)  # Of few it adds one by one; with many it sorts all.


def as_units(token_ids: np.ndarray) -> bytes:
    """Token ids as units of 4 bytes: in whatever order they sort so, sequences that begin alike stand side by side."""
    return np.ascontiguousarray(token_ids, "<i4").tobytes()


def _num_common_bytes(a: bytes, b: bytes) -> int:
    length = min(len(a), len(b))
    differs = np.frombuffer(a, np.uint8, length) != np.frombuffer(b, np.uint8, length)
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
