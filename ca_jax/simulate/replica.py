"""One simulated replica of many: which sessions its tiers hold, and a device that is busy as long as it would be.

Not the books of `AttentionStore`, which the simulation of one server runs: those keep the ids of every token and a
region for every block, some 0.5 MB for a session of 128K tokens, and take 1 ms a turn. With 1,000 replicas that is
more memory than a machine has, and an hour for 3 million turns. Here a tier is a list of whole sessions in order of
their last use, the policy `lru` of the store; a test holds both against each other on one replica.

Not here: which replica serves a turn, what fails, what is written to objects (replicas).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
from collections.abc import Callable, Iterator

from ca_jax.kv.costs import pipeline_s
from ca_jax.simulate.clock import Clock, Link
from ca_jax.simulate.config import ServerConfig
from ca_jax.simulate.workload import PlannedTurn, SessionPlan

_ALMOST = 1e-6  # Of a decode step.


@dataclasses.dataclass(eq=False, slots=True)
class Kept:
    """A session that comes, or tokens that several have, and who holds which state of it."""

    name: str
    plan: SessionPlan
    """Without turns: tokens that several sessions have, of which there is one state, 0."""
    think_s: tuple[float, ...] = ()
    shared: Kept | None = None
    """The tokens that its prompts begin with, and that others have."""
    turn: int = 0
    """The next one, or the one that is served."""
    copies: dict[int, int] = dataclasses.field(default_factory=dict)
    """By replica: the turn whose state it holds."""
    published: int = -1
    """The turn whose state is in the objects tier; -1 for none."""
    offered: int = -1
    """The same, or on its way there."""
    last_replica: int | None = None
    was_lost: bool = False
    """Whether a failure took the latest state of it."""

    def found_tokens(self, state: int | None) -> int:
        """How many tokens of the next turn's history a state has."""
        return 0 if state is None or state < 0 else self.plan.turns[self.turn].found_tokens[state]

    def made_tokens(self, state: int) -> int:
        """How many tokens were ever stored of it by a state; -1 for none."""
        if state < 0:
            return 0
        return self.plan.turns[state].made_tokens if self.plan.turns else self.plan.shared_tokens


@dataclasses.dataclass(eq=False, slots=True)
class Job:
    """A turn at a replica."""

    kept: Kept
    turn: PlannedTurn
    arrived_s: float
    replica: int
    cached_tokens: int = 0
    """Of its history, those that are loaded and not computed."""
    is_told: bool = False
    """Whether its first token was."""
    is_over: bool = False
    """Whether it has ended, or its replica has failed."""


class Tier:
    """What a tier holds, the least recently used first.

    Args:
      capacity_bytes: of it; what is larger is not held.
    """

    def __init__(self, capacity_bytes: float) -> None:
        self._capacity_bytes = capacity_bytes
        self._held: collections.OrderedDict[Kept, float] = collections.OrderedDict()
        self.held_bytes = 0.0
        """Of all that is held."""

    def __contains__(self, kept: Kept) -> bool:
        return kept in self._held

    def __iter__(self) -> Iterator[Kept]:
        return iter(self._held)

    def touch(self, kept: Kept) -> None:
        """It is used; nothing happens if it is not held."""
        if kept in self._held:
            self._held.move_to_end(kept)

    def put(self, kept: Kept, num_bytes: float) -> list[Kept]:
        """Holds it, as large as it is now; returns what had to go, itself perhaps."""
        self.held_bytes += num_bytes - self._held.pop(kept, 0.0)
        self._held[kept] = num_bytes
        gone = []
        while self.held_bytes > self._capacity_bytes:
            other, size = self._held.popitem(last=num_bytes > self._capacity_bytes)
            self.held_bytes -= size
            gone.append(other)
        return gone


