"""How much of a load is hidden: the same turn over the same history, by every depth of the read buffer.

Every sample is of two jobs, queued at the same moment for the one slot of an engine:

    job before    no history; while it is prefilled, the read buffer is filled with the first layers of the other one's
    the turn      new tokens over a stored history; what counts is from the end of the job before to its first token

Each way to load has an engine of its own over the same weights. All are given the same tokens in a round. What machines
do comes first: links at their real speed, where KV is copied as fast as it is. Paced links come second: they take no
CPU but for the copies, and their pace is set by what the turn computes in this very run. In both, `compute` is the same
turn by an engine of its own, over an endless link and with room for all layers, so that its history is on the device
when it begins: no row is compared with itself.

Not here: what times should be (`ca_jax.kv.costs`), links (`paced`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from benchmarks import harness
from benchmarks.engines import answer_of, engine_for, make_engine, random_ids, settle, store_session, take_back
from benchmarks.harness import NOISE, BenchError, Rounds, Row, Run, Sample, Ways
from benchmarks.paced import CALIBRATIONS, AdjustableLink
from ca_jax.engine import Engine
from ca_jax.kv import costs
from ca_jax.kv.costs import Rates
from ca_jax.kv.layout import kv_layout
from ca_jax.session import Session

COMPUTE = "compute"
"""The way whose history is on the device before the turn begins."""
_WARM_UP_TOKENS = 1024  # The most that an engine stores to measure its rates.


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreloadConfig(harness.ServingConfig):
    """How much of a load layer-wise pre-loading hides, at real speed and over paced links.

    `off` (all is loaded, then computed) and `all` (layers in the read buffer) are always measured; over paced links,
    where the engine has rates, `auto` too.
    """

    settled: ClassVar = ("max_batch_size", "recompute_if_faster", "read_buffer", "queue_order")
    may_be_zero: ClassVar = frozenset({"seed", "preload_read_buffers", "read_buffers"})
    may_be_empty: ClassVar = frozenset({"preload_history_tokens", "load_ratios"})

    preload_prompt_tokens: int = 1000
    """Real speed: tokens of history and turn together. As in the paper's section 4.3.1."""
    preload_history_tokens: tuple[int, ...] = (500, 600, 700, 800, 900)
    """Real speed: tokens of those whose KV is stored, a cell each; none leaves this part out."""
    preload_read_buffers: tuple[int, ...] = (0, 15)
    """Real speed: layers of the read buffer."""
    paced_history_tokens: int = 2000
    """Paced links: tokens whose KV is stored."""
    paced_new_tokens: int = 100
    """Paced links: tokens of the turn over them."""
    load_ratios: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    """Paced links: the load over the compute of the turn, a cell each; none leaves this part out."""
    read_buffers: tuple[int, ...] = (0, 1, 5, 15)
    """Paced links: layers of the read buffer."""
    ahead_tokens: int = 512
    """Tokens of the job before, which has no history: its prefill is the head start that read buffers are filled in."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.preload_history_tokens or self.load_ratios):
            raise ValueError("preload_history_tokens or load_ratios must have something to measure, got none in both")
        most = self.preload_prompt_tokens
        is_less = max(self.preload_history_tokens, default=0) < most
        wanted = f"fewer than the {most} preload_prompt_tokens"
        harness.require(is_less, "preload_history_tokens", wanted, list(self.preload_history_tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreloadRow(Row):
    """The same turn behind the same other job, its history loaded in one way; times are from that job's end on."""

    measured: str = "preload_turn"
    link: str
    """`real`: DRAM to device as it is. `paced`: a link of a set speed that takes no CPU but for the copies."""
    load_ratio: float | None
    """`paced`: the load over the compute, as asked for."""
    history_tokens: int
    new_tokens: int
    """Tokens of the turn over them."""
    read_buffer: str
    """Its layers, `all`, `auto` (as many as the engine chose), `off` (all is loaded, then computed), or `recompute`
    (nothing is stored)."""
    ttft_s: float
    """From the end of the job before to the first token."""
    ideal_s: float | None
    """What that would be were there no cost but `load_s` and `compute_s`, see `costs.pipeline_s`, `costs.blocking_s`;
    of `auto`, with the best depth. None for `recompute`."""
    ratio: float | None
    """`ttft_s` over the ideal with the compute and the head start of the same round: the median of the rounds' own."""
    hidden: float | None
    """The fraction of the blocking load that is hidden: `1 - (ttft_s - compute_s) / (off - compute_s)`, with the
    `ttft_s` of `off`. None for `recompute`, and where blocking took no longer than computing alone, within `NOISE`."""
    compute_s: float
    """`ttft_s` of the same turn by an engine whose history was on the device before."""
    load_s: float
    """Of all layers: of `paced` as set, of `real` as `off` measured it."""
    load_stall_s: float
    """Seconds in which compute waited for a load."""
    head_start_s: float
    """From the start to the end of the job before, all of which this one waited for."""
    same_tokens: bool
    """Whether the cell's ways drew the same first tokens, in both jobs and every round."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthRow:
    """How deep the read buffer should be for one speed of the link: by measured rates, by arithmetic, and by trial."""

    measured: str = "read_buffer"
    load_ratio: float
    by_rates: int
    """Layers by `costs.read_buffer_layers`, at least 1, from rates of the engine's warm-up and its turns since."""
    best: int
    """Layers by trying all with `costs.pipeline_s`, from this run's load and compute."""
    measured_best: int
    """The shallowest of the measured depths that is as fast as the fastest, within `noise`."""
    noise: float
    """The share of the time within which two count as the same."""
    rates_load_s: float
    """The load that the engine's rates predict; `load_s` is what it is."""
    load_s: float
    rates_compute_s: float
    """The prefill that the engine's rates predict; `compute_s` is what it took, all around it included."""
    compute_s: float


