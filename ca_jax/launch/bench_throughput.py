"""Measures a continuous batch of conversations: turns completed a minute, with stored KV and with none.

A closed loop: each conversation sends its next message as soon as its answer has ended, whose length is given. One
thread drives them all by the engine's steps, so that no conversation holds back another. Two engines of one process
serve the same conversations in turn, round for round, and each round begins with the other one (A B B A ...). Both are
warmed up, and serve everybody's first turn for nothing.

Not here: what is said (`bench_scripts`), what rows hold (`bench_serving_schema`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.kv.layout import kv_layout
from ca_jax.launch.bench_engines import make_engine
from ca_jax.launch.bench_recording import Recorder
from ca_jax.launch.bench_schema import Samples
from ca_jax.launch.bench_scripts import make_scripts
from ca_jax.launch.bench_serving_schema import MODES, ThroughputBenchConfig, ThroughputResult, ThroughputRow
from ca_jax.pretrained import LoadedModel, Progress
from ca_jax.replay.scripts import Script
from ca_jax.storage.config import GIB
from ca_jax.telemetry.metrics import CompileCounter
from ca_jax.turns.jobs import Job
from ca_jax.turns.requests import SamplingParams, Usage


@dataclasses.dataclass(frozen=True)
class ServedTurn:
    """One turn that has ended."""

    history_tokens: int
    """Of the conversation before it."""
    answer_ids: tuple[int, ...]
    """What was generated."""
    usage: Usage
    """What it took."""


@dataclasses.dataclass(frozen=True)
class ServedRound:
    """All conversations, served once."""

    elapsed_s: float
    """From the first message sent to the last answer ended."""
    conversations: tuple[tuple[ServedTurn, ...], ...]
    """Their turns."""

    @property
    def turns(self) -> list[ServedTurn]:
        """Of all conversations, one behind the other."""
        return list(itertools.chain.from_iterable(self.conversations))


def run_throughput_suite(
    model: LoadedModel, config: ThroughputBenchConfig, progress: Progress, recorder: Recorder | None = None
) -> ThroughputResult:
    """Measures both ways, with engines of its own. Blocks.

    The summary has `speedup`, turns a minute of the store's engine over the other's, and `tpot_p99_ratio`, its p99 of
    the times between tokens over the other's, both the median of the rounds' own; `same_tokens`, whether both gave the
    same answers in every round, and `same_answer_share`, how many of the turns; `conversations`, where messages come
    from; `recompiles`.

    Args:
      model: to serve.
      config: what to measure.
      progress: told of every round.
      recorder: gets one more round of both.

    Raises:
      BenchError: the engines cannot be as large as wanted, or conversations are wanting.
    """
    recorder = recorder or Recorder()
    scripts = make_scripts(model, config)
    with contextlib.ExitStack() as stack:
        engines = {}
        for mode in MODES:
            mode_config = engine_config(config, model, mode)
            engine = make_engine(model, mode_config, suite=config.suite, timeline=recorder.timeline)
            engines[mode] = stack.enter_context(engine)
            engine.warmup(progress=progress)
        for engine in engines.values():
            engine.wait_until_ready()  # First touch would share the memory bus with the rounds.
        bench = _Bench(engines, config, scripts.each)
        bench.measure(progress)
        if recorder.is_wanted:
            with recorder.round():
                for mode in MODES:
                    with recorder.turn(f"all turns, {mode}"):
                        bench.serve(mode)
    return ThroughputResult(rows=bench.rows(), summary={**bench.summary(), "conversations": scripts.source})


class _Bench:
    """Measures both ways.

    Args:
      engines: by mode, idle and warm.
      config: what to measure.
      scripts: of the conversations.
    """

    def __init__(self, engines: Mapping[str, Engine], config: ThroughputBenchConfig, scripts: Sequence[Script]) -> None:
        self._engines = engines
        self._config = config
        self._scripts = scripts
        self._samples = {mode: Samples() for mode in MODES}
        self._ratios = Samples()
        self._recompiles: collections.Counter[str] = collections.Counter()
        self._same_answers: list[bool] = []

    def measure(self, progress: Progress) -> None:
        """All rounds, behind one of everybody's first turn that is for nothing."""
        suite, total = self._config.suite, 1 + self._config.repeats
        progress(suite, 0, total)
        for mode in MODES:
            self.serve(mode, num_turns=1)
        progress(suite, 1, total)
        for index in range(self._config.repeats):
            self._round(MODES if index % 2 == 0 else MODES[::-1])
            progress(suite, 2 + index, total)

    def serve(self, mode: str, num_turns: int | None = None) -> ServedRound:
        """All conversations in one way; their first turns, if a number of them is given."""
        return serve(self._engines[mode], [script[:num_turns] for script in self._scripts])

    def rows(self) -> list[ThroughputRow]:
        """One for each way."""
        return [_row(self._config, mode, self._samples[mode], self._recompiles[mode]) for mode in MODES]

    def summary(self) -> dict[str, Any]:
        """Of both, see `run_throughput_suite`."""
        return {
            "speedup": self._ratios.median("speedup"),
            "tpot_p99_ratio": self._ratios.median("tpot_p99_ratio"),
            "same_tokens": all(self._same_answers),
            "same_answer_share": sum(self._same_answers) / len(self._same_answers),
            "recompiles": sum(self._recompiles.values()),
        }

    def _round(self, modes: Sequence[str]) -> None:
        served, measured = {}, {}
        for mode in modes:
            with CompileCounter() as compiles:
                served[mode] = self.serve(mode)
            self._recompiles[mode] += compiles.count
            measured[mode] = measure(served[mode])
            self._samples[mode].add(**measured[mode])
        store, recompute = measured["store"], measured["recompute"]
        self._ratios.add(
            speedup=store["turns_per_minute"] / recompute["turns_per_minute"],
            tpot_p99_ratio=store["tpot_p99_s"] / recompute["tpot_p99_s"],
        )
        pairs = zip(served["store"].turns, served["recompute"].turns, strict=True)
        self._same_answers += [turn.answer_ids == other.answer_ids for turn, other in pairs]


