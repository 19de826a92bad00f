"""The scheduler, against its promises: first come, first served; the lowest free slot; one prefill a step."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ca_jax.scheduler import Scheduler
from ca_jax.session import Job, SamplingParams
from ca_jax.text_output import TextOutput

NUM_SLOTS = 3


def job() -> Job:
    return Job(prompt_ids=[1], params=SamplingParams(), output=TextOutput(None), stop_ids=frozenset())


class SchedulerMachine(RuleBasedStateMachine):
    """Jobs come, run and go in any order; lists of Python say what is expected."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(NUM_SLOTS)
        self.waiting: list[Job] = []
        self.slots: dict[int, Job] = {}

    @rule()
    def submit(self) -> None:
        self.waiting.append(job())
        self.scheduler.submit(self.waiting[-1])

    @rule()
    def schedule(self) -> None:
        plan = self.scheduler.schedule()
        assert plan.decode == tuple(self.slots[slot] for slot in sorted(self.slots))
        free = sorted(set(range(NUM_SLOTS)) - set(self.slots))
        if self.waiting and free:
            self.slots[free[0]] = self.waiting.pop(0)
            assert plan.prefill == (self.slots[free[0]],)
        else:
            assert plan.prefill == ()

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def end_running(self, data: st.DataObject) -> None:
        ended = self.slots.pop(data.draw(st.sampled_from(sorted(self.slots))))
        self.scheduler.remove(ended)
        assert ended.slot is None

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up_waiting(self, data: st.DataObject) -> None:
        ended = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.scheduler.remove(ended)

    @rule()
    def remove_a_stranger(self) -> None:
        self.scheduler.remove(job())

    @invariant()
    def agrees(self) -> None:
        assert self.scheduler.waiting == tuple(self.waiting)
        assert self.scheduler.running == tuple(self.slots[slot] for slot in sorted(self.slots))
        assert {slot: each.slot for slot, each in self.slots.items()} == {slot: slot for slot in self.slots}
        assert self.scheduler.idle == (not self.waiting and not self.slots)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_job_prefilled_in_a_step_does_not_decode_in_it():
    scheduler = Scheduler(2)
    first, second = job(), job()
    scheduler.submit(first)
    scheduler.submit(second)
    assert (scheduler.schedule().prefill, scheduler.schedule().prefill) == ((first,), (second,))
    assert scheduler.schedule().decode == (first, second)
