"""Engines as benchmarks want them: one whose DRAM holds one session and no more, and a way to push that out.

Not here: measuring (`bench_tiers`, `bench_ttft`), page cache and directories (`bench_disk`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.errors import CaJaxError
from ca_jax.kv.layout import kv_layout
from ca_jax.launch.bench_disk import block_files, cached_share, drop_cached, fill_cached, is_dropped
from ca_jax.launch.bench_schema import BenchError
from ca_jax.launch.bench_suites import send_turn
from ca_jax.pretrained import LoadedModel
from ca_jax.session import Session
from ca_jax.storage.config import GIB
from ca_jax.storage.store import AttentionStore
from ca_jax.telemetry.timeline import NO_TIMELINE, Timeline
from ca_jax.turns.requests import Usage

SSD_BLOCK_EXTRA_BYTES = 64 << 10
"""A generous bound of what a driver adds to a block on SSD."""
_WARM_SHARE = 0.95  # Of its pages a file has in memory that counts as warm.
_SSD_SESSIONS = 4  # On SSD at once at most: two, and what replaces them.


def make_engine(
    model: LoadedModel,
    config: EngineConfig,
    *,
    suite: str,
    timeline: Timeline = NO_TIMELINE,
    store_wrapper: Callable[[AttentionStore], AttentionStore] | None = None,
) -> Engine:
    """An engine of its own for a suite.

    Args:
      model: to serve.
      config: how.
      suite: who asks, for the error.
      timeline: where its spans go.
      store_wrapper: see `Engine`.

    Raises:
      BenchError: it cannot be as large as the suite wants it.
    """
    try:
        return Engine(model, config, timeline=timeline, store_wrapper=store_wrapper)
    except ValueError as error:
        if isinstance(error, CaJaxError):
            raise
        raise BenchError(f"no engine for {suite} at this size: {error}") from error


def one_session_config(
    engine_config: EngineConfig, model: LoadedModel, directory: Path, *, max_tokens: int
) -> EngineConfig:
    """The engine whose DRAM holds one session of so many tokens and no more, so that two push each other out.

    Args:
      engine_config: what else it is.
      model: what it serves.
      directory: of its SSD tier.
      max_tokens: of the longest session that is stored.
    """
    layout = kv_layout(model, engine_config)
    num_blocks = layout.num_blocks(max_tokens)
    ssd_bytes = _SSD_SESSIONS * num_blocks * (layout.block_bytes + SSD_BLOCK_EXTRA_BYTES)
    store = dataclasses.replace(
        engine_config.store,
        dram_gib=num_blocks * layout.block_bytes / GIB,
        dram_free_fraction=0.0,
        ssd_dir=str(directory),
        ssd_gib=ssd_bytes / GIB,
    )
    return dataclasses.replace(engine_config, store=store)


class OneSessionEngine:
    """An engine made with `one_session_config`, and the bystander whose turn empties its DRAM of everyone else.

    Args:
      engine: idle; closed by `close`, since `restart` puts another one in its place.
      suite: who measures, for errors.
      max_tokens: as for `one_session_config`.
      seed: of the token ids.
    """

    def __init__(self, engine: Engine, *, suite: str, max_tokens: int, seed: int) -> None:
        self.engine = engine
        """The one that runs now."""
        self.layout = kv_layout(engine.model, engine.config)
        """Of its blocks."""
        self._suite = suite
        self._max_tokens = max_tokens
        self._rng = np.random.default_rng(seed)
        self._bystander_id = ""

    def begin(self) -> None:
        """Waits for memory, and stores the bystander: with one token more it fills DRAM."""
        self.engine.wait_until_ready()  # First touch would share the memory bus with the samples.
        self._bystander_id = self.store_session(self._max_tokens - 1).session_id

    def close(self) -> None:
        """Closes the engine."""
        self.engine.close()

    def store_session(self, num_tokens: int) -> Session:
        """A session of so many random tokens, whose KV is stored."""
        session = self.engine.session()
        send_turn(self.engine, session, self.random_ids(num_tokens))
        session.rewind(num_tokens)
        self.engine.wait_for_saves()
        return session

    def push_out(self) -> None:
        """Has the bystander fill DRAM: all other sessions are on SSD alone then."""
        bystander = self.engine.session(session_id=self._bystander_id)
        num_tokens = len(bystander.token_ids)
        send_turn(self.engine, bystander, self.random_ids(1))
        bystander.rewind(num_tokens)
        self.engine.wait_for_saves()

    def restart(self) -> None:
        """Closes the engine; a new one of the same model and directory takes its place."""
        model, config = self.engine.model, self.engine.config
        self.engine.close()
        self.engine = Engine(model, config)
        self.engine.wait_until_ready()

    def warm_up_files(self) -> None:
        """Has the page cache hold all stored KV; see `warm_up_files`."""
        warm_up_files(self._directory, self.layout.block_bytes)

    def cool_down_files(self) -> None:
        """Empties the page cache of all stored KV; see `cool_down_files`."""
        cool_down_files(self._directory, self.layout.block_bytes)

    def random_ids(self, num_tokens: int) -> list[int]:
        """So many token ids."""
        return self._rng.integers(self.engine.model.config.vocab_size, size=num_tokens).tolist()

    @property
    def _directory(self) -> Path:
        directory = self.engine.config.store.ssd_directory
        if directory is None:
            raise BenchError(f"{self._suite} wanted an engine with an SSD tier, found one without")
        return directory


def warm_up_files(directory: Path, block_bytes: int) -> None:
    """Has the page cache hold all KV that an SSD tier stores.

    Args:
      directory: the tier's.
      block_bytes: of a block's KV.

    Raises:
      BenchError: it does not, or there is no KV.
    """
    files = _block_files(directory, block_bytes)
    fill_cached(files)
    if not all(cached_share(path) >= _WARM_SHARE for path in files):
        raise BenchError("ssd_warm wanted stored KV in the page cache, found it there in parts")


def cool_down_files(directory: Path, block_bytes: int) -> None:
    """Empties the page cache of all KV that an SSD tier stores.

    Args:
      directory: the tier's.
      block_bytes: of a block's KV.

    Raises:
      BenchError: it is there still, or there is no KV.
    """
    drop_cached(path for path in directory.rglob("*") if path.is_file())
    if not is_dropped(_block_files(directory, block_bytes)):
        raise BenchError("ssd wanted the page cache without stored KV, found it there")


def _block_files(directory: Path, block_bytes: int) -> list[Path]:
    files = block_files(directory, block_bytes)
    if not files:
        raise BenchError(f"wanted stored KV in {directory}, found none")
    return files


def check_source(source: str, session: Session, num_new: int, wanted: dict[str, int]) -> Usage:
    """What a session's last turn took, which must have loaded what it should have.

    Args:
      source: what the sample is called.
      session: whose turn has ended.
      num_new: tokens of the turn.
      wanted: history tokens to be loaded, by tier; empty for none.

    Raises:
      BenchError: it loaded something else.
    """
    usage = session.usage
    if usage is None:
        raise RuntimeError(f"a turn of session {session.session_id} has ended without usage")
    found = {tier: num_tokens for tier, num_tokens in usage.cached_tokens.items() if num_tokens}
    if found != wanted:
        num_history = len(session.token_ids) - num_new - usage.completion_tokens
        raise BenchError(
            f"{source} of {num_history} + {num_new} tokens wanted {_describe(wanted)}, found {_describe(found)}"
        )
    return usage


def _describe(cached_tokens: dict[str, int]) -> str:
    described = ", ".join(f"{num_tokens} tokens from {tier}" for tier, num_tokens in cached_tokens.items())
    return described or "no tokens from the store"
