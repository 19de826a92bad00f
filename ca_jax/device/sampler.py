"""Drawing tokens: the jitted draw, and the parameters of each running job that it takes.

A draw depends on the seed and on how many tokens are before the drawn one, and on nothing else: the same turn gives the
same answer in any batch. Shapes: B rows, V tokens of the vocabulary, `logits` f32 `[B, V]`.

Not here: what may be asked for (turns.requests), logits (runner, slots).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ca_jax.device.transfer import to_device, to_host
from ca_jax.models.sharding import ModelSharding, replicated
from ca_jax.turns.grammars import Matcher
from ca_jax.turns.requests import MAX_LOGPROBS, SamplingParams, TokenLogprob

FILTERED = -1e30
"""Logit of a token that may not be drawn."""
ALL_TOKENS = np.uint32(2**32 - 1)
"""In masks of tokens: all of 32 are allowed."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerRows:
    """Sampling parameters of B rows, as arrays."""

    temperature: jax.Array
    """f32 `[B]`; 0 means greedy."""
    top_k: jax.Array
    """i32 `[B]`; 0 means all."""
    top_p: jax.Array
    """f32 `[B]` in (0, 1]; 1 means all."""
    min_p: jax.Array
    """f32 `[B]` in [0, 1): smallest probability kept, as a share of the largest."""
    repetition_penalty: jax.Array
    """f32 `[B]`; 1 means none (Keskar et al., 2019)."""
    seed: jax.Array
    """u32 `[B]`."""

    @classmethod
    def of(cls, params: Iterable[SamplingParams], put: Callable[..., jax.Array] = to_device) -> SamplerRows:
        """Those of each of B answers, put on the device by `put`."""
        rows, dtypes = tuple(params), {"top_k": np.int32, "seed": np.uint32}
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**{name: put([getattr(row, name) for row in rows], dtypes.get(name, np.float32)) for name in names})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draw:
    """Tokens of n rows, on the device or, once they were waited for, on the host.

    How likely they were is there where a row's answer is to have it. All logarithms are natural ones.
    """

    tokens: jax.Array | np.ndarray
    """i32 `[n]`."""
    logprobs: jax.Array | np.ndarray | None = None
    """f32 `[n]`, how likely each was to the model."""
    top_ids: jax.Array | np.ndarray | None = None
    """i32 `[n, m]`, what the model held likeliest, likeliest first; of equals the lower id."""
    top: jax.Array | np.ndarray | None = None
    """f32 `[n, m]`, how likely that is."""

    def wait(self) -> Draw:
        """The same on the host."""
        return jax.tree.map(to_host, self)

    def logprob(self, row: int, num_top: int | None) -> TokenLogprob | None:
        """What is said of a row's token, with so many of the likeliest; None where nothing is asked for."""
        if num_top is None or self.logprobs is None or self.top_ids is None or self.top is None:
            return None
        top = zip(self.top_ids[row, :num_top], self.top[row, :num_top], strict=True)
        return TokenLogprob(
            token_id=int(self.tokens[row]),
            logprob=float(self.logprobs[row]),
            top=tuple((int(token), float(logprob)) for token, logprob in top),
        )