class Device:
    """Prefills jobs one after the other, and decodes all that are prefilled while none can be, as `Server` does.

    Between two events all running jobs decode alike, so that only the ends of answers are events.

    Args:
      clock: of the simulation.
      config: of the server; its store is not looked at.
      on_first: told when a job has its first token.
      on_end: told when its answer has ended.
    """

    def __init__(
        self, clock: Clock, config: ServerConfig, on_first: Callable[[Job], None], on_end: Callable[[Job], None]
    ) -> None:
        self._clock, self._config = clock, config
        self._on_first, self._on_end = on_first, on_end
        self._waiting: collections.deque[Job] = collections.deque()
        self._running: list[tuple[float, int, Job]] = []  # A heap by the step that an answer ends at.
        self._held_tokens = self._context_tokens = 0.0
        self._steps = 0.0  # Decoded so far.
        self._since_s: float | None = None  # Decoding from then on, each step in:
        self._step_s = 0.0
        self._version = self._num_begun = 0
        self._prefills = False
        self.busy_s = 0.0
        """Seconds that it computed, or waited for layers."""

    def submit(self, job: Job) -> None:
        """A job whose KV is in DRAM."""
        self._waiting.append(job)
        if not self._prefills:
            self._go_on()

    def stop(self) -> None:
        """Computes nothing any more."""
        self._waiting.clear()
        self._version += 1
        self._prefills = True

    def _go_on(self) -> None:
        self._decode_until_now()
        self._version += 1
        if self._waiting and self._has_room(self._waiting[0]):
            job = self._waiting.popleft()
            taken_s = self._prefill_s(job)
            self._prefills = True
            self.busy_s += taken_s
            self._held_tokens += job.turn.prompt_tokens + job.turn.answer_tokens
            then = functools.partial(self._prefilled, job, self._version)
            self._clock.at(self._clock.now_s + taken_s, then)
        elif self._running:
            self._since_s = self._clock.now_s
            self._step_s = self._config.cost.decode_s(len(self._running), int(self._context_tokens))
            wanted = max(0.0, self._running[0][0] - self._steps)
            then = functools.partial(self._decoded, self._version)
            self._clock.at(self._clock.now_s + wanted * self._step_s, then)

    def _has_room(self, job: Job) -> bool:
        wanted = job.turn.prompt_tokens + job.turn.answer_tokens
        is_free = len(self._running) < self._config.max_batch_size
        return not self._running or (is_free and self._held_tokens + wanted <= self._config.hbm_tokens)

    def _prefill_s(self, job: Job) -> float:
        """Seconds of a prefill whose layers are loaded from DRAM ahead of their compute."""
        model, cached = self._config.model, job.cached_tokens
        compute_s = self._config.cost.prefill_s(cached, job.turn.prompt_tokens - cached)
        if not cached:
            return compute_s
        num_layers, load_s = model.num_layers, cached * model.token_bytes / self._config.link_bytes_per_s
        head_start_s = max(0.0, self._clock.now_s - job.arrived_s)
        return pipeline_s(load_s / num_layers, compute_s / num_layers, num_layers, num_layers, head_start_s)

    def _prefilled(self, job: Job, version: int) -> None:
        if version != self._version:
            return
        self._prefills = False
        self._on_first(job)
        self._context_tokens += job.turn.prompt_tokens
        self._num_begun += 1
        heapq.heappush(self._running, (self._steps + job.turn.answer_tokens - 1, self._num_begun, job))
        self._end_answers()
        self._go_on()

    def _decoded(self, version: int) -> None:
        if version == self._version:
            self._decode_until_now()
            self._end_answers()
            self._go_on()

    def _decode_until_now(self) -> None:
        if self._since_s is None:
            return
        taken_s = self._clock.now_s - self._since_s
        num_steps = taken_s / self._step_s if self._step_s else 0.0
        self._steps += num_steps
        self._context_tokens += num_steps * len(self._running)
        self.busy_s += taken_s
        self._since_s = None

    def _end_answers(self) -> None:
        while self._running and self._running[0][0] <= self._steps + _ALMOST:
            _, _, job = heapq.heappop(self._running)
            self._held_tokens -= job.turn.prompt_tokens + job.turn.answer_tokens
            self._context_tokens -= job.turn.prompt_tokens + job.turn.answer_tokens - 1
            self._on_end(job)


class Replica:
    """A replica: its tiers, links and device.

    Args:
      number: its name.
      clock: of the simulation.
      config: of the server, with a store: as large as it says.
      network_bytes_per_s: to the objects tier, each way.
      on_first: as of `Device`.
      on_end: as of `Device`.
    """

    def __init__(
        self,
        number: int,
        clock: Clock,
        config: ServerConfig,
        network_bytes_per_s: float,
        on_first: Callable[[Job], None],
        on_end: Callable[[Job], None],
    ) -> None:
        store = config.store
        if store is None:
            raise ValueError("config must have a store, got None")
        self.number = number
        self.device = Device(clock, config, on_first, on_end)
        self.dram, self.ssd = Tier(store.dram_bytes), Tier(store.ssd_bytes)
        self.ssd_read = Link(clock, store.ssd_read_bytes_per_s)
        self.reads, self.writes = Link(clock, network_bytes_per_s), Link(clock, network_bytes_per_s)
        self.jobs: dict[Job, None] = {}
        """Turns that it has, waiting or running."""
        self.num_writes = 0
        """Objects on their way out."""
        self.is_draining = self.has_failed = False

    def keep(self, kept: Kept, state: int, num_bytes: float) -> None:
        """Holds a state in DRAM and, flushed after each turn as the engine does, on SSD."""
        kept.copies[self.number] = state
        gone = (*self.dram.put(kept, num_bytes), *self.ssd.put(kept, num_bytes))
        for other in gone:
            if other not in self.dram and other not in self.ssd:
                other.copies.pop(self.number, None)

    def touch(self, kept: Kept) -> None:
        """A session is used."""
        self.dram.touch(kept)
        self.ssd.touch(kept)

    def held(self) -> list[Kept]:
        """All that a tier of it holds, the most recently used first."""
        return list(dict.fromkeys((*reversed(list(self.dram)), *reversed(list(self.ssd)))))

    def leave(self) -> None:
        """Is gone, with all that it held."""
        self.device.stop()
        for kept in self.held():
            kept.copies.pop(self.number, None)
