"""A stream under a window against the plain model, whose cache is sliced in memory here; each way to overflow."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from benchmarks.evaluate.stream import ComparedOverflow, ContextStream, Truncation
from ca_jax.errors import ContextWindowError
from ca_jax.recompute.drift import Drift
from tests import engine_kit as kit
from tests import overflow_kit as ok
from tests.kv_rest_kit import as_kept
from tests.tolerances import LOGITS_ATOL

ATOL = LOGITS_ATOL["float32"]
WINDOW = 96
STEP = 32
KEEP = 4
TOKENS = kit.prompt(300)


def a_stream(
    method: str = "ca", *, window: int = WINDOW, step_tokens: int = STEP, rounds_kv: bool = False, **overflow: object
) -> ContextStream:
    config = ok.plain(ComparedOverflow, **{"method": method, "keep_first_tokens": KEEP, **overflow})
    return ContextStream(kit.tiny_model(), config, window=window, step_tokens=step_tokens, rounds_kv=rounds_kv)


class PlainCache(ok.SlicedCache):
    """A context as plain arrays whose keys may be used at other positions than their places."""

    def __init__(self) -> None:
        super().__init__(WINDOW)
        self.positions = np.zeros(0, int)
        """At which keys are used."""

    def feed(self, part: Sequence[int]) -> np.ndarray:
        """At most a step of tokens; logits of each `[T, V]`."""
        stored, self.kv = self.kv, self.as_used()
        logits = self._feed(list(part))
        self.kv = np.concatenate([stored, self.kv[:, :, stored.shape[2] :]], axis=2)
        self.positions = np.r_[self.positions, len(self.positions) : self.kv.shape[2]]
        return logits

    def as_used(self) -> np.ndarray:
        """The KV with keys turned so far that they are at their positions once they are rotated by their places."""
        kv = self.kv.copy()
        kv[:, 0] = turned(kv[:, 0], self.positions - np.arange(len(self.positions)))
        return kv

    def slice(self, kept: np.ndarray) -> None:
        """Keeps the tokens at some places, to be used there."""
        self.keep(np.isin(np.arange(len(self.token_ids)), kept))
        self.positions = np.arange(len(kept))


def turned(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Keys `[L, T, K, H]`, rotated by so many positions."""
    half = keys.shape[-1] // 2
    angles = positions[:, None, None] * kit.tiny_model().config.rope.theta ** (-np.arange(half) / half)
    rotated = (keys[..., :half] + 1j * keys[..., half:].astype(np.float64)) * np.exp(1j * angles)
    return np.concatenate([rotated.real, rotated.imag], -1).astype(np.float32)


Cut = Callable[[PlainCache, np.ndarray], None]


def slice_it(cache: PlainCache, kept: np.ndarray) -> None:
    cache.slice(kept)


def slice_with_positions(cache: PlainCache, kept: np.ndarray) -> None:
    positions = cache.positions[kept]
    cache.slice(kept)
    cache.positions = positions


def compute_it_anew(cache: PlainCache, kept: np.ndarray) -> None:
    cache.slice(kept)
    cache.kv = kit.full_pass(cache.token_ids)[1]


CUTS: dict[str, Cut] = {"ca": slice_it, "nkvt": slice_with_positions, "tt": compute_it_anew, "of": compute_it_anew}


def nll(logits: np.ndarray, token_ids: Sequence[int]) -> list[float]:
    """Of each token, by the logits before it."""
    full = logits.astype(np.float64)
    return [np.log(np.exp(row - row.max()).sum()) + row.max() - row[i] for row, i in zip(full, token_ids, strict=True)]