def summarize(rows: Sequence[PreloadRow | DepthRow]) -> dict[str, Any]:
    """What the rows come to, those at real speed first; None where there is no row for it.

    - `ttft_saved_by_read_buffer`: at real speed, by read buffer, the share of the TTFT without pre-loading that it
      saves: median of the history lengths.
    - `real_load_hidden`: at real speed, the least fraction of the blocking load that a read buffer of all layers hides.
    - `load_hidden`: the same over a paced link where load and compute take the same.
    - `worst_ttft_vs_ideal`, `best_ttft_vs_ideal`: largest and smallest `ratio` of the paced rows.
    - `worst_depth_error`: over paced links, most layers between the read buffer that the rates gave and the best one.
    - `same_tokens`, `recompiles`: of all rows.
    """
    turns = [row for row in rows if isinstance(row, PreloadRow)]
    cells = {(row.link, row.load_ratio, row.history_tokens): row.recompiles for row in turns}
    real = [row for row in turns if row.link == "real"]
    off_s = {row.history_tokens: row.ttft_s for row in real if row.read_buffer == "off"}
    saved = collections.defaultdict(list)
    for row in real:
        if row.read_buffer not in ("off", "recompute"):
            saved[row.read_buffer].append(1 - row.ttft_s / off_s[row.history_tokens])
    deep = [(row, row.hidden) for row in turns if row.read_buffer == "all" and row.hidden is not None]
    ratios = [row.ratio for row in turns if row.link == "paced" and row.ratio is not None]
    errors = [abs(row.by_rates - row.best) for row in rows if isinstance(row, DepthRow)]
    return {
        "ttft_saved_by_read_buffer": {name: float(np.median(shares)) for name, shares in saved.items()},
        "real_load_hidden": min((hidden for row, hidden in deep if row.link == "real"), default=None),
        "load_hidden": next((hidden for row, hidden in deep if row.load_ratio == 1), None),
        "worst_ttft_vs_ideal": max(ratios, default=None),
        "best_ttft_vs_ideal": min(ratios, default=None),
        "worst_depth_error": max(errors, default=None),
        "same_tokens": all(row.same_tokens for row in turns),
        "recompiles": sum(cells.values()),
    }


