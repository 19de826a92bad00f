"""Two tiers without bytes: runs a trace of jobs over DRAM and SSD and counts hits and fetches."""

from __future__ import annotations

import dataclasses
import functools

from benchmarks.loop_workload import Stored, Tier, describe, hits_of_one_tier, next_use_in
from ca_jax.storage.placement.orders import LookAhead
from ca_jax.storage.placement.policy import EvictionPolicy, look_ahead_window, plan_fetches

__all__ = ["Stored", "Tier", "TwoTierResult", "describe", "hits_of_one_tier", "next_use_in", "run_two_tiers"]


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
    prefetch: bool,
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
        if prefetch:
            fetch, evict = plan_fetches(
                ssd.orders.view(),
                functools.partial(dram.victims, policy),
                window_jobs=look_ahead_window(dram_blocks - reserve_blocks, mean),
                lacking=reserve_blocks - dram.num_free,
            )
            taken = [ssd.take(key) for key in fetch]
            to_ssd([dram.take(key) for key in evict])
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
