"""A store without bytes, as small as it can be: a trace of jobs runs against a policy, and hits are counted.

Not here: policies (`ca_jax.storage.placement.policy`, `belady`), moves between tiers, time.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from ca_jax.simulate.clock import BeladyPolicy
from ca_jax.storage.placement.orders import LookAhead, TierOrders
from ca_jax.storage.placement.policy import EvictionPolicy, StoredEntry


@dataclasses.dataclass(frozen=True)
class Stored:
    """A session as the simulation knows it."""

    key: str
    """Its name."""
    num_blocks: int
    """Its size."""


def describe(item: Stored, queue_position: int | None) -> StoredEntry:
    """Shows a session to a policy: of no age."""
    return StoredEntry(
        key=item.key, num_blocks=item.num_blocks, last_used_s=0.0, created_s=0.0, queue_position=queue_position
    )


class Tier:
    """A cap in blocks, and the sessions within it.

    Args:
      look_ahead: the job queue.
      num_blocks: the cap.
    """

    def __init__(self, look_ahead: LookAhead, num_blocks: int):
        self.orders: TierOrders[Stored] = TierOrders(look_ahead, describe)
        """Who is stored."""
        self.num_free = num_blocks
        """Blocks that nobody holds."""

    def add(self, item: Stored) -> None:
        """Stores a session.

        Raises:
          ValueError: there is no room for it.
        """
        if item.num_blocks > self.num_free:
            raise ValueError(f"there must be {item.num_blocks} free blocks for {item.key!r}, got {self.num_free}")
        self.num_free -= item.num_blocks
        self.orders.add(item.key, item)

    def take(self, key: str) -> Stored:
        """Takes a session out.

        Raises:
          ValueError: it is not stored.
        """
        item = self.orders.get(key)
        if item is None:
            raise ValueError(f"there must be a stored session, got {key!r}, which is none")
        self.orders.remove(key)
        self.num_free += item.num_blocks
        return item

    def make_room(self, policy: EvictionPolicy, num_blocks: int) -> list[Stored] | None:
        """Evicts until `num_blocks` are free; who went, or None where that cannot be."""
        lacking = num_blocks - self.num_free
        if lacking <= 0:
            return []
        victims = self.victims(policy, lacking)
        return [self.take(key) for key in victims] if victims else None

    def victims(self, policy: EvictionPolicy, num_blocks: int, needed_at: int | None = None) -> tuple[str, ...]:
        """Who would have to go for so many more blocks, for the job at a queue position; none if that cannot be."""
        named = []
        for entry in policy.order(self.orders.view(), needed_at):
            if needed_at is None or entry.queue_position is None or entry.queue_position > needed_at:
                named.append(entry.key)
                num_blocks -= entry.num_blocks
                if num_blocks <= 0:
                    return tuple(named)
        return ()


def loop_trace(num_sessions: int, num_rounds: int) -> list[str]:
    """Jobs of sessions that come back in the same order: what recency is worst at."""
    return [f"s{i}" for _ in range(num_rounds) for i in range(num_sessions)]


def next_use_in(trace: Sequence[str]) -> Callable[[str, int], float]:
    """Gives `next_use(key, now)`: when a session is needed next, infinity for never."""
    uses = collections.defaultdict(list)
    for i, key in enumerate(trace):
        uses[key].append(i)

    def next_use(key: str, now: int) -> float:
        later = bisect.bisect_right(uses[key], now)
        return uses[key][later] if later < len(uses[key]) else math.inf

    return next_use


def hits_of_one_tier(
    trace: Sequence[str], sizes: Mapping[str, int], num_blocks: int, policy: EvictionPolicy | None, queue_jobs: int
) -> int:
    """Counts the jobs of a trace that find their session stored.

    Args:
      trace: the sessions of all jobs, in order.
      sizes: blocks of each session.
      num_blocks: the cap.
      policy: who is evicted; None for Belady's, which may also decide not to store what it has just served.
      queue_jobs: how many jobs behind the one that runs wait at any time.
    """
    look_ahead = LookAhead()
    tier = Tier(look_ahead, num_blocks)
    next_use = next_use_in(trace)
    num_hits = num_queued = now = 0
    belady = BeladyPolicy(lambda key: next_use(key, now))
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
            if tier.make_room(policy, item.num_blocks) is not None:
                tier.add(item)
            continue
        tier.num_free += item.num_blocks  # Belady's choice is among all, the one just served too.
        tier.add(item)
        if tier.num_free < item.num_blocks:
            for victim in tier.victims(belady, item.num_blocks - tier.num_free):
                tier.take(victim)
        tier.num_free -= item.num_blocks
    return num_hits