@jax.jit
def greedy(logits: jax.Array) -> jax.Array:
    """The likeliest token of each row: f32 `[B, V]` to i32 `[B]`."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@partial(jax.jit, static_argnames=("filters",))
def sample(
    logits: jax.Array,
    rows: SamplerRows,
    marks: jax.Array,
    masks: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    filters: bool,
) -> jax.Array:
    """Draws a token per row, in the order of Hugging Face's processors: penalty, temperature, top-k, top-p, min-p.

    What is added to logits comes right behind the repetition penalty, and then what masks leave out is filtered.

    Args:
      marks: f32 `[slots, 2, V]`: 1 for tokens that the repetition penalty applies to; then what is added, biases less
        presence and frequency penalties.
      masks: u32 `[B, W]`; bit `i % 32` of number `i // 32` says whether token i may be drawn.
      slots: i32 `[B]`, the slot of each row.
      positions: i32 `[B]`, position of the token being drawn; with the seed it fixes the draw.
      filters: whether any row has a top-k or a top-p, static.

    Returns:
      i32 `[B]`.
    """
    marked = marks[slots]
    penalty = rows.repetition_penalty[:, None]
    logits = jnp.where(marked[:, 0] > 0, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits = logits + marked[:, 1]
    logits = jax.lax.cond(jnp.all(masks == ALL_TOKENS), lambda: logits, lambda: _only_allowed(logits, masks))
    best = jnp.argmax(logits, axis=-1)

    def drawn() -> jax.Array:
        scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
        if filters:
            scaled = _likeliest(scaled, rows)
        floor = jnp.max(scaled, axis=-1) + jnp.log(rows.min_p)  # Minus infinity where there is none.
        scaled = jnp.where(scaled >= floor[:, None], scaled, FILTERED)

        def draw(seed: jax.Array, position: jax.Array, row: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(seed), position)
            return jnp.argmax(row + jax.random.gumbel(key, row.shape))

        return jnp.where(rows.temperature > 0, jax.vmap(draw)(rows.seed, positions, scaled), best)

    # Where all are greedy, with penalties or grammars, no random numbers are made.
    return jax.lax.cond(jnp.any(rows.temperature > 0), drawn, lambda: best).astype(jnp.int32)


def _only_allowed(logits: jax.Array, masks: jax.Array) -> jax.Array:
    """Filters all but the tokens that masks, u32 `[B, W]`, have a bit of."""
    bits = masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    return jnp.where(bits.reshape(len(masks), -1)[:, : logits.shape[-1]] > 0, logits, FILTERED)


def _likeliest(scaled: jax.Array, rows: SamplerRows) -> jax.Array:
    """Filters all but the top k, and of these all but the top p. Equally likely tokens go together.

    Nothing is sorted, which would take a hundred milliseconds for eight rows of 49,152 on a CPU: the least value that
    stays is found bit by bit, as an integer in the order of the floats.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(scaled == 0, 0.0, scaled), jnp.uint32)  # -0 is 0.
    sign = jnp.uint32(1 << 31)
    ordered = jnp.where(bits >= sign, ~bits, bits | sign)
    least = _greatest(ordered, jnp.ones_like(scaled), rows.top_k.astype(scaled.dtype))
    scaled = jnp.where(ordered >= jnp.where(rows.top_k > 0, least, 0)[:, None], scaled, FILTERED)
    least = _greatest(ordered, jax.nn.softmax(scaled, axis=-1), rows.top_p)
    return jnp.where(ordered >= jnp.where(rows.top_p < 1, least, 0)[:, None], scaled, FILTERED)


