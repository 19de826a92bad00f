"""A server in simulated time: the engine's own scheduler and store, and a device that is busy as long as it would be.

The engine's code decides: `Scheduler`, `AttentionStore` with its placement, prefetching and policy, `num_leaving`.
What takes time is simulated: prefills and decode steps (`ServerConfig.cost`), and links to the host and to the SSD
(`Link`), each shared by all. A prefill is one piece; as in the paper those of all waiting jobs come before decoding,
unless asked otherwise.

A block of the store is a few bytes here and stands for what it would hold. `compare_policies` serves one workload under
several policies.

Not here: what kind of server it is (config), what is asked of it (workload), tables (launch).
Source: CachedAttention (Gao et al., USENIX ATC 2024), section 4.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ca_jax.errors import check
from ca_jax.kv import costs
from ca_jax.overflow.config import num_leaving, oldest_first
from ca_jax.serving.scheduler import Scheduler
from ca_jax.session import Job
from ca_jax.simulate.clock import BeladyPolicy, Clock, Link, SimulatedSsd
from ca_jax.simulate.config import BELADY, ServerConfig, StoreSizes
from ca_jax.simulate.results import PolicyResult, SimCounts, SimPrefill
from ca_jax.simulate.workload import Client, SimSession, SimTurn, num_turns, stored_tokens
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.placement.policy import EVICTION_POLICIES
from ca_jax.storage.records import StoreRuntime
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tickets import LoadTicket, SaveTicket
from ca_jax.turns.requests import SamplingParams
from ca_jax.turns.text import TextOutput

RECOMPUTE = "recompute"
"""No store: every history is computed again."""
POLICIES = (*EVICTION_POLICIES, BELADY)
"""Policies that can be compared."""
_PARAMS = SamplingParams()
_SILENT = TextOutput(None)


@dataclasses.dataclass(slots=True)
class _Asked:
    """A turn that waits or runs."""

    client: Client
    turn_index: int
    arrived_s: float
    is_announced: bool = False
    waited: bool = False  # For its KV, when it could have run.


class Server:
    """Serves sessions in simulated time.

    Args:
      config: of the server.

    Raises:
      ValueError: a tier under one block.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._clock = Clock()
        self._scheduler = Scheduler(config.max_batch_size)
        self._work = self._seconds if config.queue_order == "shortest" else None
        self._asked: dict[Job, _Asked] = {}
        self._clients: dict[str, Client] = {}  # Of sessions that are not over.
        self._load = Link(self._clock, config.link_bytes_per_s)
        self._save = Link(self._clock, config.link_bytes_per_s)
        self._held_tokens = 0.0
        self._num_turns = 0
        self._rng = np.random.default_rng(0)
        self._unsaved: dict[Client, None] = {}  # Who waits for room in the store.
        self._looks_ahead = config.store is not None and config.store.looks_ahead
        self._expires = config.store is not None and config.store.ttl_s is not None
        self._store = None if config.store is None else self._open_store(config.store)
        self.counts = SimCounts()
        """What happened so far."""

    def serve(
        self, sessions: Iterable[SimSession], progress: Callable[[int], None] = lambda num_turns: None
    ) -> SimCounts:
        """Serves all sessions to their end. May be called once.

        Args:
          sessions: in order of arrival.
          progress: told now and then how many turns have begun.
        """
        self._expect(iter(sessions))
        clock, scheduler = self._clock, self._scheduler
        while True:
            clock.run_until(clock.now_s)
            plan = scheduler.schedule(self._ready, self._admits, work=self._work)
            if plan.prefill:
                if plan.decode and not self._config.prefills_block:
                    self._decode(plan.decode, most_steps=1)
                self._prefill(plan.prefill[0])
                if not self._num_turns % 1000:
                    progress(self._num_turns)
            elif plan.decode:
                self._decode(plan.decode)
            elif clock.next_s < math.inf:
                clock.run_until(clock.next_s)
            else:
                break
        self.counts.end_s = clock.now_s
        if not scheduler.idle:
            raise RuntimeError(f"{scheduler.num_waiting} jobs wait for what never comes")
        return self.counts

    # Arrivals.

    def _expect(self, source: Iterator[SimSession]) -> None:
        """Has the next session come when it is due; one at a time, so that a trace is read as it is served."""
        session = next(source, None)
        if session is None:
            return

        def come() -> None:
            self._expect(source)
            client = self._clients[session.session_id] = Client(session)
            self._ask(client, 0)

        self._clock.at(max(session.arrival_s, self._clock.now_s), come)

    def _ask(self, client: Client, turn_index: int) -> None:
        """A turn comes: its job is queued, and the next turn expected if it is known when that comes.

        What it pushes out of a full context leaves at once, as in the engine: it is not kept while the job waits.
        """
        if turn_index == client.num_done and not client.answer_left:
            self._make_room(client, self._num_new(client.session.turns[turn_index]) + 1)
            if client.is_served:
                self._leave_if_saved(client)
        job = Job([], _PARAMS, _SILENT, frozenset())
        self._asked[job] = _Asked(client, turn_index, self._clock.now_s)
        self._scheduler.submit(job)
        if self._looks_ahead:
            self._announce(job)
        turns = client.session.turns
        client.next_arrival_s = None
        if turn_index + 1 < len(turns) and (next_s := turns[turn_index + 1].arrival_s) is not None:
            self._ask_later(client, turn_index + 1, next_s)

    def _ask_later(self, client: Client, turn_index: int, time_s: float) -> None:
        client.next_arrival_s = max(time_s, self._clock.now_s)
        self._clock.at(client.next_arrival_s, functools.partial(self._ask, client, turn_index))

    def _announce(self, job: Job) -> None:
        """Tells the store that a job waits."""
        asked = self._asked[job]
        if self._store is not None and not asked.is_announced:
            asked.is_announced = True
            if self._expires:
                self._store.poll()  # What has expired by now is not waited for.
            self._store.enqueue(job, asked.client.key)
            self._store.poll()

    def _returns_s(self, key: str) -> float:
        """When a session that does not wait comes next, seconds; infinite if never. For policies that know it."""
        client = self._clients.get(key)
        return math.inf if client is None or client.next_arrival_s is None else client.next_arrival_s

    # Contexts.

    def _begin_turn(self, client: Client, turn: SimTurn) -> int:
        """Makes the context that a turn prefills; how many tokens of it are history."""
        num_new = self._num_new(turn)
        if turn.kept_tokens is not None and turn.kept_tokens < client.num_tokens:
            client.keep_first(turn.kept_tokens)
            if self._store is not None:
                self._store.truncate(client.key, turn.kept_tokens)
        self._make_room(client, num_new + 1)
        num_history = client.num_tokens
        client.grow(num_new)
        client.answer_left = turn.answer_tokens
        client.is_served, client.answers, client.gives_up = True, False, False
        return num_history

    def _num_new(self, turn: SimTurn) -> int:
        """Tokens of a turn's message, as far as they fit."""
        return min(turn.user_tokens, self._config.model.window - self._config.overflow.keep_first_tokens - 1)

    def _make_room(self, client: Client, num_wanted: int) -> None:
        """Drops tokens of a context so that some more fit, in the store too, where what was handed in is first."""
        overflow, num_tokens = self._config.overflow, client.num_tokens
        leaving = num_leaving(overflow, window=self._config.model.window, num_tokens=num_tokens, num_wanted=num_wanted)
        if not leaving:
            return
        self._unsaved.pop(client, None)
        self._complete(client, len(client.tickets))  # What was handed in is in the store first.
        mask = oldest_first(num_tokens, leaving, overflow.keep_first_tokens)
        client.keep(~mask)
        client.num_dropped += leaving
        if self._store is not None and overflow.method == "ca":
            client.num_offered -= int(np.count_nonzero(mask[: client.num_offered]))
            self._store.discard(client.key, mask)
        elif self._store is not None:
            client.num_offered = 0
            self._store.drop(client.key)

    # Prefill.

    def _ready(self, job: Job, is_next: bool) -> bool:
        asked = self._asked[job]
        if asked.client.is_served or asked.turn_index != asked.client.num_done:
            return False
        if self._store is None:
            return True
        if is_next:
            self._announce(job)
        if not asked.is_announced:
            return False
        is_ready = self._store.ready(asked.client.key, is_next)
        asked.waited |= is_next and not is_ready
        return is_ready

    def _seconds(self, job: Job) -> float:
        """What a job takes up to its first token, with what is stored now."""
        asked, config = self._asked[job], self._config
        client, turn = asked.client, asked.client.session.turns[asked.turn_index]
        num_cached = 0 if self._store is None else min(self._store.num_readable(client.key), client.num_tokens)
        compute_s = config.cost.prefill_s(num_cached, client.num_tokens - num_cached + self._num_new(turn))
        return max(compute_s, num_cached * config.model.token_bytes / config.link_bytes_per_s)

    def _admits(self, job: Job) -> bool:
        client = self._asked[job].client
        if not self._held_tokens or client.turn is None:
            return True
        num_tokens = client.num_tokens + client.turn.user_tokens + client.turn.answer_tokens
        return self._held_tokens + min(num_tokens, self._config.model.window) <= self._config.hbm_tokens

    def _prefill(self, job: Job) -> None:
        asked, config, clock = self._asked[job], self._config, self._clock
        client = asked.client
        client.is_counted = self._num_turns >= config.warmup_turns
        self._num_turns += 1
        if client.is_counted and not self.counts.num_turns:
            self.counts.begin_s = clock.now_s
        num_history = self._begin_turn(client, client.session.turns[asked.turn_index])
        self._held_tokens += self._most_tokens(client)
        num_tokens, ticket = client.num_tokens, self._begin_load(job, client)
        num_cached = client.num_offered = 0 if ticket is None else ticket.num_tokens
        compute_s = config.cost.prefill_s(num_cached, num_tokens - num_cached)
        taken_s = self._with_load_s(num_cached, compute_s, asked.arrived_s) if num_cached else compute_s
        clock.run_until(clock.now_s + taken_s)
        if self._store is not None and ticket is not None:
            self._store.complete_load(ticket)
        self._scheduler.prefilled(job)
        if client.is_counted:
            self.counts.prefills.append(
                SimPrefill(
                    prompt_tokens=num_tokens,
                    history_tokens=num_history,
                    cached_tokens=num_cached,
                    waited=asked.waited,
                    prefill_s=taken_s,
                    stall_s=taken_s - compute_s,
                    ttft_s=clock.now_s - asked.arrived_s,
                )
            )
        self._offer(client)
        self._append(client, 1)
        if not client.answer_left:
            self._finish(job)

    def _begin_load(self, job: Job, client: Client) -> LoadTicket | None:
        """Opens the load of what is stored of a context; its last token is computed in any case."""
        if self._store is None:
            return None
        ticket = None
        self._store.pin(client.key)
        if client.num_tokens > 1:
            ticket = self._store.prepare_load(
                client.key, client.token_ids[:-1], truncate=True, num_dropped=client.num_dropped
            )
        self._store.dequeue(job)
        return ticket

    def _with_load_s(self, num_cached: int, compute_s: float, arrived_s: float) -> float:
        """Seconds of a prefill whose layers are loaded ahead of their compute, from when the job came on."""
        num_layers, num_bytes = self._config.model.num_layers, num_cached * self._config.model.token_bytes
        load_s = num_bytes / self._config.link_bytes_per_s
        head_start_s = self._clock.now_s - max(self._load.free_s, arrived_s)
        self._load.move(num_bytes)
        return costs.pipeline_s(load_s / num_layers, compute_s / num_layers, num_layers, num_layers, head_start_s)

    def _most_tokens(self, client: Client) -> int:
        """Most tokens that the context of a session that runs comes to."""
        return min(client.num_tokens + client.answer_left, self._config.model.window)

    # Decoding.

    def _decode(self, jobs: tuple[Job, ...], most_steps: int | None = None) -> None:
        """Decodes until a job ends or is full, or something happens that may let another in; so many steps at most."""
        window, clock = self._config.model.window, self._clock
        clients = [self._asked[job].client for job in jobs]
        num_steps = min(min(each.answer_left, max(window - each.num_tokens, 1)) for each in clients)
        context = sum(each.num_tokens for each in clients)
        num_steps = num_steps if most_steps is None else min(num_steps, most_steps)
        step_s = self._config.cost.decode_s(len(jobs), context)
        if len(jobs) < self._config.max_batch_size and clock.next_s < math.inf:
            num_steps = max(1, min(num_steps, math.ceil((clock.next_s - clock.now_s) / step_s)))
        step_s = self._config.cost.decode_s(len(jobs), context + len(jobs) * num_steps // 2)
        clock.run_until(clock.now_s + num_steps * step_s)
        for job, client in zip(jobs, clients, strict=True):
            if client.is_counted:
                self.counts.decode_s += num_steps * step_s / len(jobs)
                self.counts.output_tokens += num_steps
            self._append(client, num_steps)
            if not client.answer_left:
                self._finish(job)

    def _append(self, client: Client, num_tokens: int) -> None:
        """Puts generated tokens behind a context; where that is full then and goes on, some leave."""
        client.grow(num_tokens)
        client.answers = True
        client.answer_left -= num_tokens
        if client.answer_left and client.num_tokens >= self._config.model.window:
            if self._store is not None and self._config.overflow.method == "ca":
                self._offer(client)
            self._make_room(client, 1)
            if self._store is None or self._config.overflow.method != "ca":  # What is left is computed anew.
                taken_s = self._config.cost.prefill_s(0, client.num_tokens)
                self._clock.run_until(self._clock.now_s + taken_s)
                self.counts.overflow_s += taken_s * client.is_counted

    def _finish(self, job: Job) -> None:
        client = self._asked.pop(job).client
        self._scheduler.remove(job)
        self._held_tokens = sum(self._most_tokens(self._asked[other].client) for other in self._scheduler.running)
        client.num_done += 1
        if client.turn is not None and client.turn.arrival_s is None:
            self._ask_later(client, client.num_done, self._clock.now_s + client.turn.think_s)
        self._offer(client)
        self._say_when(client)
        self._leave_if_saved(client)

    def _say_when(self, client: Client) -> None:
        """Tells the store when a session's next turn will come, about, if its client says so."""
        if self._store is None or self._config.resume_error is None or client.next_arrival_s is None:
            return
        error = math.exp(self._config.resume_error * self._rng.standard_normal())
        self._store.expect_back(client.key, max(client.next_arrival_s - self._clock.now_s, 0) * error)

    def _leave_if_saved(self, client: Client) -> None:
        """Once what a turn computed is stored, or never will be, its session may be served again."""
        if client.answer_left or client.tickets or client in self._unsaved:
            return
        client.is_served = False
        if client.turn is None:
            del self._clients[client.key]
        if self._store is not None:
            self._store.unpin(client.key)
            self._store.poll()

    # Saving.

    def _offer(self, client: Client) -> None:
        """Hands what is computed of a context, and not in the store, to it."""
        self._unsaved.pop(client, None)
        if self._store is None or client.gives_up or client.num_offered >= client.num_computed:
            return
        key, new_ids = client.key, client.token_ids[client.num_offered : client.num_computed]
        if self._store.room_is_coming(key, len(new_ids)):
            self._unsaved[client] = None
            return
        ticket = self._store.prepare_save(key, client.num_offered, new_ids, num_dropped=client.num_dropped)
        if ticket is None:
            client.gives_up = True
            return
        client.num_offered += len(new_ids)
        client.tickets.append(ticket)
        num_bytes = len(new_ids) * self._config.model.token_bytes
        if client.is_counted:
            self.counts.saved_bytes += num_bytes
        self._save.move(num_bytes, functools.partial(self._saved, client, ticket))

    def _saved(self, client: Client, ticket: SaveTicket) -> None:
        if ticket in client.tickets:
            self._complete(client, 1)
            self._leave_if_saved(client)

    def _complete(self, client: Client, num_saves: int) -> None:
        """Publishes the first saves of a session that are open."""
        for ticket in client.tickets[:num_saves]:
            ticket.mark_written()
            if self._store is not None:
                self._store.complete_save(ticket)
        del client.tickets[:num_saves]

    def _progressed(self) -> None:
        """Something has moved between the tiers: who waits for room may have it."""
        if self._store is None:
            return
        self._store.poll()
        for client in tuple(self._unsaved):
            self._offer(client)
            if client in self._unsaved:
                break
            self._leave_if_saved(client)

    def _open_store(self, sizes: StoreSizes) -> AttentionStore:
        layout = KVLayout.uniform(
            num_layers=1, num_kv_heads=1, head_dim=1, dtype="float16", block_tokens=sizes.block_tokens
        )
        block_bytes = self._config.model.token_bytes * sizes.block_tokens
        num_blocks = int(sizes.dram_bytes // block_bytes)
        if num_blocks < 1:
            raise ValueError(f"dram_bytes must be at least a block of {block_bytes} bytes, got {sizes.dram_bytes:g}")
        is_belady = sizes.eviction_policy == BELADY
        config = StoreConfig(
            dram_gib=num_blocks * layout.block_bytes / GIB,
            block_tokens=sizes.block_tokens,
            ttl_s=sizes.ttl_s,
            eviction_policy=StoreConfig.eviction_policy if is_belady else sizes.eviction_policy,
        )
        links = (Link(self._clock, each) for each in (sizes.ssd_read_bytes_per_s, sizes.ssd_write_bytes_per_s))
        ssd = SimulatedSsd(layout, block_bytes, int(sizes.ssd_bytes // block_bytes), *links)
        return AttentionStore(
            layout,
            config,
            BeladyPolicy(self._returns_s) if is_belady else None,
            runtime=StoreRuntime(clock=lambda: self._clock.now_s, on_progress=self._progressed),
            open_ssd=ssd.open if sizes.ssd_bytes else None,
        )


def compare_policies(
    config: ServerConfig,
    store: StoreSizes,
    policies: Sequence[str],
    sessions: Sequence[SimSession],
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> list[PolicyResult]:
    """Serves the same sessions without a store, and with one under each policy.

    Args:
      config: of the server; its store is not looked at.
      store: how large, for all policies.
      policies: of `POLICIES`.
      sessions: in order of arrival.
      progress: told a policy, its turns begun, and all of them.

    Returns:
      Recomputing first, then the policies as given.

    Raises:
      ValueError: an unknown policy, no session, or a store that the largest session does not fit in.
    """
    for policy in policies:
        check(policy in POLICIES, "policy", f"one of {', '.join(POLICIES)}", policy)
    check(len(sessions) > 0, "sessions", "at least one session", len(sessions))
    check_capacity(config, store, sessions)
    total = num_turns(sessions)
    results: list[PolicyResult] = []
    for policy in (RECOMPUTE, *policies):
        sizes = dataclasses.replace(store, eviction_policy=policy) if policy != RECOMPUTE else None

        def begun(done: int, policy: str = policy) -> None:
            progress(policy, done, total)

        counts = Server(dataclasses.replace(config, store=sizes)).serve(sessions, begun)
        begun(total)
        baseline_s = (results[0].counts if results else counts).prefill_s
        saved = 1 - counts.prefill_s / baseline_s if baseline_s else 0.0
        results.append(PolicyResult(policy=policy, counts=counts, prefill_saved=saved))
    return results


def check_capacity(config: ServerConfig, store: StoreSizes, sessions: Sequence[SimSession]) -> None:
    """Raises ValueError unless the largest session fits in DRAM, through which all KV goes."""
    largest = max(sessions, key=stored_tokens)
    num_tokens = min(stored_tokens(largest), config.model.window)
    wanted = num_tokens * config.model.token_bytes
    if store.dram_bytes < wanted:
        raise ValueError(
            f"dram_bytes must be at least {wanted / 1e9:.3g} GB, the {num_tokens} tokens of session "
            f"{largest.session_id!r}; got {store.dram_bytes / 1e9:.3g} GB"
        )


def working_set_bytes(config: ServerConfig, sessions: Sequence[SimSession]) -> float:
    """Returns the bytes of KV of all sessions, each at its largest."""
    window = config.model.window
    return sum(min(stored_tokens(session), window) for session in sessions) * config.model.token_bytes
