"""What bookkeeping costs with many sessions and jobs, and what its choices are worth. No model is needed.

Choices, searches for a prefix, how long a store takes to open, the host's work for a turn, and hits in a loop.

Not here: the host's work for a turn (`host_turns`), tests of the same choices.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks import harness
from benchmarks.disk import can_drop, drop_cached, scratch_directory
from benchmarks.harness import BenchError, Run, Spread
from benchmarks.host_turns import TurnRow, measure_turns
from benchmarks.loop_workload import hits_of_one_tier, loop_trace
from ca_jax.storage.catalog.catalog import Catalog
from ca_jax.storage.catalog.file import CATALOG_NAME, CatalogError
from ca_jax.storage.catalog.records import Namespace, SessionRecord
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.placement.blocks import ChargedBlocks
from ca_jax.storage.placement.orders import LookAhead
from ca_jax.storage.placement.policy import (
    EVICTION_POLICIES,
    EvictionPolicy,
    ReturnAwarePolicy,
    Room,
    look_ahead_window,
    make_policy,
)
from ca_jax.storage.placement.returns import ReturnTimes
from ca_jax.storage.records import Owner
from ca_jax.storage.sessions import Entry, SessionIndex
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tokens import SsdCopy, TokenPlaces, prefix_hashes

_DRAM_SHARE = 10  # One of so many sessions is in DRAM too.
_MAX_BLOCKS = 31  # Of a session; sizes are even between 1 and this: 2,000 tokens on average.
_MAX_FETCHES = 8  # Of a plan.
_PARTS = ("queue", "lookup", "plan", "victims")

# The smallest blocks there are: of the start-up only the catalog is real, and its size does not depend on them.
_LAYOUT = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float16", block_tokens=128)
_STORED_BLOCK_BYTES = 4096
_BLOCKS_URL = "memory://benchmark"  # There are none, and no room on the disk is wanted for them.
_WEIGHTS = "benchmark"
_BATCH_SESSIONS = 1000
_VOCAB_SIZE = 49_152
_SHARED = np.arange(4 * _LAYOUT.block_tokens, dtype=np.int32)  # All sessions begin with as much of it as they have.
_PROMPT_TOKENS = 16 * _LAYOUT.block_tokens  # Of a new conversation.

_LOOP_ROUNDS = 8
_OVER_CAPACITY = 0.05
_QUEUE_DEPTHS = (0.1, 0.25, 0.5, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyBenchConfig(harness.Config):
    """What bookkeeping costs with many sessions, and what the choices are worth."""

    shares: ClassVar = frozenset({"queue_depth"})

    num_sessions: int = 100_000
    """Sessions stored, when choices are timed and in the catalog of the start-up."""
    num_jobs: int = 10_000
    """Jobs that wait when choices are timed."""
    num_steps: int = 2000
    """Choices timed for each eviction policy, and searches for a prefix: what the percentiles are of."""
    loop_sessions: int = 1000
    """Sessions of the loop: revisited in the same order, 5 % over capacity."""
    queue_depth: float = 0.5
    """Jobs that wait in the loop, as a share of its sessions, for the summary; other depths have rows too."""
    ssd_dir: str | None = None
    """Directory on the disk to measure; by default where temporary files are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        harness.require(self.queue_depth > 0, "queue_depth", "a share above 0", self.queue_depth)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecisionRow:
    """One step of the bookkeeping: a job leaves the queue's head, one joins its tail, lookup, plan, victims."""

    measured: str = "decision"
    policy: str
    """Of eviction."""
    num_sessions: int
    """Stored, a tenth of them in DRAM too."""
    num_jobs: int
    """Waiting."""
    p50_ms: float
    p99_ms: float
    """Of a hundred steps one is slower."""
    max_ms: float
    fetches_per_plan: float
    """Mean of the steps: how much there was to plan."""
    p50_ms_of: dict[str, float]
    """Medians of the parts: `queue` (leave and join), `lookup` (of both sessions, as uses), `plan` (as many fetches as
    it may have, with room made for each), `victims` (room for a session, in DRAM and on SSD)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartupRow:
    """A store that opens what an earlier process left: until sessions, free lists and orders are ready."""

    measured: str = "startup"
    num_sessions: int
    num_blocks: int
    catalog_bytes: int
    startup_s: float
    """With the catalog in the page cache, as after a restart of the process."""
    cold_startup_s: float | None
    """With an empty page cache, as after a restart of the machine; None where it cannot be emptied."""
    store_bytes: int | None
    """How much larger the process is with the store open, but for freed memory that it had; None where that is not
    told."""
    spread: Spread


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixRow:
    """A new conversation that looks for the session on SSD that it begins like: all of them share a prompt."""

    measured: str = "prefix"
    num_sessions: int
    """On SSD."""
    shared_tokens: int
    """Of the prompt that they begin with."""
    prompt_tokens: int
    """Of the new conversation, the shared ones first."""
    p50_ms: float
    """Median of the searches, before each of which a session was used."""
    p99_ms: float
    """Of a hundred searches one is slower."""
    max_ms: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopRow:
    """Sessions of equal size revisited in the same order, more than there is room for."""

    measured: str = "loop"
    policy: str
    """Of eviction; `belady` knows the future."""
    num_sessions: int
    over_capacity: float
    """By how much they exceed the room, as a share of it."""
    queue_depth: float | None
    """Jobs that wait, as a share of the sessions; None where the queue is not looked at."""
    hit_rate: float
    """Of the jobs behind the first round, in which nobody can hit."""
    vs_belady: float


PolicyRow = DecisionRow | StartupRow | PrefixRow | TurnRow | LoopRow


def summarize(rows: Sequence[PolicyRow]) -> dict[str, Any]:
    """What a step of the bookkeeping, a start-up and a turn's host work cost, and what scheduler-aware choice is worth.

    `p50_ms`, `p99_ms`, `startup_100k_s`, `prefix_p99_ms` and `loop_vs_belady` at the queue depth that was asked for
    (the one that LRU has a row of), `loop_lru`, `turn_100k_ms`. Keys are named for the default sizes; rows have those
    that were measured.
    """
    (decision,) = [row for row in rows if isinstance(row, DecisionRow) and row.policy == "scheduler_aware"]
    (startup,) = [row for row in rows if isinstance(row, StartupRow)]
    (prefix,) = [row for row in rows if isinstance(row, PrefixRow)]
    loop = {(row.policy, row.queue_depth): row for row in rows if isinstance(row, LoopRow)}
    (lru,) = [row for row in loop.values() if row.policy == "lru"]
    longest = max((row for row in rows if isinstance(row, TurnRow)), key=lambda row: row.history_tokens)
    return {
        "p50_ms": decision.p50_ms,
        "p99_ms": decision.p99_ms,
        "startup_100k_s": startup.startup_s,
        "startup_100k_cold_s": startup.cold_startup_s,
        "prefix_p99_ms": prefix.p99_ms,
        "loop_vs_belady": loop["scheduler_aware", lru.queue_depth].vs_belady,
        "loop_lru": lru.hit_rate,
        "turn_100k_ms": longest.total_ms,
    }


@harness.suite(PolicyBenchConfig, summary=summarize)
def policy(run: Run[PolicyBenchConfig]) -> Iterator[PolicyRow]:
    """What the store's bookkeeping costs with many sessions, and what its choices are worth."""
    config = run.config
    with scratch_directory(config.ssd_dir) as directory:  # First: memory is measured.
        try:
            yield from _measure_startup(run, directory)
            yield from measure_turns(config.repeats, config.seed, directory)
        except (OSError, ValueError, CatalogError) as error:
            raise BenchError(f"no start-up of {config.num_sessions} sessions in {directory.parent}: {error}") from error
    for name in harness.ticked(run.progress, "decisions", EVICTION_POLICIES):
        yield _measure_decisions(config, name)
    yield from _measure_loop(run)


