"""The job queue and the sessions of one tier, kept in the orders that placement asks for: no choice sorts or scans.

Not here: the jobs themselves and which runs next (the scheduler), the choice (policy), or what a session is.

Source: CachedAttention (Gao et al., USENIX ATC 2024), section 3.3: the look-ahead windows.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from sortedcontainers import SortedDict, SortedList

from ca_jax.storage.placement.policy import StoredEntry, StoreView
from ca_jax.storage.records import check_ttl

T = TypeVar("T")
_TICKETS_PER_PRIORITY = 2**48  # More than jobs ever come; an integer compares faster than a pair.

Watcher = Callable[[str, int | None, int | None], None]
"""Notified of a key whose next job changed: the key, the ticket of its next job before and after (None: no job)."""


class LookAhead:
    """Waiting jobs in queue order, by priority and then by arrival, with the place of every session's next one.

    Each job holds a ticket, an integer that grows from the queue's head to its tail and never changes while the job
    waits, so that orders by next job can be kept without renumbering: arrivals counted from the number that the job's
    priority begins at.

    A change costs O(log n). Belongs to the bookkeeping thread.
    """

    def __init__(self) -> None:
        self._keys: SortedDict[int, str] = SortedDict()  # By ticket of the waiting job: index i is queue position i.
        self._ticket_of: dict[Hashable, int] = {}
        self._waiting: dict[str, list[int]] = {}  # Tickets of a session's jobs, ascending. Nearly always one.
        self._watchers: list[Watcher] = []
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._keys)

    def append(self, job: Hashable, key: str, priority: int = 0) -> None:
        """Queues a job of session `key` behind all others of its priority; lower values stand nearer to the head.

        Raises:
          ValueError: the job waits already.
        """
        if job in self._ticket_of:
            raise ValueError(f"the job must not wait yet, got {job!r}, which does")
        ticket = priority * _TICKETS_PER_PRIORITY + self._num_arrived
        self._num_arrived += 1
        self._ticket_of[job] = ticket
        self._keys[ticket] = key
        waiting = self._waiting.setdefault(key, [])
        first = waiting[0] if waiting else None
        bisect.insort(waiting, ticket)
        self._tell(key, first, waiting[0])

    def remove(self, job: Hashable) -> str:
        """Takes a job out, wherever it stands: to run it, or because it was given up.

        Returns:
          Its session's key.

        Raises:
          ValueError: the job does not wait.
        """
        if job not in self._ticket_of:
            raise ValueError(f"the job must be one of the {len(self)} that wait, got {job!r}")
        ticket = self._ticket_of.pop(job)
        key: str = self._keys.pop(ticket)
        waiting = self._waiting[key]
        first = waiting[0]
        waiting.remove(ticket)
        if not waiting:
            del self._waiting[key]
        self._tell(key, first, waiting[0] if waiting else None)
        return key

    def next_ticket(self, key: str) -> int | None:
        """The ticket of a session's next job; None where none waits."""
        waiting = self._waiting.get(key)
        return waiting[0] if waiting else None

    def position(self, key: str) -> int | None:
        """Queue position of a session's next job, 0 at the head; None where none waits."""
        ticket = self.next_ticket(key)
        return None if ticket is None else self._keys.bisect_left(ticket)

    def watch(self, watcher: Watcher) -> None:
        """Calls `watcher` whenever a session's next job becomes another one, or none, from now on."""
        self._watchers.append(watcher)

    def _tell(self, key: str, before: int | None, after: int | None) -> None:
        if before != after:
            for watcher in self._watchers:
                watcher(key, before, after)


