"""What saving adds to a turn: beside it, at its end, and not at all.

Every turn is a session's first, of random tokens. Three ways take turns over the same tokens: an engine without a
store, one that saves while it computes, one that saves at the end of a turn, which waits for that. What machines do
comes first: links at their real speed, where KV is copied as fast as it is. Paced links come second: they take no CPU
but for the copies, and their pace is set by what the turn without a store takes in this very run. What is still to be
saved when a turn has ended is waited for before the next sample, and is not part of one.

The stream is of single turns one behind the other, where what one leaves to save falls to those behind it.

Not here: links (`paced`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from benchmarks import harness
from benchmarks.engines import answer_of, engine_for, make_engine, random_ids, settle
from benchmarks.harness import NOISE, BenchError, Rounds, Row, Run, Sample, Ways
from benchmarks.paced import CALIBRATIONS, AdjustableLink
from ca_jax.engine import Engine
from ca_jax.kv.layout import kv_layout
from ca_jax.session import Session


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveConfig(harness.ServingConfig):
    """What saving adds to a turn, at real speed and over paced links."""

    settled: ClassVar = ("max_batch_size", "async_save")
    may_be_zero: ClassVar = frozenset({"seed", "stream_turns"})
    may_be_empty: ClassVar = frozenset({"save_prompt_tokens", "save_ratios"})

    save_prompt_tokens: tuple[int, ...] = (1000, 1300, 1600)
    """Real speed: tokens of the prompts, a row each; none leaves this part out. As in the paper's section 4.3.2."""
    save_answer_tokens: int = 20
    """Tokens of every answer. As in the paper's section 4.3.2."""
    paced_prompt_tokens: int = 1000
    """Paced links: tokens of the prompt."""
    save_ratios: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    """Paced links: the save of the prompt over the turn without a store, a row each; none leaves this part out."""
    stream_prompt_tokens: int = 500
    """Stream of single turns: tokens of the prompts."""
    stream_turns: int = 6
    """Stream of single turns: turns of one sample, each of a session of its own; 0 leaves this part out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.save_prompt_tokens or self.save_ratios or self.stream_turns):
            raise ValueError(
                "save_prompt_tokens, save_ratios or stream_turns must have something to measure, got none in all"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveRow(Row):
    """The same turn without a store, with saves beside it, and with a save at its end that it waits for."""

    measured: str = "save_turn"
    link: str
    """`real`: device to DRAM as it is. `paced`: a link of a set speed that takes no CPU but for the copies."""
    save_ratio: float | None
    """`paced`: the save of the prompt over the turn, as asked for."""
    prompt_tokens: int
    """Of the turn, all new."""
    answer_tokens: int
    """Decoded, the first included."""
    turn_off_s: float
    """Without a store: from sending to the end of the answer, as the caller sees it. What is put off until after that
    does not count, of none of the three."""
    turn_async_s: float
    turn_blocking_s: float
    """With a save at its end."""
    async_overhead: float
    """`turn_async_s` over `turn_off_s`, minus 1: the median of the rounds' own."""
    blocking_overhead: float
    """Likewise of `turn_blocking_s`."""
    async_gain: float
    """By how much saving beside the turn shortens it against saving at its end, as a share of that; likewise."""
    hidden: float | None
    """The fraction of the blocking save that is hidden: `1 - (async - off) / (blocking - off)`, of the medians; None
    where the blocking one took no longer than none, within `NOISE`."""
    save_s: float | None
    """`paced`: what the link takes for the KV of prompt and answer."""
    same_tokens: bool
    """Whether all three gave the same answer in every round."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamRow(Row):
    """Single turns one behind the other, nothing of which ever comes back, with the store on and off."""

    measured: str = "stream"
    prompt_tokens: int
    answer_tokens: int
    num_turns: int
    stream_off_s: float
    """Of all turns, without a store."""
    stream_on_s: float
    """Of all turns with the store, and until everything is in it."""
    overhead: float
    """`stream_on_s` over `stream_off_s`, minus 1: the median of the rounds' own."""
    same_tokens: bool
    """Whether both gave the same answers in every round."""


