"""Many replicas in simulated time: sessions are routed to them, replicas fail, come and go, and share an objects tier.

    router ---> replica 0   DRAM, SSD ---\\
           ---> replica 1   DRAM, SSD ----+--- objects tier
           ---> ...                      /

A turn is routed when it comes: at random, by consistent hashing of the session, or to who holds the session. Routings
are pure functions of a session's name, a `FleetView` and a number that was drawn; they know nothing of time.

Its history is read from the replica's SSD and, where that has less of it, from the objects tier; both are whole in DRAM
before the turn is prefilled, though an engine begins while the last layers of objects come. What neither has is
computed. A turn whose replica fails comes again at once.

Not here: one replica (replica), what the objects tier takes (fleet), tables (launch).
Source: consistent hashing, Karger et al., STOC 1997.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ca_jax.errors import check
from ca_jax.simulate.clock import Clock
from ca_jax.simulate.config import ServerConfig
from ca_jax.simulate.fleet import GB, FleetConfig, FleetCounts, ObjectsTier
from ca_jax.simulate.replica import Job, Kept, Replica
from ca_jax.simulate.workload import Coming, SessionPlan

VIRTUAL_NODES = 100
"""Points of each replica on the ring: the most loaded of many replicas has about a third more of the keys than the
mean. Ray Serve takes as many."""


class HashRing:
    """Points of replicas on a ring; a key belongs to the replica of the first point behind its own. Immutable.

    Args:
      replicas: numbers of the replicas; the same ones give the same ring.

    Raises:
      ValueError: no replica.
    """

    def __init__(self, replicas: Iterable[int]) -> None:
        points = sorted(pair for replica in set(replicas) for pair in _points(replica))
        check(bool(points), "replicas", "at least one", 0)
        self._places = [place for place, _ in points]
        self._replicas = [replica for _, replica in points]

    def owner(self, key: str) -> int:
        """Whose a key is."""
        return self._replicas[self._first(key)]

    def walk(self, key: str) -> Iterator[int]:
        """The replicas of all points from a key on, in the ring's order; each comes several times."""
        first = self._first(key)
        for index in range(len(self._replicas)):  # A slice would copy the ring for the few that are looked at.
            yield self._replicas[(first + index) % len(self._replicas)]

    def _first(self, key: str) -> int:
        return bisect.bisect(self._places, _place(key)) % len(self._places)


