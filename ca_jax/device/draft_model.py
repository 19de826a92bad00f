"""A small model that writes drafts: what it holds of running answers' contexts, and the tokens that it guesses.

Its KV is in pages of its own, unrotated, of the answers that it guesses for and of no others; nothing of it is stored.
It looks at the last tokens of a context, and these are at positions from 0 on: a guess need not be exact.

    context    ........................ t     all tokens of an answer; the target has KV of all but the last
    pages           ................... t     of the last ones, and behind them what was guessed before
    guess                                g g g    a step each, fed with the one before it; all are read together

Not here: whether a guess is worth it (serving.drafts), checking it (runner), jitted code (steps).
Source: speculative decoding (Leviathan et al., ICML 2023).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ca_jax import backend
from ca_jax.device import steps
from ca_jax.device.buckets import pad_to
from ca_jax.device.pages import PoolSize
from ca_jax.device.passes import RunnerSizes
from ca_jax.device.runner import Runner
from ca_jax.device.transfer import to_host
from ca_jax.device.warmup import Compile, Shapes
from ca_jax.models.config import ModelConfig
from ca_jax.session import Job

CONTEXT_TOKENS = 1024
"""Most tokens of an answer's context that the model holds. Where they are full it begins anew with the last half."""
_PASS_TOKENS = (32, 128)  # Padded tokens of a pass over context, besides the least that drafts are checked in.
_SMOOTHED = 0.2  # Weight of a new measurement.


@dataclasses.dataclass
class _Row:
    """What the pages of an answer hold."""

    number: int
    """Of the pool's rows."""
    num_gone: int
    """Of the answer, when they were filled: where more have left, what is held is of other tokens."""
    first: int
    """The place in the context of the first token."""
    num_known: int = 0
    """Tokens of the context that are held from there on,"""
    guesses: list[int] = dataclasses.field(default_factory=list)
    """and guesses behind them."""


