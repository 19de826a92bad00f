"""Which jobs run: a queue, slots for those that run, and a plan per step (iteration-level continuous batching).

Lower priority values go first, then who takes least up to a first token, or who came first; but a job that later ones
were taken before too often goes before all. A waiting job takes the first free slot as soon as there is one and the
engine has room for its prompt, and is prefilled there over as many steps as the engine wants, beside others; then it
joins the jobs that decode, which go on all the while. Jobs whose KV is still on its way are passed by, and stay where
they are in the queue.

Not here: jax, KV bytes, what a step does and how much is prefilled in one (batch).
Source: iteration-level scheduling is Orca's (Yu et al., OSDI 2022), prefill in chunks between decode steps Sarathi's
(Agrawal et al., OSDI 2024).
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterator

from sortedcontainers import SortedDict

from ca_jax.session import Job

_PASSED_JOBS = 16  # How many are looked at for one that can run.
_MAX_OVERTAKEN = 32  # How many later jobs are taken before a job.

_Place = tuple[bool, int, int]  # In the queue: whether it may be overtaken, priority (0 where not), arrival.


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What one engine step does."""

    decode: tuple[Job, ...]  # Jobs that decode one token each, by slot.
    prefill: tuple[
        Job, ...
    ]  # Jobs to prefill, or to prefill further, in the order they were taken; their slots are set.
    taken: Job | None  # The last of these, where this plan has taken it.
    preload: Job | None
    """Of those that still wait the one most likely to be prefilled next: its load may begin now."""


class Scheduler:
    """The job queue, and the slots of jobs that run.

    A step's plan costs O(log n) for n waiting jobs.

    Args:
      num_parts: equal parts that they are in, each on other devices: jobs take a slot of each part in turn.
    """

    def __init__(self, max_batch_size: int, num_parts: int = 1) -> None:
        self._part_slots = max_batch_size // num_parts
        # A heap in the order in which slots are taken: place in its part, slot.
        self._free_slots = sorted((slot % self._part_slots, slot) for slot in range(max_batch_size))
        self._queue = _Queue()
        self._running: dict[int, Job] = {}
        self._prefilling: list[Job] = []  # In slots, their prefill not complete.

    @property
    def waiting(self) -> tuple[Job, ...]:
        """Queued jobs in the order in which they would be taken; O(n)."""
        return tuple(self._queue)

    @property
    def num_waiting(self) -> int:
        """How many jobs are queued."""
        return len(self._queue)

    @property
    def running(self) -> tuple[Job, ...]:
        """Jobs in slots, decoding or being prefilled, by slot."""
        return tuple(self._running[slot] for slot in sorted(self._running))

    @property
    def prefilling(self) -> tuple[Job, ...]:
        """Jobs in slots whose prefill is not complete, in the order they were taken."""
        return tuple(self._prefilling)

    @property
    def next_slot(self) -> int | None:
        """The slot that the next job takes; None where all are taken."""
        return self._free_slots[0][1] if self._free_slots else None

    @property
    def may_take(self) -> bool:
        """Whether a job waits and there is a slot for it."""
        return bool(self._queue) and bool(self._free_slots)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._queue and not self._running

    def submit(self, job: Job) -> Job:
        """Queues a job, behind those of its priority, and returns it.

        Raises:
          ValueError: it waits or runs already.
        """
        if job in self._queue or self._is_running(job):
            raise ValueError(f"a job must neither wait nor run to be queued, and job {job.job_id} does")
        self._queue.add(job)
        return job

    def schedule(
        self,
        ready: Callable[[Job, bool], bool] = lambda job, is_next: True,
        admits: Callable[[Job], bool] = lambda job: True,
        has_room: bool | None = None,
        work: Callable[[Job], float] | None = None,
    ) -> StepPlan:
        """Plans the next step. Where there is room for another prompt, one job that waits takes the first free slot.

        That is the first in order that is ready, of the first few; if it is not admitted none is, lest smaller ones
        keep it waiting forever. Nor is a job passed by that was overtaken as often as may be.

        Args:
          ready: whether a job's KV is where it can be loaded from, or will not be; and whether it is the next in the
            queue, for which it is to be brought. Asked in order, as far as needed, and only if there is a slot.
          admits: whether there is room for what prefilling a job makes. Asked of one job, which is ready.
          has_room: whether another prompt may be begun; None: where none is being prefilled.
          work: how much a job takes up to its first token. Of the first few ready jobs of one priority the one with
            the least is taken; None: the one that came first.
        """
        decode, taken = tuple(job for job in self.running if job not in self._prefilling), None
        if (not self._prefilling if has_room is None else has_room) and self._free_slots:
            job = self._first_ready(ready, work)
            if job is not None and admits(job):
                self._queue.take(job)
                _, job.slot = heapq.heappop(self._free_slots)
                self._running[job.slot] = taken = job
                self._prefilling.append(job)
        return StepPlan(decode, self.prefilling, taken, self._first_ready(lambda *_: True, work))

    def prefilled(self, job: Job) -> None:
        """Says that a job's prefill is complete: it decodes from the next plan on.

        Raises:
          ValueError: it is not being prefilled.
        """
        if job not in self._prefilling:
            raise ValueError(
                f"job {job.job_id} must be being prefilled, got {[each.job_id for each in self._prefilling]}"
            )
        self._prefilling.remove(job)

    def remove(self, job: Job) -> None:
        """Takes a job out, wherever it is; its slot is free at once. One that is nowhere is left alone."""
        if job in self._queue:
            self._queue.remove(job)
        elif job.slot is not None and self._is_running(job):
            del self._running[job.slot]
            heapq.heappush(self._free_slots, (job.slot % self._part_slots, job.slot))
            job.slot = None
            if job in self._prefilling:
                self._prefilling.remove(job)

    def _is_running(self, job: Job) -> bool:
        return job.slot is not None and self._running.get(job.slot) is job

    def _first_ready(self, ready: Callable[[Job, bool], bool], work: Callable[[Job], float] | None) -> Job | None:
        """Of the first few jobs the first that is ready, or that of its priority with the least work."""
        found: list[Job] = []
        for position, job in enumerate(tuple(itertools.islice(self._queue, _PASSED_JOBS))):
            if found and job.priority != found[0].priority:
                break
            if ready(job, position == 0):
                found.append(job)
            if (found and work is None) or not self._queue.may_be_overtaken(job):
                break
        return min(found, key=work, default=None) if work is not None else next(iter(found), None)


