"""A turn's TTFT by where its history is: in DRAM, on SSD, on SSD after a restart, or nowhere.

Every round takes one sample of each source, the same new tokens over the same history of one session. Before a sample
the session is brought to where it is to come from:

    dram         where its last turn has left it
    ssd_warm     a bystander's turn, which takes all of DRAM, pushes it out; its files are read once
    ssd          the same, but the page cache is emptied of its files
    ssd_restart  the engine is closed; a new one of the same model and directory takes the session up; emptied likewise
    recompute    its KV is dropped; this turn stores it anew, for the next round

After a sample the session is rewound to its history, which is exact since it is in DRAM then, and written to SSD. A
sample that came from anywhere else than it should is an error, not a number.

Not here: a turn against its compute alone (`suites.ttft`), bringing sessions to where they are to be (`engines`), how
fast a tier moves bytes (`suites.store`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks import harness
from benchmarks.disk import scratch_on_disk
from benchmarks.engines import (
    OneSessionEngine,
    check_source,
    cool_down_files,
    one_session_config,
    send_turn,
    take_back,
    warm_up_files,
)
from benchmarks.harness import BenchError, Run, Sample, Spread
from benchmarks.suites.reuse import DiskHistoryConfig
from ca_jax.config import EngineConfig
from ca_jax.session import Session
from ca_jax.storage.config import StoreConfig

SOURCES = ("dram", "ssd_warm", "ssd", "ssd_restart", "recompute")
"""Where a turn's history comes from: DRAM; SSD, with the files in the page cache; SSD, without; the same, by a new
engine over the same directory; nowhere."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiersConfig(DiskHistoryConfig):
    """One turn over a history, by where that is; DRAM holds the longest and no more."""

    ssd_driver: str = StoreConfig.ssd_driver
    """How KV is kept on SSD."""

    def engine_config(self) -> EngineConfig:
        """See `HistoryConfig`; with this driver."""
        return dataclasses.replace(super().engine_config(), store=StoreConfig(ssd_driver=self.ssd_driver))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceTimes:
    """What a turn took whose history came from one source."""

    ttft_s: float
    """From sending to the first token, as the caller sees it."""
    speedup: float
    """Recompute's TTFT over this one."""
    fetch_s: float
    """Of those, seconds until prefill began, which are spent waiting for SSD where the history is there."""
    load_s: float
    """Seconds in which KV was being copied from DRAM; they overlap compute."""
    load_stall_s: float
    """Seconds in which compute waited for such a copy."""
    cached_tokens: dict[str, int]
    """History tokens whose KV was loaded, by the tier they were in: the same in every sample."""
    spread: Spread


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiersRow:
    """TTFT of the same turn by where its history's KV is."""

    history_tokens: int
    """Tokens whose KV is stored, exactly."""
    new_tokens: int
    ssd_driver: str
    """See `StoreConfig`. `raw` reads past the page cache, where the disk allows it: warm and cold are one then."""
    kv_bytes: int
    """What a fetch brings: the blocks of the history."""
    sources: dict[str, SourceTimes]
    """By the names in `SOURCES`."""
    same_tokens: bool
    """Whether all sources gave the same first token in every round."""
    recompiles: int
    """Functions compiled in the measured turns; 0 unless the first round, which is for nothing, missed one."""


def _summary(rows: Sequence[TiersRow]) -> dict[str, Any]:
    """The speed-ups of the first row."""
    times = {source: each.speedup for source, each in rows[0].sources.items() if source != "recompute"}
    return {**{f"ttft_{source}_vs_recompute": speedup for source, speedup in times.items()}, **harness.checks(rows)}


@harness.suite(TiersConfig, summary=_summary)
def tiers(run: Run[TiersConfig]) -> Iterator[TiersRow]:
    """A turn's TTFT by where its history is: DRAM, SSD, SSD after a restart, nowhere."""
    config = run.config
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(scratch_on_disk(config.ssd_dir))
        sized = one_session_config(config.engine_config(), run.model, directory, max_tokens=config.max_tokens)
        served = OneSessionEngine(run.model, sized, max_tokens=config.max_tokens, seed=config.seed)
        stack.callback(served.close)
        yield from rows_of(run, served)


def rows_of(run: Run[TiersConfig], served: OneSessionEngine) -> Iterator[TiersRow]:
    """The rows of an engine with an SSD tier, one for each pair of history and new tokens."""
    for num_history, num_new in run.config.cells:
        history = served.store_session(num_history)
        session_id, history_ids = history.session_id, list(history.token_ids)

        def ways(
            session_id: str = session_id, history_ids: list[int] = history_ids, num_new: int = num_new
        ) -> dict[str, Callable[[], Sample]]:
            new_ids = served.random_ids(num_new)
            return {source: partial(_sample, served, source, session_id, history_ids, new_ids) for source in SOURCES}

        rounds = run.rounds(ways)
        served.engine.session(session_id=session_id).close()
        recompute_s = harness.must_median(harness.of_way(rounds, "recompute"), "ttft_s")
        yield TiersRow(
            history_tokens=num_history,
            new_tokens=num_new,
            ssd_driver=served.engine.config.store.ssd_driver,
            kv_bytes=served.layout.num_blocks(num_history) * served.layout.block_bytes,
            sources={source: _times(harness.of_way(rounds, source), recompute_s) for source in SOURCES},
            same_tokens=harness.same(rounds, "token"),
            recompiles=harness.recompiles(rounds),
        )


def _times(taken: Sequence[Sample], recompute_s: float) -> SourceTimes:
    speedup = recompute_s / harness.must_median(taken, "ttft_s")
    return harness.make_row(SourceTimes, taken, speedup=speedup, cached_tokens=taken[0]["cached_tokens"])


def _sample(
    served: OneSessionEngine, source: str, session_id: str, history_ids: list[int], new_ids: list[int]
) -> Sample:
    """One turn of a session that is brought to where its history is to come from, and taken back."""
    session = _bring(served, source, session_id, history_ids)
    wanted = {} if source == "recompute" else {source.partition("_")[0]: len(history_ids)}
    token, ttft_s = send_turn(served.engine, session, new_ids)
    usage = check_source(source, session, len(new_ids), wanted)
    take_back(served.engine, session, len(history_ids))
    times = {"fetch_s": usage.queued_s, "load_s": usage.load_s, "load_stall_s": usage.load_stall_s}
    return {"token": token, "ttft_s": ttft_s, "cached_tokens": wanted, **times}


def _bring(served: OneSessionEngine, source: str, session_id: str, history_ids: list[int]) -> Session:
    if source in ("ssd_warm", "ssd"):
        served.push_out()
    elif source == "ssd_restart":
        served.restart()
    session = served.engine.session(session_id=session_id)
    if session.token_ids != history_ids:
        raise BenchError(
            f"{source} must find a conversation of {len(history_ids)} tokens in the store, got "
            f"{len(session.token_ids)} tokens"
        )
    if source == "recompute":
        served.engine.drop_stored(session)
        served.engine.wait_for_saves()
    elif source == "ssd_warm":
        warm_up_files(served.engine)
    elif source != "dram":
        cool_down_files(served.engine)
    return session