class TierOrders(Generic[T]):
    """What a tier holds, by creation, by use and by next job; for all tenants and for each.

    Every change is O(1), or O(log n) for a session with a waiting job. When the last waiting job of a session leaves
    the queue, be it run or cancelled, that counts as a use; so does the end of a hold. Belongs to the bookkeeping
    thread.

    Args:
      look_ahead: the job queue; watched from now on, for as long as it lives.
      group_of: which group a session without a waiting job is of, by its key, from the time on when it begins to be
        one; None: all are of one.
    """

    def __init__(self, look_ahead: LookAhead, group_of: Callable[[str], int] | None = None):
        self._look_ahead = look_ahead
        self._group_of = group_of
        self._slots: dict[str, _Slot[T]] = {}
        self._all: _Orders[T] = _Orders(group_of)
        self._of_tenant: dict[str, _Orders[T]] = {}
        look_ahead.watch(self._requeue)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: str) -> bool:
        return key in self._slots

    def get(self, key: str) -> T | None:
        """The item of that key, if there is one."""
        slot = self._slots.get(key)
        return None if slot is None else slot.item

    def add(self, key: str, item: T, tenant: str = "") -> None:
        """Adds a session, as the last created and the last used.

        Raises:
          ValueError: it is there already.
        """
        if key in self._slots:
            raise ValueError(f"the key must be one that the tier does not hold, got {key!r}")
        slot = self._slots[key] = _Slot(key=key, item=item, tenant=tenant)
        if tenant not in self._of_tenant:
            self._of_tenant[tenant] = _Orders(self._group_of)
        for orders in (self._all, self._of_tenant[tenant]):
            orders.by_created[key] = slot
            orders.enter(slot, self._look_ahead.next_ticket(key))

    def use(self, key: str) -> None:
        """Marks a session as the last used."""
        slot = self._slots[key]
        if not slot.held:
            for orders in self._orders_of(slot):
                orders.use(slot)

    def remove(self, key: str) -> None:
        """Takes a session out."""
        slot = self._slots.pop(key)
        for orders in self._orders_of(slot):
            del orders.by_created[key]
            if not slot.held:
                orders.leave(slot, self._look_ahead.next_ticket(key))
        if not self._of_tenant[slot.tenant].by_created:
            del self._of_tenant[slot.tenant]

    def set_held(self, key: str, held: bool) -> None:
        """Says whether a session must stay (pinned, or in use): then no choice so much as looks at it."""
        slot = self._slots[key]
        if slot.held == held:
            return
        slot.held = held
        ticket = self._look_ahead.next_ticket(key)
        for orders in self._orders_of(slot):
            if held:
                orders.leave(slot, ticket)
            else:
                orders.enter(slot, ticket)

    def view(self, describe: Callable[[T, int | None], StoredEntry], tenant: str | None = None) -> StoreView:
        """What a policy may see, of all tenants or of one; lazy, so it must be used before the next change.

        Args:
          describe: makes an entry of an item and the queue position of its session's next job.
          tenant: whose sessions; None for everybody's.
        """
        orders = self._all if tenant is None else self._of_tenant.get(tenant, _Orders(self._group_of))

        def described(slot: _Slot[T]) -> StoredEntry:
            return describe(slot.item, self._look_ahead.position(slot.key))

        idle_groups = [orders.idle] if self._group_of is None else list(orders.groups.values())
        return StoreView(
            by_last_used=_Described(orders.by_last_used, described),
            by_created=_Described(orders.by_created, described),
            idle=_Described(orders.idle, described),
            by_next_job=_Described(orders.waiting, described),
            idle_groups=tuple(_Described(group, described) for group in idle_groups),
        )

    def _orders_of(self, slot: _Slot[T]) -> tuple[_Orders[T], _Orders[T]]:
        return self._all, self._of_tenant[slot.tenant]

    def _requeue(self, key: str, before: int | None, after: int | None) -> None:
        """A session's next job is another one now, or there is none."""
        slot = self._slots.get(key)
        if slot is not None and not slot.held:
            for orders in self._orders_of(slot):
                orders.requeue(slot, before, after)


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class _Slot(Generic[T]):
    """One session of the tier."""

    key: str
    item: T
    tenant: str
    held: bool = False


