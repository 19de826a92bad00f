"""A prompt prefilled in passes: the same logits, KV and slots as in one, however it is split and whatever is before it.

Not here: which passes an engine takes (test_scheduler, test_costs), what it compiles (test_invariants).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from ca_jax.device.runner import Prefill, Runner
from ca_jax.device.slots import RunnerSizes
from tests import engine_kit as kit

ATOL = kit.ATOL
CHUNK = kit.SMALL.prefill_chunk_tokens
SLOT = 3
HISTORIES = (0, 1, 40, 256, 300)
PASS_SIZES = st.lists(st.sampled_from((16, 32, CHUNK)), max_size=8)

with_buckets_of_a_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere buckets are coarser")


@pytest.fixture(scope="module")
def runner() -> Runner:
    model = kit.tiny_model()
    sizes = RunnerSizes(window=kit.WINDOW, num_slots=8, chunk_tokens=CHUNK, shorter_passes=True)
    return Runner(model.config, model.params, sizes)


class HeldHistory:
    """A history on the device, NaN behind its tokens, that notes who has read it."""

    def __init__(self, runner: Runner, kv: np.ndarray) -> None:
        self.kv, num_tokens = kv, kv.shape[2]
        padded = np.full((*kv.shape[:2], runner.padded_history(num_tokens), *kv.shape[3:]), np.nan, np.float32)
        padded[:, :, :num_tokens] = kv
        self.layers = [jax.device_put(layer) for layer in padded]
        self.told: set[tuple[str, int]] = set()

    @property
    def num_held(self) -> int:
        return len(self.layers)

    def layer(self, layer: int) -> jax.Array:
        return self.layers[layer]

    def computed(self, layer: int, result: jax.Array) -> None:
        jax.block_until_ready(result)
        self.told.add(("computed", layer))

    def used(self, layer: int, result: jax.Array) -> None:
        jax.block_until_ready(result)
        self.told.add(("used", layer))

    def expect_read(self) -> None:
        """All that reads it is done, and was told; nothing was written to it."""
        assert self.told == {(what, layer) for what in ("computed", "used") for layer in range(len(self.layers))}
        for layer, kv in zip(self.layers, self.kv, strict=True):
            np.testing.assert_array_equal(np.asarray(layer)[:, : kv.shape[1]], kv)
            assert np.isnan(np.asarray(layer)[:, kv.shape[1] :]).all()


def split_into(num_tokens: int, sizes: Sequence[int]) -> list[int]:
    """Passes of these sizes, and of the largest behind them; the last takes what is left."""
    passes = []
    for size in itertools.chain(sizes, itertools.repeat(CHUNK)):
        passes.append(min(size, num_tokens - sum(passes)))
        if sum(passes) == num_tokens:
            return passes
    raise AssertionError


def run(
    runner: Runner, tokens: list[int], num_history: int, sizes: Sequence[int] = ()
) -> tuple[Prefill, np.ndarray, HeldHistory | None]:
    """Prefills what is behind the history; also the new tokens' KV `[L, 2, T, K, H]` as it was handed out."""
    history = HeldHistory(runner, kit.full_pass(tokens)[1][:, :, :num_history]) if num_history else None
    prefill = Prefill(SLOT, tokens[num_history:], num_history)
    passes = []
    for index, size in enumerate(split_into(len(prefill.tokens), sizes)):
        assert prefill.logits is None
        layers: list[jax.Array] = []

        def take(layer: int, kv: jax.Array, layers: list[jax.Array] = layers) -> None:
            assert layer == len(layers)
            layers.append(kv)

        runner.run_pass(prefill, size, None if index else history, take)
        passes.append(np.stack([np.asarray(kv)[:, :size] for kv in layers]))
    assert (prefill.num_left, prefill.num_done) == (0, len(prefill.tokens))
    return prefill, np.concatenate(passes, axis=2), history


@hypothesis.given(st.sampled_from(HISTORIES), st.sampled_from((1, 16, 65, 180)), PASS_SIZES)
@hypothesis.settings(max_examples=15, deadline=None)
def test_any_split_into_passes_computes_what_one_pass_does(runner, num_history, num_new, sizes):
    tokens = kit.prompt(num_history + num_new)
    logits, kv = kit.full_pass(tokens)
    prefill, new_kv, history = run(runner, tokens, num_history, sizes)
    np.testing.assert_allclose(np.asarray(prefill.logits)[0], logits[-1], atol=ATOL, rtol=0)
    np.testing.assert_allclose(new_kv, kv[:, :, num_history:], atol=ATOL, rtol=0)
    if history is not None and prefill.owns_past:  # The first of several passes has copied it.
        history.expect_read()
    runner.insert(prefill)
    if history is not None:  # It is staging: others load into it once all that reads it is done.
        history.expect_read()

    lengths = np.zeros(8, np.int32)
    lengths[SLOT] = len(tokens)
    next_token = np.zeros(8, np.int32)
    next_token[SLOT] = 0x41
    decoded, decoded_kv, _ = runner.slots.decode(next_token, lengths)
    logits, kv = kit.full_pass([*tokens, 0x41])
    np.testing.assert_allclose(np.asarray(decoded)[SLOT], logits[-1], atol=ATOL, rtol=0)
    np.testing.assert_allclose(np.asarray(decoded_kv)[:, :, SLOT], kv[:, :, -1], atol=ATOL, rtol=0)


@with_buckets_of_a_cpu
@pytest.mark.parametrize(
    ("num_history", "num_new", "padded"),
    [(0, 1, (0, 8)), (1, 64, (256, 64)), (256, 65, (256, 72)), (257, 200, (512, 64 * 3 + 8))],
)
def test_padding_is_of_whole_passes_and_the_rest(runner, num_history, num_new, padded):
    assert runner.padded(num_history, num_new) == padded
