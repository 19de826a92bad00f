"""Engines as suites want them: of a size, with a store for some sessions, and a way to push sessions out of DRAM.

Not here: measuring (`suites`), page cache and directories (`disk`), links of a set pace (`paced`).
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.disk import block_files, cached_share, drop_cached, fill_cached, is_dropped
from benchmarks.harness import BenchError
from benchmarks.paced import ControlledStore, Transfers
from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.errors import CaJaxError
from ca_jax.kv.layout import kv_layout
from ca_jax.pretrained import LoadedModel
from ca_jax.session import Session
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.store import AttentionStore
from ca_jax.telemetry.timeline import NO_TIMELINE, Timeline
from ca_jax.turns.requests import SamplingParams, Usage

SSD_BLOCK_EXTRA_BYTES = 64 << 10
"""A generous bound of what a driver adds to a block on SSD."""
SETTLING_STEPS = 4
"""Decode steps before the first sample: the first ones are not computed ahead."""
_WARM_SHARE = 0.95  # Of its pages a file has in memory that counts as warm.
_SSD_SESSIONS = 4  # On SSD at once at most: two, and what replaces them.


# Engines.


def make_engine(model: LoadedModel, config: EngineConfig, **options: Any) -> Engine:
    """As `start_engine`; it is ready: first touch of its memory would share the memory bus with what is measured."""
    engine = start_engine(model, config, **options)
    engine.wait_until_ready()
    return engine


def start_engine(
    model: LoadedModel,
    config: EngineConfig,
    *,
    timeline: Timeline = NO_TIMELINE,
    loads: Transfers | None = None,
    saves: Transfers | None = None,
) -> Engine:
    """An `Engine`, whose loads and saves go over links where there are some.

    Raises:
      BenchError: it cannot be as large as a suite wants it.
    """

    def wrap(store: AttentionStore) -> AttentionStore:
        return cast(AttentionStore, ControlledStore(store, loads=loads, saves=saves))

    try:
        return Engine(model, config, timeline=timeline, store_wrapper=wrap if loads or saves else None)
    except ValueError as error:
        if isinstance(error, CaJaxError):
            raise
        raise BenchError(f"no engine at this size: {error}") from error


def sized_config(
    config: EngineConfig,
    model: LoadedModel,
    num_blocks: float,
    *,
    directory: Path | None = None,
    ssd_blocks: float = 0,
) -> EngineConfig:
    """The engine whose DRAM, and SSD if it has a directory, hold so many blocks and no more; 0: it has no store."""
    layout = kv_layout(model, config)
    store = dataclasses.replace(config.store, dram_gib=num_blocks * layout.block_bytes / GIB)
    if directory is not None:
        ssd_bytes = ssd_blocks * (layout.block_bytes + SSD_BLOCK_EXTRA_BYTES)
        store = dataclasses.replace(store, dram_free_fraction=0.0, ssd_dir=str(directory), ssd_gib=ssd_bytes / GIB)
    return dataclasses.replace(config, store=store)


def without_store(config: EngineConfig) -> EngineConfig:
    """Returns the same engine's config, which stores nothing."""
    store = dataclasses.replace(config.store, dram_gib=0.0, ssd_dir=None, ssd_url=None)
    return dataclasses.replace(config, store=store)


def engine_for(
    config: EngineConfig, model: LoadedModel, stored_tokens: Sequence[int], *, context_window: int
) -> EngineConfig:
    """The engine of one slot whose DRAM has room for sessions of so many tokens each and no more; none: no store."""
    layout = kv_layout(model, config)
    store = StoreConfig(block_tokens=layout.block_tokens)
    config = dataclasses.replace(config, max_batch_size=1, context_window=context_window, store=store)
    return sized_config(config, model, sum(map(layout.num_blocks, stored_tokens)))


def one_session_config(config: EngineConfig, model: LoadedModel, directory: Path, *, max_tokens: int) -> EngineConfig:
    """The engine whose DRAM holds one session of so many tokens and no more, so that two push each other out."""
    num_blocks = kv_layout(model, config).num_blocks(max_tokens)
    return sized_config(config, model, num_blocks, directory=directory, ssd_blocks=_SSD_SESSIONS * num_blocks)