class _Orders(Generic[T]):
    """The orders of one set of sessions. Held ones are in `by_created` alone."""

    def __init__(self, group_of: Callable[[str], int] | None) -> None:
        # OrderedDict, not dict: taking from the front of a dict walks over all that was taken there before.
        self.by_created: collections.OrderedDict[str, _Slot[T]] = collections.OrderedDict()
        self.by_last_used: collections.OrderedDict[str, _Slot[T]] = collections.OrderedDict()
        self.idle: collections.OrderedDict[str, _Slot[T]] = collections.OrderedDict()
        # Of the idle ones, if asked for; no group is empty.
        self.groups: dict[int, collections.OrderedDict[str, _Slot[T]]] = {}
        self._group: dict[str, int] = {}  # Of the idle ones.
        self._group_of = group_of
        self.waiting: SortedDict[int, _Slot[T]] = SortedDict()  # Those that are not idle, by ticket of their next job.

    def enter(self, slot: _Slot[T], ticket: int | None) -> None:
        """Takes a slot in, as the last used."""
        self.by_last_used[slot.key] = slot
        self._place(slot, ticket)

    def leave(self, slot: _Slot[T], ticket: int | None) -> None:
        """Takes a slot out."""
        del self.by_last_used[slot.key]
        self._displace(slot, ticket)

    def use(self, slot: _Slot[T]) -> None:
        """Marks a slot as the last used."""
        self.by_last_used.move_to_end(slot.key)
        if slot.key in self.idle:
            self.idle.move_to_end(slot.key)
            if self._group_of is not None:
                self.groups[self._group[slot.key]].move_to_end(slot.key)

    def requeue(self, slot: _Slot[T], before: int | None, after: int | None) -> None:
        """A slot's next job is another one now, or none."""
        self._displace(slot, before)
        self._place(slot, after)
        if after is None:
            self.by_last_used.move_to_end(slot.key)

    def _place(self, slot: _Slot[T], ticket: int | None) -> None:
        if ticket is None:
            self.idle[slot.key] = slot
            if self._group_of is not None:
                group = self._group[slot.key] = self._group_of(slot.key)
                self.groups.setdefault(group, collections.OrderedDict())[slot.key] = slot
        else:
            self.waiting[ticket] = slot

    def _displace(self, slot: _Slot[T], ticket: int | None) -> None:
        if ticket is None:
            del self.idle[slot.key]
            if self._group_of is not None:
                group = self._group.pop(slot.key)
                del self.groups[group][slot.key]
                if not self.groups[group]:
                    del self.groups[group]
        else:
            del self.waiting[ticket]


class _Described(Generic[T]):
    """Slots as policies see them, made one by one from either end, without those that are held."""

    def __init__(
        self, slots: collections.OrderedDict[str, _Slot[T]] | SortedDict, described: Callable[[_Slot[T]], StoredEntry]
    ) -> None:
        self._slots = slots
        self._described = described

    def __iter__(self) -> Iterator[StoredEntry]:
        return (self._described(slot) for slot in self._slots.values() if not slot.held)

    def __reversed__(self) -> Iterator[StoredEntry]:
        slots = map(self._slots.__getitem__, reversed(self._slots))
        return (self._described(slot) for slot in slots if not slot.held)


class ExpiryQueue:
    """Sessions by when they expire. A change costs O(log n), nothing is scanned.

    Times are seconds of any one clock. Belongs to the bookkeeping thread.
    """

    def __init__(self) -> None:
        self._expires_s: dict[str, float] = {}
        self._by_time: SortedList[tuple[float, str]] = SortedList()

    def __len__(self) -> int:
        return len(self._expires_s)

    def set(self, key: str, used_s: float, ttl_s: float | None) -> None:
        """Says that a session was used at `used_s` and lives `ttl_s` seconds from then on; None: for ever.

        Raises:
          ValueError: ttl_s is negative or not finite.
        """
        check_ttl(ttl_s)
        self.discard(key)
        if ttl_s is not None:
            self._expires_s[key] = used_s + ttl_s
            self._by_time.add((used_s + ttl_s, key))

    def discard(self, key: str) -> None:
        """Forgets a session, if it is known."""
        expires_s = self._expires_s.pop(key, None)
        if expires_s is not None:
            self._by_time.remove((expires_s, key))

    def pop_expired(self, now_s: float) -> tuple[str, ...]:
        """Takes out all sessions whose time is over at `now_s`, the longest expired first.

        The caller sets one again that cannot go now, since it is pinned or in use.
        """
        expired = []
        while self._by_time and self._by_time[0][0] <= now_s:
            _, key = self._by_time.pop(0)
            del self._expires_s[key]
            expired.append(key)
        return tuple(expired)
