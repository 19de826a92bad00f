"""What truncation's tests are held against: the same unrotated cache sliced in memory, fed through the plain model.

A fresh prefill is no reference: deeper layers of what stays have seen the tokens that left.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.evaluate.by_layer import LayerByLayer, as_pages, from_pages
from ca_jax.device.sampler import Draw
from ca_jax.engine import Engine
from ca_jax.models.kv import KVCache, LayerKV
from ca_jax.overflow.config import DiscardContext, OverflowConfig, TokenDiscarder, num_leaving, oldest_first
from ca_jax.pretrained import LoadedModel
from ca_jax.recompute.drift import Drift
from ca_jax.recompute.plan import Plan, repair_plan
from ca_jax.session import Session
from tests import engine_kit as kit

WINDOW = 128
"""Of nearly all tests: eight blocks, so that few tokens overflow it."""
SMALL = {"context_window": WINDOW}
"""Of the engines' config."""
ATOL = kit.ATOL
_STEP = 16
_REPAIR_STEP = 8  # Repaired tokens are a multiple of it.


@functools.partial(jax.jit, static_argnames=("model",))
def _apply(model, params, tokens, history, length):
    """Logits `[T, V]` and KV of each layer `[2, T, K, H]` of tokens `[T]` behind the first `length` of
    `[L, 2, S, K, H]`.
    """
    layers = tuple(LayerKV.of(kv[:p, :, :k, :h]) for kv, (p, k, h) in zip(history, model.config.kv_shapes, strict=True))
    positions = length + jnp.arange(len(tokens))[None]
    context = history.shape[2]
    logits, new = model.apply(params, tokens[None], positions, KVCache(layers, length[None]), context)
    return logits[0], [jnp.concatenate(layer.parts) for layer in new.layers]


