"""What the suites of overlap share: links of a set pace, engines with just the room they need, ways that take turns.

Not here: what is measured (`bench_preload`, `bench_save`), what rows hold (`bench_overlap_schema`).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import numpy as np

from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.kv.layout import kv_layout
from ca_jax.launch.bench_engines import make_engine
from ca_jax.pretrained import LoadedModel, Progress
from ca_jax.session import Session
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.store import AttentionStore
from ca_jax.testing.controlled_store import ControlledStore
from ca_jax.testing.paced import Future, PacedLink, Result, Transfer
from ca_jax.testing.timers import Timer, TimerThread
from ca_jax.turns.jobs import Job

Way = TypeVar("Way")

CALIBRATIONS = 3
"""Samples of compute alone that a link's pace is set by."""


class AdjustableLink:
    """A `PacedLink` whose pace can be set while nothing moves on it, and that hardly uses the CPU; endless at first.

    A load whose bytes the same load has put there before, and no other since, takes its time and copies nothing: a
    device's copy engine would not take cores from what computes either. What is stored must stay the same meanwhile.

    Args:
      timer: whose time; a thread's own by default.
    """

    def __init__(self, timer: Timer | None = None) -> None:
        self._timer = timer or TimerThread()
        self._present: dict[tuple[int, int], Transfer] = {}  # What lies where.
        self._link = PacedLink(timer=self._timer, copies_early=True)

    def set_pace(self, bytes_per_s: float = math.inf) -> None:
        """Makes what is submitted from now on take its time at that bandwidth.

        Raises:
          ValueError: a bandwidth that is not positive.
        """
        self._link = PacedLink(bytes_per_s, timer=self._timer, copies_early=True)

    def submit(self, transfer: Transfer, copy: Callable[[], Result]) -> Future[Result]:
        """See `Transfers`."""
        if transfer.memory is None:
            return self._link.submit(transfer, copy)
        if self._present.get(transfer.memory) == transfer:
            return self._link.submit(transfer, cast(Callable[[], Result], _nothing))
        start, stop = transfer.memory
        for each in [each for each in self._present if each[0] < stop and start < each[1]]:
            del self._present[each]
        self._present[transfer.memory] = transfer
        return self._link.submit(transfer, copy)

    def close(self) -> None:
        """Waits until what was submitted has ended."""
        self._timer.close()

    def __enter__(self) -> AdjustableLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Steps:
    """Tells of rounds as they are done.

    Args:
      what: is measured.
      total: rounds in all.
      progress: who is told.
    """

    def __init__(self, what: str, total: int, progress: Progress) -> None:
        self._what, self._total, self._progress = what, total, progress
        self._done = itertools.count()
        self()

    def __call__(self) -> None:
        """One more is done; the first call is the maker's own."""
        self._progress(self._what, next(self._done), self._total)


def token_bytes(model: LoadedModel, config: EngineConfig) -> int:
    """Of one token's KV in all layers, as it is kept."""
    return kv_layout(model, config).token_bytes


def engine_for(
    config: EngineConfig, model: LoadedModel, stored_tokens: Sequence[int], *, context_window: int
) -> EngineConfig:
    """The engine of one slot whose DRAM has room for some sessions and no more.

    Args:
      config: what else it is.
      model: what it serves.
      stored_tokens: of each of those sessions; none turns the store off.
      context_window: most tokens of a session.
    """
    layout = kv_layout(model, config)
    num_bytes = sum(map(layout.num_blocks, stored_tokens)) * layout.block_bytes
    store = StoreConfig(dram_gib=num_bytes / GIB, block_tokens=layout.block_tokens)
    return dataclasses.replace(config, max_batch_size=1, context_window=context_window, store=store)


def paced_engine(
    model: LoadedModel,
    config: EngineConfig,
    *,
    suite: str,
    loads: AdjustableLink | None = None,
    saves: AdjustableLink | None = None,
) -> Engine:
    """An engine that is ready to be measured.

    Args:
      model: what it serves.
      config: what it is.
      suite: what is measured.
      loads: what histories are loaded over; None: memory as it is.
      saves: what new KV is saved over; likewise.

    Raises:
      BenchError: it cannot be as large as that.
    """

    def wrap(store: AttentionStore) -> AttentionStore:
        return cast(AttentionStore, ControlledStore(store, loads=loads, saves=saves))

    engine = make_engine(model, config, suite=suite, store_wrapper=wrap if loads or saves else None)
    engine.wait_until_ready()  # First touch would share the memory bus with the samples.
    return engine


def in_turn(ways: Mapping[str, Way], nth_round: int) -> Iterator[tuple[str, Way]]:
    """The ways in the order of a round: each has every place in turn, since what ran before may cost who follows."""
    first = nth_round % len(ways)
    items = list(ways.items())
    return iter(items[first:] + items[:first])


def run_to_end(engine: Engine, *jobs: Job) -> None:
    """Runs the engine until all jobs have ended.

    Raises:
      Exception: whatever broke one of them.
    """
    for job in jobs:
        collections.deque(engine.stream(job), maxlen=0)


def settle(engine: Engine) -> None:
    """Has an engine do what it put off until after its last answer, so that no sample waits for the one before it."""
    engine.step()
    engine.wait_for_saves()


def stored_tokens(engine: Engine, session: Session) -> int:
    """How many tokens of a session have their KV in the store."""
    return sum(info.num_tokens for info in engine.stored.list() if info.session_id == session.session_id)


def random_ids(rng: np.random.Generator, model: LoadedModel, num_tokens: int) -> list[int]:
    """Random token ids of a model's vocabulary."""
    return rng.integers(model.config.vocab_size, size=num_tokens).tolist()


def _nothing() -> None:
    """What there is to copy of bytes that are there."""