def reference(
    cut: Cut, token_ids: Sequence[int], keep: int = KEEP, share: int = WINDOW // 2, make: type[PlainCache] = PlainCache
):
    """Losses of the tokens as a stream should have them, the logits behind all, and the cache that is left."""
    cache, losses, last = make(), [np.nan], None
    for start in range(0, len(token_ids), STEP):
        part = list(token_ids[start : start + STEP])
        losses += [] if last is None else nll(last, part[:1])
        excess = len(cache.token_ids) + len(part) - WINDOW
        if excess > 0:
            cut(cache, np.r_[0:keep, keep - (-excess // share) * share : len(cache.token_ids)])
        logits = cache.feed(part)
        losses += nll(logits[:-1], part[1:])
        last = logits[-1:]
    return np.array(losses), last[0], cache


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=ATOL, rtol=0)


def kv_of(stream: ContextStream) -> np.ndarray:
    """`[L, 2, T, K, H]`."""
    return np.stack([np.asarray(kv) for kv in stream.kv])[:, :, : len(stream.token_ids)]


@pytest.mark.parametrize("feeds", [(WINDOW,), (1, 40, 55), (STEP, STEP)], ids=str)
def test_what_fits_is_one_pass_of_the_model(feeds):
    stream, token_ids = a_stream(), TOKENS[: sum(feeds)]
    bounds = np.cumsum([0, *feeds])
    losses = np.concatenate([stream.feed(token_ids[a:b]) for a, b in itertools.pairwise(bounds)])
    logits, kv = kit.full_pass(token_ids)
    assert (losses.dtype, losses.shape) == (np.float32, (len(token_ids),))
    assert np.isnan(losses[0])
    assert_close(losses[1:], np.array(nll(logits[:-1], token_ids[1:])))
    assert_close(stream.logits(), logits[-1])
    assert_close(kv_of(stream), kv)
    assert (stream.num_fed, stream.token_ids, stream.truncations) == (len(token_ids), tuple(token_ids), [])


@pytest.mark.parametrize("method", CUTS)
@pytest.mark.parametrize("num_tokens", [97, 300])
def test_each_method_is_the_plain_model_over_its_cache(method, num_tokens):
    stream = a_stream(method)
    losses, logits, cache = reference(CUTS[method], TOKENS[:num_tokens])
    other, *_ = reference(slice_with_positions if method == "ca" else slice_it, TOKENS[:num_tokens])
    assert np.abs(losses - other)[1:].max() > 0.1 or num_tokens == 97, "nothing tells methods apart"
    assert_close(stream.feed(TOKENS[:num_tokens])[1:], losses[1:])
    assert list(stream.token_ids) == cache.token_ids
    assert_close(stream.logits(), logits)
    assert_close(kv_of(stream), cache.as_used())


def test_kv_that_is_rounded_is_rounded_once_behind_the_step_that_computed_it():
    """Overflows included: what stays is not rounded again."""

    class RoundedCache(PlainCache):
        def feed(self, part: Sequence[int]) -> np.ndarray:
            logits = super().feed(part)
            self.kv[:, :, -len(part) :] = as_kept(self.kv[:, :, -len(part) :])
            return logits

    losses, _, _ = reference(slice_it, TOKENS[:200], make=RoundedCache)
    found = a_stream(rounds_kv=True).feed(TOKENS[:200])
    np.testing.assert_allclose(found, losses, atol=50 * ATOL, rtol=0)  # Some numbers lie between two of int8.
    plain = a_stream().feed(TOKENS[:200])
    assert np.abs(plain - found)[STEP:].max() > 50 * ATOL
    np.testing.assert_allclose(found[:STEP], plain[:STEP], atol=ATOL, rtol=0)


@pytest.mark.parametrize(("ratio", "share", "keep"), [(0.25, 24, 4), (0.5, 48, 0)])
def test_as_many_leave_as_asked_for(ratio, share, keep):
    stream = a_stream(truncation_ratio=ratio, keep_first_tokens=keep)
    losses, _, cache = reference(slice_it, TOKENS[:200], keep, share)
    assert_close(stream.feed(TOKENS[:200])[1:], losses[1:])
    assert list(stream.token_ids) == cache.token_ids


@pytest.mark.parametrize("method", ["ca", "tt", "nkvt"])
def test_any_tokens_may_be_dropped_by_hand(method):
    gone = np.zeros(60, bool)
    gone[[0, 5, 6, 30, 59]] = True
    stream, cache = a_stream(method), PlainCache()
    stream.feed(TOKENS[:60])
    for start in (0, STEP):
        cache.feed(TOKENS[start : min(start + STEP, 60)])
    before = stream.logits()
    stream.truncate(gone)
    CUTS[method](cache, np.flatnonzero(~gone))
    assert_close(kv_of(stream), cache.as_used())
    np.testing.assert_array_equal(stream.logits(), before)
    stream.feed(TOKENS[60:70])
    assert_close(stream.logits(), cache.feed(TOKENS[60:70])[-1])


def a_drift(tmp_path, **changes: object) -> str:
    config = kit.tiny_model().config
    values = np.random.default_rng(3).standard_normal((config.num_layers, 2, config.num_kv_heads, config.head_dim))
    drift = Drift(
        values=values.astype(np.float32),
        fingerprint=kit.tiny_model().fingerprint,
        window=WINDOW,
        truncation_ratio=0.5,
        num_tokens=1,
    )
    dataclasses.replace(drift, **changes).save(tmp_path / "drift.npz")
    return str(tmp_path / "drift.npz")


def test_drift_is_added_behind_the_first_tokens(tmp_path):
    path = a_drift(tmp_path)
    values = Drift.load(path).values

    def slice_and_move(cache: PlainCache, kept: np.ndarray) -> None:
        cache.slice(kept)
        cache.kv[:, :, KEEP:] += np.stack(values)[:, :, None]

    losses, _, cache = reference(slice_and_move, TOKENS[:200])
    stream = a_stream("ca", drift=path)
    assert_close(stream.feed(TOKENS[:200])[1:], losses[1:])
    assert_close(kv_of(stream), cache.as_used())
    assert stream.truncations[0].num_recomputed == 0


def test_the_drift_of_another_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"drift must be .* of the model with fingerprint"):
        a_stream("ca", drift=a_drift(tmp_path, fingerprint="another"))


@pytest.mark.parametrize("method", ["ca", "tt", "nkvt"])
def test_a_fork_goes_on_by_itself(method):
    stream, alone = a_stream(method), a_stream(method)
    stream.feed(TOKENS[:90])
    alone.feed(TOKENS[:90])
    fork = stream.fork()
    fork.feed(TOKENS[200:260])
    assert (stream.num_fed, fork.num_fed) == (90, 150)
    assert (len(stream.truncations), len(fork.truncations)) == (0, 2)
    np.testing.assert_array_equal(stream.feed(TOKENS[90:160]), alone.feed(TOKENS[90:160]))
    np.testing.assert_array_equal(stream.logits(), alone.logits())
    assert fork.token_ids[-28:] == tuple(TOKENS[232:260])


def test_it_goes_on_greedily_over_the_windows_end_and_up_to_a_stop_token():
    stream = a_stream()
    with pytest.raises(ValueError, match="the stream must have been fed, got an empty one"):
        stream.logits()
    stream.feed(TOKENS[:90])
    cache = PlainCache()
    for start in (0, STEP, 2 * STEP):
        logits = cache.feed(TOKENS[start : min(start + STEP, 90)])
    expected = []
    for _ in range(12):
        expected.append(int(logits[-1].argmax()))
        if len(cache.token_ids) == WINDOW:
            cache.slice(np.r_[0:KEEP, KEEP + 48 : WINDOW])
        logits = cache.feed(expected[-1:])
    stop = expected[3]
    assert stream.fork().generate(12, {stop}) == expected[: expected.index(stop) + 1]
    assert stream.fork().generate(0) == []
    assert stream.generate(12) == expected
    assert stream.truncations == [Truncation(num_fed=96, num_dropped=48, num_kept=48, num_recomputed=0)]
    assert list(stream.token_ids) == cache.token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 513, "step_tokens": 32}, "the model's 512 tokens; got step_tokens=32 and window=513"),
        ({"window": 16, "step_tokens": 32}, "step_tokens must be above 0 and at most the window"),
        ({"step_tokens": 0}, "got step_tokens=0 and window=96"),
        ({"keep_first_tokens": 96}, "keep_first_tokens must be fewer than the context window of 96 tokens, got 96"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        a_stream(**options)


def test_a_step_that_does_not_fit_beside_the_first_tokens_is_refused():
    stream = a_stream(keep_first_tokens=70)
    with pytest.raises(ContextWindowError, match="at most 26 tokens beside the 70 first that stay, got 32"):
        stream.feed(TOKENS[:128])
