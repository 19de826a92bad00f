"""Measures how much of a load is hidden: the same turn over the same history, by every depth of the read buffer.

Every sample is of two jobs, queued at the same moment for the one slot of an engine:

    job before    no history; while it is prefilled, the read buffer is filled with the first layers of the other one's
    the turn      new tokens over a stored history; what counts is from the end of the job before to its first token

Each way to load has an engine of its own over the same weights. All are given the same tokens in a round, and rounds go
through the ways in turn (A B C B C A ...). At real speed KV is copied as fast as it is. At set speeds it comes over a
link that takes no CPU but for the copies, whose pace is set by what the turn computes in this very run: `compute` is
the same turn with an endless link and room for all layers, so that its history is on the device when it begins.

Not here: what the samples come to (`bench_overlap_rows`), what rows hold (`bench_overlap_schema`), links and engines
(`bench_overlap`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ca_jax.engine import Engine
from ca_jax.kv.rates import Rates
from ca_jax.launch.bench_overlap import (
    CALIBRATIONS,
    AdjustableLink,
    Steps,
    engine_for,
    in_turn,
    paced_engine,
    random_ids,
    run_to_end,
    settle,
    token_bytes,
)
from ca_jax.launch.bench_overlap_rows import COMPUTE, PreloadCell, PreloadRound, summarize_preload
from ca_jax.launch.bench_overlap_schema import DepthRow, PreloadBenchConfig, PreloadResult, PreloadRow
from ca_jax.launch.bench_schema import BenchError
from ca_jax.launch.bench_suites import send_turn
from ca_jax.pretrained import LoadedModel, Progress
from ca_jax.session import Session
from ca_jax.telemetry.metrics import CompileCounter
from ca_jax.turns.requests import SamplingParams

_FIRST_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)
_WARM_UP_TOKENS = 1024  # The most that an engine stores to measure its rates.

Measured = tuple[list[PreloadRound], bool, int]
"""Rounds, whether all ways drew the same tokens in each, and functions compiled."""


def run_preload_suite(model: LoadedModel, config: PreloadBenchConfig, progress: Progress) -> PreloadResult:
    """Measures every way to load at real speed and at set ones. Blocks.

    Args:
      model: what is served; its engines are made here.
      config: what to measure.
      progress: told of every round.

    Raises:
      BenchError: no engine is as large as it must be, or a sample did other work than its row would say.
    """
    num_rounds = len(config.preload_history_tokens) * (1 + config.repeats)
    if config.load_ratios:
        num_rounds += 1 + len(config.load_ratios) * (1 + config.repeats)
    bench = _Bench(model, config, np.random.default_rng(config.seed), Steps(config.suite, num_rounds, progress))
    rows: list[PreloadRow | DepthRow] = []
    if config.preload_history_tokens:
        rows += bench.real_rows()
    if config.load_ratios:
        rows += bench.paced_rows()
    return PreloadResult(rows=rows, summary=summarize_preload(rows))


@dataclasses.dataclass(frozen=True)
class _Way:
    """One way to have a turn's history: an engine, its session, and what is to be done before a sample."""

    engine: Engine
    session: Session
    prepare: Callable[[], object] = lambda: None
    is_stored: bool = True


