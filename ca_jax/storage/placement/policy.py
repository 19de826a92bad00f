"""Which sessions leave a tier when room is needed, and which come back early: pure choices over a frozen view.

A choice costs what it names, not what is stored: the view yields sessions in orders that are kept anyway (`orders`).

Sessions may share blocks, and then what the eviction of several frees is no sum: a block goes with the last that holds
it. Policies choose by how many blocks sessions hold; `FreeingPolicy` asks them for more until what they name is enough.

Not here: what is stored (the AttentionStore keeps it and carries the choice out), those orders, what is learned of
returns (returns), or any clock.

Source: CachedAttention (Gao et al., USENIX ATC 2024), section 3.3.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Reversible, Sequence
from typing import Protocol

from ca_jax.storage.placement.blocks import ChargedBlocks


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredEntry:
    """One stored sequence, as a policy sees it."""

    key: str
    """Session id."""
    num_blocks: int
    """Blocks of the tier that it holds: that its eviction frees where no other does, or that fetching it takes."""
    pinned: bool
    """Whether it must stay: pinned, being loaded or saved, or the one that room is sought for."""
    last_used_s: float
    """When it was last looked up, loaded or saved; seconds of the store's clock."""
    created_s: float
    """When it was first saved; seconds of the store's clock."""
    queue_position: int | None = None
    """Place of its next job in the scheduler's queue, 0 at the head; None where no job waits."""
    return_rate: float = 0.0
    """Tokens of prefill that each of its tokens is expected to save a second, 1/s; see `returns`. Nothing is known of
    it where the policy does not ask."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreView:
    """What a policy may look at: the sessions of one tier. Valid during the call only.

    `by_last_used` and `by_created` hold the same entries, and each of them is in either `idle` or `by_next_job`. They
    are made on demand, in orders that the store keeps: a policy that stops early looks at few, however many are stored.
    What must stay may be left out of all of them.
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
    """Those of `idle`, in the same order, each in the group of those that are like it: of as many turns, say."""


class EvictionPolicy(Protocol):
    """Chooses whom to evict: from DRAM to SSD, or from SSD altogether."""

    def choose_victims(self, view: StoreView, num_blocks: int, *, needed_at: int | None = None) -> tuple[str, ...]:
        """Names entries whose eviction frees at least `num_blocks` blocks.

        Atomic: enough room, or nothing. Pure: the same view gives the same answer.

        Args:
          view: what the tier holds.
          num_blocks: blocks wanted, > 0.
          needed_at: queue position of the job that the room is for. A session whose own job comes no later is not
            evicted for it, lest fetching one job's KV push out another's that is needed sooner. None: no such limit.

        Returns:
          Keys of entries that are not pinned and together hold at least `num_blocks` blocks, in the order in which they
          should go, and none of which follows one that is enough; empty if there are none. Blocks that several share
          count for each: `room` asks for more where less is freed.
        """
        ...


class SchedulerAwarePolicy:
    """Evicts whose KV is needed last, as far as the job queue tells.

    Sessions without a waiting job go first, the least recently used of them first: any job they will get is queued
    behind all that wait. Then go those with one, from the queue's tail to its head.

    The paper looks at the first `(C_mem + C_disk) / S_kv` jobs only, which bounds its scan, and exempts their sessions
    while there are others. The order here does so for windows of every length at once, since it takes sessions
    outside a window before those inside; no length has to be chosen, and beyond the paper's the queue still knows
    better than recency does.

    Source: CachedAttention, section 3.3.2.
    """

    def choose_victims(self, view: StoreView, num_blocks: int, *, needed_at: int | None = None) -> tuple[str, ...]:
        """See `EvictionPolicy`."""
        return _first_that_suffice(
            itertools.chain(view.idle, _last_needed_first(view, needed_at)), num_blocks, needed_at
        )