def summarize(rows: Sequence[SaveRow | StreamRow]) -> dict[str, Any]:
    """What the rows come to, those at real speed first; None where there is no row for it.

    - `save_overhead`: at real speed, the most that saving beside a turn adds to it, as a share.
    - `worst_async_gain`, `best_async_gain`: at real speed, by what share saving beside a turn shortens it against
      saving at its end.
    - `store_overhead`: by what share the store slows a stream of turns that never come back.
    - `save_hidden`: over a paced link on which the save takes as long as the turn, the fraction of the blocking save
      that is hidden.
    - `same_tokens`, `recompiles`: of all rows.
    """
    turns = [row for row in rows if isinstance(row, SaveRow)]
    real = [row for row in turns if row.link == "real"]
    return {
        "save_overhead": max((row.async_overhead for row in real), default=None),
        **harness.extremes("async_gain", (row.async_gain for row in real)),
        "store_overhead": next((row.overhead for row in rows if isinstance(row, StreamRow)), None),
        "save_hidden": next((row.hidden for row in turns if row.save_ratio == 1), None),
        **harness.checks(rows),
    }


@harness.suite(SaveConfig, summary=summarize)
def save(run: Run[SaveConfig]) -> Iterator[SaveRow | StreamRow]:
    """What saving adds to a turn: beside it, at its end, and not at all; and to a stream of turns."""
    config = run.config
    bench = _Bench(run, run.rng())
    if config.save_prompt_tokens:
        yield from bench.real_rows()
    if config.save_ratios:
        yield from bench.paced_rows()
    if config.stream_turns:
        yield bench.stream_row()