def _measure_decisions(config: PolicyBenchConfig, name: str) -> DecisionRow:
    """Times steps of the bookkeeping.

    Plans are not carried out: every step plans for a DRAM that lacks the next jobs' sessions, the dearest there is.
    """
    rng = np.random.default_rng(config.seed)
    books = _Books(config, make_policy(name), rng)
    for _ in range(min(config.num_steps, 100)):  # For nothing.
        books.step()
    fetches_before = books.num_planned
    samples = np.array([books.step() for _ in range(config.num_steps)]) * 1e3
    return DecisionRow(
        policy=name,
        num_sessions=config.num_sessions,
        num_jobs=config.num_jobs,
        **harness.percentiles("p{}_ms", samples.sum(axis=1), 50, 99),
        max_ms=float(samples.sum(axis=1).max()),
        fetches_per_plan=(books.num_planned - fetches_before) / config.num_steps,
        p50_ms_of=dict(zip(_PARTS, np.percentile(samples, 50, axis=0).tolist(), strict=True)),
    )


class _Books:
    """The books of a store without bytes: sessions on SSD, a part of them in DRAM, and a queue of jobs."""

    def __init__(self, config: PolicyBenchConfig, policy: EvictionPolicy, rng: np.random.Generator) -> None:
        self.num_planned = 0
        self._look_ahead = LookAhead()
        sizes = rng.integers(1, _MAX_BLOCKS, size=config.num_sessions, endpoint=True)
        in_dram = rng.permutation(config.num_sessions) % _DRAM_SHARE == 0
        dram_blocks = int(sizes[in_dram].sum())
        self._mean_blocks = float(sizes.mean())
        self._window_jobs = look_ahead_window(dram_blocks, self._mean_blocks)
        returns = ReturnTimes(time.monotonic) if isinstance(policy, ReturnAwarePolicy) else None
        self._table = SessionIndex(self._look_ahead, dram_blocks, _LAYOUT.block_tokens, time.monotonic, returns)
        for i, (size, stays) in enumerate(zip(sizes.tolist(), in_dram.tolist(), strict=True)):
            self._table.add(_make_entry(i, size, stays))

        def table_of(key: str) -> Sequence[int]:
            entry = self._table.get(key)
            return () if entry is None or entry.ssd is None else range(entry.ssd.num_blocks)

        blocks = ChargedBlocks(0)  # None of them is shared.
        views = self._table.in_dram.view, self._table.on_ssd.view
        self._rooms = [Room(policy, blocks, view, table_of, time.monotonic) for view in views]
        self._keys: Iterator[str] = (f"s{i}" for i in iter(lambda: int(rng.integers(config.num_sessions)), -1))
        self._jobs: collections.deque[tuple[int, str]] = collections.deque()
        self._job_ids = itertools.count()
        for _ in range(config.num_jobs):
            self._join(next(self._keys))

    def step(self) -> tuple[float, ...]:
        """A job leaves the queue's head, another joins its tail, and placement decides; seconds of each part."""
        new_key = next(self._keys)
        started_s = time.perf_counter()
        job, key = self._jobs.popleft()
        self._look_ahead.remove(job)
        self._join(new_key)
        queued_s = time.perf_counter()
        for each in (key, new_key):
            entry = self._table.get(each)
            if entry is None:
                raise BenchError(f"session {each!r} must be stored, got none")
            self._table.use(entry, queued_s)
        found_s = time.perf_counter()
        fetch, _ = self._rooms[0].plan_fetches(self._table.to_fetch.view(), self._window_jobs, _MAX_FETCHES)
        planned_s = time.perf_counter()
        for room in self._rooms:
            room.choose(round(self._mean_blocks))
        chosen_s = time.perf_counter()
        self.num_planned += len(fetch)
        return queued_s - started_s, found_s - queued_s, planned_s - found_s, chosen_s - planned_s

    def _join(self, key: str) -> None:
        job = next(self._job_ids)
        self._jobs.append((job, key))
        self._look_ahead.append(job, key)