class ReturnAwarePolicy:
    """Evicts what is worth least to keep, as far as can be learned, before what the job queue asks for.

    Those without a waiting job go in the order of what each of their bytes is expected to save a second: how soon the
    session will be back, by its number of turns and the time since the last (`ReturnTimes`); tokens saved grow with
    bytes kept, so that sizes do not matter. Those with one go as with `SchedulerAwarePolicy`.

    Of each group of sessions that are alike only the two ends are looked at, the one used last and the one not used for
    longest. Where the worth of waiting rises to some time and falls from then on, as it does with people who read an
    answer before they go on, the least is at one of the ends.
    """

    def choose_victims(self, view: StoreView, num_blocks: int, *, needed_at: int | None = None) -> tuple[str, ...]:
        """See `EvictionPolicy`."""
        idle = _least_worth_first(view.idle_groups)
        return _first_that_suffice(itertools.chain(idle, _last_needed_first(view, needed_at)), num_blocks, needed_at)


class LruPolicy:
    """Evicts what was not used for longest."""

    def choose_victims(self, view: StoreView, num_blocks: int, *, needed_at: int | None = None) -> tuple[str, ...]:
        """See `EvictionPolicy`."""
        return _first_that_suffice(view.by_last_used, num_blocks, needed_at)


class FifoPolicy:
    """Evicts what was stored first, used since or not."""

    def choose_victims(self, view: StoreView, num_blocks: int, *, needed_at: int | None = None) -> tuple[str, ...]:
        """See `EvictionPolicy`."""
        return _first_that_suffice(view.by_created, num_blocks, needed_at)


EVICTION_POLICIES: dict[str, type[SchedulerAwarePolicy | ReturnAwarePolicy | LruPolicy | FifoPolicy]] = {
    "scheduler_aware": SchedulerAwarePolicy,
    "return_aware": ReturnAwarePolicy,
    "lru": LruPolicy,
    "fifo": FifoPolicy,
}


