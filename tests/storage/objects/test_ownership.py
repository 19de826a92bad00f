"""The protocol of ownership, explored whole: all orders of two owners' steps, with writes lost, late and unanswered.

The code that runs is the protocol's own; the store is a model of one: a value and a generation, and writes that are
under way. Each order is run from the beginning, as a list of choices, depth first.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest

from ca_jax.storage.objects import ownership
from ca_jax.storage.objects.manifest import Manifest, manifest_name
from ca_jax.storage.objects.ownership import Held, NotOwnerError
from ca_jax.storage.objects.store import Found, ObjectsError, Read, Write

SPACE, KEY = "n" * 64, "k"
NAME = manifest_name(SPACE, KEY)


class Objects:
    """One object. A write may be answered, refused, or unanswered: then it happened, is late, or never will."""

    def __init__(self) -> None:
        self.value: bytes | None = None
        self.generation = 0
        self.late: list[Write] = []
        self.history: list[Manifest] = []

    def read(self) -> Found:
        return Found(self.value, b"g%d" % self.generation)

    def write(self, asked: Write) -> bytes | None:
        if asked.replaces != b"g%d" % self.generation:
            return None
        self.value, self.generation = asked.value, self.generation + 1
        self.history.append(Manifest.from_bytes(asked.value))
        return b"g%d" % self.generation


class Owner:
    """Claims the session, says so many turns over it, each published, and drops what it has when it is refused."""

    def __init__(self, name: str, num_turns: int, num_claims: int) -> None:
        self.name, self.num_turns, self.num_claims = name, num_turns, num_claims
        self.held: Held | None = None
        self.chain = ""
        self.acknowledged: list[str] = []
        """Chains that it was told are published."""
        self.steps = None
        self.answer: object = None
        self.num_said = 0
        self.is_retry = False

    @property
    def is_done(self) -> bool:
        return self.steps is None and not (self.num_claims if self.held is None else self.num_turns)

    def step(self, objects: Objects, outcome: str) -> None:
        """Takes one step: a read, or a write with this outcome."""
        if self.steps is None:
            self._begin()
        try:
            asked = (
                self.steps.send(self.answer)
                if not isinstance(self.answer, Exception)
                else self.steps.throw(self.answer)
            )
        except StopIteration as end:
            self._end(end.value)
        except NotOwnerError:
            self.steps, self.held, self.answer = None, None, None
        except ObjectsError:
            self.steps, self.answer = None, None  # Tried again, with what is held.
        else:
            self.answer = self._do(objects, asked, outcome)

    def _begin(self) -> None:
        self.answer = None
        if self.held is None:
            self.num_claims -= 1
            self.steps = ownership.claim(SPACE, KEY, self.name)
            return
        if not self.is_retry:
            self.num_turns -= 1
            self.num_said += 1
            self.chain += f"{self.name}{self.num_said} "
        self.is_retry = True
        self.steps = ownership.publish(self.held, chain=self.chain, conversation=self.chain.encode())

    def _end(self, held: Held) -> None:
        is_publish = self.held is not None
        self.steps, self.held, self.answer, self.is_retry = None, held, None, False
        if is_publish:
            self.acknowledged.append(self.chain)
        else:
            self.chain = "" if held.manifest is None else held.manifest.chain

    def _do(self, objects: Objects, asked: Read | Write, outcome: str) -> object:
        assert asked.name == NAME
        if isinstance(asked, Read):
            return objects.read()
        if outcome == "answered":
            return objects.write(asked)
        if outcome == "unanswered":
            objects.write(asked)
        elif outcome == "late":
            objects.late.append(asked)
        return ObjectsError("no answer")


def orders(make, outcomes: tuple[str, ...], most_faults: int) -> Iterator[tuple[Objects, list[Owner]]]:
    """The end of every order of steps, by depth-first search over the choices that there are at each of them.

    Of owners that have the same to do the first one begins: with the other it would be the same orders by other names.
    """
    stack: list[tuple[int, ...]] = [()]
    while stack:
        prefix = stack.pop()
        objects, owners = Objects(), make()
        num_faults = 0
        for depth in itertools.count():
            choices = [(owner, outcome) for owner in owners if not owner.is_done for outcome in outcomes]
            choices = [each for each in choices if each[1] == "answered" or num_faults < most_faults]
            choices += [(late, "lands") for late in objects.late]
            if not depth and len({(owner.num_turns, owner.num_claims) for owner in owners}) == 1:
                choices = [each for each in choices if each[0] is owners[0]]
            if not choices:
                break
            taken = prefix[depth] if depth < len(prefix) else 0
            if depth >= len(prefix):
                stack += [(*prefix, *[0] * (depth - len(prefix)), each) for each in range(1, len(choices))]
            who, outcome = choices[taken]
            if outcome == "lands":
                objects.late.remove(who)
                objects.write(who)
                continue
            num_faults += outcome != "answered"
            who.step(objects, outcome)
        yield objects, owners


def check(objects: Objects, owners: list[Owner]) -> None:
    """What must hold of what was written, and of what owners believe."""
    for before, after in itertools.pairwise(objects.history):
        assert after.mark not in (each.mark for each in objects.history if each is not after)
        if after.owner != before.owner:
            assert after.epoch == before.epoch + 1, "whoever takes over raises the epoch"
            assert after.chain == before.chain, "and changes nothing else"
        else:
            assert after.epoch == before.epoch
            assert after.chain.startswith(before.chain), "nothing that was published is lost"
    owner_of = {}
    for each in objects.history:
        assert owner_of.setdefault(each.epoch, each.owner) == each.owner, "an epoch has one owner"
    for owner in owners:
        for chain in owner.acknowledged:
            assert any(each.chain == chain and each.owner == owner.name for each in objects.history)
            assert objects.history[-1].chain.startswith(chain), "what an owner was told is published stays so"


@pytest.mark.parametrize(
    ("turns", "claims", "outcomes", "most_faults", "least"),
    [
        ((2, 2), (2, 2), ("answered",), 0, 1000),
        ((1, 1), (2, 1), ("answered", "unanswered", "late", "never"), 1, 1000),
    ],
    ids=["all orders", "a write without an answer"],
)
def test_of_two_owners_no_published_turn_is_lost(turns, claims, outcomes, most_faults, least) -> None:
    def make() -> list[Owner]:
        return [Owner(name, *each) for name, each in zip("ab", zip(turns, claims, strict=True), strict=True)]

    num_orders, num_refused = 0, 0
    for objects, owners in orders(make, outcomes, most_faults):
        check(objects, owners)
        num_orders += 1
        num_refused += any(owner.held is None for owner in owners)
    assert num_orders > least
    assert num_refused, "an owner was refused in some"


def test_the_search_finds_a_protocol_that_writes_whatever_is_there(monkeypatch) -> None:
    write = Objects.write

    def careless(objects: Objects, asked: Write) -> bytes | None:
        return write(objects, dataclasses.replace(asked, replaces=b"g%d" % objects.generation))

    def explore() -> None:
        for objects, owners in orders(lambda: [Owner("a", 1, 1), Owner("b", 1, 1)], ("answered",), 0):
            check(objects, owners)

    explore()
    monkeypatch.setattr(Objects, "write", careless)
    with pytest.raises(AssertionError):
        explore()
