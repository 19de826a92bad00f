"""The job queue as placement sees it: which session's next job stands where, kept as jobs come and go.

Not here: the jobs themselves and who runs next (the scheduler), or what is stored.

Source: CachedAttention (Gao et al., USENIX ATC 2024), section 3.3: the look-ahead windows.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Hashable, Iterator

_TICKETS_PER_PRIORITY = 2**48  # More than jobs ever come; an integer compares faster than a pair.

Watcher = Callable[[str, int | None, int | None], None]
"""Told of a key whose next job changed: the key, the ticket of its next job before and after (None: no job)."""


class LookAhead:
    """Waiting jobs in queue order, by priority and then by arrival, with the place of every session's next one.

    Each job holds a ticket, an integer that grows from the queue's head to its tail and never changes while the job
    waits, so that orders by next job can be kept without renumbering: arrivals counted from the number that the job's
    priority begins at.

    A change costs O(log n) comparisons and one move of up to 8n bytes within a list: 3 us at 10,000 jobs, where a
    tree in Python would take longer. Belongs to the thread that keeps the books.
    """

    def __init__(self) -> None:
        self._tickets: list[int] = []  # Of waiting jobs, ascending: index i is queue position i.
        self._ticket_of: dict[Hashable, int] = {}
        self._key_of: dict[int, str] = {}
        self._waiting: dict[str, list[int]] = {}  # Tickets of a session's jobs, ascending. Nearly always one.
        self._watchers: list[Watcher] = []
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, job: Hashable) -> bool:
        return job in self._ticket_of

    def append(self, job: Hashable, key: str, priority: int = 0) -> None:
        """Queues a job of session `key` behind all others of its priority; lower values stand nearer to the head.

        Raises:
          ValueError: the job waits already.
        """
        self._add(job, key, priority * _TICKETS_PER_PRIORITY + self._num_arrived)
        self._num_arrived += 1

    def append_front(self, job: Hashable, key: str) -> None:
        """Puts a job of session `key` at the head, before all that wait: one that was taken and has to wait again.

        It counts as of the priority that was first, or of 0 where none waits: more urgent ones still come before it.

        Raises:
          ValueError: the job waits already.
        """
        self._add(job, key, (self._tickets[0] if self._tickets else self._num_arrived) - 1)

    def remove(self, job: Hashable) -> str:
        """Takes a job out, wherever it stands: to run it, or because nobody wants it any more.

        Returns:
          Its session's key.

        Raises:
          ValueError: the job does not wait.
        """
        if job not in self._ticket_of:
            raise ValueError(f"wanted a waiting job, found {job!r}, which is none of the {len(self)} that wait")
        ticket = self._ticket_of.pop(job)
        key = self._key_of.pop(ticket)
        del self._tickets[bisect.bisect_left(self._tickets, ticket)]
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
        return None if ticket is None else bisect.bisect_left(self._tickets, ticket)

    def keys(self, num_jobs: int | None = None) -> Iterator[str]:
        """Sessions of the first `num_jobs` waiting jobs (of all, if None), in queue order, once for each job."""
        return (self._key_of[ticket] for ticket in itertools.islice(self._tickets, num_jobs))

    def watch(self, watcher: Watcher) -> None:
        """Calls `watcher` whenever a session's next job becomes another one, or none, from now on."""
        self._watchers.append(watcher)

    def _add(self, job: Hashable, key: str, ticket: int) -> None:
        if job in self._ticket_of:
            raise ValueError(f"wanted a job that does not wait yet, found {job!r}, which does")
        self._ticket_of[job] = ticket
        self._key_of[ticket] = key
        bisect.insort(self._tickets, ticket)
        waiting = self._waiting.setdefault(key, [])
        first = waiting[0] if waiting else None
        bisect.insort(waiting, ticket)
        self._tell(key, first, waiting[0])

    def _tell(self, key: str, before: int | None, after: int | None) -> None:
        if before != after:
            for watcher in self._watchers:
                watcher(key, before, after)
