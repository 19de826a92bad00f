"""One collector at a time: a lease on the object `v1/collector`, changed by compare-and-swap alone.

    holder    count 1 ── 2 ── 3 (stopped) ·························· renew: refused, LeaseLostError
    other                        watches 3 ── unchanged for hold_s ── count 4

The holder counts up. Another one takes the lease once it has watched the count stay for as long as the lease says, by
its own monotonic clock; clocks of machines are never compared.

`take` and `renew` are generators that yield what they ask (`store.Steps`), so that a test can run all orders of two
collectors' steps over this very code.

Not here: what is done under the lease (collector).
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Callable

from ca_jax.errors import CaJaxError
from ca_jax.storage.objects.store import Found, ObjectsError, ObjectStore, Read, Steps, Write

LEASE_NAME = "v1/collector"
_FORMAT = 1
_TRIES = 4  # Of one renewal, where answers are lost.
_LOOKS = 4  # At a lease, in the time that it holds: by its holder, and by who watches it.


class LeaseLostError(CaJaxError):
    """Another collector has taken the lease: this one must delete nothing more."""


class LeaseHeldError(CaJaxError):
    """Another collector is at work."""


@dataclasses.dataclass(frozen=True)
class Lease:
    """A lease as its holder has written it."""

    holder: str
    """Names the collector; empty: nobody."""
    count: int
    """Raised by each write."""
    hold_s: float
    """How long it holds without being raised, seconds."""
    generation: bytes = b""
    """Of the object."""

    def to_bytes(self) -> bytes:
        """As an object."""
        fields = {"format": _FORMAT, "holder": self.holder, "count": self.count, "hold_s": self.hold_s}
        return json.dumps(fields).encode()


@dataclasses.dataclass(frozen=True)
class Watched:
    """Another one's lease, as it was first seen in this state."""

    generation: bytes
    hold_s: float
    since_s: float
    """When, by the clock of the one that watches."""


def take(holder: str, hold_s: float, watched: Watched | None, clock: Callable[[], float]) -> Steps[Lease | Watched]:
    """Takes the lease if it is free, or has not been renewed for as long as it holds.

    Args:
      holder: a name that no other collector has.
      watched: what the `take` before this one gave; None: this is the first.
      clock: monotonic, seconds.

    Returns:
      The lease; or, where another one has it, what is to be handed to the next `take`.

    Raises:
      ObjectsError: it is not known who has it.
    """
    found: Found = yield Read(LEASE_NAME)
    now_s, there = clock(), _parsed(found, hold_s)
    if there.holder not in ("", holder):
        if watched is None or watched.generation != found.generation:
            return Watched(found.generation, there.hold_s, now_s)
        if now_s < watched.since_s + watched.hold_s:
            return watched
    lease = Lease(holder, there.count + 1, hold_s)
    try:
        generation = yield Write(LEASE_NAME, lease.to_bytes(), found.generation)
    except ObjectsError:
        generation = None  # It may have been written: then it is found.
    if generation is None:
        found = yield Read(LEASE_NAME)
        if found.value != lease.to_bytes():
            return Watched(found.generation, _parsed(found, hold_s).hold_s, clock())
        generation = found.generation
    return dataclasses.replace(lease, generation=generation)


def renew(lease: Lease) -> Steps[Lease]:
    """Counts up.

    Raises:
      LeaseLostError: another one has taken it, or it is not known who has it.
    """
    after, generation = dataclasses.replace(lease, count=lease.count + 1), lease.generation
    try:
        for _ in range(_TRIES):
            try:
                written = yield Write(LEASE_NAME, after.to_bytes(), generation)
                if written is not None:
                    return dataclasses.replace(after, generation=written)
            except ObjectsError:
                pass  # It may have been written: then it is found.
            found: Found = yield Read(LEASE_NAME)
            if found.value == after.to_bytes():
                return dataclasses.replace(after, generation=found.generation)
            if found.generation != generation:
                raise LeaseLostError(f"{LEASE_NAME} must be held by {lease.holder}, got another collector")
    except ObjectsError as error:
        raise LeaseLostError(f"{LEASE_NAME} must be renewed, and it is not known whether it is: {error}") from error
    raise LeaseLostError(f"{LEASE_NAME} must be renewed within {_TRIES} tries, and was not")


class HeldLease:
    """The lease, while a collection runs: a context manager. `renew` is for its thread, `check` for any.

    Args:
      hold_s: how long it holds without being renewed, seconds.
      clock: monotonic, seconds.
      sleep: waits for so many seconds.

    Raises:
      LeaseHeldError: another collector is at work.
      ObjectsError: it is not known whether one is.
    """

    def __init__(
        self, objects: ObjectStore, hold_s: float, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._objects, self._hold_s, self._clock, self._sleep = objects, hold_s, clock, sleep
        holder, watched = uuid.uuid4().hex, None
        while True:
            began_s = clock()
            found = objects.run(take(holder, hold_s, watched, clock))
            if isinstance(found, Lease):
                break
            if watched is not None and found.generation != watched.generation:
                raise LeaseHeldError(f"{LEASE_NAME} must be free, got a collector that is at work: try again later")
            watched = found
            sleep(watched.hold_s / _LOOKS)
        self._lease, self._until_s = found, began_s + hold_s / 2

    def __enter__(self) -> HeldLease:
        return self

    def __exit__(self, *exc_info: object) -> None:
        free = dataclasses.replace(self._lease, holder="", count=self._lease.count + 1)
        try:
            self._objects.write(LEASE_NAME, free.to_bytes(), replaces=self._lease.generation)
        except ObjectsError:
            return  # The next one waits until it is over.

    def renew(self) -> None:
        """Renews it.

        Raises:
          LeaseLostError: it is another collector's by now.
        """
        began_s = self._clock()
        self._lease = self._objects.run(renew(self._lease))
        self._until_s = began_s + self._hold_s / 2

    def wait(self, seconds: float) -> None:
        """Waits for so many seconds, and keeps the lease.

        Raises:
          LeaseLostError: it is another collector's by now.
        """
        while seconds > 0:
            self.renew()
            self._sleep(min(seconds, self._hold_s / _LOOKS))
            seconds -= self._hold_s / _LOOKS

    def check(self) -> None:
        """Makes sure, without a request, that nobody else can have it yet, nor in a deletion's time.

        Raises:
          LeaseLostError: too long ago was it renewed.
        """
        if self._clock() >= self._until_s:
            raise LeaseLostError(f"{LEASE_NAME} must be renewed every {self._hold_s / 2} s, and was not")


def _parsed(found: Found, hold_s: float) -> Lease:
    """What an object says; of one that says nothing, a lease that somebody holds for as long as is asked for here."""
    if found.value is None:
        return Lease("", 0, hold_s)
    try:
        fields = json.loads(found.value)
        return Lease(str(fields["holder"]), int(fields["count"]), float(fields["hold_s"]))
    except (ValueError, TypeError, KeyError):
        return Lease("?", 0, hold_s)