class OneSessionEngine:
    """An engine of `one_session_config`, and the bystander whose turn empties its DRAM of all other sessions."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        *,
        max_tokens: int,
        seed: int,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self.engine = make_engine(model, config, timeline=timeline)
        """The one that runs now; `restart` puts another one in its place."""
        self.layout = kv_layout(model, config)
        self._max_tokens = max_tokens
        self._rng = np.random.default_rng(seed)
        self._bystander_id = ""

    def close(self) -> None:
        """Closes the engine."""
        self.engine.close()

    def store_session(self, num_tokens: int) -> Session:
        """A session of so many random tokens, whose KV is stored."""
        return store_session(self.engine, self.random_ids(num_tokens))

    def push_out(self) -> None:
        """Has the bystander fill DRAM, with one token more than is stored: all other sessions are on SSD alone then."""
        if not self._bystander_id:
            self._bystander_id = self.store_session(self._max_tokens - 1).session_id
        bystander = self.engine.session(session_id=self._bystander_id)
        num_tokens = len(bystander.token_ids)
        send_turn(self.engine, bystander, self.random_ids(1))
        take_back(self.engine, bystander, num_tokens)

    def restart(self) -> None:
        """Closes the engine; a new one of the same model and directory takes its place."""
        model, config = self.engine.model, self.engine.config
        self.engine.close()
        self.engine = make_engine(model, config)

    def random_ids(self, num_tokens: int) -> list[int]:
        """So many token ids."""
        return random_ids(self._rng, self.engine.model, num_tokens)


# Files of an SSD tier.


def warm_up_files(engine: Engine) -> None:
    """Has the page cache hold all KV on an engine's SSD; where it does not, that is a BenchError."""
    _, files = _files(engine)
    fill_cached(files)
    if not all(cached_share(path) >= _WARM_SHARE for path in files):
        raise BenchError("ssd_warm must have stored KV in the page cache, got it there in parts")


def cool_down_files(engine: Engine) -> None:
    """Empties the page cache of all KV on an engine's SSD; where it is there still, that is a BenchError."""
    directory, files = _files(engine)
    drop_cached(path for path in directory.rglob("*") if path.is_file())
    if not is_dropped(files):
        raise BenchError("ssd must have a page cache without stored KV, got it there")


def _files(engine: Engine) -> tuple[Path, list[Path]]:
    """The directory of an SSD tier, and its files that hold KV."""
    directory = engine.config.store.ssd_directory
    if directory is None:
        raise BenchError("a suite of SSDs must have an engine with an SSD tier, got one without")
    files = block_files(directory, kv_layout(engine.model, engine.config).block_bytes)
    if not files:
        raise BenchError(f"{directory} must hold stored KV, got none")
    return directory, files


# Turns.


def random_ids(rng: np.random.Generator, model: LoadedModel, num_tokens: int) -> list[int]:
    """Random token ids of a model's vocabulary."""
    return rng.integers(model.config.vocab_size, size=num_tokens).tolist()


def answer_of(num_tokens: int) -> SamplingParams:
    """A greedy answer of just so many tokens."""
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


def send_turn(
    engine: Engine, session: Session, new_ids: list[int], context: Sequence[Sequence[int]] | None = None
) -> tuple[int, float]:
    """A turn of one answer token, on an idle engine: that token, and seconds from sending until the caller has it.

    On return its KV is stored. Chunks of a `context` come before the new tokens, see `Session.send`.
    """
    started_s = time.perf_counter()
    collections.deque(session.send_ids(new_ids, context=context, sampling=answer_of(1)), maxlen=0)
    elapsed_s = time.perf_counter() - started_s
    settle(engine)
    return session.token_ids[-1], elapsed_s


def store_session(engine: Engine, token_ids: list[int]) -> Session:
    """A session of those tokens, whose KV is stored."""
    session = engine.session()
    send_turn(engine, session, token_ids)
    take_back(engine, session, len(token_ids))
    return session


def take_back(engine: Engine, session: Session, num_tokens: int) -> None:
    """Has a session end after so many tokens again, in the store too."""
    session.rewind(num_tokens)
    engine.wait_for_saves()


def settle(engine: Engine) -> None:
    """Has an engine do what it put off until after its last answer, so that no sample waits for the one before it."""
    engine.step()
    engine.wait_for_saves()


def check_source(source: str, session: Session, num_new: int, wanted: dict[str, int]) -> Usage:
    """What a session's last turn, of `num_new` tokens, took; it must have loaded what is wanted, by tier.

    BenchError: it loaded something else.
    """
    usage = session.usage
    if usage is None:
        raise RuntimeError(f"a turn of session {session.session_id} has ended without usage")
    found = {tier: num_tokens for tier, num_tokens in usage.cached_tokens.items() if num_tokens}
    if found != wanted:
        num_history = len(session.token_ids) - num_new - usage.completion_tokens
        raise BenchError(
            f"{source} of {num_history} + {num_new} tokens must load {_describe(wanted)}, got {_describe(found)}"
        )
    return usage


def _describe(cached_tokens: dict[str, int]) -> str:
    described = ", ".join(f"{num_tokens} tokens from {tier}" for tier, num_tokens in cached_tokens.items())
    return described or "no tokens from the store"