@dataclasses.dataclass(frozen=True)
class _Bench:
    """Measures one part at a time."""

    model: LoadedModel
    config: PreloadBenchConfig
    rng: np.random.Generator
    step: Steps  # To be called after each round.

    def real_rows(self) -> list[PreloadRow]:
        """Every history length at real speed, by each way and recomputed."""
        rows, num_tokens = [], self.config.preload_prompt_tokens
        with contextlib.ExitStack() as stack:
            engines = self._engines(stack, num_tokens, self.config.preload_read_buffers)
            for num_history in self.config.preload_history_tokens:
                num_new = num_tokens - num_history
                ways = self._store_history(engines, num_history)
                off = ways["off"]
                drop = functools.partial(off.engine.drop_stored, off.session)
                ways["recompute"] = dataclasses.replace(off, prepare=drop, is_stored=False)
                self._measure(ways, num_new, 1)
                rounds, same_tokens, recompiles = self._measure(ways, num_new, self.config.repeats)
                cell = PreloadCell(
                    link="real",
                    load_ratio=None,
                    history_tokens=num_history,
                    new_tokens=num_new,
                    num_layers=self.model.config.num_layers,
                    load_s=statistics.median(each["off"]["load_s"] for each in rounds),
                    same_tokens=same_tokens,
                    recompiles=recompiles,
                )
                rows += cell.rows(rounds)
                for name in engines:
                    ways[name].session.close()
        return rows

    def paced_rows(self) -> list[PreloadRow | DepthRow]:
        """Every ratio of load to compute, by each way, and the depths that follow."""
        rows: list[PreloadRow | DepthRow] = []
        num_history, num_new = self.config.paced_history_tokens, self.config.paced_new_tokens
        with contextlib.ExitStack() as stack:
            link = stack.enter_context(AdjustableLink())
            engines = self._engines(stack, num_history + num_new, self.config.read_buffers, link)
            endless = self._store_history(engines, num_history)
            compute = {COMPUTE: dataclasses.replace(endless["all"], prepare=link.set_pace)}
            padded = engines["auto"]._runner.padded(num_history, num_new)
            self._measure(endless, num_new, 1)
            for load_ratio in self.config.load_ratios:
                calibrated, *_ = self._measure(compute, num_new, CALIBRATIONS, tell=False)
                load_s = load_ratio * statistics.median(each[COMPUTE]["ttft_s"] for each in calibrated)
                num_bytes = num_history * token_bytes(self.model, engines["auto"].config)
                set_pace = functools.partial(link.set_pace, num_bytes / load_s)
                set_pace()
                rates = self._measure_rates(engines["auto"])
                self.step()
                paced = {name: dataclasses.replace(way, prepare=set_pace) for name, way in endless.items()}
                rounds, same_tokens, recompiles = self._measure(paced | compute, num_new, self.config.repeats)
                rates = engines["auto"].rates or rates  # Turns have kept them up to date.
                cell = PreloadCell(
                    link="paced",
                    load_ratio=load_ratio,
                    history_tokens=num_history,
                    new_tokens=num_new,
                    num_layers=self.model.config.num_layers,
                    load_s=load_s,
                    same_tokens=same_tokens,
                    recompiles=recompiles,
                )
                turns = cell.rows(rounds)
                rows += [*turns, cell.depth_row(turns, load_ratio, rates, padded)]
        return rows

    def _engines(
        self, stack: contextlib.ExitStack, num_tokens: int, depths: Sequence[int], link: AdjustableLink | None = None
    ) -> dict[str, Engine]:
        """An engine for each way to load; depths of as many layers as the model has, or more, are `all`."""
        shallower = dict.fromkeys(depth for depth in depths if depth < self.model.config.num_layers)
        read_buffers: list[int | str] = ["off", *shallower, "all", *([] if link is None else ["auto"])]
        longest = max(num_tokens, self.config.ahead_tokens) + 1
        stored = [num_tokens, self.config.ahead_tokens, _WARM_UP_TOKENS]
        config = engine_for(self.config.engine, self.model, stored, context_window=longest)
        engines = {}
        for read_buffer in read_buffers:
            each = dataclasses.replace(config, read_buffer=read_buffer, recompute_if_faster=False)
            engine = paced_engine(self.model, each, suite=self.config.suite, loads=link)
            engines[str(read_buffer)] = stack.enter_context(engine)
        return engines

    def _store_history(self, engines: Mapping[str, Engine], num_history: int) -> dict[str, _Way]:
        """Has each engine store the same history."""
        history_ids = random_ids(self.rng, self.model, num_history)
        ways = {}
        for name, engine in engines.items():
            session = engine.session()
            send_turn(engine, session, history_ids)
            session.rewind(num_history)
            engine.wait_for_saves()
            ways[name] = _Way(engine, session)
        return ways

    def _measure(self, ways: Mapping[str, _Way], num_new: int, num_rounds: int, *, tell: bool = True) -> Measured:
        """Takes so many samples of each way, in turn; tells of each round unless it is no step of its own."""
        rounds: list[PreloadRound] = []
        same_tokens = True
        with CompileCounter() as compiles:
            for nth_round in range(num_rounds):
                ahead_ids = random_ids(self.rng, self.model, self.config.ahead_tokens)
                new_ids = random_ids(self.rng, self.model, num_new)
                tokens, samples = set(), {}
                for name, way in in_turn(ways, nth_round):
                    drawn, samples[name] = _sample(name, way, ahead_ids, new_ids)
                    tokens.add(drawn)
                rounds.append({name: samples[name] for name in ways})
                same_tokens &= len(tokens) == 1
                if tell:
                    self.step()
        return rounds, same_tokens, compiles.count

    def _measure_rates(self, engine: Engine) -> Rates:
        """What an engine finds of a link when it warms up."""
        engine.warmup(max_history_tokens=self.config.paced_history_tokens, max_new_tokens=self.config.paced_new_tokens)
        rates = engine.rates
        if rates is None:
            raise BenchError("wanted an engine that knows its rates when it has warmed up, found none")
        return rates


def _sample(name: str, way: _Way, ahead_ids: list[int], new_ids: list[int]) -> tuple[tuple[int, int], dict[str, float]]:
    """One turn behind another job, which is taken back afterwards; first tokens of both, and times."""
    engine, session = way.engine, way.session
    num_history = len(session.token_ids)
    way.prepare()
    ahead_session = engine.session()
    ahead = engine.submit_turn(ahead_session, ahead_ids, _FIRST_TOKEN)
    job = engine.submit_turn(session, new_ids, _FIRST_TOKEN)
    run_to_end(engine, ahead, job)
    settle(engine)
    if job.started_s < ahead.finished_s:
        raise BenchError(f"{name} wanted the turn to begin when the job before it has ended, found that it did earlier")
    wanted = num_history if way.is_stored else 0
    if job.cached_tokens != wanted:
        raise BenchError(
            f"{name} of {num_history} + {len(new_ids)} tokens wanted {wanted} from the store, found {job.cached_tokens}"
        )
    times = {
        "ttft_s": job.first_token_s - ahead.finished_s,
        "head_start_s": ahead.finished_s - ahead.started_s,
        "load_s": job.load_s,
        "load_stall_s": job.load_stall_s,
    }
    ahead_session.close()
    session.rewind(num_history)
    engine.wait_for_saves()
    return (ahead.output_ids[0], job.output_ids[0]), times
