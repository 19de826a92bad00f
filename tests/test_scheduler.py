"""The scheduler, against its promises: the order, the lowest free slot, prefills as there is room, nobody starves."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ca_jax.serving.scheduler import Scheduler
from ca_jax.session import Job
from ca_jax.turns.requests import SamplingParams
from ca_jax.turns.text import TextOutput

NUM_SLOTS = 3
MAX_OVERTAKEN = 32
PASSED_JOBS = 16
PRIORITIES = st.integers(-2, 2)


def job(priority: int = 0) -> Job:
    return Job(
        prompt_ids=[1], params=SamplingParams(), output=TextOutput(None), stop_ids=frozenset(), priority=priority
    )


def submitted(scheduler: Scheduler, *priorities: int) -> list[Job]:
    jobs = [job(priority) for priority in priorities]
    for each in jobs:
        scheduler.submit(each)
    return jobs


def run_one(scheduler: Scheduler, ready=lambda job, is_next: True) -> Job | None:
    """Has a job prefilled and ended, if there is one that can run."""
    taken = scheduler.schedule(ready).taken
    if taken is not None:
        scheduler.prefilled(taken)
        scheduler.remove(taken)
    return taken


@dataclasses.dataclass(eq=False)
class Waiting:
    """A waiting job, and what the machine knows of it."""

    job: Job
    overtaken: int = 0

    @property
    def rank(self) -> tuple[bool, int, int]:
        may_be_overtaken = self.overtaken < MAX_OVERTAKEN
        return may_be_overtaken, self.job.priority if may_be_overtaken else 0, self.job.job_id


class SchedulerMachine(RuleBasedStateMachine):
    """Jobs come, run and go in any order; lists of Python, sorted and counted anew each time, say what is expected."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(NUM_SLOTS)
        self.waiting: list[Waiting] = []
        self.slots: dict[int, Job] = {}
        self.prefilling: list[Job] = []
        self.taken: set[Job] = set()

    def in_order(self) -> list[Waiting]:
        return sorted(self.waiting, key=lambda each: each.rank)

    def take(self, taken: Waiting, slot: int) -> None:
        assert taken.job not in self.taken, "a job was taken twice"
        assert slot not in self.slots, "a slot was given away twice"
        self.taken.add(taken.job)
        self.waiting.remove(taken)
        for each in self.waiting:
            each.overtaken += each.job.job_id < taken.job.job_id
            assert each.overtaken <= MAX_OVERTAKEN
        self.slots[slot] = taken.job
        self.prefilling.append(taken.job)

    @rule(priority=PRIORITIES)
    def submit(self, priority: int) -> None:
        self.waiting.append(Waiting(job(priority)))
        self.scheduler.submit(self.waiting[-1].job)

    @rule(data=st.data())
    def schedule(self, data: st.DataObject) -> None:
        """Some jobs wait for their KV, and some for room; what is asked of whom is part of the promise."""
        has_room = data.draw(st.sampled_from((None, False, True)), "room for another prompt")
        order = self.in_order()
        on_their_way = set(data.draw(st.lists(st.integers(0, PASSED_JOBS), unique=True), "positions not ready"))
        admitted = data.draw(st.booleans(), "admitted")
        free = sorted(set(range(NUM_SLOTS)) - set(self.slots))
        decode = tuple(self.slots[slot] for slot in sorted(self.slots) if self.slots[slot] not in self.prefilling)
        works = {each.job: data.draw(st.integers(0, 3), "work") for each in order}
        work = data.draw(st.sampled_from((None, works.__getitem__)), "of the least work first")
        will_ask, found = [], []
        if free and (not self.prefilling if has_room is None else has_room):
            for position, each in enumerate(order[:PASSED_JOBS]):
                if found and (work is None or each.job.priority != found[0].job.priority):
                    break
                will_ask.append((each.job, position == 0))
                found += [] if position in on_their_way else [each]
                if each.overtaken == MAX_OVERTAKEN:
                    break
        chosen = min(found, key=lambda each: (0 if work is None else works[each.job], order.index(each)), default=None)
        asked, asked_room = [], []

        def ready(asked_of: Job, is_next: bool) -> bool:
            asked.append((asked_of, is_next))
            return [each.job for each in order].index(asked_of) not in on_their_way

        def admits(asked_of: Job) -> bool:
            asked_room.append(asked_of)
            return admitted

        plan = self.scheduler.schedule(ready, admits, has_room, work)
        assert asked == will_ask
        assert asked_room == ([] if chosen is None else [chosen.job])
        if chosen is not None and admitted:
            self.take(chosen, free[0])
        assert plan.decode == decode
        assert plan.prefill == tuple(self.prefilling)
        assert plan.taken is (chosen.job if chosen is not None and admitted else None)
        first = self.in_order()[:PASSED_JOBS]
        alike = [each for each in first if each.job.priority == first[0].job.priority]
        alike = alike[: next((i for i, each in enumerate(first) if each.job not in {e.job for e in alike}), None)]
        if work is None or not first or first[0].overtaken == MAX_OVERTAKEN:
            alike = first[:1]
        next_one = min(alike, key=lambda each: works[each.job], default=None)
        assert plan.preload is (None if next_one is None else next_one.job)

    @precondition(lambda self: self.prefilling)
    @rule(data=st.data())
    def complete_prefill(self, data: st.DataObject) -> None:
        self.scheduler.prefilled(self.prefilling.pop(data.draw(st.integers(0, len(self.prefilling) - 1))))

    @precondition(lambda self: not self.prefilling and len(self.slots) < NUM_SLOTS)
    @rule(num_jobs=st.integers(1, MAX_OVERTAKEN + 2), priority=st.sampled_from((-9, 9)))
    def a_stream_of_jobs_comes_and_goes(self, num_jobs: int, priority: int) -> None:
        for _ in range(num_jobs):
            self.submit(priority)
            first = self.in_order()[0]
            taken = self.scheduler.schedule().taken
            assert taken is first.job
            self.take(first, taken.slot)
            self.scheduler.prefilled(self.prefilling.pop())
            del self.slots[taken.slot]
            self.scheduler.remove(taken)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def end_running(self, data: st.DataObject) -> None:
        ended = self.slots.pop(data.draw(st.sampled_from(sorted(self.slots))))
        if ended in self.prefilling:
            self.prefilling.remove(ended)
        self.scheduler.remove(ended)
        assert ended.slot is None

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up_waiting(self, data: st.DataObject) -> None:
        ended = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.scheduler.remove(ended.job)

    @rule()
    def a_stranger(self) -> None:
        stranger = job()
        found = [each.job_id for each in self.prefilling]
        with pytest.raises(ValueError, match=re.escape(f"job {stranger.job_id} must be being prefilled, got {found}")):
            self.scheduler.prefilled(stranger)
        self.scheduler.remove(stranger)
        stranger.slot = 0  # In another engine.
        self.scheduler.remove(stranger)
        assert stranger.slot == 0

    @invariant()
    def agrees(self) -> None:
        assert self.scheduler.waiting == tuple(each.job for each in self.in_order())
        assert self.scheduler.num_waiting == len(self.waiting)
        assert self.scheduler.running == tuple(self.slots[slot] for slot in sorted(self.slots))
        assert self.scheduler.prefilling == tuple(self.prefilling)
        free = set(range(NUM_SLOTS)) - set(self.slots)
        assert self.scheduler.next_slot == min(free, default=None)
        assert self.scheduler.may_take == bool(self.waiting and free)
        assert {slot: each.slot for slot, each in self.slots.items()} == {slot: slot for slot in self.slots}
        assert self.scheduler.idle == (not self.waiting and not self.slots)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_job_that_waits_or_runs_is_not_queued_again():
    scheduler = Scheduler(2)
    [waiting] = submitted(scheduler, 0)
    with pytest.raises(ValueError, match="must neither wait nor run"):
        scheduler.submit(waiting)
    assert scheduler.schedule().taken is waiting
    scheduler.prefilled(waiting)
    with pytest.raises(ValueError, match="must neither wait nor run"):
        scheduler.submit(waiting)


