"""Who is let in: how much a tenant may ask for at a time, the places of the queue, and when to come again."""

from __future__ import annotations

import collections
import contextlib
import heapq
import math
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from ca_jax.server.config import ServerConfig
from ca_jax.server.errors import ApiError, invalid
from ca_jax.server.tenants import Tenant
from ca_jax.session import Job

_KEPT_TIMES = 64  # Of the latest answers: how long others will have to wait is told by them.
_LATE_S = 1.0  # How much later than it was told a client may come and find the place that is kept for it.
T = TypeVar("T")


class Admission:
    """Lets requests in, or tells them when to come again. Belongs to the event loop.

    Args:
      config: what a request may ask for, and how many may wait.
      num_slots: how many turns run at a time.
      num_jobs: how many run or wait now.
    """

    def __init__(self, config: ServerConfig, num_slots: int, num_jobs: Callable[[], int]) -> None:
        self._config, self._num_slots, self._num_jobs = config, num_slots, num_jobs
        self.answers: collections.Counter[str] = collections.Counter()
        """Of each tenant, answers that are asked for."""
        self.lookups: collections.Counter[tuple[str, bool]] = collections.Counter()
        """Of each tenant, requests for anything else; those that are streams apart."""
        self._num_coming = 0  # Jobs that were let in and that the engine's thread has not queued yet.
        self._told: list[float] = []  # When the clients that were told to come again will: a heap.
        self._seconds: collections.deque[float] = collections.deque(maxlen=_KEPT_TIMES)  # In a slot, by answer.
        self._ended_s = 0.0  # When the last one ended, or the first of those began that are there.

    @contextlib.contextmanager
    def answering(self, tenant: Tenant, num_answers: int, priority: int | None = None) -> Iterator[None]:
        """Admits a request for as long as it is served, and counts each of its answers.

        Raises:
          ApiError: it asks for more than it ever may have (400, 403), or its tenant has too many now (429, with a time
            to come again).
        """
        most = min(self._config.max_choices, tenant.max_requests or self._config.max_choices)
        if num_answers > most:
            raise invalid("n", f"the answers of one request must be at most {most}, got {num_answers}")
        if priority is not None and priority < tenant.best_priority:
            message = f"priority must be at least {tenant.best_priority} for this key's tenant, got {priority}"
            raise ApiError(403, message, param="priority", code="priority_not_allowed")
        if tenant.max_requests is not None and self.answers[tenant.name] + num_answers > tenant.max_requests:
            why = f"this key's tenant may have {tenant.max_requests} answers at a time"
            raise self._busy(why, max(self._num_there, self._num_slots))
        with _counted(self.answers, tenant.name, num_answers):
            yield

    @contextlib.contextmanager
    def looking(self, tenant: Tenant, *, is_stream: bool = False) -> Iterator[None]:
        """Admits a request that asks the engine for something else than answers, for as long as it does.

        Raises:
          ApiError: its tenant has too many (429).
        """
        if self.lookups[tenant.name, is_stream] >= self._config.max_lookups:
            message = f"{self._config.max_lookups} such requests are being served already, and no more may"
            raise ApiError(429, f"the server is busy: {message}", code="rate_limit_exceeded", retry_after_s=1)
        with _counted(self.lookups, (tenant.name, is_stream), 1):
            yield

    @contextlib.contextmanager
    def coming(self, num_jobs: int) -> Iterator[None]:
        """Counts jobs until the engine's thread has queued them: the block.

        A place is kept for each client that was told to come again: clients that have just been answered would
        otherwise take every place, being there first.

        Raises:
          ApiError: the queue has no place for them (429, with a time to come again).
        """
        self._take_places(num_jobs)
        self._num_coming += num_jobs
        try:
            yield
        finally:
            self._num_coming -= num_jobs

    def ended(self, job: Job) -> None:
        """Takes note of how long a job was in a slot. For the engine's thread."""
        if job.started_s and job.finished_s:
            self._seconds.append(job.finished_s - job.started_s)
            self._ended_s = time.monotonic()

    def _take_places(self, num_jobs: int) -> None:
        now_s = time.monotonic()
        while self._told and self._told[0] + _LATE_S < now_s:
            heapq.heappop(self._told)  # It has not come.
        comes_again = bool(self._told) and self._told[0] <= now_s
        if comes_again:
            heapq.heappop(self._told)
        num_there, most = self._num_there, self._config.max_queue
        if not num_there:
            self._told.clear()  # Every client finds a place now.
            self._ended_s = now_s
            return
        num_kept = 0 if comes_again or num_there < self._num_slots else len(self._told)
        if num_there - self._num_slots + num_jobs + num_kept <= most:
            return
        num_waiting = max(num_there - self._num_slots, 0)
        num_before = num_waiting + num_jobs + num_kept - most
        error = self._busy(f"{num_waiting} turns wait already, and {most} may", num_before)
        heapq.heappush(self._told, now_s + (error.retry_after_s or 0))
        raise error

    @property
    def _num_there(self) -> int:
        return self._num_jobs() + self._num_coming

    def _busy(self, why: str, num_before: int) -> ApiError:
        """The error that says how long to wait: until so many answers have ended, by the latest ones' time in a slot.

        If none has ended for longer than that (a step compiles, say), as long again.
        """
        typical_s = sorted(self._seconds)[len(self._seconds) // 2] if self._seconds else 1.0
        wait_s = max(typical_s * num_before / self._num_slots, time.monotonic() - self._ended_s)
        seconds = max(1, min(math.ceil(wait_s), 60))
        return ApiError(429, f"the server is busy: {why}", code="rate_limit_exceeded", retry_after_s=seconds)


@contextlib.contextmanager
def _counted(counts: collections.Counter[T], key: T, number: int) -> Iterator[None]:
    """Counts so many more for as long as the block lasts."""
    counts[key] += number
    try:
        yield
    finally:
        counts[key] -= number
