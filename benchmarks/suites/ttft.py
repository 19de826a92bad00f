"""How close a turn over stored history comes to what bounds it: its compute alone, and its load alone.

Every round takes one sample of each way, of the same new tokens over the same history:

    dram      a turn whose history is in DRAM
    ssd_warm  a turn whose history is on SSD alone, pushed out of DRAM by a bystander; its files are in the page cache
    apart     the history is copied from DRAM to the device, and nothing is computed; then the new tokens are prefilled
              over what was copied so

The last one goes past the engine's scheduling, with its own loader and functions. A turn whose history came from
anywhere else than it should is an error, not a number.

Not here: loads and computes alone (`apart`), bringing sessions to where they are to be (`engines`), TTFT from a cold
SSD and after a restart (`suites.tiers`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks import harness
from benchmarks.apart import ApartEngine
from benchmarks.disk import scratch_directory
from benchmarks.engines import (
    OneSessionEngine,
    check_source,
    one_session_config,
    send_turn,
    take_back,
    warm_up_files,
)
from benchmarks.harness import Run, Sample, Ways
from benchmarks.recording import Recorder
from benchmarks.suites.reuse import DiskHistoryConfig, HistoryRow
from ca_jax.session import Session


@dataclasses.dataclass(frozen=True, kw_only=True)
class TtftConfig(DiskHistoryConfig):
    """One turn over a history, against its compute and its load alone; DRAM holds the longest and no more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TtftRow(HistoryRow):
    """Time to the first token (TTFT) of the same turn by where its history is, against its load and compute alone."""

    kv_bytes: int
    ttft_dram_s: float
    """From sending to the first token, as the caller sees it, with the history in DRAM."""
    ttft_ssd_s: float
    """The same, with the history on SSD alone, whose files are in the page cache."""
    fetch_ssd_s: float
    """Of that, seconds until prefill began: from SSD to DRAM."""
    compute_s: float
    """The same prefill with its history on the device already, until its first token is on the host."""
    load_s: float
    """The same load from DRAM to the device, while nothing is computed."""
    load_stall_s: float
    """Of `ttft_dram_s`, seconds in which compute waited for a layer."""
    ratio_dram: float
    """`ttft_dram_s` over `compute_s`: the median of the rounds' own ratios, as the next two."""
    ratio_ssd: float
    ratio_ideal: float
    """`ttft_dram_s` over the larger of `load_s` and `compute_s`, which no overlap beats."""


def _summary(rows: Sequence[TtftRow]) -> dict[str, Any]:
    """The largest ratios of the rows."""
    ratios = {name: max(getattr(row, name) for row in rows) for name in ("ratio_dram", "ratio_ssd", "ratio_ideal")}
    return {**ratios, **harness.checks(rows)}


@harness.suite(TtftConfig, summary=_summary, is_recorded=True, plots_turn=True)
def ttft(run: Run[TtftConfig]) -> Iterator[TtftRow]:
    """A turn's TTFT from DRAM and from SSD against its compute and its load alone."""
    config, recorder = run.config, run.recorder or Recorder()
    max_tokens = config.max_tokens
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(scratch_directory(config.ssd_dir))
        sized = one_session_config(config.engine_config(), run.model, directory, max_tokens=max_tokens)
        seed, timeline = config.seed, recorder.timeline
        served = OneSessionEngine(run.model, sized, max_tokens=max_tokens, seed=seed, timeline=timeline)
        stack.callback(served.close)
        longest = max(config.history_tokens)
        served.engine.warmup(max_history_tokens=longest, max_new_tokens=max(config.new_tokens), progress=run.progress)
        apart = ApartEngine(served.engine, max_history_tokens=longest)
        stack.callback(apart.close)
        for nth, (num_history, num_new) in enumerate(config.cells):
            yield _Bench(run, served, apart, recorder).row(num_history, num_new, may_record=not nth)


@dataclasses.dataclass(frozen=True)
class _Bench:
    run: Run[TtftConfig]
    served: OneSessionEngine
    apart: ApartEngine
    recorder: Recorder

    def row(self, num_history: int, num_new: int, *, may_record: bool) -> TtftRow:
        session = self.served.store_session(num_history)
        ways = partial(self._ways, session, num_new)
        rounds = self.run.rounds(ways)
        if may_record and self.recorder.is_wanted:
            with self.recorder.round():
                harness.interleave(ways, 1, warm_up=0)
        session.close()
        for each in rounds:
            dram, ssd, apart = (each[name] for name in ("dram", "ssd_warm", "apart"))
            apart["ratio_dram"] = dram["ttft_dram_s"] / apart["compute_s"]
            apart["ratio_ssd"] = ssd["ttft_ssd_s"] / apart["compute_s"]
            apart["ratio_ideal"] = dram["ttft_dram_s"] / max(apart["load_s"], apart["compute_s"])
        return harness.make_row(
            TtftRow,
            harness.samples(rounds),
            history_tokens=num_history,
            new_tokens=num_new,
            kv_bytes=num_history * self.served.layout.token_bytes,
            same_tokens=harness.same(rounds, "token"),
        )

    def _ways(self, session: Session, num_new: int) -> Ways:
        new_ids = self.served.random_ids(num_new)
        return {
            "dram": partial(self._turn, "dram", session, new_ids),
            "ssd_warm": partial(self._turn, "ssd_warm", session, new_ids),
            "apart": partial(self.apart.sample, session, new_ids),
        }

    def _turn(self, source: str, session: Session, new_ids: list[int]) -> Sample:
        """A turn that is taken back."""
        num_history, engine = len(session.token_ids), self.served.engine
        tier = source.partition("_")[0]
        if tier == "ssd":
            self.served.push_out()
            warm_up_files(engine)
        with self.recorder.turn(f"{len(new_ids)} tokens over {num_history:,} from {source}"):
            token, ttft_s = send_turn(engine, session, new_ids)
        usage = check_source(source, session, len(new_ids), {tier: num_history})
        take_back(engine, session, num_history)
        if tier == "ssd":
            return {"token": token, "ttft_ssd_s": ttft_s, "fetch_ssd_s": usage.queued_s}
        return {"token": token, "ttft_dram_s": ttft_s, "load_stall_s": usage.load_stall_s}