def _make_entry(i: int, num_blocks: int, in_dram: bool) -> Entry:
    num_tokens = num_blocks * _LAYOUT.block_tokens
    entry = Entry(key=f"s{i}", owner=Owner(session_id=f"s{i}"), created_s=float(i), last_used_s=float(i))
    entry.ssd = SsdCopy(places=TokenPlaces.dense(num_tokens), block_ids=np.arange(num_blocks))
    if in_dram:
        entry.token_ids = np.zeros(num_tokens, np.int32)
        entry.block_ids = list(range(num_blocks))
    return entry


def _measure_startup(run: Run[PolicyBenchConfig], directory: Path) -> Iterator[PolicyRow]:
    """Opens a store on a catalog of many sessions with a clock.

    The first time is for nothing (files are made then) but what the store takes and how it finds prefixes.
    """
    config = run.config
    num_held, num_blocks = _write_catalog(run, directory)
    catalog = directory / CATALOG_NAME
    store_config = StoreConfig(
        dram_gib=_MAX_BLOCKS * _LAYOUT.block_bytes / GIB,
        block_tokens=_LAYOUT.block_tokens,
        ssd_dir=str(directory),
        ssd_gib=(num_blocks + 1) * _STORED_BLOCK_BYTES / GIB,
        ssd_url=_BLOCKS_URL,
    )

    prefixes: list[PrefixRow] = []

    def open_store() -> float:
        gc.collect()  # A process that has just started holds nothing of a store that was closed before.
        started_s = time.perf_counter()
        store = AttentionStore(_LAYOUT, store_config, weights=_WEIGHTS)
        elapsed_s = time.perf_counter() - started_s
        memory.append(_resident_bytes())
        num_found = store.stats().num_sessions
        if not prefixes and num_found:
            prefixes.append(_measure_prefixes(config, store))
        store.close()
        if num_found != config.num_sessions:
            raise BenchError(f"a restart must find {config.num_sessions} sessions, got {num_found}")
        return elapsed_s

    memory = [_resident_bytes()]
    can_be_cold = can_drop(directory)
    taken: list[dict[str, float]] = []
    for _ in harness.ticked(run.progress, "start-up", range(1 + config.repeats)):
        sample = {}
        if can_be_cold:
            drop_cached(path for path in directory.glob(f"{CATALOG_NAME}*") if path.is_file())
            sample["cold_startup_s"] = open_store()
        taken.append({**sample, "startup_s": open_store()})
    before, after = memory[:2]
    yield harness.make_row(
        StartupRow,
        taken[1:],
        num_sessions=config.num_sessions,
        num_blocks=num_held,
        catalog_bytes=catalog.stat().st_size,
        store_bytes=None if before is None or after is None else max(after - before, 0),
    )
    yield from prefixes


