"""Which session begins like a sequence for longest, unit by unit: tokens in DRAM, hashes of blocks on SSD.

    units as bytes, sorted       a b c d
                                 a b c e f     <- of a b c e x: four units in common
                                 a x           <- one
    a b c e x would stand between the two

The longest prefix that a sequence shares with any of a sorted list, it shares with one of the two that it would stand
between: one binary search finds it, however many there are, and however many of them begin alike.

Saves of decoded tokens publish often, and searches are rare: what changes is only marked, and put in its place by the
next search.

Not here: hashes of blocks (prefix), or which units count (books).
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

_MAX_CHANGED = 64  # Sessions that a search puts in their place, at most: a millisecond or two.
_RUN_ITEMS = 1000  # Of a sorted list, at least after a run was split.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Published:
    """What a session has to share."""

    tenant: str
    """Whose it is."""
    units: np.ndarray | bytes
    """Token ids, int32 `[T]`, or hashes of blocks, joined; another object whenever they are others."""
    num_units: int
    """How many of them, from the first on, others may have the KV of."""


class SortedRuns:
    """A sorted list in runs, so that a change moves a few thousand items however long it is."""

    def __init__(self) -> None:
        self._runs: list[list[Any]] = []  # None is empty.
        self._lasts: list[Any] = []

    def update(self, items: Iterable[Any]) -> None:
        """Adds many items, for the price of sorting all."""
        ordered = sorted([item for run in self._runs for item in run] + list(items))
        self._runs = [ordered[start : start + _RUN_ITEMS] for start in range(0, len(ordered), _RUN_ITEMS)]
        self._lasts = [run[-1] for run in self._runs]

    def add(self, item: Any) -> None:
        """Adds an item."""
        if not self._runs:
            self.update([item])
            return
        index = min(bisect.bisect_left(self._lasts, item), len(self._runs) - 1)
        run = self._runs[index]
        bisect.insort(run, item)
        parts = [run] if len(run) <= 2 * _RUN_ITEMS else [run[:_RUN_ITEMS], run[_RUN_ITEMS:]]
        self._runs[index : index + 1] = parts
        self._lasts[index : index + 1] = [part[-1] for part in parts]

    def remove(self, item: Any) -> None:
        """Removes an item that is there."""
        index = bisect.bisect_left(self._lasts, item)
        run = self._runs[index]
        del run[bisect.bisect_left(run, item)]
        parts = [run] if run else []
        self._runs[index : index + 1] = parts
        self._lasts[index : index + 1] = [part[-1] for part in parts]

    def around(self, wanted: Any) -> Iterator[Any]:
        """The items between which `wanted` would stand: two, or one at an end."""
        index = bisect.bisect_left(self._lasts, wanted)
        at = bisect.bisect_left(self._runs[index], wanted) if index < len(self._runs) else 0
        if at:
            yield self._runs[index][at - 1]
        elif index:
            yield self._lasts[index - 1]
        if index < len(self._runs):
            yield self._runs[index][at]


class _Indexed(NamedTuple):
    """An item of the sorted list."""

    tenant: str
    sequence: bytes
    key: str
    units: np.ndarray | bytes


class PrefixIndex:
    """Sequences of all tenants, sorted. Belongs to the thread that keeps the books.

    A search costs O(log n) comparisons, and for each session that changed since the last one a copy of its units if
    they are token ids, and a move within a run. A change costs an entry in a dict.

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
        self._sorted = SortedRuns()
        self._indexed: dict[str, _Indexed] = {}

    def __len__(self) -> int:
        """Sessions that can be found."""
        self._catch_up()
        return len(self._indexed)

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
        neighbours = [item for item in self._sorted.around((tenant, wanted)) if item.tenant == tenant]
        found = [(_num_common_bytes(item.sequence, wanted) // self._unit_bytes, item.key) for item in neighbours]
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
        if len(added) > _MAX_CHANGED:
            self._sorted.update(added)
        else:
            for item in added:
                self._sorted.add(item)


def as_units(token_ids: np.ndarray) -> bytes:
    """Token ids as units of 4 bytes: in whatever order they sort so, sequences that begin alike stand side by side."""
    return np.ascontiguousarray(token_ids, "<i4").tobytes()


def _num_common_bytes(a: bytes, b: bytes) -> int:
    length = min(len(a), len(b))
    differs = np.frombuffer(a, np.uint8, length) != np.frombuffer(b, np.uint8, length)
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
