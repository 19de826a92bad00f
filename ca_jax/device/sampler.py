"""The sampling parameters of the decode slots, kept on the device as long as the batch stays the same.

Not here: how a token is drawn (sampling), when an answer ends (engine).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection
from functools import partial

import jax
import numpy as np

from ca_jax.device import sampling
from ca_jax.device.transfer import to_device, to_host
from ca_jax.models.sharding import ModelSharding, replicated
from ca_jax.turns.requests import MAX_LOGPROBS, SamplingParams, TokenLogprob

_NEVER = -1e9  # Added to a logit.


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Tokens of n rows, on the host."""

    tokens: np.ndarray
    """i32 `[n]`."""
    logprobs: np.ndarray | None = None
    """f32 `[n]`, of the tokens; None where no row's answer is to have it."""
    top_ids: np.ndarray | None = None
    """i32 `[n, m]`, the likeliest tokens of each row, likeliest first."""
    top_logprobs: np.ndarray | None = None
    """f32 `[n, m]`, theirs."""

    def logprob(self, row: int, params: SamplingParams) -> TokenLogprob | None:
        """What is said of a row's token where its answer is drawn by `params`; None where they ask for nothing."""
        if params.logprobs is None or self.logprobs is None or self.top_ids is None or self.top_logprobs is None:
            return None
        top = zip(self.top_ids[row, : params.logprobs], self.top_logprobs[row, : params.logprobs], strict=True)
        return TokenLogprob(
            token_id=int(self.tokens[row]),
            logprob=float(self.logprobs[row]),
            top=tuple((int(token), float(logprob)) for token, logprob in top),
        )


@dataclasses.dataclass(frozen=True)
class Draw:
    """Tokens of n rows that the device is about to draw, and how likely they are."""

    tokens: jax.Array
    """i32 `[n]`."""
    logprobs: sampling.LogProbabilities | None
    """Of the same logits; None where no row's answer is to have it."""

    def wait(self) -> Drawn:
        """Waits for them."""
        tokens, of = to_host(self.tokens), self.logprobs
        return Drawn(tokens) if of is None else Drawn(tokens, to_host(of.drawn), to_host(of.top_ids), to_host(of.top))