class DraftModel:
    """Guesses tokens of running answers. Belongs to the engine's thread.

    Args:
      config: the model's.
      params: its parameters, on one device.
      size: of its pool: of one part, with pages for all that its rows may hold.
      max_tokens: most tokens of a guess.
      vocab_size: of the target. Tables are padded: a token that one of the two has no row for is neither read nor said.
    """

    def __init__(
        self, config: ModelConfig, params: steps.Params, size: PoolSize, max_tokens: int, vocab_size: int
    ) -> None:
        self._vocab_size = min(vocab_size, config.vocab_size)
        self.max_tokens = min(max_tokens, size.max_tokens // 2)
        """Most tokens of a guess."""
        self.runner = Runner(config, params, RunnerSizes(pool=size, chunk_tokens=_PASS_TOKENS[-1]))
        """Of the model, with its own pool."""
        self._passes = tuple(sorted({backend.here().draft_sizes[0], *_PASS_TOKENS}))
        self._rows: dict[Job, _Row] = {}
        self._pass_s: dict[int, float] = {}  # By padded tokens, of a pass over context.
        self._step_s: dict[int, float] = {}  # By padded rows, of a step that guesses.

    @property
    def num_rows(self) -> int:
        """Answers that it guesses for at a time, at most."""
        return self.runner.pool.size.num_rows

    @property
    def num_bytes(self) -> int:
        """Of its parameters and its pool, on the device."""
        return self.runner.param_bytes + self.runner.pool.num_bytes

    def keep(self, jobs: Collection[Job]) -> None:
        """Forgets all answers but these."""
        for job in [job for job in self._rows if job not in jobs]:
            number = self._rows.pop(job).number
            self.runner.pool.end(number)
            self.runner.sampler.free_slot(number)

    def seconds(self, jobs: Collection[Job], num_tokens: int, step_s: float) -> tuple[float, float]:
        """How long a guess of so many tokens for each of these jobs takes, by what was measured.

        Args:
          step_s: seconds of a step of the target for a model that is as large as this one; for what is not measured.

        Returns:
          Seconds of passes over context that was not held before, and of the guess: with what follows from guess to
          guess, such as the last token of one that was right as a whole.
        """
        passes = {size: self._of_pass(size, step_s) for size in self._passes}
        sizes = self._sizes(sum(map(self._num_missing, jobs)))
        guess_s = num_tokens * self._step_s.get(pad_to(self.runner.batch_buckets, len(jobs)), step_s)
        guess_s += sizes.count(self._passes[0]) * passes[self._passes[0]]
        return sum(passes[size] for size in sizes if size > self._passes[0]), guess_s

    def guess(self, counts: Mapping[Job, int], step_s: float) -> dict[Job, list[int]]:
        """The tokens that may follow each job's last one, so many of each. Waits for them.

        They are drawn as the answer's are, by its seed and the token's number: two models that agree draw alike.

        Args:
          counts: of jobs, each 1 to `max_tokens`. With those that are kept they are at most `num_rows`.
          step_s: as of `seconds`.
        """
        self._take_context(counts, step_s)
        started_s, runner = time.perf_counter(), self.runner
        by_row = {self._rows[job].number: job for job in counts}
        slots = runner.placed(by_row)
        running = [None if slot is None else by_row[slot] for slot in slots]
        last = self._readable([0 if job is None else job.token_ids[-1] for job in running])
        tokens: Any = runner.to_device(last, np.int32)
        lengths = np.array([0 if job is None else job.num_tokens - 1 - self._rows[job].first for job in running])
        # Draws are numbered as the target's are, by all tokens that were before them.
        num_gone = np.array([0 if job is None else job.num_gone + self._rows[job].first for job in running])
        drawn = []
        for step in range(max(counts.values())):
            logits, likeliest = runner.dispatch((), slots, tokens, lengths + step, num_gone, draws=False).found
            tokens = runner.sampler.start(logits, lengths + step + num_gone + 1, slots, likeliest).tokens
            drawn.append(tokens)
        found, guesses = np.stack([to_host(each) for each in drawn]), {}
        for column, job in enumerate(running):
            if job is not None:
                row, written = self._rows[job], found[:, column].tolist()
                row.num_known, row.guesses = job.num_tokens - row.first, written[:-1]  # The last one has no KV yet.
                guesses[job] = list(itertools.takewhile(self._is_said, written[: counts[job]]))
        key = len(slots)
        self._step_s[key] = _mixed(self._step_s.get(key, step_s), (time.perf_counter() - started_s) / len(drawn))
        return guesses

    def _is_said(self, token: int) -> bool:
        return token < self._vocab_size

    def _readable(self, token_ids: Sequence[int]) -> list[int]:
        return [token if self._is_said(token) else 0 for token in token_ids]

    def _num_missing(self, job: Job) -> int:
        """Tokens of its context that are to be computed before its last one is."""
        first, num_held = self._held(job)
        return job.num_tokens - 1 - first - num_held

    def _held(self, job: Job) -> tuple[int, int]:
        """Where what is held of a job begins in its context, and how many tokens are; those before its last one."""
        row, window, before = self._rows.get(job), self.runner.window, job.num_tokens - 1
        begin = max(job.num_tokens - window // 2, 0), 0
        if row is None or row.num_gone != job.num_gone or job.num_tokens + self.max_tokens - row.first > window:
            return begin
        at = row.first + row.num_known
        if at > job.num_tokens:
            return begin
        follows = job.token_ids[at : at + len(row.guesses)]
        pairs = enumerate(zip(row.guesses, follows, strict=False))
        num_right = next((number for number, (guess, token) in pairs if guess != token), len(follows))
        return row.first, min(row.num_known + num_right, before - row.first)

    def _take_context(self, jobs: Collection[Job], step_s: float) -> None:
        """Brings what is held of jobs up to their last tokens, in passes of some tokens of several of them."""
        pool, missing = self.runner.pool, dict[int, tuple[int, list[int]]]()
        for job in jobs:
            first, num_held = self._held(job)
            row = self._rows.get(job)
            if row is None:
                number = min(set(range(self.num_rows)) - {each.number for each in self._rows.values()})
                row = self._rows[job] = _Row(number, job.num_gone, first)
                pool.begin(number, self.runner.window)
                biases = tuple((token, bias) for token, bias in job.params.logit_bias if self._is_said(token))
                params = dataclasses.replace(job.params, logprobs=None, logit_bias=biases)
                self.runner.sampler.set_slot(number, params, [])
            if not num_held:
                row.first, row.num_gone = first, job.num_gone
            row.num_known, row.guesses = job.num_tokens - 1 - first, []
            if new := job.token_ids[first + num_held : -1]:
                missing[row.number] = num_held, self._readable(new)
        for size in self._sizes(sum(len(new) for _, new in missing.values())):
            started_s, spans, room = time.perf_counter(), {}, size
            for number, (start, new) in list(missing.items()):
                taken = new[:room]
                if taken:
                    spans[number] = start, taken
                    missing[number] = start + len(taken), new[len(taken) :]
                    room -= len(taken)
            self._run(spans, size)
            self._pass_s[size] = _mixed(self._of_pass(size, step_s), time.perf_counter() - started_s)

    def _run(self, spans: Mapping[int, tuple[int, list[int]]], size: int) -> None:
        """Computes the KV of some tokens of rows into their pages, padded to so many, and waits."""
        runner = self.runner
        for number, (start, new) in spans.items():
            runner.pool.make_room(number, start + len(new), start)
        step = runner.laid_out(spans, (size,))
        x, _, _, runner.pool.buffers, _ = steps.model_step(
            runner.config,
            runner.params,
            runner.pool.buffers,
            runner.to_device(step.tokens),
            step.rows,
            runner.tables,
            step.num_tokens,
            self.num_rows,
            with_attention=False,
            packs=False,
            sharding=None,
            adapters=None,
        )
        x.block_until_ready()

    def _sizes(self, num_tokens: int) -> list[int]:
        """The passes that take so many tokens."""
        whole, rest = divmod(num_tokens, self._passes[-1])
        return [self._passes[-1]] * whole + ([pad_to(self._passes, rest)] if rest else [])

    def _of_pass(self, size: int, step_s: float) -> float:
        """Seconds of a pass of so many tokens: as measured; before that, as of a device that computes what it pads."""
        return self._pass_s.get(size, step_s * (1 + size / 16))

    def functions(self) -> list[Compile]:
        """What it needs compiled; as of `warmup.functions_of`."""
        runner, shapes = self.runner, Shapes(self.runner)
        config, alone = runner.config, {"with_attention": False, "packs": False, "sharding": None, "adapters": None}

        def take(size: int) -> None:
            given = shapes.params, shapes.pages, shapes.small(1, size), shapes.rows(self.num_rows, size), shapes.tables
            shapes.compiled(steps.model_step, config, *given, size, self.num_rows, **alone)

        def write(size: int) -> None:
            given = shapes.params, shapes.pages, shapes.small(size), shapes.rows(size, size), shapes.tables
            logits, found, *_ = shapes.compiled(steps.decode, config, *given, **alone)
            runner.sampler.compile(shapes.compiled, shapes.small, logits, found)

        return [*(partial(take, size) for size in self._passes), *(partial(write, n) for n in runner.batch_buckets)]


def _mixed(known: float, new: float) -> float:
    """A measurement with those before it. One that is far above or below them counts as twice or half of these."""
    return (1 - _SMOOTHED) * min(known, 2 * new) + _SMOOTHED * min(new, 2 * known)