class SlicedCache:
    """A context as plain arrays: `kv [L, 2, T, K, H]` unrotated, one row for each of `token_ids`; of layers that differ
    zeros behind what is there.

    Args:
      window: most tokens of it.
      model: whose; None: the tiny one.
    """

    def __init__(self, window: int, model: LoadedModel | None = None) -> None:
        self.model = model or kit.tiny_model()
        config = self.model.config
        self.window = window
        self.token_ids: list[int] = []
        shapes = ((num_parts, 0, *of_token) for num_parts, *of_token in config.kv_shapes)
        self.kv = kit.stacked([np.zeros(shape, np.float32) for shape in shapes])

    def feed(self, token_ids: Sequence[int]) -> np.ndarray:
        """Puts tokens behind the context; logits of the last one, `[V]`."""
        logits = np.zeros(0)
        for start in range(0, len(token_ids), _STEP):
            logits = self._feed(list(token_ids[start : start + _STEP]))[-1]
        return logits

    def keep(self, kept: np.ndarray) -> None:
        """Keeps some tokens, by mask, as they are; used at their new positions."""
        places = np.flatnonzero(kept)
        self.token_ids = [self.token_ids[place] for place in places]
        self.kv = self.kv[:, :, places]

    def compute_anew(self, num_tokens: int) -> None:
        """Has the KV of the first tokens be that of a fresh prefill; what is behind them stays as it is."""
        fresh = SlicedCache(self.window, self.model)
        fresh.feed(self.token_ids[:num_tokens])
        self.kv = np.concatenate([fresh.kv, self.kv[:, :, num_tokens:]], axis=2)

    def blend(self, plan: Plan) -> None:
        """Has some of the tokens' KV computed anew, layer by layer, and the others move as these have."""
        by_layer = LayerByLayer(self.model, self.window, self.window)
        shapes = zip(self.kv, self.model.config.kv_shapes, strict=True)
        pages = [as_pages(jnp.asarray(kv[:p, :, :k, :h])) for kv, (p, k, h) in shapes]
        found = by_layer.recomputed(plan, self.token_ids, pages)
        self.kv = kit.stacked([np.asarray(from_pages(each)) for each in found])

    def _feed(self, part: list[int]) -> np.ndarray:
        """Puts tokens behind the context, in one pass; logits of each, `[T, V]`."""
        model, length = self.model, len(self.token_ids)
        # Of the tiny model alone there are enough answers for a function of single tokens to be worth compiling.
        num_rows = 1 if len(part) == 1 and model is kit.tiny_model() else -(-len(part) // _STEP) * _STEP
        room = np.full((*self.kv.shape[:2], self.window, *self.kv.shape[3:]), np.nan, np.float32)
        room[:, :, :length] = self.kv
        padded = np.zeros(num_rows, np.int32)
        padded[: len(part)] = part
        logits, new = _apply(model.model, model.params, padded, room, np.int32(length))
        self.kv = np.concatenate([self.kv, kit.stacked(list(map(np.asarray, new)))[:, :, : len(part)]], axis=2)
        self.token_ids += part
        return np.asarray(logits)[: len(part)]


class Conversation:
    """A conversation under a window, as an engine with this `OverflowConfig` should hold it.

    Args:
      overflow: the engine's.
      window: most tokens of it.
      drift: what the config's file has.
      model: whose; None: the tiny one.
    """

    def __init__(
        self,
        overflow: OverflowConfig,
        window: int = WINDOW,
        drift: Drift | None = None,
        model: LoadedModel | None = None,
    ) -> None:
        self.cache = SlicedCache(window, model)
        self.overflow = overflow
        self.window = window
        self.drift = drift
        self.pending: list[int] = []  # The last token, which was drawn and never run; or tokens whose KV was lost.
        self.turn_starts: list[int] = []
        self.num_to_repair = 0  # First tokens that the next prefill computes anew.
        self.num_cached = 0  # Of the last turn's prompt, tokens that needed no compute.
        self.num_cuts = 0  # Truncations so far.
        self.num_dropped = 0  # Tokens that left so far, by hand too.
        self.logits: list[np.ndarray] = []  # Of the last answer, one row for each token.

    @property
    def token_ids(self) -> list[int]:
        """The context, the last token included."""
        return self.cache.token_ids + self.pending

    def copy(self) -> Conversation:
        """Another one that is the same."""
        model = self.cache.model
        return copy.deepcopy(self, {id(model): model})

    def say(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """A turn: the greedy answer."""
        return self._answer(token_ids, max_tokens, ())

    def follow(self, token_ids: Sequence[int], answer: Sequence[int]) -> None:
        """A turn whose answer is given: each of its tokens must be as likely as the likeliest, to 1e-4.

        For long runs, in which two tokens are as likely as each other now and then.
        """
        self._answer(token_ids, len(answer), answer)
        for token, logits in zip(answer, self.logits, strict=True):
            assert logits.max() - logits[token] <= ATOL, f"token {token}, where {logits.argmax()} is likelier"

    def give_up(self, token_ids: Sequence[int]) -> None:
        """A turn that ended before its first token: what has left for it does not come back."""
        self._make_room(len(self.token_ids), len(token_ids) + 1)

    def discard(self, discarded: np.ndarray) -> None:
        """Forgets tokens by hand, bool `[T]`: nothing drifts then."""
        self.num_cuts += 1
        self._drop(discarded, by_hand=True)

    def forget(self, num_tokens: int) -> None:
        """Forgets the KV of all but the first tokens, as a store does that does not hold it; not the tokens."""
        lost = self.cache.token_ids[num_tokens:]
        self.cache.keep(np.arange(len(self.cache.token_ids)) < num_tokens)
        self.num_to_repair = min(self.num_to_repair, num_tokens)
        self.pending = lost + self.pending

    def rewind(self, num_tokens: int) -> None:
        """Goes back to the first tokens."""
        tokens = self.token_ids[:num_tokens]
        self.forget(min(num_tokens, len(self.cache.token_ids)))
        self.pending = tokens[len(self.cache.token_ids) :]
        self.turn_starts = [start for start in self.turn_starts if start < num_tokens]

    def _answer(self, token_ids: Sequence[int], max_tokens: int, given: Sequence[int]) -> list[int]:
        self._make_room(len(self.token_ids), len(token_ids) + 1)
        self._repair(min(self.num_to_repair, len(self.cache.token_ids)))
        self.num_to_repair = 0
        self.turn_starts.append(len(self.token_ids))
        self.num_cached = len(self.cache.token_ids)
        logits = self.cache.feed([*self.pending, *token_ids])
        self.logits, answer = [logits], []
        while True:
            answer.append(given[len(answer)] if given else int(logits.argmax()))
            self.pending = answer[-1:]
            if len(answer) == max_tokens:
                return answer
            if len(self.token_ids) >= self.window:
                if self.overflow.keep_first_tokens >= len(self.cache.token_ids):
                    return answer
                self._make_room(len(self.cache.token_ids), 2, is_running=True)
            logits = self.cache.feed(self.pending)
            self.logits.append(logits)

    def _make_room(self, num_tokens: int, num_wanted: int, is_running: bool = False) -> None:
        """Has some of the first `num_tokens` tokens leave, where they and so many more are above the window.

        How many, and which the oldest are, is what test_overflow holds.
        """
        num_needed = num_tokens + num_wanted - self.window
        if num_needed <= 0:
            return
        first, ends = self.overflow.keep_first_tokens, []
        count = num_leaving(self.overflow, window=self.window, num_tokens=num_tokens, num_wanted=num_wanted)
        if num_tokens - count + num_wanted > self.window:  # The first ones are in the way too.
            first, count = 0, num_tokens
        elif self.overflow.whole_turns:
            ends = [*self.turn_starts, *([] if is_running else [num_tokens])]  # Where the last turn ends, if it has.
        discarded = np.zeros(len(self.token_ids), bool)
        if isinstance(self.overflow.discarder, Recorded) and first + count < num_tokens:
            discarded[self.overflow.discarder.choices.popleft()] = True
        else:
            discarded[:num_tokens] = oldest_first(num_tokens, count, first, ends, num_needed)
        self.num_cuts += 1
        self._drop(discarded)

    def _drop(self, discarded: np.ndarray, *, by_hand: bool = False) -> None:
        """Drops tokens, and does to what stays what is to be done at once: nothing, in the method of the paper."""
        num_run, overflow = len(self.cache.token_ids), self.overflow
        self.num_dropped += int(discarded.sum())
        self.pending = [token for token, leaves in zip(self.pending, discarded[num_run:], strict=True) if not leaves]
        self.cache.keep(~discarded[:num_run])
        self.turn_starts = [int((~discarded[:start]).sum()) for start in self.turn_starts]
        num_left = len(self.cache.token_ids)
        if overflow.method in ("tt", "of"):
            self.cache.compute_anew(num_left)
        if overflow.method != "ca":
            return
        if self.drift is not None and not by_hand:
            self.cache.kv[:, :, overflow.keep_first_tokens :] += kit.stacked(self.drift.values)[:, :, None]
        if overflow.recomputes and overflow.anchor_tokens:
            num_anchors = -(-overflow.anchor_tokens // _REPAIR_STEP) * _REPAIR_STEP
            self.cache.compute_anew(min(num_anchors, num_left))
        if overflow.recomputes and overflow.repair_ratio:
            self.num_to_repair = num_left

    def _repair(self, num_tokens: int) -> None:
        """What the next prefill does to the first tokens of what has stayed."""
        if self.overflow.repair_ratio == 1:
            self.cache.compute_anew(num_tokens)
        elif (plan := repair_plan(self.overflow, len(self.cache.kv), num_tokens)) is not None:
            self.cache.blend(plan)


class Recorded:
    """A discarder that notes what another chooses, and what that was told, so that a reference can do the same.

    Args:
      inner: who chooses.
    """

    def __init__(self, inner: TokenDiscarder) -> None:
        self._inner = inner
        self.name = f"recorded {inner.name}"
        self.needs_attention = inner.needs_attention
        self.needs_kv = inner.needs_kv
        self.contexts: list[DiscardContext] = []
        self.choices: collections.deque[np.ndarray] = collections.deque()

    def choose(self, context: DiscardContext) -> np.ndarray:
        """See `TokenDiscarder`."""
        self.contexts.append(context)
        self.choices.append(self._inner.choose(context))
        return self.choices[-1]


def plain(kind: type[OverflowConfig] = OverflowConfig, **changes: object) -> OverflowConfig:
    """An `OverflowConfig` that repairs nothing but what is said; what deviates, unless that is said too."""
    repair = "deviating" if {"anchor_tokens", "repair_ratio"} & changes.keys() else "none"
    return kind(**{"repair": repair, "anchor_tokens": 0, "repair_ratio": 0.0, **changes})


def config(keep_first: int = 4, ratio: float = 0.5, **changes: object) -> OverflowConfig:
    """The same, by shorter names."""
    return plain(keep_first_tokens=keep_first, truncation_ratio=ratio, **changes)


def say(session: Session, token_ids: Sequence[int], max_tokens: int) -> list[int]:
    """Sends a turn to its end; all of its generated tokens, those too that have left meanwhile."""
    answer = session.send_ids(token_ids, max_tokens=max_tokens)
    kit.drain(answer)
    return answer.job.output_ids


@contextlib.contextmanager
def recorded_logits(engine: Engine) -> Iterator[list[np.ndarray]]:
    """The logits that an engine draws from, `[V]` for each token of the one job that runs."""
    sampler, rows = engine._runner.sampler, []
    start = sampler.start

    def record(logits: jax.Array, *args: object, **options: object) -> Draw:
        rows.append(np.asarray(logits)[0])
        return start(logits, *args, **options)

    sampler.start = record
    try:
        yield rows
    finally:
        del sampler.start


def random_drift(model: LoadedModel, window: int, directory: Path) -> tuple[str, Drift]:
    """A file with a drift of a model that nobody measured, and what is in it."""
    rng = np.random.default_rng(0)
    values = tuple(rng.normal(0, 0.2, shape).astype(np.float32) for shape in model.config.kv_shapes)
    drift = Drift(values=values, fingerprint=model.fingerprint, window=window, truncation_ratio=0.5, num_tokens=1)
    drift.save(directory / "drift.npz")
    return str(directory / "drift.npz"), drift


Step = int | tuple[int, int] | tuple[str, int] | Callable[[int], np.ndarray]
"""Of a conversation: a prompt of so many tokens; the same and its answer's tokens; `lose` or `rewind`, and how many
tokens stay; or what is discarded by hand: a mask, bool `[T]`, of as many tokens as there are."""


class Pair:
    """A session and its reference, which are to stay the same.

    Args:
      engine: the session's.
      session: a new one if not given.
      reference: of a session that has begun.
      drift: what the config's file has.
      atol: of logits.
    """

    def __init__(
        self,
        engine: Engine,
        session: Session | None = None,
        reference: Conversation | None = None,
        drift: Drift | None = None,
        *,
        atol: float = ATOL,
    ) -> None:
        overflow = engine.config.overflow or OverflowConfig()
        self.engine = engine
        self.session = session or engine.session()
        self.reference = reference or Conversation(overflow, engine.window, drift, engine.model)
        self.atol = atol

    def turn(self, token_ids: Sequence[int], max_tokens: int) -> None:
        """A turn of both: the same tokens, from the same logits."""
        num_dropped = self.reference.num_dropped
        with recorded_logits(self.engine) as logits:
            answer = say(self.session, token_ids, max_tokens)
        expected = self.reference.say(token_ids, max_tokens)
        np.testing.assert_allclose(logits, self.reference.logits, rtol=0, atol=self.atol)
        assert answer == expected
        assert self.session.token_ids == self.reference.token_ids
        usage = self.session.usage
        assert (usage.completion_tokens, usage.dropped_tokens) == (
            len(expected),
            self.reference.num_dropped - num_dropped,
        )
        if self.reference.overflow.method not in ("tt", "of"):
            assert usage.num_cached_tokens == self.reference.num_cached, "only what is new is computed"

    def turns(self, *prompt_tokens: int, max_tokens: int = 8, seed: int = 0) -> None:
        """Turns with prompts of so many tokens."""
        for index, num_tokens in enumerate(prompt_tokens):
            self.turn(kit.prompt(num_tokens, seed + index), max_tokens)

    def play(self, *steps: Step) -> None:
        """Steps one after the other; what is stored behind each turn is the reference's KV."""
        for index, step in enumerate(steps):
            if callable(step):
                self.discard(step(len(self.session.token_ids)))
            elif isinstance(step, tuple) and isinstance(step[0], str):
                getattr(self, step[0])(step[1])
            else:
                num_tokens, max_tokens = step if isinstance(step, tuple) else (step, 8)
                self.turn(kit.prompt(num_tokens, seed=index), max_tokens)
                self.expect_stored_kv()

    def discard(self, discarded: np.ndarray) -> None:
        """Tokens leave by hand, bool `[T]`."""
        assert self.session.discard(discarded) == (~discarded).sum()
        self.reference.discard(discarded)
        assert self.session.token_ids == self.reference.token_ids
        assert self.session.num_dropped == self.reference.num_dropped

    def lose(self, num_tokens: int) -> None:
        """The KV of all but the first tokens is lost."""
        self.engine.truncate_stored(self.session, num_tokens)
        self.reference.forget(num_tokens)

    def rewind(self, num_tokens: int) -> None:
        """Goes back to the first tokens."""
        self.session.rewind(num_tokens)
        self.reference.rewind(num_tokens)

    def expect_stored_kv(self) -> None:
        """What is stored is the reference's KV."""
        stored, expected = kit.stored_kv(self.engine, self.session), self.reference.cache.kv
        np.testing.assert_allclose(stored, expected, rtol=0, atol=self.atol)


@contextlib.contextmanager
def pair(overflow: OverflowConfig, drift: Drift | None = None, **changes: object) -> Iterator[Pair]:
    """A session and its reference, in an engine of their own."""
    with kit.small_engine(overflow=overflow, **SMALL, **changes) as engine:
        yield Pair(engine, drift=drift)