class Sampler:
    """Draws tokens for slots, each with its own parameters. Belongs to the engine's thread.

    Args:
      num_slots: how many decode slots there are.
      vocab_size: V.
      sharding: of the model whose logits it draws from, which are whole on each device; None: it is on one.
    """

    def __init__(self, num_slots: int, vocab_size: int, sharding: ModelSharding | None = None) -> None:
        self._to_device = partial(to_device, sharding=replicated(sharding))
        self._params: list[SamplingParams | None] = [None] * num_slots
        self._vocab_size = vocab_size
        self._num_top = min(MAX_LOGPROBS, vocab_size)
        self._seen: jax.Array | None = None  # bool [slots, V], made when first needed
        self._addends: jax.Array | None = None  # f32 [slots, V], made when first needed
        self._added: set[int] = set()  # slots whose addends are not all 0
        self._counts: list[collections.Counter[int]] = [collections.Counter() for _ in range(num_slots)]
        self._barred: list[tuple[int, ...]] = [()] * num_slots  # stop tokens that are not to be drawn yet
        self._drawn = [0] * num_slots  # tokens of each answer that have any barred
        self._rows: dict[tuple[int, int], sampling.SamplerRows] = {}

    def set_slot(self, slot: int, params: SamplingParams, token_ids: list[int], stop_ids: Collection[int] = ()) -> None:
        """Gives a slot to an answer whose prompt is `token_ids`, and that ends with any of `stop_ids`."""
        self._barred[slot] = tuple(t for t in stop_ids if t < self._vocab_size) if params.min_tokens else ()
        self._drawn[slot] = 0
        if params.min_tokens and not self._barred[slot]:
            params = dataclasses.replace(params, min_tokens=0)  # There is nothing to bar.
        self._params[slot] = params
        self._rows.clear()
        self._set_addends(slot, params)
        if _is_greedy(params):
            return
        if self._seen is None:
            self._seen = self._to_device(np.zeros((len(self._params), self._vocab_size), bool))
        present = np.zeros(self._vocab_size, bool)
        if params.repetition_penalty != 1.0:
            present[token_ids] = True
        self._seen = sampling.set_row(self._seen, self._to_device(slot, np.int32), self._to_device(present))

    def free_slot(self, slot: int) -> None:
        """Forgets a slot's parameters."""
        self._params[slot] = None
        self._rows.clear()

    def forget_if_broken(self) -> bool:
        """Lets go of what a call that broke has left of its arrays; whether one had. All slots are to be freed then."""
        try:
            jax.block_until_ready((self._seen, self._addends))
        except RuntimeError:
            self._seen = self._addends = None
            self._added.clear()
            return True
        return False

    @property
    def has_penalties(self) -> bool:
        """Whether a draw depends on tokens that must be marked first."""
        return any(params is not None and _penalises(params) for params in self._params)

    def draw(self, logits: jax.Array, positions: np.ndarray, first_slot: int = 0) -> Drawn:
        """Draws as `start` does, and waits for the tokens."""
        return self.start(logits, positions, first_slot).wait()

    def start(self, logits: jax.Array, positions: np.ndarray, first_slot: int = 0) -> Draw:
        """Draws a token for each row. Does not wait.

        Args:
          logits: f32 `[n, V]`, of slots `first_slot` to `first_slot + n`.
          positions: i32 `[n]`, of the tokens being drawn.
          first_slot: which slot the first row is.

        Returns:
          Of n rows, anything for slots not in use; with log-probabilities where a slot's answer is to have them.
        """
        num_rows = logits.shape[0]
        slots = range(first_slot, first_slot + num_rows)
        used = [params for slot in slots if (params := self._params[slot]) is not None]
        if self._seen is None or all(_is_greedy(params) for params in used):
            tokens = sampling.greedy(logits)
        else:
            rows = self._rows.get((first_slot, num_rows))
            if rows is None:
                rows = self._rows[first_slot, num_rows] = self._rows_of(slots)
            first, places = self._to_device(first_slot, np.int32), self._to_device(positions, np.int32)
            addends = self._addends if any(_adds(params) for params in used) else None
            tokens = sampling.sample(logits, rows, self._seen, first, places, addends)
        if all(params.logprobs is None for params in used):
            return Draw(tokens, None)
        return Draw(tokens, sampling.log_probabilities(logits, tokens, self._num_top))

    def warmup(self, batch_sizes: tuple[int, ...]) -> None:
        """Compiles drawing for these numbers of rows. All slots must be free; drawing is then as if never called.

        That is greedily or not, with and without what is added to logits, and how likely the tokens are.
        """
        sampled = SamplingParams(temperature=1.0, repetition_penalty=1.1, logprobs=0)
        for params in (SamplingParams(logprobs=0), sampled, dataclasses.replace(sampled, presence_penalty=1.0)):
            self.set_slot(0, params, [])
            for size in batch_sizes:
                self.draw(self._to_device(np.zeros((size, self._vocab_size), np.float32)), np.zeros(size, np.int32))
            self.mark(0, 0)
        self.free_slot(0)
        self._addends = None
        self._added.clear()

    def mark(self, slot: int, token: int) -> None:
        """Notes a drawn token for the slot's penalties."""
        params = self._params[slot]
        if params is None or not _penalises(params):
            return
        at, drawn = self._to_device(slot, np.int32), self._to_device(token, np.int32)
        if params.repetition_penalty != 1.0 and self._seen is not None:
            self._seen = sampling.mark_seen(self._seen, at, drawn)
        if _penalises_answer(params) and self._addends is not None:
            self._counts[slot][token] += 1
            penalty = params.presence_penalty + params.frequency_penalty * self._counts[slot][token]
            value = self._to_device(dict(params.logit_bias).get(token, 0.0) - penalty, np.float32)
            self._addends = sampling.set_addend(self._addends, at, drawn, value)
        if params.min_tokens:
            self._drawn[slot] += 1
            if self._drawn[slot] == params.min_tokens:
                self._unbar(slot, params)

    def _unbar(self, slot: int, params: SamplingParams) -> None:
        """Lets an answer end that is as long as it must be."""
        self._params[slot] = params = dataclasses.replace(params, min_tokens=0)
        self._rows.clear()
        biases = dict(params.logit_bias)
        for token in self._barred[slot]:
            if self._addends is not None:
                value = self._to_device(biases.get(token, 0.0), np.float32)
                at, barred = self._to_device(slot, np.int32), self._to_device(token, np.int32)
                self._addends = sampling.set_addend(self._addends, at, barred, value)
        self._barred[slot] = ()

    def _set_addends(self, slot: int, params: SamplingParams) -> None:
        """Begins what is added to a slot's logits: its biases, what bars stop tokens, and no penalties so far."""
        self._counts[slot].clear()
        if not _adds(params) and slot not in self._added:
            return
        if self._addends is None:
            self._addends = self._to_device(np.zeros((len(self._params), self._vocab_size), np.float32))
        row = np.zeros(self._vocab_size, np.float32)
        for token, bias in params.logit_bias:
            row[token] = bias
        row[list(self._barred[slot])] = _NEVER
        self._addends = sampling.set_row(self._addends, self._to_device(slot, np.int32), self._to_device(row))
        (self._added.add if _adds(params) else self._added.discard)(slot)

    def _rows_of(self, slots: range) -> sampling.SamplerRows:
        filled = [self._params[slot] or SamplingParams() for slot in slots]
        return sampling.SamplerRows(
            temperature=self._to_device([row.temperature for row in filled], np.float32),
            top_k=self._to_device([row.top_k for row in filled], np.int32),
            top_p=self._to_device([row.top_p for row in filled], np.float32),
            min_p=self._to_device([row.min_p for row in filled], np.float32),
            repetition_penalty=self._to_device([row.repetition_penalty for row in filled], np.float32),
            seed=self._to_device([row.seed for row in filled], np.uint32),
        )


def _penalises(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or _penalises_answer(params) or params.min_tokens > 0


def _penalises_answer(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0


def _adds(params: SamplingParams) -> bool:
    return _penalises_answer(params) or bool(params.logit_bias) or params.min_tokens > 0


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0 and params.repetition_penalty == 1.0 and not _adds(params)