@dataclasses.dataclass(frozen=True)
class _Bench:
    run: Run[SaveConfig]
    rng: np.random.Generator

    def real_rows(self) -> Iterator[SaveRow]:
        """Every prompt length at real speed."""
        with contextlib.ExitStack() as stack:
            engines = self._engines(stack, max(self.run.config.save_prompt_tokens))
            for num_prompt in self.run.config.save_prompt_tokens:
                rounds = self._measure(engines, num_prompt, self.run.config.repeats, warm_up=1)
                yield save_row(rounds, prompt_tokens=num_prompt, answer_tokens=self.run.config.save_answer_tokens)

    def paced_rows(self) -> Iterator[SaveRow]:
        """Every ratio of save to turn."""
        config, num_prompt = self.run.config, self.run.config.paced_prompt_tokens
        with contextlib.ExitStack() as stack:
            link = stack.enter_context(AdjustableLink())
            engines = self._engines(stack, num_prompt, link)
            token_bytes = kv_layout(self.run.model, engines["off"].config).token_bytes
            self._measure(engines, num_prompt, 1)
            for save_ratio in config.save_ratios:
                alone = self._measure({"off": engines["off"]}, num_prompt, CALIBRATIONS)
                prompt_save_s = save_ratio * harness.must_median(harness.samples(alone), "seconds")
                link.set_pace(num_prompt * token_bytes / prompt_save_s)
                save_s = prompt_save_s * self._saved_tokens(num_prompt) / num_prompt
                rounds = self._measure(engines, num_prompt, config.repeats)
                sizes = {"prompt_tokens": num_prompt, "answer_tokens": config.save_answer_tokens}
                yield save_row(rounds, **sizes, save_ratio=save_ratio, save_s=save_s)

    def stream_row(self) -> StreamRow:
        """The stream; the store has room for one of them, so that it makes room by giving up the one before.

        With less room a turn could find none at all, where saves fall behind: what is being saved is not given up.
        """
        config, num_prompt = self.run.config, self.run.config.stream_prompt_tokens
        with contextlib.ExitStack() as stack:
            engines = {
                "off": self._engine(stack, num_prompt, 0),
                "on": self._engine(stack, num_prompt, config.stream_turns),
            }
            rounds = self._measure(engines, num_prompt, config.repeats, warm_up=1, num_turns=config.stream_turns)
        taken = []
        for each in rounds:
            off_s, on_s = (each[way]["seconds"] for way in ("off", "on"))
            taken.append({"stream_off_s": off_s, "stream_on_s": on_s, "overhead": on_s / off_s - 1})
        return harness.make_row(
            StreamRow,
            taken,
            prompt_tokens=num_prompt,
            answer_tokens=config.save_answer_tokens,
            num_turns=config.stream_turns,
            same_tokens=harness.same(rounds, "answers"),
            recompiles=harness.recompiles(rounds),
        )

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
        longest = num_prompt + self.run.config.save_answer_tokens
        sized = engine_for(self.run.config.engine, self.run.model, [longest] * num_stored, context_window=longest)
        sized = dataclasses.replace(sized, async_save=async_save)
        return stack.enter_context(make_engine(self.run.model, sized, saves=link))

    def _measure(
        self,
        engines: Mapping[str, Engine],
        num_prompt: int,
        repeats: int,
        *,
        warm_up: int = 0,
        num_turns: int = 1,
    ) -> Rounds:
        def ways() -> Ways:
            prompts = [random_ids(self.rng, self.run.model, num_prompt) for _ in range(num_turns)]
            return {name: partial(self._answer, name, engine, prompts) for name, engine in engines.items()}

        return harness.interleave(ways, repeats, warm_up=warm_up, progress=self.run.progress)

    def _answer(self, name: str, engine: Engine, prompts: Sequence[list[int]]) -> Sample:
        """A turn of a session of its own for each prompt; the answers, and seconds.

        Those of a stream last until all is saved, and leave what they stored to the next to make room of.
        """
        params = answer_of(self.run.config.save_answer_tokens)
        sessions = [engine.session() for _ in prompts]
        started_s = time.perf_counter()
        for session, prompt in zip(sessions, prompts, strict=True):
            collections.deque(session.send_ids(prompt, sampling=params), maxlen=0)
        if len(prompts) > 1:
            engine.wait_for_saves()
        elapsed_s = time.perf_counter() - started_s
        settle(engine)
        self._check_stored(name, engine, sessions[-1])
        answers = [session.token_ids[len(prompt) :] for session, prompt in zip(sessions, prompts, strict=True)]
        if len(prompts) == 1:
            sessions[0].close()
        return {"answers": answers, "seconds": elapsed_s}

    def _check_stored(self, name: str, engine: Engine, session: Session) -> None:
        """Raises BenchError unless all of a session's KV was saved, where there is a store."""
        wanted = self._saved_tokens(len(session.token_ids) - self.run.config.save_answer_tokens)
        wanted *= engine.config.store.dram_gib > 0
        found = sum(info.num_tokens for info in engine.stored.list() if info.session_id == session.session_id)
        if found != wanted:
            raise BenchError(
                f"{name} of {len(session.token_ids)} tokens must have {wanted} in the store afterwards, got {found}"
            )

    def _saved_tokens(self, num_prompt: int) -> int:
        """Tokens of a turn that have KV: all but the last of the answer."""
        return num_prompt + self.run.config.save_answer_tokens - 1


def save_row(rounds: Rounds, save_ratio: float | None = None, **values: Any) -> SaveRow:
    """A row of rounds of the ways `off`, `async` and `blocking`; without a ratio they were at real speed."""
    taken = []
    for each in rounds:
        off_s, async_s, blocking_s = (each[way]["seconds"] for way in ("off", "async", "blocking"))
        times = {"turn_off_s": off_s, "turn_async_s": async_s, "turn_blocking_s": blocking_s}
        overheads = {"async_overhead": async_s / off_s - 1, "blocking_overhead": blocking_s / off_s - 1}
        taken.append({**times, **overheads, "async_gain": 1 - async_s / blocking_s})
    off_s, async_s, blocking_s = (harness.must_median(taken, f"turn_{way}_s") for way in ("off", "async", "blocking"))
    added_s = blocking_s - off_s
    return harness.make_row(
        SaveRow,
        taken,
        link="real" if save_ratio is None else "paced",
        save_ratio=save_ratio,
        **values,
        hidden=1 - (async_s - off_s) / added_s if added_s > NOISE * off_s else None,
        same_tokens=harness.same(rounds, "answers"),
        recompiles=harness.recompiles(rounds),
    )