@harness.suite(PreloadConfig, summary=summarize)
def preload(run: Run[PreloadConfig]) -> Iterator[PreloadRow | DepthRow]:
    """How much of a load is hidden, by every depth of the read buffer."""
    config, bench = run.config, _Bench(run, run.rng())
    if config.preload_history_tokens:
        yield from bench.real_rows()
    if config.load_ratios:
        yield from bench.paced_rows()


@dataclasses.dataclass(frozen=True)
class _Way:
    """One way to have a turn's history: an engine, its session, and what is to be done before a sample."""

    engine: Engine
    session: Session
    prepare: Callable[[], object] = lambda: None
    is_stored: bool = True


@dataclasses.dataclass(frozen=True)
class _Bench:
    run: Run[PreloadConfig]
    rng: np.random.Generator

    def real_rows(self) -> Iterator[PreloadRow]:
        """Every history length at real speed, by each way and recomputed."""
        config, num_layers = self.run.config, self.run.model.config.num_layers
        num_tokens = config.preload_prompt_tokens
        with contextlib.ExitStack() as stack:
            engines = self._engines(stack, num_tokens, config.preload_read_buffers)
            link = stack.enter_context(AdjustableLink())
            engines[COMPUTE] = self._engine(stack, num_tokens, "all", link)
            for num_history in config.preload_history_tokens:
                ways = self._store_history(engines, num_history)
                off, compute = ways["off"], ways.pop(COMPUTE)
                drop = functools.partial(off.engine.drop_stored, off.session)
                ways["recompute"] = dataclasses.replace(off, prepare=drop, is_stored=False)
                rounds = self._measure(ways | {COMPUTE: compute}, num_tokens - num_history, config.repeats, 1)
                load_s = harness.must_median(harness.of_way(rounds, "off"), "load_s")
                cell = PreloadCell(num_layers, num_history, num_tokens - num_history, load_s, None)
                yield from cell.rows(rounds)
                for way in (*ways.values(), compute):
                    way.session.close()

    def paced_rows(self) -> Iterator[PreloadRow | DepthRow]:
        """Every ratio of load to compute, by each way, and the depths that follow."""
        config, model = self.run.config, self.run.model
        num_history, num_new = config.paced_history_tokens, config.paced_new_tokens
        with contextlib.ExitStack() as stack:
            link = stack.enter_context(AdjustableLink())
            engines = self._engines(stack, num_history + num_new, config.read_buffers, link)
            auto = engines["auto"]
            endless = self._store_history(engines, num_history)
            compute = {COMPUTE: dataclasses.replace(endless["all"], prepare=link.set_pace)}
            padded = auto._runner.padded(num_history, num_new)
            self._measure(endless, num_new, 1, 0)
            for load_ratio in config.load_ratios:
                calibrated = self._measure(compute, num_new, CALIBRATIONS, 0)
                load_s = load_ratio * harness.must_median(harness.samples(calibrated), "ttft_s")
                set_pace = functools.partial(
                    link.set_pace, num_history * kv_layout(model, auto.config).token_bytes / load_s
                )
                set_pace()
                auto.warmup(max_history_tokens=num_history, max_new_tokens=num_new)
                paced = {name: dataclasses.replace(way, prepare=set_pace) for name, way in endless.items()}
                rounds = self._measure(paced | compute, num_new, config.repeats, 0)
                if auto.rates is None:
                    raise BenchError("an engine that has warmed up must know its rates, got none")
                cell = PreloadCell(model.config.num_layers, num_history, num_new, load_s, load_ratio)
                turns = cell.rows(rounds)
                yield from turns
                yield cell.depth_row(turns, auto.rates, padded)

    def _engines(
        self, stack: contextlib.ExitStack, num_tokens: int, depths: Sequence[int], link: AdjustableLink | None = None
    ) -> dict[str, Engine]:
        """An engine for each way to load; depths of as many layers as the model has, or more, are `all`."""
        shallower = dict.fromkeys(depth for depth in depths if depth < self.run.model.config.num_layers)
        read_buffers: list[int | str] = ["off", *shallower, "all", *([] if link is None else ["auto"])]
        return {str(depth): self._engine(stack, num_tokens, depth, link) for depth in read_buffers}

    def _engine(
        self, stack: contextlib.ExitStack, num_tokens: int, read_buffer: int | str, link: AdjustableLink | None
    ) -> Engine:
        config, model = self.run.config, self.run.model
        longest = max(num_tokens, config.ahead_tokens) + 1
        stored = [num_tokens, config.ahead_tokens, _WARM_UP_TOKENS]
        sized = engine_for(config.engine, model, stored, context_window=longest)
        # By arrival: the turn waits for the job before it, however long that takes.
        options: dict[str, Any] = {"recompute_if_faster": False, "queue_order": "arrival"}
        sized = dataclasses.replace(sized, read_buffer=read_buffer, **options)
        return stack.enter_context(make_engine(model, sized, loads=link))

    def _store_history(self, engines: Mapping[str, Engine], num_history: int) -> dict[str, _Way]:
        """Has each engine store the same history."""
        history_ids = random_ids(self.rng, self.run.model, num_history)
        return {name: _Way(engine, store_session(engine, history_ids)) for name, engine in engines.items()}

    def _measure(self, ways: Mapping[str, _Way], num_new: int, repeats: int, warm_up: int) -> Rounds:
        def round_of_ways() -> Ways:
            ahead_ids = random_ids(self.rng, self.run.model, self.run.config.ahead_tokens)
            new_ids = random_ids(self.rng, self.run.model, num_new)
            return {name: functools.partial(take, name, way, ahead_ids, new_ids) for name, way in ways.items()}

        return harness.interleave(round_of_ways, repeats, warm_up=warm_up, progress=self.run.progress)


