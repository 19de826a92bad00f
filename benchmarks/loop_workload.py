"""A store without bytes, as small as it can be: a trace of jobs runs against a policy, and hits are counted.

Not here: policies (`ca_jax.storage.placement.policy`, `belady`), moves between tiers, time.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

from ca_jax.simulate.clock import BeladyPolicy
from ca_jax.storage.placement.orders import LookAhead, TierOrders
from ca_jax.storage.placement.policy import EvictionPolicy, StoredEntry


@dataclasses.dataclass(frozen=True)
class Stored:
    """A session as the simulation knows it."""

    key: str
    num_blocks: int


def describe(item: Stored, queue_position: int | None) -> StoredEntry:
    """Shows a session to a policy: of no age."""
    return StoredEntry(
        key=item.key, num_blocks=item.num_blocks, last_used_s=0.0, created_s=0.0, queue_position=queue_position
    )


class _Tier:
    """Blocks, and the sessions that hold some of them."""

    def __init__(self, look_ahead: LookAhead, num_blocks: int):
        self.orders: TierOrders[Stored] = TierOrders(look_ahead, describe)
        self.num_free = num_blocks

    def add(self, item: Stored) -> None:
        self.num_free -= item.num_blocks
        self.orders.add(item.key, item)

    def make_room(self, policy: EvictionPolicy, num_blocks: int) -> bool:
        """Evicts until so many blocks are free; nobody, and False, where that cannot be."""
        victims, num_free = [], self.num_free
        entries = iter(policy.order(self.orders.view(), None))
        while num_free < num_blocks:
            if (entry := next(entries, None)) is None:
                return False
            victims.append(entry)
            num_free += entry.num_blocks
        for entry in victims:
            self.orders.remove(entry.key)
        self.num_free = num_free
        return True


def loop_trace(num_sessions: int, num_rounds: int) -> list[str]:
    """Jobs of sessions that come back in the same order: what recency is worst at."""
    return [f"s{i}" for _ in range(num_rounds) for i in range(num_sessions)]


def hits_of_one_tier(
    trace: Sequence[str], sizes: Mapping[str, int], num_blocks: int, policy: EvictionPolicy | None, queue_jobs: int
) -> int:
    """Counts the jobs of a trace that find their session stored, in a tier of so many blocks.

    Behind the one that runs `queue_jobs` wait at any time. Without a policy it is Belady's, which may also decide not
    to store what it has just served.
    """
    look_ahead = LookAhead()
    tier = _Tier(look_ahead, num_blocks)
    uses = collections.defaultdict(list)
    for nth, key in enumerate(trace):
        uses[key].append(nth)

    def next_use(key: str) -> float:
        later = bisect.bisect_right(uses[key], now)
        return uses[key][later] if later < len(uses[key]) else math.inf

    num_hits = num_queued = now = 0
    belady = BeladyPolicy(next_use)
    for now, key in enumerate(trace):
        while num_queued < min(len(trace), now + 1 + queue_jobs):
            look_ahead.append(num_queued, trace[num_queued])
            num_queued += 1
        look_ahead.remove(now)
        if key in tier.orders:
            num_hits += 1
            tier.orders.use(key)
            continue
        item = Stored(key, sizes[key])
        if policy is not None:
            if tier.make_room(policy, item.num_blocks):
                tier.add(item)
            continue
        tier.add(item)  # Belady's choice is among all, the one just served too.
        tier.make_room(belady, 0)
    return num_hits
