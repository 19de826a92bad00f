"""The job queue and a tier's orders, against lists that are sorted anew each time."""

from __future__ import annotations

import bisect
import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.loop_workload import Stored, describe
from ca_jax.storage.placement.orders import LookAhead, TierOrders
from ca_jax.storage.placement.returns import SaidReturns

KEYS = st.sampled_from("abcdef")
TENANTS = ("", "x", "y")


def test_a_session_whose_later_job_is_more_urgent_is_watched_by_that():
    queue = LookAhead()
    heard = []
    queue.watch(lambda key, before, after: heard.append((before, after)))
    queue.append(1, "a")
    queue.append(2, "a", -1)
    (_, late), (before, urgent) = heard
    assert late == before > urgent == queue.next_ticket("a")
    queue.remove(2)
    assert heard[2:] == [(urgent, late)]


def test_a_job_waits_once():
    queue = LookAhead()
    queue.append("job", "a")
    with pytest.raises(ValueError, match="the job must not wait yet, got 'job'"):
        queue.append("job", "b")
    with pytest.raises(ValueError, match="one of the 1 that wait, got 'other'"):
        queue.remove("other")


@dataclasses.dataclass
class Model:
    tenant: str
    created: int
    used: int
    held: bool = False
    group: int = 0
    """As it was when it last began to be idle."""


