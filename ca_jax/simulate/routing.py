"""Which replica serves a turn: at random, by consistent hashing of the session, or who holds the session.

Routings are pure functions of a session's name, a `FleetView` and a number that was drawn. They know nothing of time.

Not here: what happens then (replicas).
Source: consistent hashing, Karger et al., STOC 1997.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ca_jax.errors import check

VIRTUAL_NODES = 100
"""Points of each replica on the ring: the most loaded of many replicas has about a third more of the keys than the
mean. Ray Serve takes as many."""


class HashRing:
    """Points of replicas on a ring; a key belongs to the replica of the first point behind its own. Immutable.

    Args:
      replicas: numbers of the replicas; the same ones give the same ring.

    Raises:
      ValueError: no replica.
    """

    def __init__(self, replicas: Iterable[int]) -> None:
        points = sorted(pair for replica in set(replicas) for pair in _points(replica))
        check(bool(points), "replicas", "at least one", 0)
        self._places = [place for place, _ in points]
        self._replicas = [replica for _, replica in points]

    def owner(self, key: str) -> int:
        """Whose a key is."""
        return self._replicas[self._first(key)]

    def walk(self, key: str) -> Iterator[int]:
        """The replicas of all points from a key on, in the ring's order; each comes several times."""
        first = self._first(key)
        for index in range(len(self._replicas)):  # A slice would copy the ring for the few that are looked at.
            yield self._replicas[(first + index) % len(self._replicas)]

    def _first(self, key: str) -> int:
        return bisect.bisect(self._places, _place(key)) % len(self._places)


def _place(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


@functools.cache
def _points(replica: int) -> tuple[tuple[int, int], ...]:
    return tuple((_place(f"replica {replica} point {point}"), replica) for point in range(VIRTUAL_NODES))


@dataclasses.dataclass(slots=True)
class FleetView:
    """What a router knows of the replicas that take turns."""

    replicas: Sequence[int]
    """Their numbers; at least one."""
    ring: HashRing
    """Of the same replicas."""
    loads: dict[int, int]
    """Turns that each of them has, waiting or running."""


Routing = Callable[[str, FleetView, Mapping[int, int], float], int]
"""Chooses a replica.

Args: the session's name; the fleet; by replica how far it holds the session, higher is more, replicas that take no
turns included; a number in [0, 1) that was drawn for this turn.
"""


def by_chance(session: str, view: FleetView, holders: Mapping[int, int], drawn: float) -> int:
    """Any replica."""
    return view.replicas[int(drawn * len(view.replicas))]


def by_hash(session: str, view: FleetView, holders: Mapping[int, int], drawn: float) -> int:
    """The session's replica on the ring: the same as long as that replica is there."""
    return view.ring.owner(session)


def by_holder(session: str, view: FleetView, holders: Mapping[int, int], drawn: float) -> int:
    """Who holds most of the session; else the replica with the fewest turns; of several, the first on the ring."""
    held = max((far for replica, far in holders.items() if replica in view.loads), default=None)
    if held is not None:
        likely = {replica for replica, far in holders.items() if far == held and replica in view.loads}
    else:
        least = min(view.loads.values(), default=0)
        likely = {replica for replica, load in view.loads.items() if load == least}
    if len(likely) == 1:
        return next(iter(likely))
    return next((replica for replica in view.ring.walk(session) if replica in likely), view.ring.owner(session))


ROUTINGS: Mapping[str, Routing] = {"random": by_chance, "hash": by_hash, "holder": by_holder}
"""By name."""