def test_where_slots_are_in_parts_jobs_take_one_of_each_in_turn():
    scheduler = Scheduler(6, num_parts=2)

    def slots_of(num_jobs: int) -> list[int | None]:
        jobs = submitted(scheduler, *[0] * num_jobs)
        for each in jobs:
            assert scheduler.schedule().taken is each
            scheduler.prefilled(each)
        return [each.slot for each in jobs]

    assert slots_of(6) == [0, 3, 1, 4, 2, 5]
    for each in scheduler.running:
        if each.slot in (1, 2, 3):
            scheduler.remove(each)
    assert slots_of(3) == [3, 1, 2]


def test_a_long_job_waits_for_short_ones_that_came_later_until_it_was_overtaken_often_enough():
    scheduler = Scheduler(1)
    (long,) = submitted(scheduler, 0)
    works = {long: 9.0}
    taken = []
    for _ in range(MAX_OVERTAKEN + 2):
        (short,) = submitted(scheduler, 0)
        works[short] = 1.0
        taken.append(scheduler.schedule(work=works.__getitem__).taken)
        scheduler.prefilled(taken[-1])
        scheduler.remove(taken[-1])
    assert taken.index(long) == MAX_OVERTAKEN


def test_a_job_is_overtaken_and_passed_by_as_often_as_is_allowed_and_then_comes_first():
    """By urgent ones, and while its KV does not come: then others wait, since what they save could keep it away."""
    scheduler = Scheduler(1)
    late, *patient = submitted(scheduler, 5, 7, 6)
    asked: list[tuple[Job, bool]] = []

    def ready(each: Job, is_next: bool) -> bool:
        asked.append((each, is_next))
        return each is not late

    for _ in range(MAX_OVERTAKEN):
        (urgent,) = submitted(scheduler, 0)
        assert run_one(scheduler, ready) is urgent
    (urgent,) = submitted(scheduler, 0)
    asked.clear()
    plan = scheduler.schedule(ready)
    assert (plan.taken, plan.preload, asked) == (None, late, [(late, True)])
    assert [run_one(scheduler) for _ in range(4)] == [late, *patient, urgent], "of several the earliest"