def _greatest(ordered: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The greatest number that entries of so much weight reach: u32 `[B, V]`, f32 `[B, V]`, f32 `[B]` to u32 `[B]`."""

    def narrow(step: jax.Array, found: jax.Array) -> jax.Array:
        tried = found | (jnp.uint32(1 << 31) >> step.astype(jnp.uint32))
        weight = jnp.sum(jnp.where(ordered >= tried[:, None], weights, 0), axis=-1)
        return jnp.where(weight >= wanted, tried, found)

    return jax.lax.fori_loop(0, 32, narrow, jnp.zeros(ordered.shape[0], jnp.uint32))


@partial(jax.jit, static_argnames=("num_top",))
def log_probabilities(logits: jax.Array, tokens: jax.Array, num_top: int) -> Draw:
    """How likely drawn tokens were by the model's own distribution, whatever they were drawn from.

    That is the softmax of the logits as they are: before penalties, biases, temperature and filters.

    Args:
      tokens: i32 `[B]`, as they were drawn.
      num_top: static, how many of the likeliest tokens are wanted, at most V.
    """
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top, top_ids = jax.lax.top_k(logprobs, num_top)
    return Draw(tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0], top_ids, top)


@partial(jax.jit, donate_argnames=("marks",))
def set_entry(marks: jax.Array, slot: jax.Array, kind: jax.Array, token: jax.Array, value: jax.Array) -> jax.Array:
    """Replaces one number of `marks [slots, 2, V]`, which is donated; i32 scalars and a f32 one."""
    return marks.at[slot, kind, token].set(value)


@jax.jit
def set_row(marks: jax.Array, slot: jax.Array, new: jax.Array) -> jax.Array:
    """Replaces a slot's `[2, V]` of `marks [slots, 2, V]`; i32 scalar."""
    return marks.at[slot].set(new)


_NEVER = -1e9  # Added to a logit.


class Sampler:
    """Draws tokens for slots, each with its own parameters. Belongs to the engine's thread.

    Args:
      sharding: of the model whose logits it draws from, which are whole on each device; None: it is on one.
    """

    def __init__(self, num_slots: int, vocab_size: int, sharding: ModelSharding | None = None) -> None:
        self._to_device = partial(to_device, sharding=replicated(sharding))
        self._params: list[SamplingParams | None] = [None] * num_slots
        self._vocab_size = vocab_size
        self._num_top = min(MAX_LOGPROBS, vocab_size)
        self._marks: jax.Array | None = None  # f32 [slots, 2, V], see `sample`; made when first needed
        self._marked: set[int] = set()  # slots whose marks may be other than 0
        self._counts: list[collections.Counter[int]] = [collections.Counter() for _ in range(num_slots)]
        self._barred: list[tuple[int, ...]] = [()] * num_slots  # stop tokens that are not to be drawn yet
        self._matchers: list[Matcher | None] = [None] * num_slots
        self._masks = np.full((num_slots, -(-vocab_size // 32)), ALL_TOKENS)
        self._no_masks: dict[int, jax.Array] = {}  # By rows.
        self._rows: dict[tuple[int | None, ...], tuple[SamplerRows, jax.Array]] = {}

    def set_slot(
        self,
        slot: int,
        params: SamplingParams,
        token_ids: list[int],
        stop_ids: Collection[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        """Gives a slot to an answer whose prompt is `token_ids`, that ends with any of `stop_ids`, and is to match.

        Raises:
          InvalidRequestError: what `matcher` allows is too complex to be told.
        """
        self._matchers[slot] = matcher
        self._masks[slot] = ALL_TOKENS
        if matcher is not None:
            matcher.fill(self._masks[slot])
        self._barred[slot] = tuple(t for t in stop_ids if t < self._vocab_size) if params.min_tokens else ()
        if params.min_tokens and not self._barred[slot]:
            params = dataclasses.replace(params, min_tokens=0)  # There is nothing to bar.
        self._params[slot] = params
        self._rows.clear()
        self._counts[slot].clear()
        is_greedy = _is_greedy(params) and matcher is None
        if is_greedy and slot not in self._marked:
            return
        if self._marks is None:
            self._marks = self._to_device(np.zeros((len(self._params), 2, self._vocab_size), np.float32))
        row = np.zeros((2, self._vocab_size), np.float32)
        if params.repetition_penalty != 1.0:
            row[0, token_ids] = 1
        for token, bias in params.logit_bias:
            row[1, token] = bias
        row[1, list(self._barred[slot])] = _NEVER
        self._marks = set_row(self._marks, self._to_device(slot, np.int32), self._to_device(row))
        (self._marked.discard if is_greedy else self._marked.add)(slot)

    def free_slot(self, slot: int) -> None:
        """Forgets a slot's parameters."""
        self._params[slot] = self._matchers[slot] = None
        self._rows.clear()

    def forget_if_broken(self) -> bool:
        """Lets go of what a call that broke has left of its arrays; whether one had. All slots are to be freed then."""
        try:
            jax.block_until_ready(self._marks)
        except RuntimeError:
            self._marks = None
            self._marked.clear()
            return True
        return False

    @property
    def waits_for_marks(self) -> bool:
        """Whether a draw depends on tokens that must be marked first."""
        return any(map(self.follows_marks, range(len(self._params))))

    def follows_marks(self, slot: int) -> bool:
        """Whether a slot's draws depend on tokens that must be marked first: none can be drawn ahead."""
        params = self._params[slot]
        return self._matchers[slot] is not None or (params is not None and _penalises(params))

    def start(
        self,
        logits: jax.Array,
        positions: npt.ArrayLike,
        slots: Sequence[int | None],
        likeliest: jax.Array | None = None,
    ) -> Draw:
        """Draws a token for each row. Does not wait.

        Args:
          positions: i32 `[n]`, of the tokens being drawn.
          slots: which each row is; None: no slot's, for which anything is drawn.
          likeliest: token of each row, i32 `[n]`, where that is known.

        Returns:
          Of n rows; with log-probabilities where a slot's answer is to have them.
        """
        used = [params for slot in slots if slot is not None and (params := self._params[slot]) is not None]
        is_bounded = any(slot is not None and self._matchers[slot] for slot in slots)
        if self._marks is None or (not is_bounded and all(_is_greedy(params) for params in used)):
            tokens = greedy(logits) if likeliest is None else likeliest
        else:
            key = tuple(slots)
            if key not in self._rows:
                found = (None if slot is None else self._params[slot] for slot in slots)
                rows = SamplerRows.of((params or SamplingParams() for params in found), self._to_device)
                self._rows[key] = rows, self._to_device([slot or 0 for slot in slots], np.int32)
            rows, numbers = self._rows[key]
            filters = any(params.top_k > 0 or params.top_p < 1 for params in used)
            places, masks = self._to_device(positions, np.int32), self._masks_of(slots if is_bounded else len(slots))
            tokens = sample(logits, rows, self._marks, masks, numbers, places, filters)
        if all(params.logprobs is None for params in used):
            return Draw(tokens)
        return log_probabilities(logits, tokens, self._num_top)

    def _masks_of(self, rows: Sequence[int | None] | int) -> jax.Array:
        """What each row's grammar allows, u32 `[n, W]`; of so many rows without any, the same array each time."""
        width = self._masks.shape[1]
        if isinstance(rows, int):
            if rows not in self._no_masks:
                self._no_masks[rows] = self._to_device(np.full((rows, width), ALL_TOKENS))
            return self._no_masks[rows]
        masks = np.full(
            (len(rows), width), ALL_TOKENS
        )  # Anew each time: where host and device share memory it is read.
        for row, slot in enumerate(rows):
            if slot is not None:
                masks[row] = self._masks[slot]
        return self._to_device(masks)

    def compile(self, compiled: Callable[..., Any], small: Callable[..., Any], logits: Any, tokens: Any) -> None:
        """Compiles all ways of drawing from logits of such a shape, and of marking."""
        size, vocab_size = logits.shape
        marks, scalar = small(len(self._params), 2, vocab_size, dtype=np.float32), small()
        rows = SamplerRows.of([SamplingParams()] * size, lambda values, dtype: small(size, dtype=dtype))
        masks = small(size, self._masks.shape[1], dtype=np.uint32)
        for filters in (False, True):
            drawn = compiled(sample, logits, rows, marks, masks, small(size), small(size), filters)
        for each in (tokens, drawn):
            compiled(log_probabilities, logits, each, self._num_top)
        compiled(set_entry, marks, scalar, scalar, scalar, small(dtype=np.float32))
        compiled(set_row, marks, scalar, small(2, vocab_size, dtype=np.float32))

    def mark(self, slot: int, token: int) -> None:
        """Notes a drawn token for the slot's penalties and its grammar.

        Raises:
          InvalidRequestError: what may follow it is too complex to be told.
        """
        params, matcher = self._params[slot], self._matchers[slot]
        if matcher is not None:  # While the device computes what is behind the token.
            matcher.take(token)
            matcher.fill(self._masks[slot])
        if params is None or not _penalises(params):
            return
        if params.repetition_penalty != 1.0:
            self._set_mark(slot, 0, token, 1)
        self._counts[slot][token] += 1
        if _penalises_answer(params):
            self._set_addend(slot, params, token)
        if params.min_tokens and self._counts[slot].total() == params.min_tokens:  # From here on it may end.
            self._params[slot] = dataclasses.replace(params, min_tokens=0)
            self._rows.clear()
            for barred in self._barred[slot]:
                self._set_addend(slot, params, barred)
            self._barred[slot] = ()

    def _set_addend(self, slot: int, params: SamplingParams, token: int) -> None:
        """Says what is added to a token that may be drawn: its bias, less penalties for how often it was."""
        count, bias = self._counts[slot][token], dict(params.logit_bias).get(token, 0.0)
        penalty = params.presence_penalty * (count > 0) + params.frequency_penalty * count
        self._set_mark(slot, 1, token, bias - penalty)

    def _set_mark(self, slot: int, kind: int, token: int, value: float) -> None:
        if self._marks is not None:
            at = (self._to_device(number, np.int32) for number in (slot, kind, token))
            self._marks = set_entry(self._marks, *at, self._to_device(value, np.float32))


def _penalises(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or _penalises_answer(params) or params.min_tokens > 0


def _penalises_answer(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0


def _adds(params: SamplingParams) -> bool:
    return _penalises_answer(params) or bool(params.logit_bias) or params.min_tokens > 0


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0 and params.repetition_penalty == 1.0 and not _adds(params)
