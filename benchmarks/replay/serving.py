"""Serves a workload with an engine, in one loop of one thread, and keeps what every turn took.

Turns that are due are queued, however many: those that wait are what scheduler and store look ahead at. Between turns
that are due and none that runs, the loop sleeps.

What is kept is of each turn, of moments in between and in all; a summary and a comparison follow from it. A hit counts
turns: one of whose history something was loaded. `loaded_tokens` over `history_tokens` counts tokens.

Not here: what is asked (workload), tables and plots (`ca_jax.launch`).
"""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections.abc import Callable, Iterable

import numpy as np

from benchmarks.engines import answer_of
from benchmarks.replay.workload import Exchange, Workload
from ca_jax.engine import Engine
from ca_jax.session import Job, Session
from ca_jax.simulate.config import DecodeSample

SAMPLE_S = 0.5
"""Least time between two looks at what the engine is doing."""
_OF_METRICS = (
    *("prefill_s", "decode_s", "decode_steps", "load_stall_s", "write_stall_s"),
    *("truncations", "failed_loads", "failed_saves"),
)
_OF_SSD = {"fetched_bytes": "fetched_bytes", "flushed_bytes": "flushed_bytes", "ssd_evictions": "num_evictions"}


def serve(
    engine: Engine,
    workload: Workload,
    *,
    warmup_turns: int = 0,
    on_sample: Callable[[Sample], None] = lambda sample: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Served:
    """Serves all conversations to their ends, each in a session of its own, and waits until their KV is stored.

    In the thread that runs the engine, which is idle and has the window that the workload was made for. Answers are
    greedy and exactly as long as they are to be; what broke a turn is raised. The first turns, of the warm-up, are not
    counted. `clock` and `sleep` are of seconds; what the engine measures is of its own clock.
    """
    if engine.window != workload.window:
        raise ValueError(f"the engine's window must be the workload's {workload.window} tokens, got {engine.window}")
    return _Replay(engine, workload, warmup_turns, on_sample, clock, sleep).run()


@dataclasses.dataclass
class _Running:
    """A turn that was queued."""

    session: int
    turn: int
    due_s: float
    submitted_s: float
    message_tokens: int
    job: Job

    @property
    def num_history(self) -> int:
        """Tokens of the conversation before it that are still there."""
        return self.job.num_prompt_tokens - self.message_tokens


@dataclasses.dataclass
class _Replay:
    _engine: Engine
    _workload: Workload
    _warmup_turns: int
    _on_sample: Callable[[Sample], None]
    _clock: Callable[[], float]
    _sleep: Callable[[float], None]

    def __post_init__(self) -> None:
        self._begin_s = self._clock()
        self._sessions: dict[int, Session] = {}
        self._due = [(each.turns[0].not_before_s, index, 0) for index, each in enumerate(self._workload.sessions)]
        heapq.heapify(self._due)
        self._waiting: list[_Running] = []
        self._running: list[_Running] = []
        self._ended: list[tuple[float, ServedTurn]] = []
        self._answers: dict[tuple[int, int], tuple[int, ...]] = {}
        self._num_started = self._returning = self._hits = self._output_tokens = self._prompt_tokens = 0
        self._samples: list[Sample] = []
        self._decode_samples: list[DecodeSample] = []
        self._counted: set[int] = set()  # Ids of jobs.
        self._first = self._before = self._totals()

    def run(self) -> Served:
        """See `serve`."""
        while self._due or self._waiting or self._running:
            self._submit()
            if self._waiting or self._running:
                self._step()
            else:
                self._sleep(max(self._due[0][0] - self._now_s, 0.0))
            if not self._samples or self._now_s - self._samples[-1].time_s >= SAMPLE_S:
                self._sample()
        end_s = self._now_s
        self._engine.wait_for_saves()
        self._sample()
        totals = {name: value - self._before[name] for name, value in self._totals().items()}
        totals["elapsed_s"] = end_s - self._before["elapsed_s"]
        uncounted = [turn for _, turn in self._ended if not turn.is_counted]
        for name in ("prefill_s", "load_stall_s"):  # A step may prefill prompts of the warm-up and others at once.
            totals[name] += self._before[name] - self._first[name] - sum(getattr(turn, name) for turn in uncounted)
        return Served(
            turns=tuple(turn for _, turn in sorted(self._ended, key=lambda each: each[0])),
            answers=self._answers,
            samples=tuple(self._samples),
            decode_samples=tuple(self._decode_samples),
            totals=totals,
        )

    @property
    def _now_s(self) -> float:
        return self._clock() - self._begin_s

    def _submit(self) -> None:
        """Queues what is due."""
        while self._due and self._due[0][0] <= self._now_s:
            due_s, index, turn = heapq.heappop(self._due)
            if index not in self._sessions:
                self._sessions[index] = self._engine.session()
            session = self._sessions[index]
            exchange = self._turns(index)[turn]
            submitted_s = self._now_s
            job = session.submit(exchange.message, sampling=answer_of(exchange.answer_tokens))
            self._waiting.append(_Running(index, turn, due_s, submitted_s, len(exchange.message), job))

    def _step(self) -> None:
        """Has the engine go on, and takes in what that came to."""
        if not self._counted:
            self._before = self._totals()
        metrics = self._engine.metrics
        decode_s, passes = metrics.decode_s, metrics.prefill_passes
        decoding = [each.job for each in self._running if each.job.output_ids]
        num_jobs, context_tokens = len(decoding), sum(job.num_tokens for job in decoding)
        self._engine.step()
        if num_jobs and metrics.decode_s > decode_s and metrics.prefill_passes == passes:
            self._decode_samples.append(
                DecodeSample(num_jobs=num_jobs, context_tokens=context_tokens, seconds=metrics.decode_s - decode_s)
            )
        for each in self._waiting:
            if each.job.error is not None:
                raise each.job.error
            if each.job.started_s:
                self._begun(each)
        self._waiting = [each for each in self._waiting if not each.job.started_s]
        ended = [each for each in self._running if each.job.done]
        self._running = [each for each in self._running if not each.job.done]
        for each in ended:
            self._end(each)

    def _begun(self, each: _Running) -> None:
        """A turn's prefill has begun."""
        if self._num_started >= self._warmup_turns:
            self._counted.add(each.job.job_id)
        self._num_started += 1
        self._running.append(each)
        if each.num_history:
            self._returning += 1
            self._hits += each.job.cached_tokens > 0

    def _end(self, each: _Running) -> None:
        """A turn has ended: the next one of its conversation gets its time."""
        job, turns = each.job, self._turns(each.session)
        if job.error is not None:
            raise job.error
        usage = job.usage()
        waited_s = each.submitted_s - each.due_s
        served = ServedTurn(
            session=each.session,
            turn=each.turn,
            due_s=each.due_s,
            started_s=each.submitted_s + usage.queued_s,
            ttft_s=waited_s + usage.ttft_s,
            latency_s=waited_s + usage.ttft_s + usage.decode_s,
            prefill_s=usage.prefill_s,
            load_stall_s=usage.load_stall_s,
            decode_s=usage.decode_s,
            history_tokens=each.num_history,
            message_tokens=each.message_tokens,
            answer_tokens=usage.completion_tokens,
            cached_tokens=usage.num_cached_tokens,
            tier=job.cached_tier,
            dropped_tokens=self._sessions[each.session].num_dropped,
            is_counted=job.job_id in self._counted,
        )
        self._ended.append((job.started_s, served))
        self._answers[each.session, each.turn] = tuple(job.output_ids)
        self._output_tokens += usage.completion_tokens
        self._prompt_tokens += usage.prompt_tokens
        if each.turn + 1 < len(turns):
            due_s = max(turns[each.turn + 1].not_before_s, self._now_s + turns[each.turn + 1].think_s)
            heapq.heappush(self._due, (due_s, each.session, each.turn + 1))

    def _turns(self, index: int) -> tuple[Exchange, ...]:
        return self._workload.sessions[index].turns

    def _sample(self) -> None:
        stats = self._engine.store_stats()
        sample = Sample(
            time_s=self._now_s,
            ended=len(self._ended),
            running=len(self._running),
            waiting=len(self._waiting),
            returning=self._returning,
            hits=self._hits,
            output_tokens=self._output_tokens,
            prompt_tokens=self._prompt_tokens,
            dram_share=stats.used_bytes / stats.capacity_bytes if stats.capacity_bytes else 0.0,
            ssd_share=0.0 if stats.ssd is None else stats.ssd.used_bytes / stats.ssd.capacity_bytes,
        )
        self._samples.append(sample)
        self._on_sample(sample)

    def _totals(self) -> Totals:
        metrics, stats = self._engine.metrics, self._engine.store_stats()
        return {
            "elapsed_s": self._now_s,
            **{name: getattr(metrics, name) for name in _OF_METRICS},
            "loaded_bytes": stats.loaded_bytes,
            "saved_bytes": stats.saved_bytes,
            "dram_evictions": stats.num_evictions,
            "skipped_saves": sum(stats.skipped_saves.values()),
            **{name: 0 if stats.ssd is None else getattr(stats.ssd, field) for name, field in _OF_SSD.items()},
        }


Totals = dict[str, float]
"""What the engine and its store have done since the warm-up: `EngineMetrics`, `StoreStats` and `SsdStats` by the names
in `serving`, and `elapsed_s`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedTurn:
    """One turn that has ended. Times are seconds; `due_s` and `started_s` since the replay began."""

    session: int
    """The conversation's place in the workload."""
    turn: int
    due_s: float
    """When it came."""
    started_s: float
    ttft_s: float
    """From when it came to its first token."""
    latency_s: float
    """From when it came to its last token."""
    prefill_s: float
    """Its prefill's passes, waiting for loads included."""
    load_stall_s: float
    """Of that, waiting for loads."""
    decode_s: float
    """From its first token to its last."""
    history_tokens: int
    """Of the conversation before it, without what left as the window was full."""
    message_tokens: int
    answer_tokens: int
    cached_tokens: int
    tier: str
    """Where that was when the turn was queued: `device`, `dram` or `ssd`."""
    dropped_tokens: int
    """Tokens of the conversation that left in this turn or an earlier one."""
    is_counted: bool
    """Whether it came after the warm-up."""

    @property
    def loaded_tokens(self) -> int:
        """Tokens of its history whose KV was loaded; more may be loaded that another conversation began with."""
        return min(self.cached_tokens, self.history_tokens)

    @property
    def prefill_tokens(self) -> int:
        """Tokens that were prefilled."""
        return self.history_tokens + self.message_tokens - self.cached_tokens

    @property
    def tpot_s(self) -> float:
        """Mean time between its tokens; answers have two or more."""
        return self.decode_s / max(self.answer_tokens - 1, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """What the engine was doing at one moment."""

    time_s: float
    ended: int
    running: int
    waiting: int
    returning: int
    """Turns that have begun and had a history."""
    hits: int
    """Of those, the ones whose history was loaded, in part at least."""
    output_tokens: int
    prompt_tokens: int
    """Histories and messages of these."""
    dram_share: float
    """Share of the DRAM tier in use."""
    ssd_share: float
    """Share of the SSD tier in use; 0 where there is none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """A workload, served."""

    turns: tuple[ServedTurn, ...]
    """In the order in which their prefills began."""
    answers: dict[tuple[int, int], tuple[int, ...]]
    """What was generated, by conversation and turn."""
    samples: tuple[Sample, ...]
    decode_samples: tuple[DecodeSample, ...]
    """Decode steps without a prefill pass in the same engine step."""
    totals: Totals
    """After the warm-up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """How a quantity is distributed over turns."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of these values, one at least."""
        values = list(values)
        p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        return cls(mean=float(np.mean(values)), p50=p50, p90=p90, p99=p99)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """A run, but for its warm-up."""

    turns: int
    returning_turns: int
    """Of those, the ones that had a history."""
    dram_hits: int
    """Of those, the ones whose history was used, in part at least, and had been in DRAM since, or on devices."""
    ssd_hits: int
    """Likewise, and it had been fetched from SSD for this turn, ahead of it or while it waited."""
    misses: int
    hit_rate: float
    """Hits of either tier over returning turns; 0 where there are none."""
    prompt_tokens: int
    history_tokens: int
    loaded_tokens: int
    """Of those, the ones whose KV was loaded."""
    recomputed_tokens: int
    """And the ones that were prefilled again. The last token of an answer always is: nothing was computed of it."""
    prefill_tokens: int
    output_tokens: int
    ttft_s: Spread
    """From when a turn came to its first token."""
    tpot_s: Spread
    """Mean time between a turn's tokens."""
    latency_s: Spread
    prefill_tokens_per_s: float
    """Prompt tokens, loaded ones included, over the time of prefill passes."""
    decode_tokens_per_s: float
    """Tokens behind first ones over the time of decode steps."""
    turns_per_minute: float
    totals: Totals


def summarize(served: Served) -> Summary:
    """Sums up a run. ValueError: no turn is counted."""
    turns = [turn for turn in served.turns if turn.is_counted]
    if not turns:
        raise ValueError(f"warmup_turns must be fewer than the {len(served.turns)} turns, got as many or more")
    totals = served.totals
    returning = [turn for turn in turns if turn.history_tokens]
    hits = [turn for turn in returning if turn.cached_tokens]
    from_ssd = sum(turn.tier == "ssd" for turn in hits)
    history_tokens = sum(turn.history_tokens for turn in turns)
    prompt_tokens = history_tokens + sum(turn.message_tokens for turn in turns)
    loaded_tokens = sum(turn.loaded_tokens for turn in turns)
    output_tokens = sum(turn.answer_tokens for turn in turns)
    return Summary(
        turns=len(turns),
        returning_turns=len(returning),
        dram_hits=len(hits) - from_ssd,
        ssd_hits=from_ssd,
        misses=len(returning) - len(hits),
        hit_rate=len(hits) / max(len(returning), 1),
        prompt_tokens=prompt_tokens,
        history_tokens=history_tokens,
        loaded_tokens=loaded_tokens,
        recomputed_tokens=history_tokens - loaded_tokens,
        prefill_tokens=sum(turn.prefill_tokens for turn in turns),
        output_tokens=output_tokens,
        ttft_s=Spread.of(turn.ttft_s for turn in turns),
        tpot_s=Spread.of(turn.tpot_s for turn in turns),
        latency_s=Spread.of(turn.latency_s for turn in turns),
        prefill_tokens_per_s=_ratio(prompt_tokens, totals["prefill_s"]),
        decode_tokens_per_s=_ratio(output_tokens - len(turns), totals["decode_s"]),
        turns_per_minute=_ratio(60 * len(turns), totals["elapsed_s"]),
        totals=totals,
    )


def compare(stored: Served, recomputed: Served) -> dict[str, float]:
    """Compares a run with a store to the same workload recomputed; above 1 where the store is better.

    `busy_time` is of prefill passes and decode steps. `same_answers` are turns with the same tokens in both runs, of
    those of `comparable_answers`: turns up to the first in which tokens left a full context, since from there on KV
    that is kept has seen tokens that what is recomputed has not.
    """
    ours, other = summarize(stored), summarize(recomputed)
    undropped = {(turn.session, turn.turn) for turn in stored.turns if not turn.dropped_tokens}

    def times(*names: str) -> float:
        return _ratio(sum(other.totals[name] for name in names), sum(ours.totals[name] for name in names))

    return {
        "prefill_time": times("prefill_s"),
        "total_time": times("elapsed_s"),
        "busy_time": times("prefill_s", "decode_s"),
        "mean_ttft": _ratio(other.ttft_s.mean, ours.ttft_s.mean),
        "p99_ttft": _ratio(other.ttft_s.p99, ours.ttft_s.p99),
        "same_answers": sum(stored.answers[each] == recomputed.answers[each] for each in undropped),
        "comparable_answers": len(undropped),
    }


def _ratio(amount: float, other: float) -> float:
    return amount / other if other else 0.0