def take(name: str, way: _Way, ahead_ids: list[int], new_ids: list[int]) -> Sample:
    """One turn behind another job, which is taken back afterwards; first tokens of both, and times."""
    engine, session = way.engine, way.session
    num_history = len(session.token_ids)
    way.prepare()
    ahead_session = engine.session()
    ahead = ahead_session.submit(ahead_ids, sampling=answer_of(1))
    job = session.submit(new_ids, sampling=answer_of(1))
    for each in (ahead, job):
        collections.deque(engine.stream(each), maxlen=0)
    settle(engine)
    if job.started_s < ahead.finished_s:
        raise BenchError(f"{name} must begin the turn when the job before it has ended, got one that began earlier")
    wanted = num_history if way.is_stored else 0
    if job.cached_tokens != wanted:
        raise BenchError(
            f"{name} of {num_history} + {len(new_ids)} tokens must load {wanted} from the store, got "
            f"{job.cached_tokens}"
        )
    ahead_session.close()
    take_back(engine, session, num_history)
    return {
        "tokens": (ahead.output_ids[0], job.output_ids[0]),
        "ttft_s": job.first_token_s - ahead.finished_s,
        "head_start_s": ahead.finished_s - ahead.started_s,
        "load_s": job.load_s,
        "load_stall_s": job.load_stall_s,
    }


