"""A context that grows without end under a window: the pure model, its KV in plain arrays, and each way to overflow.

What the engine does with tiers, slots and jobs is done here with slices of arrays, so that the two can be compared, and
methods with each other. KV that two streams share is not donated: a stream that was copied goes on beside the first.

Computes with the model alone: with no engine, session, store or runner, which it is there to be compared with.

Not here: texts and benchmarks (tasks), serving (engine), drift and measuring it (`ca_jax.recompute.drift`).
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks.evaluate.by_layer import LayerByLayer, as_pages, from_pages
from benchmarks.harness import ticked
from ca_jax.device import page_steps, steps
from ca_jax.device.transfer import to_device, to_host
from ca_jax.errors import ContextWindowError
from ca_jax.models import rope
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import KVCache, LayerKV, quantize
from ca_jax.overflow.config import METHODS, DiscardContext, OverflowConfig, check_discarded, num_leaving
from ca_jax.pretrained import LoadedModel, Progress, check_token_ids
from ca_jax.recompute.drift import Drift, add_drift
from ca_jax.recompute.plan import repair_plan

_CAPACITY_STEP = 256  # Places of KV grow by so many; each step is compiled for.
_LOSS_TOKENS = 64  # Logits of so many tokens are in memory at once.
_PASS_TOKENS = 512  # Most tokens that are computed anew in one pass.
_LEAST_STEP = 8  # Steps shorter than `step_tokens` are padded to a power of two, at least this.


class ComparedOverflow(OverflowConfig):
    """A way to overflow as it is evaluated: `method` may also be `nkvt`, CachedAttention's naive KV truncation.

    That uses what stays at its old positions, which is wrong: the others are compared with it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method == "nkvt" and self.token_discarder.needs_attention:
            raise ValueError(
                f"nkvt must have a discarder that asks for no attention, got {self.token_discarder.name!r}: at wrong "
                "positions it says nothing"
            )

    @property
    def methods(self) -> tuple[str, ...]:
        """What `method` may be."""
        return (*METHODS, "nkvt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truncation:
    """One overflow."""

    num_fed: int
    """Tokens fed before it."""
    num_dropped: int
    num_kept: int
    num_recomputed: float
    """Tokens computed anew; where that is done in some layers only, times their share of the layers."""


class ContextStream:
    """One context under a window.

    Args:
      model: whose.
      overflow: what happens at the window's end.
      window: most tokens of the context.
      step_tokens: tokens that are fed at once; the context overflows between steps.
      rounds_kv: whether KV is rounded behind the step that computed it, as int8 at rest rounds what a turn loads.

    Raises:
      ValueError: a window above what the model was trained for, or that `overflow` does not fit.
    """

    def __init__(
        self,
        model: LoadedModel,
        overflow: OverflowConfig,
        *,
        window: int,
        step_tokens: int = 128,
        rounds_kv: bool = False,
    ) -> None:
        overflow.check_window(window)
        if not 0 < step_tokens <= window <= model.config.max_positions:
            raise ValueError(
                "step_tokens must be above 0 and at most the window, and the window at most the model's "
                f"{model.config.max_positions} tokens; "
                f"got step_tokens={step_tokens} and window={window}"
            )
        self.truncations: list[Truncation] = []
        """What has overflowed so far, oldest first."""
        self.num_fed = 0
        self._model = model
        self._config = model.config
        self._overflow = overflow
        self._drift = None if overflow.drift is None else Drift.load(overflow.drift)
        if self._drift is not None:
            self._drift.check_model(model.config, model.fingerprint)
        self._window = window
        self._step_tokens = step_tokens
        self._rounds_kv = rounds_kv
        self._by_layer = LayerByLayer(model, window + max(step_tokens, _PASS_TOKENS), window)
        self._token_ids: list[int] = []
        self._discarder = overflow.token_discarder
        self._attention: np.ndarray = np.zeros(0, np.float32)  # That the tokens received, if that is asked for.
        self._kv: list[jax.Array] = []  # Per layer [1, 2, K, S, H].
        self._is_shared = False  # Whether somebody else may hold these arrays.
        self._last: jax.Array | None = None  # x [1, 1, F] of the last token.

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The context as it is now."""
        return tuple(self._token_ids)

    @property
    def kv(self) -> tuple[jax.Array, ...]:
        """Its unrotated KV, `[2, S, K, H]` for each layer; places behind its tokens hold anything."""
        return tuple(map(from_pages, self._kv))

    def fork(self) -> ContextStream:
        """Another stream that goes on from here."""
        self._is_shared = True
        other = copy.copy(self)
        other.truncations, other._token_ids, other._kv = list(self.truncations), list(self._token_ids), list(self._kv)
        return other

    def feed(self, token_ids: Sequence[int], progress: Progress = lambda *_: None, what: str = "") -> np.ndarray:
        """Puts tokens behind the context, which overflows as often as it takes; progress, of what, is told of steps.

        Negative log likelihood of each token, nats, f32 `[T]`; NaN for the first one of the stream.

        Raises:
          InvalidRequestError: no tokens, or ids outside the vocabulary.
          ContextWindowError: a step is too long to fit beside the first tokens that stay.
        """
        losses = []
        last = self._last
        for part, x in self._steps(token_ids, progress, what):
            targets = np.zeros(x.shape[1], np.int32)
            targets[: len(part)] = part
            before = jnp.zeros_like(x[:, :1]) if last is None else last
            found = to_host(_losses(self._config, self._by_layer.outer, before, x, to_device(targets)))[: len(part)]
            losses.append(found if last is not None else np.array([np.nan, *found[1:]], np.float32))
            last = self._last
        return np.concatenate(losses)

    def extend(self, token_ids: Sequence[int], progress: Progress = lambda *_: None, what: str = "") -> None:
        """Puts tokens behind the context as `feed` does, and asks for no likelihoods, which cost a fifth of it."""
        for _ in self._steps(token_ids, progress, what):
            pass

    def _steps(self, token_ids: Sequence[int], progress: Progress, what: str) -> Iterator[tuple[list[int], jax.Array]]:
        """Puts tokens behind the context step by step; gives each step's, and their last hidden states."""
        check_token_ids(token_ids, self._config.vocab_size)
        for start in ticked(progress, what, range(0, len(token_ids), self._step_tokens)):
            part = list(token_ids[start : start + self._step_tokens])
            yield part, self._step(part)

    def logits(self) -> np.ndarray:
        """Of the token that would come next, f32 `[V]`. ValueError: nothing was fed."""
        if self._last is None:
            raise ValueError("the stream must have been fed, got an empty one")
        return to_host(steps.all_logits(self._config, self._by_layer.outer, self._last))[0, 0]

    def generate(self, max_tokens: int, stop_ids: Collection[int] = ()) -> list[int]:
        """Puts the likeliest tokens behind the context, up to a stop token, which is the last one returned."""
        token_ids: list[int] = []
        while len(token_ids) < max_tokens and not (token_ids and token_ids[-1] in stop_ids):
            token_ids.append(int(self.logits().argmax()))
            self._step(token_ids[-1:])
        return token_ids

    # Overflow.

    def _make_room(self, num_tokens: int) -> None:
        count = num_leaving(self._overflow, window=self._window, num_tokens=len(self._token_ids), num_wanted=num_tokens)
        if len(self._token_ids) - count + num_tokens > self._window:
            raise ContextWindowError(
                f"a step must be at most {self._window - self._overflow.keep_first_tokens} tokens beside the "
                f"{self._overflow.keep_first_tokens} first that stay, got {num_tokens}"
            )
        if count:
            context = DiscardContext(
                num_tokens=len(self._token_ids),
                num_leaving=count,
                keep_first=self._overflow.keep_first_tokens,
                attention=self._attention if self._discarder.needs_attention else None,
                kv=self._cache() if self._discarder.needs_kv else None,
            )
            self.truncate(check_discarded(self._discarder.choose(context), len(self._token_ids)))

    def truncate(self, discarded: np.ndarray) -> None:
        """Drops tokens by hand, bool `[T]`, as an overflow would."""
        kept = np.flatnonzero(~discarded)
        self._token_ids = [self._token_ids[i] for i in kept]
        self._attention = self._attention[kept]
        overflow, recomputed = self._overflow, 0.0
        if overflow.method in ("tt", "of"):
            token_ids, self._token_ids, self._kv = self._token_ids, [], []
            self._attention = self._attention[:0]
            for start in range(0, len(token_ids), _PASS_TOKENS):
                self._run(token_ids[start : start + _PASS_TOKENS], _PASS_TOKENS)
            recomputed = float(len(token_ids))
        else:
            padded = np.zeros(_capacity(len(kept)), np.int32)
            padded[: len(kept)] = kept
            self._kv = [_take(kv, to_device(padded)) for kv in self._kv]
            if overflow.method == "nkvt":
                moved = np.zeros(_capacity(len(kept)), np.int32)
                moved[: len(kept)] = kept - np.arange(len(kept))
                tables = [self._by_layer.tables[self._config.kind_of(i).rope] for i in range(len(self._kv))]
                self._kv = [_turn_on(of, kv, to_device(moved)) for of, kv in zip(tables, self._kv, strict=True)]
        if overflow.method == "ca" and len(kept):
            recomputed += self._repair()
        self.truncations.append(
            Truncation(
                num_fed=self.num_fed,
                num_dropped=int(discarded.sum()),
                num_kept=len(kept),
                num_recomputed=recomputed,
            )
        )

    def _repair(self) -> float:
        """Does to what stays what is asked for; tokens computed anew."""
        overflow, num_tokens = self._overflow, len(self._token_ids)
        if self._drift is not None:
            span = (to_device(overflow.keep_first_tokens, np.int32), to_device(num_tokens, np.int32))
            drifts = zip(self._kv, self._drift.values, strict=True)
            self._kv = [as_pages(add_drift(from_pages(kv), to_device(drift), *span)) for kv, drift in drifts]
        plan = repair_plan(overflow, self._config.num_layers, num_tokens)
        if plan is None:
            return 0.0
        self._kv = self._by_layer.recomputed(plan, self._token_ids, self._kv)
        return plan.num_recomputed

    def _cache(self) -> KVCache:
        layers = tuple(LayerKV.of(kv) for kv in self.kv)
        return KVCache(layers, to_device([len(self._token_ids)], np.int32))

    # Computing.

    def _step(self, token_ids: list[int]) -> jax.Array:
        """Puts the tokens of one step behind the context; their last hidden states `[1, at least T, F]`."""
        self._make_room(len(token_ids))
        padded = min(max(1 << (len(token_ids) - 1).bit_length(), _LEAST_STEP), max(self._step_tokens, _LEAST_STEP))
        x = self._run(token_ids, padded)
        self._last = x[:, len(token_ids) - 1 : len(token_ids)]
        self.num_fed += len(token_ids)
        return x

    def _run(self, token_ids: Sequence[int], padded: int) -> jax.Array:
        """Computes tokens behind the context and keeps their KV; their last hidden states `[1, padded, F]`."""
        by_layer, wants_attention = self._by_layer, self._discarder.needs_attention
        x = by_layer.embedded(token_ids, padded)
        start, stop = len(self._token_ids), len(self._token_ids) + len(token_ids)
        capacity = _capacity(start + padded)
        attention = np.zeros(capacity, np.float32)
        attention[:start] = self._attention
        for i in range(self._config.num_layers):
            pages = self._kv[i] if start else by_layer.empty(capacity)
            if pages.shape[3] < capacity:
                pages = _grown(pages, capacity)
            elif start and self._is_shared:
                pages = jnp.copy(pages)
            x, kv, pages, *seen = by_layer.layer(i, x, pages, start, len(token_ids), with_attention=wants_attention)
            for each in seen:
                attention[:stop] += to_host(each)[0, :stop]
            if self._rounds_kv:
                rounded = _packed(kv)
                numbers = (to_device(number, np.int32) for number in ([0], 0, start, len(token_ids)))
                pages, _ = page_steps.fill_pages(pages, rounded, *numbers)
            self._kv = [*self._kv[:i], pages, *self._kv[i + 1 :]]
        self._attention = attention[:stop]
        self._is_shared = False
        self._token_ids += token_ids
        return x


_packed = jax.jit(quantize)


def _capacity(num_tokens: int) -> int:
    return -(-num_tokens // _CAPACITY_STEP) * _CAPACITY_STEP


@partial(jax.jit, static_argnames=("config",))
def _losses(config: ModelConfig, outer: Any, before: jax.Array, x: jax.Array, targets: jax.Array) -> jax.Array:
    """Of tokens i32 `[T]`, with hidden states `x [1, T, F]` behind `before [1, 1, F]`, nats f32 `[T]`.

    A few tokens at a time, since vocabularies are wide.
    """
    x = jnp.concatenate([before, x[:, :-1]], axis=1)
    size = math.gcd(x.shape[1], _LOSS_TOKENS)

    def block(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = steps.all_logits(config, outer, part[0])[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, part[1])

    return lax.map(block, (x.reshape(-1, 1, size, x.shape[2]), targets.reshape(-1, size))).reshape(-1)


@partial(jax.jit, static_argnames=("capacity",))
def _grown(pages: jax.Array, capacity: int) -> jax.Array:
    """Pages `[1, 2, K, S, H]` with room for so many tokens."""
    return jnp.pad(pages, ((0, 0),) * 3 + ((0, capacity - pages.shape[3]), (0, 0)))


@jax.jit
def _take(pages: jax.Array, places: jax.Array) -> jax.Array:
    return pages[:, :, :, places]


@jax.jit
def _turn_on(table: rope.Rotation, pages: jax.Array, num_positions: jax.Array) -> jax.Array:
    """A page `[1, 2, K, S, H]` whose keys, rotated by their places, are so many positions, i32 `[S]`, further on."""
    scale = table.cos[0]  # Nothing is turned at position 0: it turns, and multiplies by nothing.
    onward = rope.Rotation(table.cos[num_positions] / scale, table.sin[num_positions] / scale)
    keys = rope.rotate(pages[0, 0].swapaxes(0, 1), onward)
    return pages.at[0, 0].set(keys.swapaxes(0, 1))
