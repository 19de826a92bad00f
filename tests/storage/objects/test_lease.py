"""One collector at a time: all orders of two collectors' steps over the lease, and whole collections that meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from ca_jax.storage.objects import lease
from ca_jax.storage.objects.collector import collect
from ca_jax.storage.objects.lease import Lease, LeaseHeldError, LeaseLostError, Watched
from ca_jax.storage.objects.store import Found, ObjectsError, ObjectStore, Read, Write
from tests.storage.objects.shared_kit import NOW_S, orphan, short_runs

pytestmark = pytest.mark.usefixtures(short_runs.__name__)
HOLD_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Model:
    """The lease's object. A write may be answered, refused, or unanswered: then it happened, is late, or never will."""

    def __init__(self) -> None:
        self.value: bytes | None = None
        self.generation = 0
        self.late: list[Write] = []

    def do(self, asked: Read | Write, outcome: str) -> object:
        if isinstance(asked, Read):
            return Found(self.value, b"g%d" % self.generation)
        if outcome in ("answered", "unanswered"):
            written = self.write(asked)
        elif outcome == "late":
            self.late.append(asked)
        return written if outcome == "answered" else ObjectsError("no answer")

    def write(self, asked: Write) -> bytes | None:
        if asked.replaces != b"g%d" % self.generation:
            return None
        self.value, self.generation = asked.value, self.generation + 1
        return b"g%d" % self.generation


class Collector:
    """Tries to take the lease so many times, then renews it so many times. Its clock is its own."""

    def __init__(self, name: str, ahead_s: float, num_takes: int, num_renewals: int) -> None:
        self.name, self.ahead_s, self.num_takes, self.num_renewals = name, ahead_s, num_takes, num_renewals
        self.now_s = ahead_s
        self.held: Lease | None = None
        self.watched: Watched | None = None
        self.until_s, self.began_s = ahead_s, 0.0
        self.steps, self.answer = None, None
        self.is_lost = False

    @property
    def is_done(self) -> bool:
        return self.steps is None and (self.is_lost or not (self.num_takes if not self.held else self.num_renewals))

    @property
    def is_sure(self) -> bool:
        """Whether it believes that it alone may delete."""
        return self.held is not None and not self.is_lost and self.now_s < self.until_s

    def step(self, model: Model, outcome: str) -> None:
        if self.steps is None:
            self.answer, self.began_s = None, self.now_s
            if self.held is None:
                self.num_takes -= 1
                self.steps = lease.take(self.name, HOLD_S, self.watched, lambda: self.now_s)
            else:
                self.num_renewals -= 1
                self.steps = lease.renew(self.held)
        try:
            is_error = isinstance(self.answer, Exception)
            asked = self.steps.throw(self.answer) if is_error else self.steps.send(self.answer)
        except StopIteration as end:
            self.steps = None
            if isinstance(end.value, Watched):
                self.watched = end.value
            else:
                self.held, self.until_s = end.value, self.began_s + HOLD_S
        except LeaseLostError:
            self.steps, self.is_lost = None, True
        except ObjectsError:
            self.steps = None
        else:
            self.answer = model.do(asked, outcome)


def orders(
    collectors: Callable[[Model], list[Collector]], num_waits: int, outcomes: tuple[str, ...] = ("answered",)
) -> Iterator[tuple[Model, list[Collector], int]]:
    """Every state that any order of steps leads to, in which so many times half of the lease's time passes.

    One write of an order at most is not answered. Given with each is how many collectors are sure at once.
    """
    stack: list[tuple[int, ...]] = [()]
    while stack:
        prefix = stack.pop()
        model, num_left, num_faults = Model(), num_waits, 0
        actors = collectors(model)
        for depth in itertools.count():
            choices: list[tuple[object, str]] = [
                (actor, outcome)
                for actor in actors
                if not actor.is_done
                for outcome in outcomes
                if outcome == "answered" or not num_faults
            ]
            choices += [(late, "lands") for late in model.late]
            if num_left and choices:
                choices.append((None, "waits"))
            if not choices:
                break
            if depth >= len(prefix):
                stack += [(*prefix, *[0] * (depth - len(prefix)), each) for each in range(1, len(choices))]
            who, outcome = choices[prefix[depth] if depth < len(prefix) else 0]
            if isinstance(who, Write):
                model.late.remove(who)
                model.write(who)
            elif isinstance(who, Collector):
                num_faults += outcome != "answered"
                who.step(model, outcome)
            else:
                num_left -= 1
                for actor in actors:
                    actor.now_s += HOLD_S / 2
            yield model, actors, sum(actor.is_sure for actor in actors)


def begin(_: Model) -> list[Collector]:
    """Two that want the lease; the first renews it once."""
    return [Collector("a", 0.0, 1, 1), Collector("b", 1e6, 2, 0)]


