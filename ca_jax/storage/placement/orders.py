"""The job queue and the sessions of one tier, kept in the orders that placement asks for: no choice sorts or scans.

Not here: the jobs themselves and which runs next (the scheduler), the choice (policy), or what a session is.

Source: CachedAttention (Gao et al., USENIX ATC 2024), section 3.3: the look-ahead windows.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping
from typing import Any, Generic, TypeVar

from sortedcontainers import SortedDict

from ca_jax.storage.placement.policy import StoredEntry, StoreView
from ca_jax.storage.placement.returns import SaidReturns

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
        """Where a session's next job stands in the queue that placement looks at, 0 at its head; None: none waits."""
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
      describe: what policies see of an item, with the queue position of its session's next job.
      group_of: which group a session without a waiting job is of, by its key, from the time on when it begins to be
        one; None: all are of one.
      said: when sessions will be back, from the same time on, or from `said_anew`; None: nobody says.
    """

    def __init__(
        self,
        look_ahead: LookAhead,
        describe: Callable[[T, int | None], StoredEntry],
        group_of: Callable[[str], int] | None = None,
        said: SaidReturns | None = None,
    ) -> None:
        self._look_ahead = look_ahead
        self._describe = describe
        self._group_of = group_of
        self._said = said
        self._slots: dict[str, _Slot[T]] = {}
        self._all: _Orders[T] = _Orders()
        self._of_tenant: dict[str, _Orders[T]] = collections.defaultdict(_Orders)
        look_ahead.watch(self._requeue)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: str) -> bool:
        return key in self._slots

    def add(self, key: str, item: T, tenant: str = "") -> None:
        """Adds a session that is not there yet, as the last created and the last used."""
        slot = _Slot(key=key, item=item, tenant=tenant, orders=(self._all, self._of_tenant[tenant]))
        self._slots[key] = slot
        for orders in slot.orders:
            orders.by_created[key] = slot
        self._enter(slot)

    def adopt(self, created: Iterable[tuple[str, T, str]], used: Iterable[str]) -> None:
        """Adds sessions as `add` does, and then uses each.

        Args:
          created: key, item and tenant of each, in the order of creation.
          used: the same keys in the order of use.
        """
        for key, item, tenant in created:
            slot = _Slot(key=key, item=item, tenant=tenant, orders=(self._all, self._of_tenant[tenant]))
            self._slots[key] = self._all.by_created[key] = slot.orders[1].by_created[key] = slot
        for key in used:
            self._enter(self._slots[key])

    def use(self, key: str) -> None:
        """Marks a session as the last used."""
        slot = self._slots[key]
        if not slot.held:
            for orders in slot.orders:
                orders.by_last_used.move_to_end(key)
                for shelf, at in self._shelves(slot, orders, self._look_ahead.next_ticket(key)):
                    if isinstance(shelf, collections.OrderedDict):
                        shelf.move_to_end(at)

    def remove(self, key: str) -> None:
        """Takes a session out."""
        slot = self._slots.pop(key)
        if not slot.held:
            self._leave(slot)
        for orders in slot.orders:
            del orders.by_created[key]
        if not self._of_tenant[slot.tenant].by_created:
            del self._of_tenant[slot.tenant]

    def set_held(self, key: str, held: bool) -> None:
        """Says whether a session must stay (pinned, or in use): then no choice so much as looks at it."""
        slot = self._slots[key]
        if slot.held != held:
            slot.held = held
            (self._leave if held else self._enter)(slot)

    def said_anew(self, key: str) -> None:
        """It is said anew when a session will be back, or what was said does not hold any more. Counts as a use."""
        slot = self._slots[key]
        if not slot.held:
            self._leave(slot)
            self._enter(slot)

    def view(self, tenant: str | None = None) -> StoreView:
        """What a policy may see, of all tenants or of one; lazy, so it must be used before the next change.

        Args:
          tenant: whose sessions; None for everybody's.
        """
        while self._said is not None and self._all.expected:
            until_s, key = self._all.expected.peekitem(0)[0]
            if until_s > self._said.now_s:
                break
            self.said_anew(key)  # It was not back by then.
        orders = self._all if tenant is None else self._of_tenant.get(tenant, _Orders())

        def described(slot: _Slot[T]) -> StoredEntry:
            return self._describe(slot.item, self._look_ahead.position(slot.key))

        groups = [orders.unsaid] if self._group_of is None else orders.groups.values()
        return StoreView(
            by_last_used=_Described(orders.by_last_used, described),
            by_created=_Described(orders.by_created, described),
            idle=_Described(orders.idle, described),
            by_next_job=_Described(orders.waiting, described),
            idle_groups=tuple(_Described(group, described) for group in groups if group),
            unsaid=_Described(orders.unsaid, described),
            expected=_Described(orders.expected, described),
        )

    def _enter(self, slot: _Slot[T]) -> None:
        """Takes a slot that is not held (any more) in, as the last used."""
        for orders in slot.orders:
            orders.by_last_used[slot.key] = slot
        self._place(slot, self._look_ahead.next_ticket(slot.key))

    def _leave(self, slot: _Slot[T]) -> None:
        """Takes a slot out of the orders of those that are not held."""
        for orders in slot.orders:
            del orders.by_last_used[slot.key]
        self._displace(slot, self._look_ahead.next_ticket(slot.key))

    def _requeue(self, key: str, before: int | None, after: int | None) -> None:
        """A session's next job is another one now, or there is none."""
        slot = self._slots.get(key)
        if slot is not None and not slot.held:
            self._displace(slot, before)
            self._place(slot, after)
            if after is None:
                for orders in slot.orders:
                    orders.by_last_used.move_to_end(key)

    def _place(self, slot: _Slot[T], ticket: int | None) -> None:
        slot.until_s = None if ticket is not None or self._said is None else self._said.until_s(slot.key)
        if ticket is None and self._group_of is not None:
            slot.group = self._group_of(slot.key)
        for orders in slot.orders:
            for shelf, at in self._shelves(slot, orders, ticket):
                shelf[at] = slot

    def _displace(self, slot: _Slot[T], ticket: int | None) -> None:
        for orders in slot.orders:
            for shelf, at in self._shelves(slot, orders, ticket):
                del shelf[at]

    def _shelves(
        self, slot: _Slot[T], orders: _Orders[T], ticket: int | None
    ) -> list[tuple[MutableMapping[Any, _Slot[T]], Any]]:
        """Where a slot belongs that is not held, by the ticket of its next job, beside `by_last_used`."""
        if ticket is not None:
            return [(orders.waiting, ticket)]
        if slot.until_s is not None:
            return [(orders.idle, slot.key), (orders.expected, (slot.until_s, slot.key))]
        found: list[tuple[MutableMapping[Any, _Slot[T]], Any]] = [(orders.idle, slot.key), (orders.unsaid, slot.key)]
        return found if self._group_of is None else [*found, (orders.groups[slot.group], slot.key)]


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class _Slot(Generic[T]):
    """One session of the tier."""

    key: str
    item: T
    tenant: str
    orders: tuple[_Orders[T], _Orders[T]]  # Of all, and of its tenant.
    held: bool = False
    group: int = 0  # While it is idle, where there are groups.
    until_s: float | None = None  # While it is expected.


class _Orders(Generic[T]):
    """The orders of one set of sessions. Held ones are in `by_created` alone."""

    def __init__(self) -> None:
        # OrderedDict, not dict: taking from the front of a dict walks over all that was taken there before.
        self.by_created: collections.OrderedDict[str, _Slot[T]] = collections.OrderedDict()
        self.by_last_used: collections.OrderedDict[str, _Slot[T]] = collections.OrderedDict()
        self.idle: collections.OrderedDict[str, _Slot[T]] = collections.OrderedDict()
        self.unsaid: collections.OrderedDict[str, _Slot[T]] = collections.OrderedDict()  # Idle, and not expected.
        self.groups: dict[int, collections.OrderedDict[str, _Slot[T]]]  # Of these.
        self.groups = collections.defaultdict(collections.OrderedDict)
        self.expected: SortedDict[tuple[float, str], _Slot[T]] = SortedDict()  # Idle too, by the time.
        self.waiting: SortedDict[int, _Slot[T]] = SortedDict()  # All others, by ticket of their next job.


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
