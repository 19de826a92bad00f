"""Measures bookkeeping with many sessions and jobs: what choices and searches cost and are worth, and how long a store
takes to open.

Not here: what rows hold (`bench_storage_schema`), flags and main (`bench`), tests of the same choices.
"""

from __future__ import annotations

import collections
import gc
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ca_jax.launch.bench_disk import can_drop, drop_cached, scratch_directory
from ca_jax.launch.bench_schema import BenchError, Samples
from ca_jax.launch.bench_storage_schema import DecisionRow, LoopRow, PolicyBenchConfig, PolicyRow, PrefixRow, StartupRow
from ca_jax.launch.bench_turn import measure_turns
from ca_jax.pretrained import Progress
from ca_jax.storage.catalog.catalog import Catalog
from ca_jax.storage.catalog.file import CATALOG_NAME, CatalogError
from ca_jax.storage.catalog.records import Namespace, SessionRecord
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.placement.orders import LookAhead
from ca_jax.storage.placement.policy import (
    EVICTION_POLICIES,
    EvictionPolicy,
    PrefetchPolicy,
    ReturnAwarePolicy,
    look_ahead_window,
    make_policy,
)
from ca_jax.storage.placement.returns import ReturnTimes
from ca_jax.storage.records import Owner
from ca_jax.storage.sessions import Entry, SessionIndex, SsdCopy
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tokens import prefix_hashes
from ca_jax.testing.loop_workload import hits_of_one_tier, loop_trace

_DRAM_SHARE = 10  # One of so many sessions is in DRAM too.
_MAX_BLOCKS = 31  # Of a session; sizes are even between 1 and this: 2,000 tokens on average.
_RESERVE_SHARE = 10  # One of so many blocks of DRAM is kept free.
_PARTS = ("queue", "lookup", "plan", "victims")

# The smallest blocks there are: of the start-up only the catalog is real, and its size does not depend on them.
_LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float16", block_tokens=128)
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


def run_policy_suite(config: PolicyBenchConfig, progress: Progress) -> list[PolicyRow]:
    """Measures choices, the start-up and the loop. Blocks.

    Args:
      config: what to measure.
      progress: told of every part that is done.

    Raises:
      BenchError: the disk has no room, or a store did not find what was written.
    """
    rows: list[PolicyRow] = []
    with scratch_directory(config.ssd_dir) as directory:  # First: memory is measured.
        try:
            rows += _measure_startup(config, directory, progress)
            rows += measure_turns(config, directory)
        except (OSError, ValueError, CatalogError) as error:
            raise BenchError(f"no start-up of {config.num_sessions} sessions in {directory.parent}: {error}") from error
    progress("decisions", 0, len(EVICTION_POLICIES))
    for done, name in enumerate(EVICTION_POLICIES, 1):
        rows.append(_measure_decisions(config, name))
        progress("decisions", done, len(EVICTION_POLICIES))
    return rows + _measure_loop(config, progress)


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
    step_ms = samples.sum(axis=1)
    return DecisionRow(
        policy=name,
        num_sessions=config.num_sessions,
        num_jobs=config.num_jobs,
        p50_ms=float(np.percentile(step_ms, 50)),
        p99_ms=float(np.percentile(step_ms, 99)),
        max_ms=float(step_ms.max()),
        fetches_per_plan=(books.num_planned - fetches_before) / config.num_steps,
        p50_ms_of=dict(zip(_PARTS, np.percentile(samples, 50, axis=0).tolist(), strict=True)),
    )


class _Books:
    """The books of a store without bytes: sessions on SSD, a part of them in DRAM, and a queue of jobs.

    Args:
      config: how many.
      policy: who is evicted.
      rng: draws sizes and jobs.
    """

    def __init__(self, config: PolicyBenchConfig, policy: EvictionPolicy, rng: np.random.Generator) -> None:
        self.num_planned = 0
        """Fetches planned, by all steps."""
        self._policy = policy
        self._prefetch = PrefetchPolicy(eviction=policy)
        self._look_ahead = LookAhead()
        sizes = rng.integers(1, _MAX_BLOCKS, size=config.num_sessions, endpoint=True)
        in_dram = rng.permutation(config.num_sessions) % _DRAM_SHARE == 0
        dram_blocks = int(sizes[in_dram].sum())
        self._reserve_blocks = dram_blocks // _RESERVE_SHARE
        self._mean_blocks = float(sizes.mean())
        self._window_jobs = look_ahead_window(dram_blocks, self._mean_blocks)
        returns = ReturnTimes(time.monotonic) if isinstance(policy, ReturnAwarePolicy) else None
        self._table = SessionIndex(self._look_ahead, dram_blocks, _LAYOUT.block_tokens, returns)
        for i, (size, stays) in enumerate(zip(sizes.tolist(), in_dram.tolist(), strict=True)):
            self._table.add(_make_entry(i, size, stays))
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
                raise BenchError(f"wanted session {each!r} to be stored, found that it is not")
            self._table.use(entry, queued_s)
        found_s = time.perf_counter()
        plan = self._prefetch.plan(
            self._table.to_fetch(),
            self._table.in_dram(),
            window_jobs=self._window_jobs,
            free_blocks=self._reserve_blocks,
            reserve_blocks=self._reserve_blocks,
        )
        planned_s = time.perf_counter()
        for view in (self._table.in_dram(), self._table.on_ssd()):
            self._policy.choose_victims(view, round(self._mean_blocks))
        chosen_s = time.perf_counter()
        self.num_planned += len(plan.fetch)
        return queued_s - started_s, found_s - queued_s, planned_s - found_s, chosen_s - planned_s

    def _join(self, key: str) -> None:
        job = next(self._job_ids)
        self._jobs.append((job, key))
        self._look_ahead.append(job, key)


