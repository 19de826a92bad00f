"""Measures what saving adds to a turn: beside it, at its end, and not at all.

Every turn is a session's first, of random tokens. Three ways take turns over the same tokens (A B C B C A ...): an
engine without a store, one that saves while it computes, one that saves at the end of a turn, which waits for that. At
real speed KV is copied as fast as it is. At set speeds it goes over a link that takes no CPU but for the copies, whose
pace is set by what the turn without a store takes in this very run. What is still to be saved when a turn has ended is
waited for before the next sample, which is not part of one.

The stream is of single turns one behind the other, where what one leaves to save falls to those behind it.

Not here: what the samples come to (`bench_overlap_rows`), what rows hold (`bench_overlap_schema`), links and engines
(`bench_overlap`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np

from ca_jax.engine import Engine
from ca_jax.launch.bench_overlap import (
    CALIBRATIONS,
    AdjustableLink,
    Steps,
    engine_for,
    in_turn,
    paced_engine,
    random_ids,
    settle,
    stored_tokens,
    token_bytes,
)
from ca_jax.launch.bench_overlap_rows import SaveCell, save_round, stream_round, summarize_save
from ca_jax.launch.bench_overlap_schema import SaveBenchConfig, SaveResult, SaveRow, StreamRow
from ca_jax.launch.bench_schema import BenchError, Samples
from ca_jax.pretrained import LoadedModel, Progress
from ca_jax.session import Session
from ca_jax.telemetry.metrics import CompileCounter
from ca_jax.turns.requests import SamplingParams

Measured = tuple[list[dict[str, float]], bool, int]
"""Seconds by way, of each round; whether all ways gave the same answers; functions compiled."""


def run_save_suite(model: LoadedModel, config: SaveBenchConfig, progress: Progress) -> SaveResult:
    """Measures turns at real speed and at set ones, and the stream. Blocks.

    Args:
      model: what is served; its engines are made here.
      config: what to measure.
      progress: told of every round.

    Raises:
      BenchError: no engine is as large as it must be, or a sample did other work than its row would say.
    """
    num_rounds = len(config.save_prompt_tokens) * (1 + config.repeats)
    if config.save_ratios:
        num_rounds += 1 + len(config.save_ratios) * (1 + config.repeats)
    if config.stream_turns:
        num_rounds += 1 + config.repeats
    bench = _Bench(model, config, np.random.default_rng(config.seed), Steps(config.suite, num_rounds, progress))
    rows: list[SaveRow | StreamRow] = []
    if config.save_prompt_tokens:
        rows += bench.real_rows()
    if config.save_ratios:
        rows += bench.paced_rows()
    if config.stream_turns:
        rows.append(bench.stream_row())
    return SaveResult(rows=rows, summary=summarize_save(rows))


@dataclasses.dataclass(frozen=True)
class _Bench:
    """Measures one part at a time."""

    model: LoadedModel
    config: SaveBenchConfig
    rng: np.random.Generator
    step: Steps  # To be called after each round.

    def real_rows(self) -> list[SaveRow]:
        """Every prompt length at real speed."""
        rows = []
        with contextlib.ExitStack() as stack:
            engines = self._engines(stack, max(self.config.save_prompt_tokens))
            for num_prompt in self.config.save_prompt_tokens:
                self._measure(engines, num_prompt, 1)
                rows.append(self._row(engines, num_prompt))
        return rows

    def paced_rows(self) -> list[SaveRow]:
        """Every ratio of save to turn."""
        rows, num_prompt = [], self.config.paced_prompt_tokens
        with contextlib.ExitStack() as stack:
            link = stack.enter_context(AdjustableLink())
            engines = self._engines(stack, num_prompt, link)
            self._measure(engines, num_prompt, 1)
            for save_ratio in self.config.save_ratios:
                rounds, *_ = self._measure({"off": engines["off"]}, num_prompt, CALIBRATIONS, tell=False)
                prompt_save_s = save_ratio * statistics.median(seconds["off"] for seconds in rounds)
                link.set_pace(num_prompt * token_bytes(self.model, engines["off"].config) / prompt_save_s)
                self.step()
                save_s = prompt_save_s * self._saved_tokens(num_prompt) / num_prompt
                rows.append(self._row(engines, num_prompt, save_ratio=save_ratio, save_s=save_s))
        return rows

    def stream_row(self) -> StreamRow:
        """The stream; the store has room for one of them, so that it makes room by giving up the one before.

        With less room a turn could find none at all, where saves fall behind: what is being saved is not given up.
        """
        num_prompt, num_turns = self.config.stream_prompt_tokens, self.config.stream_turns
        with contextlib.ExitStack() as stack:
            engines = {
                "off": self._engine(stack, num_prompt, 0),
                "on": self._engine(stack, num_prompt, num_turns),
            }
            self._measure(engines, num_prompt, 1, num_turns=num_turns)
            rounds, same_tokens, recompiles = self._measure(
                engines, num_prompt, self.config.repeats, num_turns=num_turns
            )
        samples = Samples()
        for seconds in rounds:
            samples.add(**stream_round(seconds["off"], seconds["on"]))
        return StreamRow(
            prompt_tokens=num_prompt,
            answer_tokens=self.config.save_answer_tokens,
            num_turns=num_turns,
            stream_off_s=samples.median("stream_off_s"),
            stream_on_s=samples.median("stream_on_s"),
            overhead=samples.median("overhead"),
            same_tokens=same_tokens,
            recompiles=recompiles,
            spread=samples.spread(),
        )

    def _row(
        self,
        engines: Mapping[str, Engine],
        num_prompt: int,
        *,
        save_ratio: float | None = None,
        save_s: float | None = None,
    ) -> SaveRow:
        rounds, same_tokens, recompiles = self._measure(engines, num_prompt, self.config.repeats)
        samples = Samples()
        for seconds in rounds:
            samples.add(**save_round(seconds["off"], seconds["async"], seconds["blocking"]))
        cell = SaveCell(
            link="real" if save_ratio is None else "paced",
            save_ratio=save_ratio,
            prompt_tokens=num_prompt,
            answer_tokens=self.config.save_answer_tokens,
            save_s=save_s,
            same_tokens=same_tokens,
            recompiles=recompiles,
        )
        return cell.row(samples)

    def _engines(
        self, stack: contextlib.ExitStack, num_prompt: int, link: AdjustableLink | None = None
    ) -> dict[str, Engine]:
        """An engine for each way to save; their stores have room for two sessions."""
        return {
            "off": self._engine(stack, num_prompt, 0),
            "async": self._engine(stack, num_prompt, 2, link),
            "blocking": self._engine(stack, num_prompt, 2, link, async_save=False),
        }

    def _engine(
        self,
        stack: contextlib.ExitStack,
        num_prompt: int,
        num_stored: int,
        link: AdjustableLink | None = None,
        *,
        async_save: bool = True,
    ) -> Engine:
        """An engine whose store has room for so many sessions."""
        longest = num_prompt + self.config.save_answer_tokens
        config = engine_for(self.config.engine, self.model, [longest] * num_stored, context_window=longest)
        config = dataclasses.replace(config, async_save=async_save)
        return stack.enter_context(paced_engine(self.model, config, suite=self.config.suite, saves=link))

    def _measure(
        self,
        engines: Mapping[str, Engine],
        num_prompt: int,
        num_rounds: int,
        *,
        num_turns: int = 1,
        tell: bool = True,
    ) -> Measured:
        """Takes so many samples of each way, in turn; tells of each round unless it is no step of its own."""
        rounds, same_tokens = [], True
        with CompileCounter() as compiles:
            for nth_round in range(num_rounds):
                prompts = [random_ids(self.rng, self.model, num_prompt) for _ in range(num_turns)]
                seconds, answers = dict[str, float](), list[list[list[int]]]()
                for name, engine in in_turn(engines, nth_round):
                    given, seconds[name] = self._answer(name, engine, prompts, stream=num_turns > 1)
                    answers.append(given)
                rounds.append(seconds)
                same_tokens &= all(given == answers[0] for given in answers)
                if tell:
                    self.step()
        return rounds, same_tokens, compiles.count

    def _answer(
        self, name: str, engine: Engine, prompts: Sequence[list[int]], *, stream: bool
    ) -> tuple[list[list[int]], float]:
        """A turn of a session of its own for each prompt; the answers, and seconds.

        Those of a stream last until all is saved, and leave what they stored to the next to make room of.
        """
        params = SamplingParams(max_tokens=self.config.save_answer_tokens, ignore_eos=True)
        sessions = [engine.session() for _ in prompts]
        started_s = time.perf_counter()
        for session, prompt in zip(sessions, prompts, strict=True):
            collections.deque(session.send_ids(prompt, sampling=params), maxlen=0)
        if stream:
            engine.wait_for_saves()
        elapsed_s = time.perf_counter() - started_s
        settle(engine)
        self._check_stored(name, engine, sessions[-1])
        if not stream:
            for session in sessions:
                session.close()
        answers = [session.token_ids[len(prompt) :] for session, prompt in zip(sessions, prompts, strict=True)]
        return answers, elapsed_s

    def _check_stored(self, name: str, engine: Engine, session: Session) -> None:
        """Raises BenchError unless all of a session's KV was saved, where there is a store."""
        wanted = self._saved_tokens(len(session.token_ids) - self.config.save_answer_tokens)
        wanted *= engine.config.store.dram_gib > 0
        found = stored_tokens(engine, session)
        if found != wanted:
            raise BenchError(
                f"{name} of {len(session.token_ids)} tokens wanted {wanted} in the store afterwards, found {found}"
            )

    def _saved_tokens(self, num_prompt: int) -> int:
        """Tokens of a turn that have KV: all but the last of the answer."""
        return num_prompt + self.config.save_answer_tokens - 1
