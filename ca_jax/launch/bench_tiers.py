"""Measures a turn's TTFT by where its history is: in DRAM, on SSD, on SSD after a restart, or nowhere.

Every round takes one sample of each source (A B C A B C ...), the same new tokens over the same history of one session.
Before a sample the session is brought to where it is to come from:

    dram         where its last turn has left it
    ssd_warm     a bystander's turn, which takes all of DRAM, pushes it out; its files are read once
    ssd          the same, but the page cache is emptied of its files
    ssd_restart  the engine is closed; a new one of the same model and directory takes the session up; emptied likewise
    recompute    its KV is dropped; this turn stores it anew, for the next round

After a sample the session is rewound to its history, which is exact since it is in DRAM then, and written to SSD. A
sample that came from anywhere else than it should is an error, not a number. The first round is for nothing: what it
compiles need not be compiled again. Nothing is compiled for a restart, since the process is the same.

Not here: reuse against recompute without an SSD, and beside a peer (`bench_suites`), what rows hold (`bench_schema`),
how fast a tier moves bytes (`bench_storage`).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from pathlib import Path

import numpy as np

from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.launch.bench_disk import block_files, cached_share, drop_cached, fill_cached, is_dropped
from ca_jax.launch.bench_schema import SOURCES, BenchConfig, BenchError, Samples, SourceTimes, TiersRow
from ca_jax.launch.bench_suites import send_turn
from ca_jax.metrics import CompileCounter
from ca_jax.pretrained import LoadedModel, Progress
from ca_jax.session import Session
from ca_jax.storage.config import GIB
from ca_jax.storage.layout import KVLayout

_WANTED_TIERS = {"dram": "dram", "ssd_warm": "ssd", "ssd": "ssd", "ssd_restart": "ssd"}
_WARM_SHARE = 0.95  # Of its pages a file has in memory that counts as warm.
_SSD_SESSIONS = 4  # On SSD at once at most: two, and what replaces them.
_SSD_BLOCK_EXTRA_BYTES = 64 << 10  # A generous bound of what a driver adds to a block.


def tiers_engine_config(config: BenchConfig, model: LoadedModel, directory: Path) -> EngineConfig:
    """The engine whose DRAM holds one session of the longest row and no more, so that two push each other out.

    Args:
      config: what to measure.
      model: what it serves.
      directory: of its SSD tier.
    """
    engine_config = config.engine_config()
    layout = _layout(model, engine_config.store.block_tokens)
    num_blocks = layout.num_blocks(_max_tokens(config))
    ssd_bytes = _SSD_SESSIONS * num_blocks * (layout.block_bytes + _SSD_BLOCK_EXTRA_BYTES)
    store = dataclasses.replace(
        engine_config.store,
        dram_gib=num_blocks * layout.block_bytes / GIB,
        dram_free_fraction=0.0,
        ssd_dir=str(directory),
        ssd_gib=ssd_bytes / GIB,
    )
    return dataclasses.replace(engine_config, store=store)


def run_tiers_suite(engine: Engine, config: BenchConfig, progress: Progress) -> list[TiersRow]:
    """Measures every row. Blocks.

    Args:
      engine: idle, made with `tiers_engine_config`; closed on return, since others take its place.
      config: what to measure.
      progress: told of every round.

    Raises:
      BenchError: a sample's history did not come from where it should have.
    """
    cells = config.cells()
    total, done = len(cells) * (1 + config.repeats), itertools.count()
    progress(config.suite, next(done), total)
    bench = _Bench(engine, config)
    try:
        bench.begin()
        rows = []
        for num_history, num_new in cells:
            row = bench.start_row(num_history, num_new)
            for keep in [False] + [True] * config.repeats:
                bench.round(row, keep)
                progress(config.suite, next(done), total)
            rows.append(bench.end_row(row))
        return rows
    finally:
        bench.close()


@dataclasses.dataclass
class _OpenRow:
    """A row being measured."""

    session_id: str
    history_ids: list[int]
    num_new: int
    samples: dict[str, Samples] = dataclasses.field(default_factory=lambda: collections.defaultdict(Samples))
    same_tokens: bool = True
    recompiles: int = 0


class _Bench:
    """One engine at a time, and the bystander that empties its DRAM."""

    def __init__(self, engine: Engine, config: BenchConfig) -> None:
        self._engine = engine
        self._config = config
        self._rng = np.random.default_rng(config.seed)
        self._layout = _layout(engine.model, engine.config.store.block_tokens)
        self._bystander_id = ""

    def begin(self) -> None:
        """Waits for memory, and stores the bystander: with one token more it fills DRAM."""
        self._engine.wait_until_ready()  # First touch would share the memory bus with the samples.
        self._bystander_id = self._store_session(_max_tokens(self._config) - 1)[0]

    def start_row(self, num_history: int, num_new: int) -> _OpenRow:
        session_id, history_ids = self._store_session(num_history)
        return _OpenRow(session_id=session_id, history_ids=history_ids, num_new=num_new)

    def round(self, row: _OpenRow, keep: bool) -> None:
        """Takes one sample of every source; for nothing, unless they are to be kept."""
        new_ids = self._random_ids(row.num_new)
        tokens = set()
        for source in SOURCES:
            samples = row.samples[source] if keep else Samples()
            token, compiles = self._sample(source, row, new_ids, samples)
            tokens.add(token)
            row.recompiles += compiles if keep else 0
        row.same_tokens &= len(tokens) == 1

    def end_row(self, row: _OpenRow) -> TiersRow:
        self._engine.session(session_id=row.session_id).close()
        num_history = len(row.history_ids)
        recompute_s = row.samples["recompute"].median("ttft_s")
        return TiersRow(
            history_tokens=num_history,
            new_tokens=row.num_new,
            ssd_driver=self._engine.config.store.ssd_driver,
            kv_bytes=self._layout.num_blocks(num_history) * self._layout.block_bytes,
            sources={
                source: SourceTimes(
                    ttft_s=samples.median("ttft_s"),
                    speedup=recompute_s / samples.median("ttft_s"),
                    fetch_s=samples.median("fetch_s"),
                    load_s=samples.median("load_s"),
                    load_stall_s=samples.median("load_stall_s"),
                    cached_tokens=_wanted_tokens(source, num_history),
                    spread=samples.spread(),
                )
                for source, samples in row.samples.items()
            },
            same_tokens=row.same_tokens,
            recompiles=row.recompiles,
        )

    def close(self) -> None:
        self._engine.close()

    def _sample(self, source: str, row: _OpenRow, new_ids: list[int], samples: Samples) -> tuple[int, int]:
        """One turn of the row's session, which is taken back; its token, and functions compiled."""
        session = self._bring(source, row)
        with CompileCounter() as compiles:
            token, ttft_s = send_turn(self._engine, session, new_ids)
        usage, wanted = session.usage, _wanted_tokens(source, len(row.history_ids))
        if usage is None:
            raise RuntimeError(f"a turn of session {session.session_id} has ended without usage")
        found = {tier: num_tokens for tier, num_tokens in usage.cached_tokens.items() if num_tokens}
        if found != wanted:
            raise BenchError(
                f"{source} of {len(row.history_ids)} + {len(new_ids)} tokens wanted {_describe(wanted)}, found "
                f"{_describe(found)}"
            )
        samples.add(ttft_s=ttft_s, fetch_s=usage.queued_s, load_s=usage.load_s, load_stall_s=usage.load_stall_s)
        session.rewind(len(row.history_ids))
        self._engine.wait_for_saves()
        return token, compiles.count

    def _bring(self, source: str, row: _OpenRow) -> Session:
        """Brings the row's session to where its history is to come from."""
        if source in ("ssd_warm", "ssd"):
            self._push_out()
        elif source == "ssd_restart":
            self._restart()
        session = self._engine.session(session_id=row.session_id)
        if session.token_ids != row.history_ids:
            raise BenchError(
                f"{source} wanted a conversation of {len(row.history_ids)} tokens in the store, found "
                f"{len(session.token_ids)} tokens"
            )
        if source == "recompute":
            self._engine.drop_stored(session)
            self._engine.wait_for_saves()
        elif source == "ssd_warm":
            self._warm_up()
        elif source != "dram":
            self._cool_down()
        return session

    def _push_out(self) -> None:
        """Has the bystander fill DRAM."""
        bystander = self._engine.session(session_id=self._bystander_id)
        num_tokens = len(bystander.token_ids)
        send_turn(self._engine, bystander, self._random_ids(1))
        bystander.rewind(num_tokens)
        self._engine.wait_for_saves()

    def _restart(self) -> None:
        model, config = self._engine.model, self._engine.config
        self._engine.close()
        self._engine = Engine(model, config)
        self._engine.wait_until_ready()

    def _warm_up(self) -> None:
        files = self._block_files()
        fill_cached(files)
        if not all(cached_share(path) >= _WARM_SHARE for path in files):
            raise BenchError("ssd_warm wanted stored KV in the page cache, found it there in parts")

    def _cool_down(self) -> None:
        drop_cached(path for path in self._directory.rglob("*") if path.is_file())
        if not is_dropped(self._block_files()):
            raise BenchError("ssd wanted the page cache without stored KV, found it there")

    def _block_files(self) -> list[Path]:
        files = block_files(self._directory, self._layout.block_bytes)
        if not files:
            raise BenchError(f"wanted stored KV in {self._directory}, found none")
        return files

    @property
    def _directory(self) -> Path:
        directory = self._engine.config.store.ssd_directory
        if directory is None:
            raise BenchError("tiers wanted an engine with an SSD tier, found one without")
        return directory

    def _store_session(self, num_tokens: int) -> tuple[str, list[int]]:
        """Has the KV of so many random tokens stored; the session's id and the tokens."""
        session, token_ids = self._engine.session(), self._random_ids(num_tokens)
        send_turn(self._engine, session, token_ids)
        session.rewind(num_tokens)
        self._engine.wait_for_saves()
        return session.session_id, token_ids

    def _random_ids(self, num_tokens: int) -> list[int]:
        return self._rng.integers(self._engine.model.config.vocab_size, size=num_tokens).tolist()


def _layout(model: LoadedModel, block_tokens: int) -> KVLayout:
    return KVLayout(
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=model.dtype,
        block_tokens=block_tokens,
    )


def _max_tokens(config: BenchConfig) -> int:
    """Tokens of the longest row whose KV is stored."""
    return max(config.history_tokens) + max(config.new_tokens)


def _wanted_tokens(source: str, num_history: int) -> dict[str, int]:
    """Tokens that a sample must have loaded, by tier."""
    return {_WANTED_TIERS[source]: num_history} if source in _WANTED_TIERS else {}


def _describe(cached_tokens: dict[str, int]) -> str:
    described = ", ".join(f"{num_tokens} tokens from {tier}" for tier, num_tokens in cached_tokens.items())
    return described or "no tokens from the store"