def _make_entry(i: int, num_blocks: int, in_dram: bool) -> Entry:
    num_tokens = num_blocks * _LAYOUT.block_tokens
    entry = Entry(key=f"s{i}", owner=Owner(session_id=f"s{i}"), created_s=float(i), last_used_s=float(i))
    entry.ssd = SsdCopy(num_tokens=num_tokens, block_ids=np.arange(num_blocks))
    if in_dram:
        entry.token_ids = np.zeros(num_tokens, np.int32)
        entry.block_ids = list(range(num_blocks))
    return entry


def _measure_startup(config: PolicyBenchConfig, directory: Path, progress: Progress) -> list[PolicyRow]:
    """Opens a store on a catalog of many sessions with a clock.

    The first time is for nothing (files are made then) but what the store takes and how it finds prefixes.
    """
    num_held, num_blocks = _write_catalog(config, directory, progress)
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
            raise BenchError(f"wanted {config.num_sessions} sessions after a restart, found {num_found}")
        return elapsed_s

    memory = [_resident_bytes()]
    can_be_cold = can_drop(directory)
    samples = Samples()
    progress("start-up", 0, 1 + config.repeats)
    for i in range(1 + config.repeats):
        if can_be_cold:
            drop_cached(path for path in directory.glob(f"{CATALOG_NAME}*") if path.is_file())
            cold_s = open_store()
            if i:
                samples.add(cold_startup_s=cold_s)
        warm_s = open_store()
        if i:
            samples.add(startup_s=warm_s)
        progress("start-up", i + 1, 1 + config.repeats)
    before, after = memory[:2]
    startup = StartupRow(
        num_sessions=config.num_sessions,
        num_blocks=num_held,
        catalog_bytes=catalog.stat().st_size,
        startup_s=samples.median("startup_s"),
        cold_startup_s=samples.median_or_none("cold_startup_s"),
        store_bytes=None if before is None or after is None else max(after - before, 0),
        spread=samples.spread(),
    )
    return [startup, *prefixes]


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
            raise BenchError(f"wanted one of {config.num_sessions} sessions that share a prompt, found none")
    return PrefixRow(
        num_sessions=config.num_sessions,
        shared_tokens=len(_SHARED),
        prompt_tokens=_PROMPT_TOKENS,
        p50_ms=float(np.percentile(searches_ms, 50)),
        p99_ms=float(np.percentile(searches_ms, 99)),
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


def _write_catalog(config: PolicyBenchConfig, directory: Path, progress: Progress) -> tuple[int, int]:
    """Publishes the sessions, with holes between their blocks; how many blocks they hold, and holes included."""
    rng = np.random.default_rng(config.seed)
    num_held = next_block = 0
    with Catalog(directory, Namespace(weights=_WEIGHTS, layout=_LAYOUT, location=_BLOCKS_URL)) as catalog:
        progress("catalog", 0, config.num_sessions)
        for start in range(0, config.num_sessions, _BATCH_SESSIONS):
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
                        num_tokens=len(token_ids),
                        prefixes=prefix_hashes(token_ids, _LAYOUT.block_tokens),
                        created_s=float(i),
                        last_used_s=float(i),
                    )
                    catalog.publish(record, token_ids, np.zeros((size, _LAYOUT.num_layers), np.uint64))
                    num_held, next_block = num_held + size, next_block + size + 1
            progress("catalog", stop, config.num_sessions)
    return num_held, next_block


def _measure_loop(config: PolicyBenchConfig, progress: Progress) -> list[PolicyRow]:
    """Counts hits of every policy at the summary's queue depth, and of the scheduler-aware one at others.

    But for the one that learns: nobody returns at a time of his own here.
    """
    num_sessions = config.loop_sessions
    trace = loop_trace(num_sessions, _LOOP_ROUNDS)
    sizes = dict.fromkeys(trace, 1)
    num_blocks = round(num_sessions / (1 + _OVER_CAPACITY))
    cells: list[tuple[str, float | None]] = [("belady", None)]
    cells += [("scheduler_aware", depth) for depth in sorted({*_QUEUE_DEPTHS, config.queue_depth})]
    cells += [
        (name, config.queue_depth) for name in EVICTION_POLICIES if name not in ("scheduler_aware", "return_aware")
    ]
    rates: list[float] = []
    progress("loop", 0, len(cells))
    for name, depth in cells:
        policy = None if name == "belady" else make_policy(name)
        hits = hits_of_one_tier(trace, sizes, num_blocks, policy, queue_jobs=round(num_sessions * (depth or 0)))
        rates.append(hits / (num_sessions * (_LOOP_ROUNDS - 1)))
        progress("loop", len(rates), len(cells))
    return [
        LoopRow(
            policy=name,
            num_sessions=num_sessions,
            over_capacity=num_sessions / num_blocks - 1,
            queue_depth=depth,
            hit_rate=rate,
            vs_belady=rate / rates[0],
        )
        for (name, depth), rate in zip(cells, rates, strict=True)
    ]
