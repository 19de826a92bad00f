"""Decoding ahead: tokens of an answer are guessed from what its context says already, and checked in one step.

    context     ... def area ( width ) : ... | def area (        the last tokens stand there before
    draft                                                width ) :   what followed them then
    checked     one step over the last token and the draft: each token is drawn as ever, behind the ones before it
    taken       what was drawn, up to the first token that the draft has wrong, that one included

So the answer is what it would be without, greedy or drawn: a draw depends on the seed and the place alone. A draft is
worth what it saves: how likely a guess is right is counted, by how many tokens stood there before, also where nothing
was checked; how long steps take is measured. What is checked is what gives most tokens a second by that, often nothing.

A draft model, where there is one, writes the drafts of answers for which the context says less. Its guesses cost time
before they are there. So they are made where what was counted and measured says that they pay, and now and then to see.

Not here: the steps (device.runner, device.draft_model), who decodes and takes the tokens (batch).
Source: prompt lookup decoding (Saxena, 2023), checked as in speculative decoding (Leviathan et al., ICML 2023).
"""

from __future__ import annotations

import dataclasses
import heapq
import logging
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ca_jax import backend
from ca_jax.config import EngineConfig
from ca_jax.device.draft_model import CONTEXT_TOKENS, DraftModel
from ca_jax.device.pages import PoolSize
from ca_jax.device.processes import Processes, least
from ca_jax.models.config import ModelConfig
from ca_jax.session import Job

_LOG = logging.getLogger(__name__)

LEAST_MATCH = 2
"""Tokens that must stand in the context as they stand at its end, at least."""
MOST_MATCH = 16
"""More than so many are as good as so many."""
ROW_TOKENS = 8
"""Drafts are checked where a step has so many tokens for each answer: with more answers the host's work is no longer
hidden behind the device's, and 8 answers on a CPU came more slowly for it."""
_KEPT = 0.998  # Of what was counted, with each new one.
_PRIOR = 8.0  # Guesses that what is known of all answers weighs, in what is known of one.
_SMOOTHED = 0.2  # Weight of a new measurement.
_FORGOTTEN = 0.002  # Of what checking costs too much, with each step in which that kept a draft from being checked.
_BY_MODEL = 0  # The class of a draft model's guesses, among the numbers of tokens that match.
_MODEL_RIGHT = 0.8  # How likely a model's guess is right, before any was checked; it weighs as `_PRIOR` says.
_MODEL_KEPT = 0.99  # As `_KEPT`, of a model's guesses: few are made where they do not pay, and these must tell.
_TRIAL = 8  # Guesses of a model in a row, by which it is seen how it does where it is not held to pay.
_CAUGHT_UP = 4  # Steps that a trial may take for context that it lacks again, since other steps came between.
_FIRST_TRIAL = 30.0  # Steps that the first trials may take together.
_TRIED = 0.01  # Share of the time that goes into guesses of a model that by what is known would not pay.
_CHECKED_IN_A_ROW = 128  # Steps, with a model; then one checks nothing, so that what such steps take stays known.
_ANSWER_TOKENS = 64.0  # That an answer still has, before any has ended.


def draft_pool(model: ModelConfig, config: EngineConfig, window: int) -> PoolSize:
    """How large the pool of a draft model is: pages for as many answers as drafts are checked of at a time.

    Args:
      model: the draft model's architecture.
      config: of the engine.
      window: its context window, tokens.
    """
    num_rows = min(config.max_batch_size, max(backend.here().draft_sizes[-1] // ROW_TOKENS, 1))
    return PoolSize.for_window(min(CONTEXT_TOKENS, window, model.steady_positions), num_rows, 1, config.page_tokens)


class Lookup:
    """The context of an answer, and what in it may say how it goes on."""

    def __init__(self, job: Job) -> None:
        self._tokens = np.zeros(max(1024, 2 * job.num_tokens), np.int32)
        self._num_tokens = 0
        self._num_gone = job.num_gone
        self.hits, self.counts = np.zeros((2, MOST_MATCH + 1))
        """Of this answer: guesses that were right and guesses, by the tokens that stood there before; 0: a model's."""

    def find(self, job: Job, most: int) -> tuple[int, list[int]]:
        """How many tokens before the longest match there are alike, at most `MOST_MATCH`, and what is behind it.

        Args:
          most: tokens of that.

        Returns:
          0 and nothing where less than `LEAST_MATCH` match. Of matches as long as each other the last one's.
        """
        self._follow(job)
        tokens, end = self._tokens, self._num_tokens
        found = np.flatnonzero(tokens[: end - 1] == tokens[end - 1]) if end else np.zeros(0, np.int64)
        length = 1
        while length < min(MOST_MATCH, end - 1):
            longer = found[found >= length]
            longer = longer[tokens[longer - length] == tokens[end - 1 - length]]
            if not len(longer):
                break
            found, length = longer, length + 1
        if length < LEAST_MATCH or not len(found):
            return 0, []
        start = int(found[-1]) + 1
        return length, tokens[start + np.arange(most) % (end - start)].tolist()  # What repeats itself goes on so.

    def _follow(self, job: Job) -> None:
        """Takes what was drawn, or all where tokens have left."""
        if job.num_gone != self._num_gone or job.num_tokens < self._num_tokens:
            self._num_gone, self._num_tokens = job.num_gone, 0
        if job.num_tokens > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros(job.num_tokens, np.int32)])
        self._tokens[self._num_tokens : job.num_tokens] = job.token_ids[self._num_tokens :]
        self._num_tokens = job.num_tokens