@dataclasses.dataclass(frozen=True)
class PreloadCell:
    """What the rows of one history and one speed have in common."""

    num_layers: int
    history_tokens: int
    new_tokens: int
    load_s: float
    load_ratio: float | None
    """Over the compute, as asked for; None at real speed."""

    def rows(self, rounds: Rounds) -> list[PreloadRow]:
        """The rows of the cell's ways but `compute`, which is among them and so is `off`."""
        compute_s, off_s = (harness.must_median(harness.of_way(rounds, way), "ttft_s") for way in (COMPUTE, "off"))
        return [self._row(way, rounds, compute_s, off_s - compute_s) for way in rounds[0] if way != COMPUTE]

    def _row(self, read_buffer: str, rounds: Rounds, compute_s: float, blocking_s: float) -> PreloadRow:
        taken = [{**each[read_buffer], "load_s": self.load_s} for each in rounds]
        for sample, each in zip(taken, rounds, strict=True):
            ideal_s = self._ideal_s(read_buffer, each[COMPUTE]["ttft_s"], sample["head_start_s"])
            sample["ratio"] = None if ideal_s is None else sample["ttft_s"] / ideal_s
        ttft_s, head_start_s = (harness.must_median(taken, name) for name in ("ttft_s", "head_start_s"))
        is_hidden = read_buffer != "recompute" and blocking_s > NOISE * compute_s
        return harness.make_row(
            PreloadRow,
            taken,
            link="real" if self.load_ratio is None else "paced",
            load_ratio=self.load_ratio,
            history_tokens=self.history_tokens,
            new_tokens=self.new_tokens,
            read_buffer=read_buffer,
            ideal_s=self._ideal_s(read_buffer, compute_s, head_start_s),
            hidden=1 - (ttft_s - compute_s) / blocking_s if is_hidden else None,
            compute_s=compute_s,
            load_s=self.load_s,
            same_tokens=harness.same(rounds, "tokens"),
            recompiles=harness.recompiles(rounds),
        )

    def depth_row(self, rows: Sequence[PreloadRow], rates: Rates, padded: tuple[int, int]) -> DepthRow:
        """How deep the read buffer should be over a paced link, by rows of the cell, none of them `recompute`.

        `rates` were measured by an engine over the same link; `padded` are the history and new tokens that it computes.
        """
        ttft_s = {self._depth(row.read_buffer): row.ttft_s for row in rows if row.read_buffer not in ("off", "auto")}
        as_fast_s = min(ttft_s.values()) * (1 + NOISE)
        compute_s, head_start_s = rows[0].compute_s, float(np.median([row.head_start_s for row in rows]))
        by_rates = costs.read_buffer_layers(rates, self.history_tokens, self.new_tokens, padded=lambda *_: padded)
        return DepthRow(
            load_ratio=self.load_ratio or 0.0,
            by_rates=max(1, by_rates),
            best=self._best_depth(compute_s, head_start_s),
            measured_best=min(depth for depth, time_s in ttft_s.items() if time_s <= as_fast_s),
            noise=NOISE,
            rates_load_s=self.num_layers * costs.layer_load_s(rates, self.history_tokens),
            load_s=self.load_s,
            rates_compute_s=rates.prefill.seconds(*padded),
            compute_s=compute_s,
        )

    def _ideal_s(self, read_buffer: str, compute_s: float, head_start_s: float) -> float | None:
        if read_buffer == "recompute":
            return None
        layer_times_s = self._of_layer(compute_s)
        if read_buffer == "off":
            return costs.blocking_s(*layer_times_s, self.num_layers)
        return costs.pipeline_s(*layer_times_s, self.num_layers, self._depth(read_buffer), head_start_s)

    def _best_depth(self, compute_s: float, head_start_s: float) -> int:
        """The smallest depth, 0 to L, with which `costs.pipeline_s` is shortest."""
        num_layers = self.num_layers
        times_s = [
            costs.pipeline_s(*self._of_layer(compute_s), num_layers, depth, head_start_s)
            for depth in range(num_layers + 1)
        ]
        return next(depth for depth, time_s in enumerate(times_s) if time_s <= min(times_s) * (1 + 1e-9))

    def _depth(self, read_buffer: str) -> int:
        return self.num_layers if read_buffer in ("all", "auto") else int(read_buffer)

    def _of_layer(self, compute_s: float) -> tuple[float, float]:
        """Load and compute of one layer."""
        return self.load_s / self.num_layers, compute_s / self.num_layers