def _measure_prefixes(config: PolicyBenchConfig, store: AttentionStore) -> PrefixRow:
    """Times new conversations' searches, each after a turn of some session: what that changed is put in its place."""
    rng = np.random.default_rng(config.seed)
    searches_ms = []
    for _ in range(config.num_steps):
        with store.pinned(_key(int(rng.integers(config.num_sessions)))):
            prompt = np.concatenate([_SHARED, rng.integers(_VOCAB_SIZE, size=_PROMPT_TOKENS - len(_SHARED))])
        started_s = time.perf_counter()
        found = store.find_prefix("", prompt)
        searches_ms.append((time.perf_counter() - started_s) * 1e3)
        if found is None:
            raise BenchError(f"a search must find one of {config.num_sessions} sessions that share a prompt, got none")
    return PrefixRow(
        num_sessions=config.num_sessions,
        shared_tokens=len(_SHARED),
        prompt_tokens=_PROMPT_TOKENS,
        **harness.percentiles("p{}_ms", searches_ms, 50, 99),
        max_ms=max(searches_ms),
    )


def _resident_bytes() -> int | None:
    """Memory that the process has; None where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _key(session: int) -> str:
    return f"{session:064x}"


def _write_catalog(run: Run[PolicyBenchConfig], directory: Path) -> tuple[int, int]:
    """Publishes the sessions, with holes between their blocks; how many blocks they hold, and holes included."""
    config = run.config
    rng = np.random.default_rng(config.seed)
    num_held = next_block = 0
    with Catalog(directory, Namespace(weights=_WEIGHTS, layout=_LAYOUT, location=_BLOCKS_URL)) as catalog:
        for start in harness.ticked(run.progress, "catalog", range(0, config.num_sessions, _BATCH_SESSIONS)):
            stop = min(start + _BATCH_SESSIONS, config.num_sessions)
            with catalog.batch():
                for i in range(start, stop):
                    size = int(rng.integers(1, _MAX_BLOCKS, endpoint=True))
                    token_ids = rng.integers(_VOCAB_SIZE, size=size * _LAYOUT.block_tokens)
                    token_ids[: len(_SHARED)] = _SHARED[: len(token_ids)]
                    record = SessionRecord(
                        key=_key(i),
                        tenant="",
                        session_id=f"session-{i}",
                        block_ids=np.arange(next_block, next_block + size),
                        places=TokenPlaces.dense(len(token_ids)),
                        prefixes=prefix_hashes(token_ids, _LAYOUT.block_tokens),
                        created_s=float(i),
                        last_used_s=float(i),
                    )
                    catalog.publish(record, token_ids, np.zeros((size, _LAYOUT.num_layers), np.uint32))
                    num_held, next_block = num_held + size, next_block + size + 1
    return num_held, next_block


def _measure_loop(run: Run[PolicyBenchConfig]) -> Iterator[LoopRow]:
    """Counts hits of every policy at the summary's queue depth, and of the scheduler-aware one at others.

    But for the one that learns: nobody returns at a time of his own here.
    """
    config, num_sessions = run.config, run.config.loop_sessions
    trace = loop_trace(num_sessions, _LOOP_ROUNDS)
    sizes = dict.fromkeys(trace, 1)
    num_blocks = round(num_sessions / (1 + _OVER_CAPACITY))
    cells: list[tuple[str, float | None]] = [("belady", None)]
    cells += [("scheduler_aware", depth) for depth in sorted({*_QUEUE_DEPTHS, config.queue_depth})]
    cells += [
        (name, config.queue_depth) for name in EVICTION_POLICIES if name not in ("scheduler_aware", "return_aware")
    ]
    belady = 1.0
    for name, depth in harness.ticked(run.progress, "loop", cells):
        policy = None if name == "belady" else make_policy(name)
        hits = hits_of_one_tier(trace, sizes, num_blocks, policy, queue_jobs=round(num_sessions * (depth or 0)))
        rate = hits / (num_sessions * (_LOOP_ROUNDS - 1))
        belady = rate if policy is None else belady
        yield LoopRow(
            policy=name,
            num_sessions=num_sessions,
            over_capacity=num_sessions / num_blocks - 1,
            queue_depth=depth,
            hit_rate=rate,
            vs_belady=rate / belady,
        )
