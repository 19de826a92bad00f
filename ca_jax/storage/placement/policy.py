"""Which sessions leave a tier when room is needed, and which come back early: pure choices over a frozen view.

A choice costs what it names, not what is stored: the view yields sessions in orders that are kept anyway (`orders`).

Sessions may share blocks, and then what the eviction of several frees is no sum: a block goes with the last that holds
it. A policy says in which order sessions go; `Room` takes as many of them as free enough.

Not here: what is stored (the AttentionStore keeps it and carries the choice out), those orders, what is learned of
returns (returns), or any clock.

Source: CachedAttention (Gao et al., USENIX ATC 2024), section 3.3.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Reversible, Sequence
from typing import Any, Protocol

from ca_jax.storage.placement.blocks import ChargedBlocks
from ca_jax.storage.placement.returns import ReuseGaps


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredEntry:
    """One stored sequence, as a policy sees it."""

    key: str
    """Session id."""
    tenant: str = ""
    """Whose it is."""
    num_blocks: int
    """Blocks of the tier that it holds: that its eviction frees where no other does, or that fetching it takes."""
    last_used_s: float
    """When it was last looked up, loaded or saved; seconds of the store's clock."""
    created_s: float
    """When it was first saved; seconds of the store's clock."""
    queue_position: int | None = None
    """Place of its next job in the scheduler's queue, 0 at the head; None where no job waits."""
    return_rate: float = 0.0
    """Tokens of prefill that each of its tokens is expected to save a second, 1/s; see `returns`. Nothing is known of
    it where the policy does not ask."""
    away_s: float = 0.0
    """Without a waiting job: how long it will be away from now on, as its client says; of whom nobody says it, as long
    as it has been, seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreView:
    """What a policy may look at: the sessions of one tier. Valid during the call only.

    `by_last_used` and `by_created` hold the same entries, and each of them is in either `idle` or `by_next_job`; those
    of `idle` are in either `unsaid` or `expected`. They are made on demand, in orders that the store keeps: a policy
    that stops early looks at few, however many are stored.
    What must stay (pinned, being loaded or saved, or what room is sought for) is in none of them.
    """

    by_last_used: Iterable[StoredEntry]
    """Least recently used first."""
    by_created: Iterable[StoredEntry]
    """Oldest first."""
    idle: Iterable[StoredEntry]
    """Those without a waiting job, least recently used first."""
    by_next_job: Reversible[StoredEntry]
    """Those with a waiting job, the one whose job is nearest to the queue's head first."""
    idle_groups: Sequence[Reversible[StoredEntry]]
    """Those of `unsaid`, in the same order, each in the group of those that are like it: of as many turns, say."""
    unsaid: Iterable[StoredEntry]
    """Those of `idle` of which nobody says when they will be back, least recently used first."""
    expected: Reversible[StoredEntry]
    """The others, that which will be back first first."""


class EvictionPolicy(Protocol):
    """Says whom to evict: from DRAM to SSD, or from SSD altogether."""

    def order(self, view: StoreView, needed_at: int | None = None) -> Iterable[StoredEntry]:
        """The sessions of a tier, those that should go first first. Taken from as long as room lacks: best lazy.

        Pure: the same view gives the same answer.

        Args:
          view: what the tier holds.
          needed_at: queue position of the job that the room is for. Sessions whose own job comes no later are not
            evicted for it, lest fetching one job's KV push out another's that is needed sooner, and may be left out.
        """
        ...


class SchedulerAwarePolicy:
    """Evicts whose KV is needed last, as far as the job queue tells.

    Sessions without a waiting job go first, the least recently used of them first: any job they will get is queued
    behind all that wait. Then go those with one, from the queue's tail to its head. Where a client says when a session
    will be back, it goes among the others as if it had been away for as long as it will be.

    The paper looks at the first `(C_mem + C_disk) / S_kv` jobs only, which bounds its scan, and exempts their sessions
    while there are others. The order here does so for windows of every length at once, since it takes sessions
    outside a window before those inside; no length has to be chosen, and beyond the paper's the queue still knows
    better than recency does.

    Source: CachedAttention, section 3.3.2.
    """

    def order(self, view: StoreView, needed_at: int | None = None) -> Iterable[StoredEntry]:
        """See `EvictionPolicy`."""
        idle = heapq.merge(view.unsaid, reversed(view.expected), key=lambda entry: -entry.away_s)
        return itertools.chain(idle, last_needed_first(view, needed_at))


