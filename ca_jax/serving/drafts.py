"""Decoding ahead: tokens of an answer are guessed from what its context says already, and checked in one step.

    context     ... def area ( width ) : ... | def area (        the last tokens stand there before
    draft                                                width ) :   what followed them then
    checked     one step over the last token and the draft: each token is drawn as ever, behind the ones before it
    taken       what was drawn, up to the first token that the draft has wrong, that one included

So the answer is what it would be without, greedy or drawn: a draw depends on the seed and the place alone. A draft is
worth what it saves: how likely a guess is right is counted, by how many tokens stood there before, also where nothing
was checked; how long steps take is measured. What is checked is what gives most tokens a second by that, often nothing.

Not here: the step (device.runner), who decodes and takes the tokens (batch).
Source: prompt lookup decoding (Saxena, 2023), checked as in speculative decoding (Leviathan et al., ICML 2023).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from ca_jax.device.processes import Processes, least
from ca_jax.session import Job

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


class Lookup:
    """The context of an answer, and what in it may say how it goes on."""

    def __init__(self, job: Job) -> None:
        self._tokens = np.zeros(max(1024, 2 * job.num_tokens), np.int32)
        self._num_tokens = 0
        self._num_gone = job.num_gone
        self.hits, self.counts = np.zeros((2, MOST_MATCH + 1))
        """Of this answer: guesses that were right and guesses, by the tokens that stood there before."""

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
    """Tokens before it that match."""
    tokens: list[int]
    """What may follow."""
    likely: np.ndarray
    """f64, how likely each token is right if those before it are."""


class Drafter:
    """Says what is worth checking. Belongs to the engine's thread.

    Args:
      max_tokens: the most tokens of a draft; 0 switches drafts off.
      sizes: that steps are padded to which check drafts, ascending, tokens of each part.
      num_parts: that rows are in.
    """

    def __init__(self, max_tokens: int, sizes: tuple[int, ...], num_parts: int, processes: Processes) -> None:
        self._max_tokens = max_tokens if sizes else 0
        self._sizes = sizes
        self._num_parts = num_parts
        self._processes = processes
        self._lookups: dict[Job, Lookup] = {}
        matched = np.arange(MOST_MATCH + 1)
        self._hits = np.minimum(0.1 * matched, 0.9)
        self._counts = np.ones(MOST_MATCH + 1)
        self._decode_s: dict[int, float] = {}  # Of a step that checks nothing, by rows.
        self._cost: dict[tuple[int, int], float] = {}  # By rows and padded tokens, in such steps.

    def guesses(self, jobs: Mapping[Job, int]) -> dict[Job, Guess]:
        """What may follow the tokens of jobs, of each so many at most. Jobs that are not among them are forgotten."""
        if not self._max_tokens or len(jobs) * ROW_TOKENS > self._sizes[-1] * self._num_parts:
            return {}
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

    def choose(self, guesses: Mapping[Job, Guess], part_of: Mapping[Job, int]) -> tuple[int, dict[Job, list[int]]]:
        """The drafts that give most tokens a second, of jobs that decode in one step; none: to check none.

        Args:
          part_of: of each job that decodes, the part that its row is in.

        Returns:
          What the tokens of each part are padded to, and drafts; 0 and none.
        """
        if not guesses:
            return 0, {}
        num_rows, options = len(part_of), []
        for size in self._sizes:
            drafts, gained = self._drafts_of(size, guesses, part_of)
            options.append((1 + gained / num_rows, size, drafts))
        worth = [0.0 if not drafts else gain / self._cost.get((num_rows, size), 1.0) for gain, size, drafts in options]
        best = int(np.argmax(worth))
        [chosen] = least(self._processes, "drafts", [best if worth[best] > 1 else -1])
        if chosen < 0:
            for gain, size, drafts in options:
                if drafts and gain > 1 and self._cost.get((num_rows, size), 1.0) > gain:
                    self._cost[num_rows, size] *= 1 - _FORGOTTEN
            return 0, {}
        return options[chosen][1:]

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
            at = min(guess.length + number, MOST_MATCH)
            for hits, counts in ((self._hits, self._counts), *(() if own is None else ((own.hits, own.counts),))):
                hits[at] = _KEPT * hits[at] + (token == right)
                counts[at] = _KEPT * counts[at] + 1
            if token != right:
                return

    def took(self, num_rows: int, size: int, seconds: float) -> None:
        """A step of so many rows took so long, that checked drafts in so many tokens, or 0: that checked none."""
        if not size:
            self._decode_s[num_rows] = _mixed(self._decode_s.get(num_rows), seconds)
        elif num_rows in self._decode_s:
            key, cost = (num_rows, size), seconds / self._decode_s[num_rows]
            self._cost[key] = _mixed(self._cost.get(key), cost)


def _mixed(known: float | None, new: float) -> float:
    """A measurement with those before it, of which one that is far above them is worth as much as twice these."""
    return new if known is None else (1 - _SMOOTHED) * known + _SMOOTHED * min(new, 2 * known)