class OrdersMachine(RuleBasedStateMachine):
    """Two tiers over one queue; one of them begins to watch when jobs wait already, and has no groups."""

    @initialize(keys=st.lists(KEYS, max_size=4))
    def open(self, keys):
        self.queue = LookAhead()
        self.jobs: list[tuple[int, str]] = []
        self.priorities: list[int] = []  # Of those.
        self.num_jobs = 0
        self.tick = 0
        self.groups = dict.fromkeys("abcdef", 0)
        group_of = self.groups.__getitem__
        self.time_s, self.until_s = 0.0, dict.fromkeys("abcdef", 0.0)
        self.said = SaidReturns(lambda: self.time_s)
        first = TierOrders(self.queue, describe, group_of, self.said)
        self.tiers: list[tuple[TierOrders, dict[str, Model]]] = [(first, {})]
        for key in keys:
            self.append(key)
        self.tiers.append((TierOrders(self.queue, describe), {}))

    def now(self) -> int:
        self.tick += 1
        return self.tick

    @rule(key=KEYS, group=st.integers(0, 2))
    def regroup(self, key, group):
        self.groups[key] = group

    @rule(key=KEYS, seconds=st.none() | st.integers(0, 9))
    def say(self, key, seconds):
        """As `SessionIndex.expect_back` does, which forgets it where the next turn comes."""
        orders, model = self.tiers[0]
        is_busy = key in [other for _, other in self.jobs]
        self.said.say(key, seconds, is_busy=is_busy)
        self.until_s[key] = 0.0 if is_busy or seconds is None else self.time_s + 1.5 * seconds
        if key in model:
            orders.said_anew(key)
            if not model[key].held:
                model[key].used = self.now()
                model[key].group = self.groups[key]

    @rule(seconds=st.integers(0, 4))
    def wait(self, seconds):
        before_s, self.time_s = self.time_s, self.time_s + seconds
        model, waiting = self.tiers[0][1], [key for _, key in self.jobs]
        over = [(until_s, key) for key, until_s in self.until_s.items() if before_s < until_s <= self.time_s]
        for _, key in sorted(over):
            if key in model and not model[key].held and key not in waiting:
                model[key].used = self.now()
                model[key].group = self.groups[key]

    def append(self, key, priority=0):
        self.said.forget(key)
        self.until_s[key] = 0.0
        self.queue.append(self.num_jobs, key, priority)
        position = bisect.bisect_right(self.priorities, priority)
        self.priorities.insert(position, priority)
        self.jobs.insert(position, (self.num_jobs, key))
        self.num_jobs += 1

    @rule(key=KEYS, priority=st.integers(-2, 2))
    def append_job(self, key, priority):
        self.append(key, priority)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), first=st.booleans())
    def remove_job(self, data, first):
        position = 0 if first else data.draw(st.integers(0, len(self.jobs) - 1))
        del self.priorities[position]
        job, key = self.jobs.pop(position)
        assert self.queue.remove(job) == key
        if key not in [other for _, other in self.jobs]:
            for _, model in self.tiers:
                if key in model and not model[key].held:
                    model[key].used = self.now()
                    model[key].group = self.groups[key]

    @rule(key=KEYS, tier=st.integers(0, 1), tenant=st.sampled_from(TENANTS))
    def add_or_remove(self, key, tier, tenant):
        orders, model = self.tiers[tier]
        if key in model:
            orders.remove(key)
            del model[key]
        else:
            orders.add(key, Stored(key, 1), tenant)
            now = self.now()
            model[key] = Model(tenant, created=now, used=now, group=self.groups[key])

    @rule(tier=st.integers(0, 1), keys=st.permutations("abcdef"), order=st.permutations("abcdef"))
    def adopt(self, tier, keys, order):
        orders, model = self.tiers[tier]
        created = [(key, tenant) for key, tenant in zip(keys, TENANTS, strict=False) if key not in model]
        used = [key for key in order if key in dict(created)]
        orders.adopt([(key, Stored(key, 1), tenant) for key, tenant in created], used)
        for key, tenant in created:
            model[key] = Model(tenant, created=self.now(), used=0, group=self.groups[key])
        for key in used:
            model[key].used = self.now()

    @rule(key=KEYS, tier=st.integers(0, 1))
    def use(self, key, tier):
        orders, model = self.tiers[tier]
        if key in model:
            orders.use(key)
            model[key].used = self.now()

    @rule(key=KEYS, tier=st.integers(0, 1), held=st.booleans())
    def hold(self, key, tier, held):
        orders, model = self.tiers[tier]
        if key in model:
            orders.set_held(key, held)
            if model[key].held and not held:
                model[key].used = self.now()
                model[key].group = self.groups[key]
            model[key].held = held

    @invariant()
    def queue_agrees(self):
        order = [key for _, key in self.jobs]
        assert list(self.queue._keys.values()) == order
        for key in "abcdef":
            assert self.queue.position(key) == (order.index(key) if key in order else None)

    @invariant()
    def orders_agree(self):
        order = [key for _, key in self.jobs]
        for orders, model in self.tiers:
            assert list(orders._all.by_created) == sorted(model, key=lambda key: model[key].created)
            for tenant in (None, *TENANTS):
                view = orders.view(tenant)
                free = [k for k, entry in model.items() if not entry.held and tenant in (None, entry.tenant)]
                by_use = sorted(free, key=lambda key: model[key].used)
                waiting = sorted((key for key in free if key in order), key=order.index)
                assert [entry.key for entry in view.by_last_used] == by_use
                assert [entry.key for entry in view.by_created] == sorted(free, key=lambda key: model[key].created)
                assert [entry.key for entry in view.idle] == [key for key in by_use if key not in order]
                assert [(entry.key, entry.queue_position) for entry in view.by_next_job] == [
                    (key, order.index(key)) for key in waiting
                ]
                assert [entry.key for entry in reversed(view.by_next_job)] == waiting[::-1]
                has_groups = orders is self.tiers[0][0]
                expected = [key for key in by_use if key not in order and self.until_s[key] > self.time_s]
                expected = sorted(expected, key=lambda key: (self.until_s[key], key)) if has_groups else []
                assert [entry.key for entry in view.expected] == expected
                assert [entry.key for entry in reversed(view.expected)] == expected[::-1]
                unsaid = [key for key in by_use if key not in order and key not in expected]
                assert [entry.key for entry in view.unsaid] == unsaid
                idle = [(key, model[key].group * has_groups) for key in unsaid]
                groups = {frozenset(entry.key for entry in group): group for group in view.idle_groups}
                assert len(groups) == len(view.idle_groups) == len({group for _, group in idle})
                for group in {group for _, group in idle}:
                    keys = [key for key, other in idle if other == group]
                    assert [entry.key for entry in groups[frozenset(keys)]] == keys
                    assert [entry.key for entry in reversed(groups[frozenset(keys)])] == keys[::-1]


TestOrdersMachine = OrdersMachine.TestCase
TestOrdersMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