def _place(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


@functools.cache
def _points(replica: int) -> tuple[tuple[int, int], ...]:
    return tuple((_place(f"replica {replica} point {point}"), replica) for point in range(VIRTUAL_NODES))


@dataclasses.dataclass(slots=True)
class FleetView:
    """What a router knows of the replicas that take turns."""

    replicas: Sequence[int]
    """Their numbers; at least one."""
    ring: HashRing
    """Of the same replicas."""
    loads: dict[int, int]
    """Turns that each of them has, waiting or running."""


Routing = Callable[[str, FleetView, Mapping[int, int], float], int]
"""Chooses a replica.

Args: the session's name; the fleet; by replica how far it holds the session, higher is more, replicas that take no
turns included; a number in [0, 1) that was drawn for this turn.
"""


def by_chance(session: str, view: FleetView, holders: Mapping[int, int], drawn: float) -> int:
    """Any replica."""
    return view.replicas[int(drawn * len(view.replicas))]


def by_hash(session: str, view: FleetView, holders: Mapping[int, int], drawn: float) -> int:
    """The session's replica on the ring: the same as long as that replica is there."""
    return view.ring.owner(session)


def by_holder(session: str, view: FleetView, holders: Mapping[int, int], drawn: float) -> int:
    """Who holds most of the session; else the replica with the fewest turns; of several, the first on the ring."""
    held = max((far for replica, far in holders.items() if replica in view.loads), default=None)
    if held is not None:
        likely = {replica for replica, far in holders.items() if far == held and replica in view.loads}
    else:
        least = min(view.loads.values(), default=0)
        likely = {replica for replica, load in view.loads.items() if load == least}
    if len(likely) == 1:
        return next(iter(likely))
    return next((replica for replica in view.ring.walk(session) if replica in likely), view.ring.owner(session))


ROUTINGS: Mapping[str, Routing] = {"random": by_chance, "hash": by_hash, "holder": by_holder}
"""By name."""


class Fleet:
    """Serves sessions with many replicas. May be run once.

    Args:
      config: of the fleet.
      server: of each replica, with its store.
      routing: one of `ROUTINGS`.
      seed: of failures, and of what a routing draws.

    Raises:
      ValueError: no number of replicas, or an unknown routing.
    """

    def __init__(self, config: FleetConfig, server: ServerConfig, routing: str, seed: int = 0) -> None:
        check(config.num_replicas is not None, "num_replicas", "at least 1", config.num_replicas)
        check(routing in ROUTINGS, "routing", f"one of {', '.join(ROUTINGS)}", routing)
        self._config, self._server, self._routing = config, server, routing
        self._clock = Clock()
        self._objects = ObjectsTier(config.objects, self._clock)
        self._token_bytes = server.model.token_bytes
        self._failures, self._draws = (np.random.default_rng((seed, which)) for which in (1, 2))
        self._replicas: dict[int, Replica] = {}
        self._numbers = itertools.count()
        self._shared: dict[str, Kept] = {}
        self._seen: set[Kept] = set()  # What several have, once one had it.
        self.counts = FleetCounts()
        """What happened so far."""
        self._view: FleetView
        self._add(config.num_replicas or 0)

    def run(self, sessions: Iterator[Coming], progress: Callable[[float], None] = lambda time_s: None) -> FleetCounts:
        """Serves sessions as long as the config says.

        Args:
          sessions: in order of arrival, without end or not.
          progress: told simulated seconds now and then.
        """
        config, clock = self._config, self._clock
        for time_s, count in config.scale_events:
            clock.at(time_s, functools.partial(self._add if count > 0 else self._drain, abs(count)))
        clock.at(config.warmup_s, self._begin_counting)
        self._expect(sessions)
        for part in range(1, 101):
            clock.run_until(config.duration_s * part / 100)
            progress(clock.now_s)
        now = {number: each.device.busy_s for number, each in self._replicas.items() if not each.has_failed}
        before = self.counts.busy_s
        self.counts.busy_s = {number: busy - before[number] for number, busy in now.items() if number in before}
        return self.counts

    def row(self) -> dict[str, Any]:
        """Everything as one row of JSON, after `run`."""
        elapsed_s = self._config.duration_s - self._config.warmup_s
        return {
            "routing": self._routing,
            **self.counts.row(elapsed_s),
            **self._objects.row(elapsed_s, self.counts.num_tokens),
        }

    # Turns.

    def _expect(self, sessions: Iterator[Coming]) -> None:
        coming = next(sessions, None)
        if coming is not None:
            self._clock.at(coming.arrival_s, functools.partial(self._come, coming, sessions))

    def _come(self, coming: Coming, sessions: Iterator[Coming]) -> None:
        self._expect(sessions)
        plan, shared = coming.plan, None
        if plan.shared_key is not None:
            of_all = SessionPlan(turns=(), shared_tokens=plan.shared_tokens)
            shared = self._shared.setdefault(plan.shared_key, Kept(plan.shared_key, of_all))
        self._ask(Kept(coming.session_id, plan, coming.think_s, shared), self._clock.now_s)

    def _ask(self, kept: Kept, arrived_s: float, is_told: bool = False) -> None:
        """A turn comes: it is routed, and what is stored of its history is on its way to the replica's DRAM."""
        if not self._view.replicas:  # All have failed: it asks again.
            self._clock.at(self._clock.now_s + 1.0, functools.partial(self._ask, kept, arrived_s, is_told))
            return
        number = ROUTINGS[self._routing](kept.name, self._view, kept.copies, float(self._draws.random()))
        replica, counts = self._replicas[number], self.counts
        counts.sessions_moved += kept.last_replica not in (None, number)
        kept.last_replica = number
        turn, shared = kept.plan.turns[kept.turn], kept.shared
        num_shared = turn.shared_tokens
        local, local_of = kept.found_tokens(kept.copies.get(number)), kept
        if shared is not None and number in shared.copies and num_shared > local:
            local, local_of = num_shared, shared
        remote = kept.found_tokens(kept.published)
        if shared is not None and shared.published == 0:
            remote = max(remote, num_shared)
        history = max(turn.history_tokens, num_shared if shared in self._seen else 0)
        from_objects = max(0, remote - local)
        if self._config.objects_write != "none" and local < history:
            self._objects.look()
        tier = "dram" if local_of in replica.dram else "ssd"
        tokens = {tier: local, "objects": from_objects, "recomputed": history - local - from_objects}
        counts.tokens.update(tokens, history=history, new=turn.prompt_tokens - history, answer=turn.answer_tokens)
        if kept.was_lost and tokens["recomputed"]:
            counts.failure_turns += 1
            counts.failure_tokens += tokens["recomputed"]
        job = Job(kept, turn, arrived_s, number, local + from_objects, is_told)
        replica.jobs[job] = None
        self._view.loads[number] = len(replica.jobs)
        for each in filter(None, (kept, shared)):
            replica.touch(each)
        ready_s = now_s = self._clock.now_s
        if tier == "ssd" and local:
            ready_s = replica.ssd_read.move(local * self._token_bytes)
        if from_objects:
            ready_s = max(ready_s, self._objects.read(replica.reads, from_objects * self._token_bytes))
        if ready_s > now_s:
            self._clock.at(ready_s, functools.partial(self._is_ready, job))
        else:
            replica.device.submit(job)

    def _is_ready(self, job: Job) -> None:
        if not job.is_over:
            self._replicas[job.replica].device.submit(job)

    def _first(self, job: Job) -> None:
        if not job.is_told:
            self.counts.ttft_s.append(self._clock.now_s - job.arrived_s)
            job.is_told = True

    def _end(self, job: Job) -> None:
        """An answer has ended: its session is stored, and comes again once its user has thought."""
        kept, replica = job.kept, self._replicas[job.replica]
        job.is_over = True
        del replica.jobs[job]
        if replica.number in self._view.loads:
            self._view.loads[replica.number] = len(replica.jobs)
        self.counts.turns_of[replica.number] += 1
        state, kept.was_lost = kept.turn, False
        if kept.shared is not None:
            self._seen.add(kept.shared)
            replica.keep(kept.shared, 0, kept.plan.shared_tokens * self._token_bytes)
        replica.keep(kept, state, job.turn.stored_tokens * self._token_bytes)
        write = self._config.objects_write
        if write == "turn" or (replica.is_draining and write != "none"):
            self._write(replica, kept)
        elif write == "idle":
            then = functools.partial(self._write_if_idle, replica, kept, state)
            self._clock.at(self._clock.now_s + self._config.objects_idle_s, then)
        if replica.is_draining:
            self._leave_if_done(replica)
        kept.turn += 1
        if kept.turn < len(kept.plan.turns):
            now_s = self._clock.now_s + kept.think_s[kept.turn]
            self._clock.at(now_s, functools.partial(self._ask, kept, now_s))

    # Writing to the objects tier.

    def _write_if_idle(self, replica: Replica, kept: Kept, state: int) -> None:
        if kept.copies.get(replica.number) == state and kept.turn == state + 1 and not replica.has_failed:
            self._write(replica, kept)

    def _write(self, replica: Replica, kept: Kept) -> None:
        """Writes what a replica holds of a session and the objects tier has not, nor is being given."""
        state = kept.copies.get(replica.number, -1)
        for each, its_state in ((kept.shared, 0), (kept, state)):
            if each is None or its_state <= each.offered or replica.number not in each.copies:
                continue
            num_tokens = each.made_tokens(its_state) - each.made_tokens(each.offered)
            each.offered = its_state
            replica.num_writes += 1
            end_s = self._objects.write(replica.writes, num_tokens * self._token_bytes)
            self._clock.at(end_s, functools.partial(self._written, replica, each, its_state))

    def _written(self, replica: Replica, kept: Kept, state: int) -> None:
        replica.num_writes -= 1
        if replica.has_failed:  # Before it was durable.
            kept.offered = max(kept.published, min(kept.offered, state - 1))
        else:
            kept.published = max(kept.published, state)
        if replica.is_draining:
            self._leave_if_done(replica)

    # Replicas.

    def _add(self, count: int) -> None:
        for _ in range(count):
            self._start(next(self._numbers))
        self._see()

    def _start(self, number: int) -> None:
        rate = self._config.network_gb_per_s * GB
        self._replicas[number] = Replica(number, self._clock, self._server, rate, self._first, self._end)
        if self._config.mtbf_hours is not None:
            lives_s = self._failures.exponential(3600 * self._config.mtbf_hours)
            self._clock.at(self._clock.now_s + lives_s, functools.partial(self._fail, self._replicas[number]))

    def _see(self) -> None:
        """Has the router know which replicas take turns."""
        taking = {each.number: len(each.jobs) for each in self._replicas.values() if self._takes(each)}
        ring = HashRing(taking) if taking else self._view.ring
        self._view = FleetView(tuple(taking), ring, taking)

    @staticmethod
    def _takes(replica: Replica) -> bool:
        return not (replica.is_draining or replica.has_failed)

    def _fail(self, replica: Replica) -> None:
        """A replica is gone with all that it held; its turns come again, and it comes back empty."""
        if self._replicas.get(replica.number) is not replica:
            return
        replica.has_failed = True
        self.counts.num_failures += 1
        for kept in replica.held():
            kept.was_lost |= bool(kept.plan.turns) and kept.copies.get(replica.number) == kept.turn - 1
        replica.leave()
        self._see()
        for job in tuple(replica.jobs):
            job.is_over = True
            self.counts.turns_retried += 1
            self._ask(job.kept, job.arrived_s, job.is_told)
        if not replica.is_draining:
            self._clock.at(self._clock.now_s + self._config.restart_s, functools.partial(self._restart, replica.number))

    def _restart(self, number: int) -> None:
        self._start(number)
        self._see()

    def _drain(self, count: int) -> None:
        """The last replicas take no turns any more, and leave when theirs have ended and all is written."""
        leaving = [each for each in self._replicas.values() if self._takes(each)][-count:]
        for replica in leaving:
            replica.is_draining = True
        self._see()
        for replica in leaving:
            if self._config.objects_write != "none":
                for kept in replica.held():
                    if kept.plan.turns and kept.copies.get(replica.number) == kept.turn - 1:
                        self._write(replica, kept)
            self._leave_if_done(replica)

    def _leave_if_done(self, replica: Replica) -> None:
        if not replica.jobs and not replica.num_writes and self._replicas.get(replica.number) is replica:
            replica.leave()
            del self._replicas[replica.number]

    def _begin_counting(self) -> None:
        self.counts = FleetCounts(busy_s={number: each.device.busy_s for number, each in self._replicas.items()})
        self._objects.reset()