def make_policy(name: str) -> EvictionPolicy:
    """Makes the policy of that name.

    Raises:
      ValueError: no policy has that name.
    """
    if name not in EVICTION_POLICIES:
        raise ValueError(f"eviction policy must be one of {', '.join(EVICTION_POLICIES)}; got {name!r}")
    return EVICTION_POLICIES[name]()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefetchPlan:
    """What to fetch from SSD to DRAM now, and what to evict from DRAM for it."""

    fetch: tuple[str, ...] = ()
    """Sessions in queue order."""
    evict: tuple[str, ...] = ()
    """Sessions in the order in which they should go. None of them is needed before any of `fetch`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefetchPolicy:
    """Fetches the KV of waiting jobs before they run, in queue order, while room lasts.

    Source: CachedAttention, section 3.3.1.

    Raises:
      ValueError: max_fetches is not positive.
    """

    eviction: EvictionPolicy
    """Who makes room in DRAM."""
    max_fetches: int = 8
    """Most sessions in one plan. The next plan knows the queue better: more than the disk can work on is a guess."""

    def __post_init__(self) -> None:
        if self.max_fetches <= 0:
            raise ValueError(f"max_fetches must be positive, got {self.max_fetches}")

    def plan(
        self,
        on_ssd: StoreView,
        in_dram: StoreView,
        *,
        window_jobs: int,
        free_blocks: int,
        reserve_blocks: int = 0,
        admits: Callable[[StoredEntry], bool] = lambda entry: True,
    ) -> PrefetchPlan:
        """Plans fetches for the first `window_jobs` waiting jobs.

        A fetch may start at once in blocks that are free, the reserve's among them; what is evicted for it brings the
        reserve back. A session is fetched only where less urgent ones can make that room, so a fetch never undoes an
        eviction, nor the other way round.

        Args:
          on_ssd: what may be fetched: sessions on SSD that are neither in DRAM nor on their way. Pins do not matter.
          in_dram: what may be evicted for it.
          window_jobs: the look-ahead prefetch window `L_pw`, of `look_ahead_window`.
          free_blocks: free blocks in DRAM.
          reserve_blocks: how many of them should be free again when the plan is carried out: the host buffer.
          admits: whether a session may be fetched beside those that it admitted before. One that may not takes no place
            in the plan, and no room is made for it.

        Returns:
          The plan: all the room that its fetches need, or fewer fetches. The first that lacks room ends it, so that a
          small one does not take the room of one that is needed sooner; one that could not have it even in an otherwise
          empty DRAM is the caller's to leave out of `on_ssd`.
        """
        fetch: list[str] = []
        evict: tuple[str, ...] = ()
        lacking = reserve_blocks - free_blocks
        for entry in on_ssd.by_next_job:
            position = entry.queue_position
            if position is None or position >= window_jobs or len(fetch) == self.max_fetches:
                break
            if not admits(entry):
                continue
            lacking += entry.num_blocks
            if lacking > 0:
                victims = self.eviction.choose_victims(in_dram, lacking, needed_at=position)
                if not victims:
                    break
                evict = victims
            fetch.append(entry.key)
        return PrefetchPlan(fetch=tuple(fetch), evict=evict)


def look_ahead_window(available_bytes: float, mean_session_bytes: float) -> int:
    """How many jobs a look-ahead window spans: as many as there is room for sessions of average size.

    `L_pw = C_mem / S_kv` for prefetching, where `C_mem` is the DRAM that prefetching may use; `(C_mem + C_disk) / S_kv`
    for eviction, `C` being capacities (`SchedulerAwarePolicy` says why it needs none). `S_kv` is the average KV size of
    a session, as measured.

    Returns:
      The quotient rounded down, but 1 where anything is available; 0 where nothing is stored.

    Raises:
      ValueError: a size that is negative or not finite.

    Source: CachedAttention, sections 3.3.1 and 3.3.2.
    """
    for name, size in (("available_bytes", available_bytes), ("mean_session_bytes", mean_session_bytes)):
        if not (math.isfinite(size) and size >= 0):
            raise ValueError(f"{name} must be a number of bytes >= 0, got {size}")
    if not available_bytes or not mean_session_bytes:
        return 0
    return max(1, int(available_bytes // mean_session_bytes))


def _last_needed_first(view: StoreView, needed_at: int | None) -> Iterable[StoredEntry]:
    """Those with a waiting job behind that place, from the queue's tail on."""
    waiting = reversed(view.by_next_job)
    if needed_at is None:
        return waiting
    # All that follow the first that stays stand nearer to the head.
    return itertools.takewhile(lambda entry: (entry.queue_position or 0) > needed_at, waiting)


def _least_worth_first(groups: Iterable[Reversible[StoredEntry]]) -> Iterator[StoredEntry]:
    """The entries of all groups, always the one of the lowest rate among those at their ends."""
    ends: list[tuple[float, float, int, StoredEntry, Iterator[StoredEntry]]] = []
    number = itertools.count()  # So that entries are never compared.

    def push(end: Iterator[StoredEntry]) -> None:
        entry = next(end, None)
        if entry is not None:
            heapq.heappush(ends, (entry.return_rate, entry.last_used_s, next(number), entry, end))

    for group in groups:
        push(iter(group))
        push(reversed(group))
    named: set[str] = set()
    while ends:
        _, _, _, entry, end = heapq.heappop(ends)
        if entry.key not in named:  # If it is, the other end has come from there.
            named.add(entry.key)
            yield entry
            push(end)


def _first_that_suffice(entries: Iterable[StoredEntry], num_blocks: int, needed_at: int | None) -> tuple[str, ...]:
    victims = []
    for entry in entries:
        if entry.pinned or not entry.num_blocks:
            continue
        if needed_at is not None and entry.queue_position is not None and entry.queue_position <= needed_at:
            continue
        victims.append(entry.key)
        num_blocks -= entry.num_blocks
        if num_blocks <= 0:
            return tuple(victims)
    return ()