def engine_config(config: ThroughputBenchConfig, model: LoadedModel, mode: str) -> EngineConfig:
    """The engine of one of `MODES`: its DRAM holds all conversations, or none."""
    layout = kv_layout(model, config.engine)
    num_blocks = config.concurrent_sessions * layout.num_blocks(config.context_window) if mode == "store" else 0
    store = dataclasses.replace(config.engine.store, dram_gib=num_blocks * layout.block_bytes / GIB)
    return dataclasses.replace(config.engine, context_window=config.context_window, store=store)


def serve(engine: Engine, scripts: Sequence[Script]) -> ServedRound:
    """Serves conversations to their end, all at once, each in a session of its own that is forgotten then.

    Args:
      engine: idle; it is idle again afterwards.
      scripts: what is said in each, and how long answers are.

    Raises:
      Exception: what broke a turn, if something did.
    """
    sessions = [engine.session() for _ in scripts]
    to_come = [iter(script) for script in scripts]
    turns: list[list[ServedTurn]] = [[] for _ in scripts]
    history_tokens = [0] * len(scripts)
    running: dict[int, Job] = {}

    def send(indices: Iterable[int]) -> None:
        for index in indices:
            if (exchange := next(to_come[index], None)) is not None:
                params = SamplingParams(max_tokens=exchange.answer_tokens, ignore_eos=True)
                history_tokens[index] = len(sessions[index].token_ids)
                running[index] = engine.submit_turn(sessions[index], exchange.message, params)

    started_s = time.perf_counter()
    send(range(len(scripts)))
    while running:
        engine.step()
        ended = [index for index, job in running.items() if job.done]
        for index in ended:
            job = running.pop(index)
            if job.error is not None:
                raise job.error
            turns[index].append(ServedTurn(history_tokens[index], tuple(job.output_ids), job.usage()))
        send(ended)
    elapsed_s = time.perf_counter() - started_s
    engine.wait_for_saves()
    for session in sessions:
        session.close()
    return ServedRound(elapsed_s, tuple(map(tuple, turns)))


def measure(served: ServedRound) -> dict[str, float]:
    """What a row says of a round: the fields of `ThroughputRow` that are medians. Answers have two tokens or more."""
    usages = [turn.usage for turn in served.turns]
    ttft_s = [usage.ttft_s for usage in usages]
    tpot_s = np.concatenate([np.diff(usage.token_times_s) for usage in usages])
    history_tokens = sum(turn.history_tokens for turn in served.turns)
    hit_tokens = sum(min(turn.usage.num_cached_tokens, turn.history_tokens) for turn in served.turns)
    return {
        "turns_per_minute": 60 * len(usages) / served.elapsed_s,
        "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
        "prefill_tokens": sum(usage.new_tokens for usage in usages),
        "hit_share": hit_tokens / max(history_tokens, 1),
        "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "tpot_p50_s": float(np.percentile(tpot_s, 50)),
        "tpot_p99_s": float(np.percentile(tpot_s, 99)),
    }


def _row(config: ThroughputBenchConfig, mode: str, samples: Samples, recompiles: int) -> ThroughputRow:
    return ThroughputRow(
        mode=mode,
        concurrent_sessions=config.concurrent_sessions,
        turns=config.concurrent_sessions * config.num_turns,
        turns_per_minute=samples.median("turns_per_minute"),
        prompt_tokens=round(samples.median("prompt_tokens")),
        prefill_tokens=round(samples.median("prefill_tokens")),
        hit_share=samples.median("hit_share"),
        ttft_p50_s=samples.median("ttft_p50_s"),
        ttft_p99_s=samples.median("ttft_p99_s"),
        tpot_p50_s=samples.median("tpot_p50_s"),
        tpot_p99_s=samples.median("tpot_p99_s"),
        recompiles=recompiles,
        spread=samples.spread(),
    )
