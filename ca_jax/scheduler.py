"""Which jobs run: a queue, decode slots, and a plan per step (iteration-level continuous batching).

First come, first served; a waiting job takes the lowest free slot as soon as there is one and joins the jobs that
decode. Jobs whose KV is still on its way are passed by, and stay where they are in the queue. At most one job is
prefilled per step, so that running answers go on between prefills.

Not here: jax, KV bytes, what a step does (engine).
Source: iteration-level scheduling is Orca's (Yu et al., OSDI 2022).
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Callable

from ca_jax.session import Job

_PASSED_JOBS = 16  # How many are looked at for one that can run.


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What one engine step does."""

    prefill: tuple[Job, ...]
    """Jobs to prefill; their slot is set."""
    decode: tuple[Job, ...]
    """Jobs that decode one token each after that, newly prefilled ones not among them."""


class Scheduler:
    """The job queue and the decode slots.

    Args:
      max_batch_size: how many slots there are.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._free_slots = list(range(max_batch_size))
        self._waiting: collections.deque[Job] = collections.deque()
        self._running: dict[int, Job] = {}

    @property
    def waiting(self) -> tuple[Job, ...]:
        """Queued jobs, next first: the future that fetching and eviction look at."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Job, ...]:
        """Jobs in slots, by slot."""
        return tuple(self._running[slot] for slot in sorted(self._running))

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._waiting and not self._running

    def submit(self, job: Job) -> None:
        """Queues a job."""
        self._waiting.append(job)

    def schedule(self, ready: Callable[[Job, bool], bool] = lambda job, is_next: True) -> StepPlan:
        """Plans the next step and gives slots to the jobs it prefills.

        Args:
          ready: whether a job's KV is where it can be loaded from, or will not be; and whether it is the next in the
            queue, for which it is to be brought.
        """
        decode = self.running
        prefill = []
        if self._waiting and self._free_slots:
            jobs = enumerate(itertools.islice(self._waiting, _PASSED_JOBS))
            job = next((job for position, job in jobs if ready(job, position == 0)), None)
        else:
            job = None
        if job is not None:
            self._waiting.remove(job)
            job.slot = heapq.heappop(self._free_slots)
            self._running[job.slot] = job
            prefill.append(job)
        return StepPlan(tuple(prefill), decode)

    def remove(self, job: Job) -> None:
        """Takes a job out, wherever it is; its slot is free at once."""
        if job.slot is not None:
            del self._running[job.slot]
            heapq.heappush(self._free_slots, job.slot)
            job.slot = None
        elif job in self._waiting:
            self._waiting.remove(job)
