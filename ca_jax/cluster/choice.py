"""Which replica a request is sent to, and which keys a replica holds.

    held and there    its holder, unless that has too much to do and another may answer as well
    held by none now  the one that has least to do
    never seen        where the ring of hashes has it, which is the same for everybody who asks

Affinity is a hint: a history that reaches another replica is computed anew there. What names a conversation and does
not tell it stays with its holder.

Not here: keys (`keys`), Ray Serve (`router`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

_SATURATED = 2.0  # Jobs for each slot, from which on a turn waits as long as others of its length take.
R = TypeVar("R", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Load:
    """What a replica has to do, and its room."""

    share: float = 0.0
    """Jobs that run or wait, for each slot."""
    free_bytes: int = 0
    """Of its DRAM tier."""

    @property
    def is_saturated(self) -> bool:
        """Whether a turn would wait here for about as long as it takes."""
        return self.share >= _SATURATED

    @property
    def rank(self) -> tuple[float, int]:
        """The lesser of two has less to do, or as much and more room."""
        return self.share, -self.free_bytes


def order_of(
    ring: Sequence[R], loads: Mapping[R, Load], holder: R | None, *, was_held: bool = False, is_bound: bool = False
) -> list[R]:
    """Replicas in the order in which a request is offered to them.

    Args:
      ring: all that are there, in the order in which the ring has them for the request's key.
      loads: of each; one that has said nothing has nothing to do.
      holder: which holds what the request is about; None: none that is there.
      was_held: whether one held it that is gone.
      is_bound: whether the holder alone can answer.
    """
    if holder is not None and holder in ring and is_bound:
        return [holder]
    by_load = sorted(ring, key=lambda each: loads.get(each, Load()).rank)  # Of equal ones in the ring's order.
    in_ring = None if was_held or not ring else ring[0]
    first = holder if holder in ring else in_ring
    if first is None or loads.get(first, Load()).is_saturated:
        return by_load
    return [first, *(each for each in by_load if each != first)]


class Held(Generic[R]):
    """The latest keys that somebody holds, with the time of their last use and a value.

    Args:
      capacity: most of them.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: collections.OrderedDict[str, tuple[float, R]] = collections.OrderedDict()

    def use(self, keys: Iterable[str], value: R, now_s: float | None = None) -> None:
        """Notes a use of keys; the one that was not used for longest is forgotten where there are too many."""
        for key in keys:
            self._held[key] = time.time() if now_s is None else now_s, value
            self._held.move_to_end(key)
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)

    def forget(self, keys: Iterable[str]) -> None:
        """Forgets keys, if they are held."""
        for key in keys:
            self._held.pop(key, None)

    def get(self, key: str) -> tuple[float, R] | None:
        """When a key was last used, seconds since 1970, and its value; None where it is not held."""
        return self._held.get(key)

    def times(self) -> dict[str, int]:
        """When each was last used, whole seconds since 1970, oldest first."""
        return {key: int(used_s) for key, (used_s, _) in self._held.items()}


def write_times(path: Path, times: Mapping[str, float]) -> None:
    """Writes keys and times to a file, all of it or nothing. Not durably: they are a hint."""
    partly = path.with_suffix(".new")
    with contextlib.suppress(OSError):
        partly.write_text(json.dumps(times), encoding="utf-8")
        os.replace(partly, path)


def read_times(path: Path) -> dict[str, float]:
    """What a file has of keys and times; nothing where it is not there, or not like that."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(key): float(used_s) for key, used_s in found.items()}
    return {}