def meet(model: Model) -> list[Collector]:
    """One that has the lease, and one that wants it."""
    first, second = Collector("a", 0.0, 1, 1), Collector("b", 1e6, 2, 0)
    while first.held is None:
        first.step(model, "answered")
    return [first, second]


@pytest.mark.parametrize(
    ("collectors", "outcomes"),
    [(begin, ("answered",)), (meet, ("answered", "unanswered", "late", "never"))],
    ids=["all orders", "a write without an answer"],
)
def test_no_two_collectors_are_sure_at_once(collectors, outcomes) -> None:
    num_states, ends = 0, set()
    for _, (first, second), num_sure in orders(collectors, 2, outcomes):
        assert num_sure < 2
        num_states += 1
        ends.add((first.is_lost, second.held is not None))
    assert num_states > 1000
    assert {(True, True), (False, False)} <= ends


def test_the_search_finds_who_does_not_wait(monkeypatch) -> None:
    take = lease.take

    def hasty(holder: str, hold_s: float, watched: Watched | None, clock: Callable[[], float]):
        watched = None if watched is None else Watched(watched.generation, 0.0, watched.since_s)
        return take(holder, hold_s, watched, clock)

    monkeypatch.setattr(lease, "take", hasty)
    assert any(num_sure > 1 for _, _, num_sure in orders(meet, 1))


@pytest.fixture
def memory() -> ObjectStore:
    return ObjectStore("memory://", 5.0)


def test_an_object_that_says_nothing_is_taken_over_after_a_while(memory) -> None:
    memory.write(lease.LEASE_NAME, b"?")
    clock = Clock()
    collect(memory, now_s=NOW_S, clock=clock, sleep=clock.sleep, grace_s=0.0)
    assert clock.now_s >= HOLD_S
    assert b'"holder": ""' in memory.read(lease.LEASE_NAME).value, "it is free, and nobody waits for it"
    before_s = clock.now_s
    collect(memory, now_s=NOW_S, clock=clock, sleep=clock.sleep, grace_s=0.0)
    assert clock.now_s == before_s


def test_a_second_collector_finds_the_first_at_work(memory) -> None:
    clock = Clock()
    errors = []

    def second() -> None:
        def sleep(seconds: float) -> None:
            """The first one goes on meanwhile."""
            first = memory.read("v1/collector").value
            memory.write("v1/collector", first.replace(b'"count": ', b'"count": 1'))
            clock.sleep(seconds)

        with pytest.raises(LeaseHeldError) as found:
            collect(memory, now_s=NOW_S, sleep=sleep, clock=clock)
        errors.append(found.value)

    orphan(memory, list(range(20)))
    with pytest.raises(LeaseLostError):  # The test has written in its place.
        collect(memory, now_s=NOW_S, clock=clock, sleep=lambda seconds: second())
    assert len(errors) == 1


class Paused(ObjectStore):
    """Does something before one of its writes is sent, and notes what is deleted by those behind it."""

    def __init__(self, at: int, pause: Callable[[], None]) -> None:
        super().__init__("memory://", 5.0)
        self._at, self._pause = at, pause
        self._numbers = itertools.count()
        self.num_deleted, self.deleted_after = 0, []

    def write(self, name: str, value: bytes | None, **options: object) -> bytes | None:
        number = next(self._numbers)
        if number == self._at:
            self._pause()
        if value is None:
            self.num_deleted += 1
            self.deleted_after += [name] if number > self._at else []
        return super().write(name, value, **options)


@pytest.mark.parametrize("at", range(2, 15))
def test_one_that_was_paused_loses_its_lease_and_deletes_nothing_more(monkeypatch, at) -> None:
    """Another takes over by its own clock, which shows another time, and is at work still. One write is under way."""
    monkeypatch.setattr("ca_jax.storage.objects.collector._THREADS", 1)
    clock, other_clock = Clock(), Clock()
    other_clock.now_s = 1e6
    has_taken = []

    def pause() -> None:
        other = ObjectStore("memory://", 5.0)
        other._store = objects._store

        def sleep(seconds: float) -> None:
            clock.sleep(seconds)
            other_clock.sleep(seconds)
            if seconds == 0.5:  # In its grace.
                has_taken.append(True)
                raise KeyboardInterrupt

        monkeypatch.setattr(lease.HeldLease, "__exit__", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            collect(other, now_s=NOW_S, sleep=sleep, clock=other_clock, grace_s=0.5)

    objects = Paused(10**9, pause)
    orphan(objects, list(range(20)))
    objects._at, objects.num_deleted = at + next(objects._numbers), 0
    with pytest.raises(LeaseLostError):
        collect(objects, now_s=NOW_S, sleep=clock.sleep, clock=clock, grace_s=1.0)
    assert has_taken
    assert not objects.deleted_after
    assert bool(objects.num_deleted) == (at > 8)