class ReturnAwarePolicy:
    """Evicts what is worth least to keep, as far as can be learned, before what the job queue asks for.

    Those without a waiting job go in the order of what each of their bytes is expected to save a second: how soon the
    session will be back, by its number of turns and the time since the last (`ReturnTimes`); tokens saved grow with
    bytes kept, so that sizes do not matter. Where a client says when it will be back, that is what is expected. Those
    with one go as with `SchedulerAwarePolicy`.

    Of each group of sessions that are alike only the two ends are looked at, the one used last and the one not used for
    longest. Where the worth of waiting rises to some time and falls from then on, as it does with people who read an
    answer before they go on, the least is at one of the ends.
    """

    def order(self, view: StoreView, needed_at: int | None = None) -> Iterable[StoredEntry]:
        """See `EvictionPolicy`."""
        idle = _least_worth_first([*view.idle_groups, view.expected])
        return itertools.chain(idle, last_needed_first(view, needed_at))


class LruPolicy:
    """Evicts what was not used for longest."""

    def order(self, view: StoreView, needed_at: int | None = None) -> Iterable[StoredEntry]:
        """See `EvictionPolicy`."""
        return view.by_last_used


class FifoPolicy:
    """Evicts what was stored first, used since or not."""

    def order(self, view: StoreView, needed_at: int | None = None) -> Iterable[StoredEntry]:
        """See `EvictionPolicy`."""
        return view.by_created


EVICTION_POLICIES: dict[str, type[SchedulerAwarePolicy | ReturnAwarePolicy | LruPolicy | FifoPolicy]] = {
    "scheduler_aware": SchedulerAwarePolicy,
    "return_aware": ReturnAwarePolicy,
    "lru": LruPolicy,
    "fifo": FifoPolicy,
}


def make_policy(name: str) -> EvictionPolicy:
    """Makes the policy of that name, one of `EVICTION_POLICIES`."""
    return EVICTION_POLICIES[name]()


class Room:
    """Room in one tier: who is evicted for it.

    Args:
      policy: in which order sessions go.
      blocks: of the tier.
      view: of the tier, of one tenant's sessions or (None) of everybody's.
      table_of: blocks that a session holds; none for one that must stay, which is passed by.
      clock: seconds.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        blocks: ChargedBlocks,
        view: Callable[[str | None], StoreView],
        table_of: Callable[[str], Sequence[int]],
        clock: Callable[[], float],
    ) -> None:
        self._policy = policy
        self._blocks = blocks
        self._view = view
        self._table_of = table_of
        self.gaps = ReuseGaps(clock)
        """How soon what was evicted from the tier is wanted again."""
        self._num_evictions = self._num_evicted_blocks = 0

    def victims(self, tenant: str, num_blocks: int) -> tuple[str, ...] | None:
        """Names sessions to evict so that a tenant can take so many more blocks: its own as far as its quota lacks.

        Returns:
          Keys in the order in which they should go; None where there is not enough that may go.
        """
        lacking, excess = self._blocks.lacking(num_blocks), self._blocks.excess(tenant, num_blocks)
        own = self.choose(excess, tenant=tenant) if excess > 0 else ()
        if excess > 0 and not own:
            return None
        if self.frees(own) >= lacking:
            return own
        others = self.choose(lacking)  # It may name the same sessions again.
        return tuple(dict.fromkeys(own + others)) if others else None

    def choose(self, num_blocks: int, *, tenant: str | None = None, needed_at: int | None = None) -> tuple[str, ...]:
        """Names sessions whose eviction frees at least `num_blocks` blocks, and none without need; none if too few.

        Args:
          num_blocks: > 0.
          tenant: whose sessions; None for everybody's.
          needed_at: as for `EvictionPolicy.order`; None: no such limit.
        """
        tables: dict[str, Sequence[int]] = {}

        def named() -> Iterator[Sequence[int]]:
            for entry in self._policy.order(self._view(tenant), needed_at):
                position = math.inf if entry.queue_position is None else entry.queue_position
                is_later = needed_at is None or position > needed_at
                if is_later and entry.key not in tables and (table := self._table_of(entry.key)):
                    tables[entry.key] = table
                    yield table

        if not any(freed >= num_blocks for freed in self._blocks.frees(named())):
            return ()
        if not self._blocks.are_shared:
            return tuple(tables)
        goes = self._blocks.held_by_none_but(tables.values())
        return tuple(key for key, table in tables.items() if not goes.isdisjoint(table))

    def plan_fetches(
        self, on_ssd: StoreView, window_jobs: int, max_fetches: int, reserve_blocks: int = 0
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Plans fetches for the first `window_jobs` waiting jobs, before they run, in queue order, while room lasts.

        A fetch may start at once in blocks that are free, the reserve's among them; what is evicted for it brings the
        reserve back. A session is fetched only where less urgent ones can make that room, so a fetch never undoes an
        eviction, nor the other way round.

        Args:
          on_ssd: what may be fetched to this tier: sessions on SSD that are neither in DRAM nor on their way. Pins do
            not matter.
          window_jobs: the look-ahead prefetch window `L_pw`, of `look_ahead_window`.
          max_fetches: most sessions in one plan. The next plan knows the queue better: more than the disk can work on
            is a guess.
          reserve_blocks: blocks that should be free when the plan is carried out (the host buffer).

        Returns:
          Sessions to fetch, in queue order, and sessions to evict for them, in the order in which they should go. The
          first that lacks room ends the plan, so that a small one does not take the room of one that is needed sooner;
          one that could not have it even in an otherwise empty DRAM is the caller's to leave out of `on_ssd`. The first
          that does not fit its tenant's quota ends the plan for this tenant: no room is made for its sessions.

        Source: CachedAttention, section 3.3.1.
        """
        planned: list[tuple[str, int, int]] = []  # Key, blocks that lack for it and those before, queue position.
        lacking = self._blocks.lacking(reserve_blocks)
        wanted: collections.Counter[str] = collections.Counter()  # Blocks by tenant.
        for entry in on_ssd.by_next_job:
            position = entry.queue_position
            if position is None or position >= window_jobs or len(planned) >= max_fetches:
                break
            wanted[entry.tenant] += entry.num_blocks
            if self._blocks.excess(entry.tenant, wanted[entry.tenant]):
                continue
            lacking += entry.num_blocks
            planned.append((entry.key, lacking, position))

        def going(number: int) -> tuple[str, ...] | None:
            """Who goes for the first so many; None where too few may."""
            _, lacking, position = planned[number - 1]
            return () if lacking <= 0 else self.choose(lacking, needed_at=position) or None

        # Each needs what those before it do and more, and fewer may go for it: if there is room for the last there is
        # for all.
        number, evict = len(planned), going(len(planned)) if planned else ()
        if evict is None:
            number, evict = 0, ()
            while (more := going(number + 1)) is not None:
                number, evict = number + 1, more
        return tuple(key for key, _, _ in planned[:number]), evict

    def frees(self, keys: Sequence[str]) -> int:
        """How many blocks the eviction of sessions frees."""
        return max(self._blocks.frees(map(self._table_of, keys)), default=0)

    def evict(self, keys: Iterable[str], leave: Callable[[str], object]) -> None:
        """Evicts sessions, each by a call of `leave`, and counts what that frees."""
        for key in keys:
            num_free = self._blocks.num_free
            leave(key)
            self._num_evictions += 1
            self._num_evicted_blocks += self._blocks.num_free - num_free
            self.gaps.evicted(key)

    def wanted(self, key: str, is_here: bool) -> None:
        """A session is wanted, which the tier has or misses."""
        (self.gaps.forget if is_here else self.gaps.wanted)(key)

    def stats(self, block_bytes: int) -> dict[str, Any]:
        """The fields of `TierStats`, for blocks of so many bytes."""
        num_blocks, num_free = self._blocks.num_blocks, self._blocks.num_free
        return {
            "capacity_bytes": num_blocks * block_bytes,
            "used_bytes": (num_blocks - num_free) * block_bytes,
            "free_bytes": num_free * block_bytes,
            "num_evictions": self._num_evictions,
            "evicted_bytes": self._num_evicted_blocks * block_bytes,
            "evict_to_reuse": self.gaps.histogram(),
        }


