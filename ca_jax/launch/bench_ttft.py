"""Measures how close a turn over stored history comes to what bounds it: its compute alone, and its load alone.

Every round takes one sample of each way (A B C D A B C D ...), of the same new tokens over the same history:

    dram      a turn whose history is in DRAM
    ssd_warm  a turn whose history is on SSD alone, pushed out of DRAM by a bystander; its files are in the page cache
    load      the history is copied from DRAM to the device, and nothing is computed
    compute   the new tokens are prefilled over what was copied so

The last two go past the engine's scheduling, with its own loader and functions. After a turn the session is rewound to
its history. A turn whose history came from anywhere else than it should is an error, not a number. The engine is warmed
up, and the first round is for nothing.

Not here: loads and computes alone (`bench_apart`), bringing sessions to where they are to be (`bench_engines`), TTFT
from a cold SSD and after a restart (`bench_tiers`), what rows hold (`bench_serving_schema`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ca_jax.launch.bench_apart import ApartEngine
from ca_jax.launch.bench_disk import scratch_directory
from ca_jax.launch.bench_engines import OneSessionEngine, check_source, make_engine, one_session_config
from ca_jax.launch.bench_recording import Recorder
from ca_jax.launch.bench_schema import Samples
from ca_jax.launch.bench_serving_schema import TtftBenchConfig, TtftResult, TtftRow
from ca_jax.launch.bench_suites import send_turn
from ca_jax.pretrained import LoadedModel, Progress
from ca_jax.session import Session
from ca_jax.storage.store import AttentionStore
from ca_jax.telemetry.metrics import CompileCounter
from ca_jax.turns.requests import Usage

_TIERS = {"dram": "dram", "ssd_warm": "ssd"}


def run_ttft_suite(
    model: LoadedModel, config: TtftBenchConfig, progress: Progress, recorder: Recorder | None = None
) -> TtftResult:
    """Measures every row, with an engine of its own. Blocks.

    Args:
      model: to serve.
      config: what to measure.
      progress: told of every round.
      recorder: gets one more round of the first row: a turn from DRAM, then one from SSD.

    Raises:
      BenchError: the engine cannot be as large as the longest row wants it, the disk cannot be used, or a turn's
        history did not come from where it should have.
    """
    recorder = recorder or Recorder()
    stores: list[AttentionStore] = []

    def keep(store: AttentionStore) -> AttentionStore:
        stores.append(store)
        return store

    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(scratch_directory(config.ssd_dir))
        engine_config = one_session_config(config.engine_config(), model, directory, max_tokens=config.max_tokens)
        engine = make_engine(model, engine_config, suite="ttft", timeline=recorder.timeline, store_wrapper=keep)
        served = OneSessionEngine(engine, suite="ttft", max_tokens=config.max_tokens, seed=config.seed)
        stack.callback(served.close)
        engine.warmup(
            max_history_tokens=max(config.history_tokens), max_new_tokens=max(config.new_tokens), progress=progress
        )
        apart = ApartEngine(engine, stores[0], max_history_tokens=max(config.history_tokens))
        stack.callback(apart.close)
        served.begin()
        rows = _measure(_Bench(served, apart, recorder), config, progress)
    return TtftResult(rows=rows, summary=summarize_ttft(rows))


def summarize_ttft(rows: Sequence[TtftRow]) -> dict[str, Any]:
    """`ratio_dram`, `ratio_ssd`, `ratio_ideal`: the largest of the rows; `same_tokens` and `recompiles` of all."""
    ratios = {name: max(getattr(row, name) for row in rows) for name in ("ratio_dram", "ratio_ssd", "ratio_ideal")}
    return {
        **ratios,
        "same_tokens": all(row.same_tokens for row in rows),
        "recompiles": sum(row.recompiles for row in rows),
    }


def _measure(bench: _Bench, config: TtftBenchConfig, progress: Progress) -> list[TtftRow]:
    cells = config.cells()
    total, done = len(cells) * (1 + config.repeats), itertools.count()
    progress(config.suite, next(done), total)
    rows: list[TtftRow] = []
    for num_history, num_new in cells:
        is_first = not rows
        rows.append(
            bench.row(num_history, num_new, config.repeats, is_first, lambda: progress(config.suite, next(done), total))
        )
    return rows


class _Bench:
    """Measures one row at a time."""

    def __init__(self, served: OneSessionEngine, apart: ApartEngine, recorder: Recorder) -> None:
        self._served = served
        self._apart = apart
        self._recorder = recorder

    def row(self, num_history: int, num_new: int, repeats: int, may_record: bool, step: Callable[[], None]) -> TtftRow:
        """Measures one size: a round that does not count, then so many that do."""
        session = self._served.store_session(num_history)
        self._round(session, num_new, Samples())
        step()
        samples, same_tokens = Samples(), True
        with CompileCounter() as compiles:
            for _ in range(repeats):
                same_tokens &= self._round(session, num_new, samples)
                step()
        if may_record and self._recorder.is_wanted:
            with self._recorder.round():
                self._round(session, num_new, Samples())
        session.close()
        return TtftRow(
            history_tokens=num_history,
            new_tokens=num_new,
            kv_bytes=num_history * self._served.layout.token_bytes,
            ttft_dram_s=samples.median("ttft_dram_s"),
            ttft_ssd_s=samples.median("ttft_ssd_s"),
            fetch_ssd_s=samples.median("fetch_ssd_s"),
            compute_s=samples.median("compute_s"),
            load_s=samples.median("load_s"),
            load_stall_s=samples.median("load_stall_s"),
            ratio_dram=samples.median("ratio_dram"),
            ratio_ssd=samples.median("ratio_ssd"),
            ratio_ideal=samples.median("ratio_ideal"),
            same_tokens=same_tokens,
            recompiles=compiles.count,
            spread=samples.spread(),
        )

    def _round(self, session: Session, num_new: int, samples: Samples) -> bool:
        """One sample of each way; whether all gave the same token."""
        new_ids = self._served.random_ids(num_new)
        dram_token, dram_s, usage = self._turn("dram", session, new_ids)
        self._served.push_out()
        self._served.warm_up_files()
        ssd_token, ssd_s, ssd_usage = self._turn("ssd_warm", session, new_ids)
        with self._apart.loaded(session) as history:
            token, compute_s = self._apart.prefill(history, new_ids)
        samples.add(
            ttft_dram_s=dram_s,
            ttft_ssd_s=ssd_s,
            fetch_ssd_s=ssd_usage.queued_s,
            compute_s=compute_s,
            load_s=history.load_s,
            load_stall_s=usage.load_stall_s,
            ratio_dram=dram_s / compute_s,
            ratio_ssd=ssd_s / compute_s,
            ratio_ideal=dram_s / max(history.load_s, compute_s),
        )
        return len({dram_token, ssd_token, token}) == 1

    def _turn(self, source: str, session: Session, new_ids: list[int]) -> tuple[int, float, Usage]:
        """A turn that is taken back: its token, its TTFT, and what it took."""
        num_history = len(session.token_ids)
        with self._recorder.turn(f"{len(new_ids)} tokens over {num_history:,} from {source}"):
            token, ttft_s = send_turn(self._served.engine, session, new_ids)
        usage = check_source(source, session, len(new_ids), {_TIERS[source]: num_history})
        session.rewind(num_history)
        self._served.engine.wait_for_saves()
        return token, ttft_s, usage