class FreeingPolicy:
    """Another policy's choice, with the blocks counted that are freed, and not those that are held.

    Skips sessions whose eviction frees no block. Where blocks are shared the policy is asked O(log n) times.

    Args:
      policy: who chooses.
      blocks: says which blocks are shared.
      table_of: blocks that a session holds; none for one that must stay.

    Raises:
      RuntimeError: of any choice: the policy named too few, one twice, or one that must stay.
    """

    def __init__(self, policy: EvictionPolicy, blocks: ChargedBlocks, table_of: Callable[[str], Sequence[int]]) -> None:
        self._policy = policy
        self._blocks = blocks
        self._table_of = table_of

    def choose_victims(self, view: StoreView, num_blocks: int, *, needed_at: int | None = None) -> tuple[str, ...]:
        """See `EvictionPolicy`; what is named frees at least `num_blocks` blocks."""
        wanted, asked_for_all = num_blocks, False
        while True:
            keys = self._policy.choose_victims(view, wanted, needed_at=needed_at)
            if keys:
                tables = self._tables_of(keys, wanted)
                freed = self._blocks.frees(tables)
                if freed[-1] >= num_blocks:
                    return self._that_count(keys, tables, freed, num_blocks)
                wanted *= 2
            if asked_for_all:
                return ()
            if not keys:  # So many are not held, and what is held may be enough.
                wanted, asked_for_all = _num_held(view, needed_at), True
                if wanted < num_blocks:
                    return ()

    def frees(self, keys: Sequence[str]) -> int:
        """How many blocks the eviction of sessions frees."""
        return self._blocks.frees(map(self._table_of, keys))[-1] if keys else 0

    def _tables_of(self, keys: tuple[str, ...], num_blocks: int) -> list[Sequence[int]]:
        """What sessions hold that the policy named, checked."""
        tables = [self._table_of(key) for key in keys]
        sizes = [len(table) for table in tables]
        if len({*keys}) != len(keys) or not all(sizes) or sum(sizes) < num_blocks:
            raise RuntimeError(
                f"{type(self._policy).__name__} must free {num_blocks} blocks by evicting {keys}; "
                f"got that these may free {sizes}"
            )
        return tables

    def _that_count(
        self, keys: tuple[str, ...], tables: list[Sequence[int]], freed: list[int], num_blocks: int
    ) -> tuple[str, ...]:
        """The first ones that are enough, without those of whose blocks none is freed."""
        num_keys = next(index for index, number in enumerate(freed, 1) if number >= num_blocks)
        if all(more > less for less, more in zip((0, *freed), freed[:num_keys], strict=False)):
            return keys[:num_keys]
        goes = self._blocks.held_by_none_but(tables[:num_keys])
        return tuple(key for key, table in zip(keys[:num_keys], tables, strict=False) if not goes.isdisjoint(table))


def choose_room(
    policy: FreeingPolicy,
    view: Callable[[str | None], StoreView],
    *,
    tenant: str,
    lacking: int,
    excess: int,
) -> tuple[str, ...] | None:
    """Names sessions to evict, all that is needed or none.

    Args:
      policy: who chooses.
      view: of the tier, of one tenant's sessions or (None) of everybody's.
      tenant: whose sequence the room is for.
      lacking: blocks the tier lacks; none, if not positive.
      excess: blocks that `tenant` has to give up itself.

    Returns:
      Keys in the order in which they should go; None where there is not enough that may go.

    Raises:
      RuntimeError: the policy named too few, or one that must stay.
    """
    victims = policy.choose_victims(view(tenant), excess) if excess > 0 else ()
    if excess > 0 and not victims:
        return None
    if policy.frees(victims) >= lacking:
        return victims
    others = policy.choose_victims(view(None), lacking)  # It may name the same sessions again.
    return tuple(dict.fromkeys(victims + others)) if others else None


def _num_held(view: StoreView, needed_at: int | None) -> int:
    """Blocks of all sessions that may be evicted, for a job in that place; those that several share count for each."""
    return sum(
        entry.num_blocks
        for entry in view.by_last_used
        if not entry.pinned and (needed_at is None or entry.queue_position is None or entry.queue_position > needed_at)
    )
