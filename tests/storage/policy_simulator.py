"""A store without bytes, as small as it can be: runs a trace of jobs against a policy and counts hits."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math

from ca_jax.storage.lookahead import LookAhead
from ca_jax.storage.orders import TierOrders
from ca_jax.storage.policy import EvictionPolicy, PrefetchPolicy, StoredEntry, look_ahead_window
from ca_jax.testing.belady import BeladyPolicy


@dataclasses.dataclass(frozen=True)
class Stored:
    key: str
    num_blocks: int


def describe(item: Stored, queue_position: int | None) -> StoredEntry:
    return StoredEntry(
        key=item.key,
        num_blocks=item.num_blocks,
        pinned=False,
        last_used_s=0.0,
        created_s=0.0,
        queue_position=queue_position,
    )


class Tier:
    """A cap in blocks, and the sessions within it."""

    def __init__(self, look_ahead: LookAhead, num_blocks: int):
        self.orders: TierOrders[Stored] = TierOrders(look_ahead)
        self.num_free = num_blocks

    def add(self, item: Stored) -> None:
        self.num_free -= item.num_blocks
        assert self.num_free >= 0, "the cap is a hard one"
        self.orders.add(item.key, item)

    def take(self, key: str) -> Stored:
        item = self.orders.get(key)
        assert item is not None
        self.orders.remove(key)
        self.num_free += item.num_blocks
        return item

    def make_room(self, policy: EvictionPolicy, num_blocks: int) -> list[Stored] | None:
        """Evicts until `num_blocks` are free; who went, or None where that cannot be."""
        lacking = num_blocks - self.num_free
        if lacking <= 0:
            return []
        victims = policy.choose_victims(self.orders.view(describe), lacking)
        return [self.take(key) for key in victims] if victims else None


def next_use_in(trace: list[str]):
    """Gives `next_use(key, now)`: when a session is needed next, infinity for never."""
    uses = collections.defaultdict(list)
    for i, key in enumerate(trace):
        uses[key].append(i)

    def next_use(key: str, now: int) -> float:
        later = bisect.bisect_right(uses[key], now)
        return uses[key][later] if later < len(uses[key]) else math.inf

    return next_use


def hits_of_one_tier(
    trace: list[str], sizes: dict[str, int], num_blocks: int, policy: EvictionPolicy | None, queue_jobs: int
) -> int:
    """Jobs of `trace` that find their session stored, `queue_jobs` of them waiting at any time.

    With no policy, Belady's, which may also decide not to store what it has just served.
    """
    look_ahead = LookAhead()
    tier = Tier(look_ahead, num_blocks)
    next_use = next_use_in(trace)
    num_hits = num_queued = 0
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
            belady = BeladyPolicy(lambda key, now=now: next_use(key, now))
            for victim in belady.choose_victims(tier.orders.view(describe), item.num_blocks - tier.num_free):
                tier.take(victim)
        tier.num_free -= item.num_blocks
    return num_hits


@dataclasses.dataclass
class TwoTierResult:
    dram_hits: int = 0
    ssd_hits: int = 0
    num_fetches: int = 0
    wasted_fetches: int = 0
    """Fetched and evicted again before they were used."""


def run_two_tiers(
    trace: list[str],
    sizes: dict[str, int],
    dram_blocks: int,
    ssd_blocks: int,
    policy: EvictionPolicy,
    prefetch: PrefetchPolicy | None,
    queue_jobs: int,
    reserve_blocks: int,
) -> TwoTierResult:
    """Runs `trace` over DRAM and SSD, a session in one of them at a time, fetches being instant."""
    look_ahead = LookAhead()
    dram, ssd = Tier(look_ahead, dram_blocks), Tier(look_ahead, ssd_blocks)
    result = TwoTierResult()
    fetched: set[str] = set()

    def to_ssd(victims: list[Stored] | None) -> bool:
        for victim in victims or ():
            result.wasted_fetches += victim.key in fetched
            fetched.discard(victim.key)
            if ssd.make_room(policy, victim.num_blocks) is not None:
                ssd.add(victim)
        return victims is not None

    mean = sum(sizes.values()) / len(sizes)
    num_queued = 0
    for now, key in enumerate(trace):
        while num_queued < min(len(trace), now + 1 + queue_jobs):
            look_ahead.append(num_queued, trace[num_queued])
            num_queued += 1
        if prefetch is not None:
            plan = prefetch.plan(
                ssd.orders.view(describe),
                dram.orders.view(describe),
                window_jobs=look_ahead_window(dram_blocks - reserve_blocks, mean),
                free_blocks=dram.num_free,
                reserve_blocks=reserve_blocks,
            )
            taken = [ssd.take(key) for key in plan.fetch]
            to_ssd([dram.take(key) for key in plan.evict])
            for item in taken:
                result.num_fetches += 1
                fetched.add(item.key)
                dram.add(item)
        look_ahead.remove(now)
        fetched.discard(key)
        if key in dram.orders:
            result.dram_hits += 1
            dram.orders.use(key)
            continue
        if key in ssd.orders:
            result.ssd_hits += 1
            item = ssd.take(key)
        else:
            item = Stored(key, sizes[key])
        if to_ssd(dram.make_room(policy, item.num_blocks)):
            dram.add(item)
    return result