@dataclasses.dataclass(frozen=True)
class Guess:
    """What may follow the tokens of a job."""

    length: int
    """Tokens before it that match; 0: it is a draft model's."""
    tokens: list[int]
    """What may follow; of a draft model that was not asked yet, anything."""
    likely: np.ndarray
    """f64, how likely each token is right if those before it are."""

    @property
    def expected(self) -> float:
        """How many of its tokens should be right, up to the first that is not."""
        return float(np.cumprod(self.likely).sum())


class Choice(NamedTuple):
    """What a step checks."""

    size: int
    """What the tokens of each part are padded to; 0: nothing is checked."""
    drafts: dict[Job, list[int]]
    """By job; see `Drafter.write` for those that a model is to write."""
    asked: frozenset[Job]
    """Whose drafts the model is to write."""


NOTHING = Choice(0, {}, frozenset())
"""No draft is checked."""


class Drafter:
    """Says what is worth checking. Belongs to the engine's thread.

    Args:
      max_tokens: the most tokens of a draft; 0 switches drafts off.
      sizes: that steps are padded to which check drafts, ascending, tokens of each part.
      num_parts: that rows are in.
      model: writes drafts, too; None: there is none.
      model_share: of a step of the target, what one of the model should take before that is measured.
    """

    def __init__(
        self,
        max_tokens: int,
        sizes: tuple[int, ...],
        num_parts: int,
        processes: Processes,
        model: DraftModel | None = None,
        model_share: float = 1.0,
    ) -> None:
        self._max_tokens = max_tokens if sizes else 0
        self._sizes = sizes
        self._num_parts = num_parts
        self._processes = processes
        self._lookups: dict[Job, Lookup] = {}
        matched = np.arange(MOST_MATCH + 1)
        self._hits = np.minimum(0.1 * matched, 0.9)
        self._counts = np.ones(MOST_MATCH + 1)
        self._hits[_BY_MODEL], self._counts[_BY_MODEL] = _PRIOR * _MODEL_RIGHT, _PRIOR
        self._model, self._model_share = model, model_share
        self._most: dict[Job, int] = {}
        self._answer_tokens = _ANSWER_TOKENS
        self._num_checked = 0  # Steps that checked drafts, since one that did not.
        self._saved_up, self._due = _FIRST_TRIAL, 0.0  # For trials, in steps that check nothing; of the last choice.
        self._num_tries = 0  # Guesses that are left of a trial.
        self._model_s = 0.0  # That the model took in the step that runs.
        self._decode_s: dict[int, float] = {}  # Of a step that checks nothing, by rows.
        self._cost: dict[tuple[int, int], float] = {}  # By rows and padded tokens, in such steps.

    def guesses(self, jobs: Mapping[Job, int]) -> dict[Job, Guess]:
        """What may follow the tokens of jobs, of each so many at most. Jobs that are not among them are forgotten."""
        self._most = {}
        if not self._max_tokens or len(jobs) * ROW_TOKENS > self._sizes[-1] * self._num_parts:
            return {}
        if self._model is not None:
            self._most = {job: min(most, self._model.max_tokens) for job, most in jobs.items() if most > 0}
            self._model.keep(jobs.keys())
            for job in self._lookups.keys() - jobs.keys():
                self._answer_tokens += _SMOOTHED * (len(job.output_ids) - self._answer_tokens)
        self._lookups = {job: self._lookups.get(job) or Lookup(job) for job in jobs}
        found = {}
        for job, most in jobs.items():
            length, tokens = self._lookups[job].find(job, min(most, self._max_tokens)) if most > 0 else (0, [])
            if tokens:
                classes = np.minimum(length + np.arange(len(tokens)), MOST_MATCH)
                found[job] = Guess(length, tokens, self._likely(job)[classes])
        return found

    def _likely(self, job: Job) -> np.ndarray:
        """How likely a guess for a job is right, by the tokens that match."""
        own, share = self._lookups[job], self._hits / self._counts
        return (own.hits + _PRIOR * share) / (own.counts + _PRIOR)

    def choose(self, guesses: Mapping[Job, Guess], part_of: Mapping[Job, int]) -> Choice:
        """The drafts that give most tokens a second, of jobs that decode in one step; none: to check none.

        Args:
          guesses: of the context, as of `guesses`.
          part_of: of each job that decodes, the part that its row is in.
        """
        num_rows, self._model_s = len(part_of), 0.0
        of_model = self._of_model(guesses, num_rows)
        if not guesses and not of_model:
            return NOTHING
        options, worth = list[tuple[float, int, dict[Job, list[int]]]](), list[float]()
        for size in self._sizes:
            drafts, gained = self._drafts_of(size, guesses, part_of) if guesses else ({}, 0.0)
            options.append((1 + gained / num_rows, size, drafts))
            worth.append(0.0 if not drafts else options[-1][0] / self._cost.get((num_rows, size), 1.0))
        best = int(np.argmax(worth))
        [chosen] = least(self._processes, "drafts", [best if worth[best] > 1 else -1])
        if of_model:
            if self._num_checked >= _CHECKED_IN_A_ROW:
                return NOTHING
            asked = self._ask(guesses, of_model, part_of, max(worth[best], 1.0))
            if asked.size:
                return asked
        if chosen < 0:
            for gain, size, drafts in options:
                if drafts and gain > 1 and self._cost.get((num_rows, size), 1.0) > gain:
                    self._cost[num_rows, size] *= 1 - _FORGOTTEN
            return NOTHING
        _, size, drafts = options[chosen]
        return Choice(size, drafts, frozenset())

    def _of_model(self, guesses: Mapping[Job, Guess], num_rows: int) -> dict[Job, Guess]:
        """What the model may be asked: for jobs of whose guesses by it more should be right than of those there are."""
        if self._model is None or num_rows not in self._decode_s:
            return {}
        found = dict[Job, Guess]()
        for job, most in self._most.items():
            guess = Guess(_BY_MODEL, [0] * most, np.full(most, self._likely(job)[_BY_MODEL]))
            if job not in guesses or guess.expected > guesses[job].expected:
                found[job] = guess
        return found

    def _ask(
        self, guesses: Mapping[Job, Guess], of_model: Mapping[Job, Guess], part_of: Mapping[Job, int], bar: float
    ) -> Choice:
        """What to have the model write, of what it may be asked: what gives most tokens a second, if more than without.

        Args:
          bar: tokens that a row has without it, in the time of a step that checks nothing.

        Returns:
          `NOTHING` where it does not pay. Once enough time has gone by without, what costs least of it all the same, a
          few times in a row, to see how it does.
        """
        if self._model is None:
            return NOTHING
        num_rows, step_s = len(part_of), self._decode_s[len(part_of)]
        (most, best), (least_cost, tried), is_held = (bar, NOTHING), (np.inf, NOTHING), False
        due = 0.0
        for size in self._sizes:
            drafts, gained = self._drafts_of(size, {**guesses, **of_model}, part_of)
            asked = frozenset(job for job in drafts if job in of_model)
            if not asked:
                continue
            num_tokens, gain = max(len(drafts[job]) for job in asked), 1 + gained / num_rows
            context_s, guess_s = self._model.seconds(asked, num_tokens, self._model_share * step_s)
            cost = self._cost.get((num_rows, size), 1.0)
            if cost > size:  # It compiled.
                self._cost[num_rows, size] *= 1 - _FORGOTTEN
            cost += guess_s / step_s
            # What is computed of a context serves all tokens that its answer still has.
            left = max(min(self._answer_tokens, *(self._most[job] + 1 for job in asked)), gain)
            worth = gain / (cost + context_s / step_s * gain / left)
            if worth > most:
                most, best = worth, Choice(size, drafts, asked)
            if (all_of_it := context_s / step_s + _TRIAL * (cost * bar - 1)) < least_cost:
                least_cost, due = all_of_it, context_s / step_s + cost * bar - 1
                tried, is_held = Choice(size, drafts, asked), context_s <= _CAUGHT_UP * step_s
        self._due = 0.0 if best.size else due
        if best.size:
            return best
        if self._num_tries and is_held:
            return tried
        self._saved_up, self._num_tries = self._saved_up + _TRIED, 0
        return tried if self._saved_up >= least_cost else NOTHING

    def write(self, choice: Choice) -> tuple[dict[Job, list[int]], dict[Job, Guess]]:
        """Has the model write the drafts that it is asked for, and waits for them.

        A model that breaks is not asked again: the engine goes on without it.

        Returns:
          All drafts of the choice, and those of the model as guesses.
        """
        if not choice.asked or self._model is None:
            return choice.drafts, {}
        self._num_tries = self._num_tries - 1 if self._num_tries else _TRIAL - 1
        self._saved_up, started_s = max(self._saved_up - self._due, 0.0), time.perf_counter()
        counts = {job: len(draft) for job, draft in choice.drafts.items() if job in choice.asked}
        try:
            written = self._model.guess(counts, self._model_share * min(self._decode_s.values()))
        except Exception:
            _LOG.warning("the draft model broke, and is not asked again", exc_info=True)
            self._model, self._most = None, {}
            return {job: draft for job, draft in choice.drafts.items() if job not in choice.asked}, {}
        self._model_s = time.perf_counter() - started_s
        guesses = {job: Guess(_BY_MODEL, draft, np.ones(len(draft))) for job, draft in written.items()}
        return {**choice.drafts, **written}, guesses

    def _drafts_of(
        self, size: int, guesses: Mapping[Job, Guess], part_of: Mapping[Job, int]
    ) -> tuple[dict[Job, list[int]], float]:
        """The likeliest drafts that fit a step of so many tokens a part, and how many tokens they should give."""
        room = [size - list(part_of.values()).count(part) for part in range(self._num_parts)]
        reached = {job: np.cumprod(guess.likely) for job, guess in guesses.items()}
        order = [(-float(likely[0]), number, job) for number, (job, likely) in enumerate(reached.items())]
        heapq.heapify(order)
        counts, gained = dict.fromkeys(reached, 0), 0.0
        while order:
            likely, number, job = heapq.heappop(order)
            if room[part_of[job]] <= 0:
                continue
            room[part_of[job]] -= 1
            gained -= likely
            counts[job] += 1
            if counts[job] < len(reached[job]):
                heapq.heappush(order, (-float(reached[job][counts[job]]), number, job))
        return {job: guesses[job].tokens[:count] for job, count in counts.items() if count}, gained

    def score(self, job: Job, guess: Guess, drawn: Sequence[int]) -> None:
        """Counts which tokens of a guess were right: up to the first that was not, of those that were drawn."""
        own = self._lookups.get(job)
        for number, (token, right) in enumerate(zip(guess.tokens, drawn, strict=False)):
            at = min(guess.length + number, MOST_MATCH) if guess.length else _BY_MODEL
            kept = _KEPT if guess.length else _MODEL_KEPT
            for hits, counts in ((self._hits, self._counts), *(() if own is None else ((own.hits, own.counts),))):
                hits[at] = kept * hits[at] + (token == right)
                counts[at] = kept * counts[at] + 1
            if token != right:
                return

    def took(self, num_rows: int, size: int, seconds: float) -> None:
        """A step of so many rows took so long, that checked drafts in so many tokens, or 0: that checked none.

        The time that a model took to write them does not count.
        """
        seconds, self._num_checked = seconds - self._model_s, self._num_checked + 1 if size else 0
        if not size:
            self._decode_s[num_rows] = _mixed(self._decode_s.get(num_rows), seconds)
        elif num_rows in self._decode_s:
            key, cost = (num_rows, size), seconds / self._decode_s[num_rows]
            self._cost[key] = _mixed(self._cost.get(key), cost)


def _mixed(known: float | None, new: float) -> float:
    """A measurement with those before it, of which one that is far above them is worth as much as twice these."""
    return new if known is None else (1 - _SMOOTHED) * known + _SMOOTHED * min(new, 2 * known)
