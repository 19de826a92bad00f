"""Serves a workload with an engine, in one loop of one thread, and keeps what every turn took.

Turns that are due are queued, however many: those that wait are what scheduler and store look ahead at. Between turns
that are due and none that runs, the loop sleeps.

Not here: what is asked (workload), what is kept and what follows from it (results).
"""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections.abc import Callable

from ca_jax.engine import Engine
from ca_jax.session import Session
from ca_jax.simulate.fitted import DecodeSample
from ca_jax.simulate.replay.results import Sample, Served, ServedTurn, Totals
from ca_jax.simulate.replay.workload import ReplayTurn, Workload
from ca_jax.turns.jobs import Job
from ca_jax.turns.requests import SamplingParams

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

    Blocks, in the thread that runs the engine. Answers are greedy and exactly as long as they are to be.

    Args:
      engine: idle, with the window that the workload was made for.
      workload: what is asked.
      warmup_turns: first turns that are not counted.
      on_sample: told now and then what goes on.
      clock: seconds; what the engine measures is of its own clock.
      sleep: waits so many seconds of that clock.

    Raises:
      ValueError: the engine has another window.
      Exception: what broke a turn, if something did.
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
        self._before = self._totals()

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
            exchange = self._turns(index)[turn].exchange
            params = SamplingParams(max_tokens=exchange.answer_tokens, ignore_eos=True)
            submitted_s = self._now_s
            job = self._engine.submit_turn(session, exchange.message, params)
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

    def _turns(self, index: int) -> tuple[ReplayTurn, ...]:
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