class _Queue:
    """Waiting jobs in the order in which they are taken.

    A job is overtaken when one that came later is taken. Of those that came later than it, all that were ever taken
    were taken since it came; so it was overtaken `_MAX_OVERTAKEN` times once that many jobs that were taken came later,
    which the latest such jobs tell of all that wait, without a count for each. Who came earlier was overtaken no less.
    """

    def __init__(self) -> None:
        self._arrivals = itertools.count()
        self._jobs: SortedDict[_Place, Job] = SortedDict()
        self._place_of: dict[Job, _Place] = {}
        self._to_overtake: SortedDict[int, Job] = SortedDict()  # By arrival.
        self._last_taken: list[int] = []  # The latest arrivals that were taken, a heap: the earliest of them first.

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: Job) -> bool:
        return job in self._place_of

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def may_be_overtaken(self, job: Job) -> bool:
        """Whether later jobs may still be taken before a job."""
        return self._place_of[job][0]

    def add(self, job: Job) -> None:
        """Queues a job behind those of its priority."""
        arrival = next(self._arrivals)
        self._to_overtake[arrival] = job
        self._put(job, (True, job.priority, arrival))

    def remove(self, job: Job) -> int:
        """Takes a job out; its arrival."""
        place = self._place_of.pop(job)
        del self._jobs[place]
        self._to_overtake.pop(place[2], None)
        return place[2]

    def take(self, job: Job) -> None:
        """Takes a job out to run it: those that came before it and still wait are overtaken."""
        heapq.heappush(self._last_taken, self.remove(job))
        if len(self._last_taken) > _MAX_OVERTAKEN:
            heapq.heappop(self._last_taken)
        if len(self._last_taken) == _MAX_OVERTAKEN:
            while self._to_overtake and self._to_overtake.peekitem(0)[0] < self._last_taken[0]:
                _, overtaken = self._to_overtake.peekitem(0)
                self._put(overtaken, (False, 0, self.remove(overtaken)))

    def _put(self, job: Job, place: _Place) -> None:
        self._place_of[job] = place
        self._jobs[place] = job
