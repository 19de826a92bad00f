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

Not here: reuse against recompute without an SSD, and beside a peer (`bench_suites`), a turn against its compute alone
(`bench_ttft`), bringing sessions to where they are to be (`bench_engines`), what rows hold (`bench_schema`), how fast a
tier moves bytes (`bench_storage`).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from pathlib import Path

from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.launch.bench_engines import OneSessionEngine, check_source, one_session_config
from ca_jax.launch.bench_schema import SOURCES, BenchConfig, BenchError, Samples, SourceTimes, TiersRow
from ca_jax.launch.bench_suites import send_turn
from ca_jax.pretrained import LoadedModel, Progress
from ca_jax.session import Session
from ca_jax.telemetry.metrics import CompileCounter

_WANTED_TIERS = {"dram": "dram", "ssd_warm": "ssd", "ssd": "ssd", "ssd_restart": "ssd"}


def tiers_engine_config(config: BenchConfig, model: LoadedModel, directory: Path) -> EngineConfig:
    """The engine whose DRAM holds one session of the longest row and no more.

    Args:
      config: what to measure.
      model: what it serves.
      directory: of its SSD tier.
    """
    return one_session_config(config.engine_config(), model, directory, max_tokens=_max_tokens(config))


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
    bench = _Bench(OneSessionEngine(engine, suite="tiers", max_tokens=_max_tokens(config), seed=config.seed))
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
    """Measures one row at a time."""

    def __init__(self, served: OneSessionEngine) -> None:
        self._served = served

    @property
    def _engine(self) -> Engine:
        return self._served.engine

    def begin(self) -> None:
        """Warms up."""
        self._served.begin()

    def start_row(self, num_history: int, num_new: int) -> _OpenRow:
        """Stores a history that the rounds of a row share."""
        session = self._served.store_session(num_history)
        return _OpenRow(session_id=session.session_id, history_ids=session.token_ids, num_new=num_new)

    def round(self, row: _OpenRow, keep: bool) -> None:
        """Takes one sample of every source; for nothing, unless they are to be kept."""
        new_ids = self._served.random_ids(row.num_new)
        tokens = set()
        for source in SOURCES:
            samples = row.samples[source] if keep else Samples()
            token, compiles = self._sample(source, row, new_ids, samples)
            tokens.add(token)
            row.recompiles += compiles if keep else 0
        row.same_tokens &= len(tokens) == 1

    def end_row(self, row: _OpenRow) -> TiersRow:
        """Sums a row up, and forgets its history."""
        self._engine.session(session_id=row.session_id).close()
        num_history, layout = len(row.history_ids), self._served.layout
        recompute_s = row.samples["recompute"].median("ttft_s")
        return TiersRow(
            history_tokens=num_history,
            new_tokens=row.num_new,
            ssd_driver=self._engine.config.store.ssd_driver,
            kv_bytes=layout.num_blocks(num_history) * layout.block_bytes,
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
        """Closes the engine."""
        self._engine.close()

    def _sample(self, source: str, row: _OpenRow, new_ids: list[int], samples: Samples) -> tuple[int, int]:
        """One turn of the row's session, which is taken back; its token, and functions compiled."""
        session = self._bring(source, row)
        with CompileCounter() as compiles:
            token, ttft_s = send_turn(self._engine, session, new_ids)
        usage = check_source(source, session, len(new_ids), _wanted_tokens(source, len(row.history_ids)))
        samples.add(ttft_s=ttft_s, fetch_s=usage.queued_s, load_s=usage.load_s, load_stall_s=usage.load_stall_s)
        session.rewind(len(row.history_ids))
        self._engine.wait_for_saves()
        return token, compiles.count

    def _bring(self, source: str, row: _OpenRow) -> Session:
        """Brings the row's session to where its history is to come from."""
        if source in ("ssd_warm", "ssd"):
            self._served.push_out()
        elif source == "ssd_restart":
            self._served.restart()
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
            self._served.warm_up_files()
        elif source != "dram":
            self._served.cool_down_files()
        return session


def _max_tokens(config: BenchConfig) -> int:
    """Tokens of the longest row whose KV is stored."""
    return max(config.history_tokens) + max(config.new_tokens)


def _wanted_tokens(source: str, num_history: int) -> dict[str, int]:
    """Tokens that a sample must have loaded, by tier."""
    return {_WANTED_TIERS[source]: num_history} if source in _WANTED_TIERS else {}