def look_ahead_window(available_bytes: float, mean_session_bytes: float) -> int:
    """How many jobs a look-ahead window spans: as many as there is room for sessions of average size.

    `L_pw = C_mem / S_kv` for prefetching, where `C_mem` is the DRAM that prefetching may use; `(C_mem + C_disk) / S_kv`
    for eviction, `C` being capacities (`SchedulerAwarePolicy` says why it needs none). `S_kv` is the average KV size of
    a session, as measured.

    Returns:
      The quotient rounded down, but 1 where anything is available; 0 where nothing is stored.

    Source: CachedAttention, sections 3.3.1 and 3.3.2.
    """
    if not available_bytes or not mean_session_bytes:
        return 0
    return max(1, int(available_bytes // mean_session_bytes))


def last_needed_first(view: StoreView, needed_at: int | None) -> Iterable[StoredEntry]:
    """Those with a waiting job behind that place, from the queue's tail on."""
    waiting = reversed(view.by_next_job)
    if needed_at is None:
        return waiting
    # All that follow the first that stays stand nearer to the head.
    return itertools.takewhile(lambda entry: (entry.queue_position or 0) > needed_at, waiting)


def _least_worth_first(groups: Iterable[Reversible[StoredEntry]]) -> Iterator[StoredEntry]:
    """The entries of all groups, always the one of the lowest rate among those at their ends."""
    ends = [end for group in groups for end in (iter(group), reversed(group))]
    named: set[str] = set()
    # Within a group the rates may fall and rise: `merge` looks at the next of each end only, as is wanted here.
    for entry in heapq.merge(*ends, key=lambda entry: (entry.return_rate, entry.last_used_s)):
        if entry.key not in named:  # If it is, the other end has come from there.
            named.add(entry.key)
            yield entry
