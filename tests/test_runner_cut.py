"""A runner's slot that is cut: against the plain model over the same unrotated cache, sliced in memory.

Not here: the jitted moves themselves (test_steps_cut), when a slot is cut (test_overflow_turns).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ca_jax.device import steps
from ca_jax.device.runner import Runner
from ca_jax.device.slots import RunnerSizes
from ca_jax.recompute.drift import Drift
from ca_jax.recompute.plan import plan_repair
from ca_jax.recompute.recomputer import make_recomputer
from tests import engine_kit as kit
from tests.tolerances import LOGITS_ATOL

ATOL = LOGITS_ATOL["float32"]
CHUNK = kit.SMALL.prefill_chunk_tokens
NUM_TOKENS = 300
SLOT, OTHER = 2, 5
KEPT = np.r_[0:4, 160:NUM_TOKENS]


@pytest.fixture(scope="module")
def runner() -> Runner:
    model = kit.tiny_model()
    return Runner(model.config, model.params, RunnerSizes(window=kit.WINDOW, num_slots=8, chunk_tokens=CHUNK))


def fill(runner: Runner, slot: int, tokens: list[int]) -> None:
    prefill = runner.start_prefill(slot, tokens, 0)
    while prefill.num_left:
        runner.run_pass(prefill, min(CHUNK, prefill.num_left))
    runner.insert(prefill)


@pytest.fixture
def tokens(runner) -> list[int]:
    """What is in `SLOT` when a test begins."""
    ids = kit.prompt(NUM_TOKENS, seed=1)
    fill(runner, SLOT, ids)
    fill(runner, OTHER, kit.prompt(200, seed=2))
    return ids


def held(runner: Runner, slot: int, num_tokens: int) -> np.ndarray:
    """What a slot holds of its first tokens, rotated: `[2, L, K, T, H]`."""
    return np.stack([[np.asarray(buffer)[slot, :, :num_tokens] for buffer in part] for part in runner.slots.buffers])


def rotated(kv: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Unrotated KV `[L, 2, T, K, H]` as a slot holds it at some positions, in float64."""
    half = kv.shape[-1] // 2
    theta = kit.tiny_model().config.rope.theta
    angles = positions[:, None, None] * theta ** (-np.arange(half) / half)
    turned = (kv[:, 0, ..., :half] + 1j * kv[:, 0, ..., half:].astype(np.float64)) * np.exp(1j * angles)
    keys = np.concatenate([turned.real, turned.imag], -1)
    return np.stack([keys, kv[:, 1]]).transpose(0, 1, 3, 2, 4)


def next_logits(runner: Runner, slot: int, num_tokens: int) -> np.ndarray:
    lengths = np.zeros(8, np.int32)
    lengths[slot] = num_tokens
    return np.asarray(runner.slots.decode(np.full(8, 0x41, np.int32), lengths)[0])[slot]


def test_what_stays_decodes_as_the_sliced_cache_does(runner, tokens):
    kv, other = kit.full_pass(tokens)[1], held(runner, OTHER, 200)
    runner.slots.cut(SLOT, KEPT)
    expected = rotated(kv[:, :, KEPT], np.arange(len(KEPT)))
    np.testing.assert_allclose(held(runner, SLOT, len(KEPT)), expected, atol=ATOL, rtol=0)
    np.testing.assert_array_equal(held(runner, OTHER, 200), other)

    table = steps.rotation_table(kit.tiny_model().config, 2 * kit.WINDOW)
    slots = steps.make_slots(kit.tiny_model().config, 1, kit.WINDOW, "float32")
    for layer, part in enumerate(kv[:, :, KEPT]):
        slots.keys[layer], slots.values[layer], _ = steps.insert_slot(
            slots.keys[layer], slots.values[layer], jnp.asarray(part), jnp.int32(0), jnp.int32(0), table
        )
    model, length = kit.tiny_model(), jnp.asarray([len(KEPT)], jnp.int32)
    logits, *_ = steps.decode(model.config, model.params, slots, jnp.asarray([0x41], jnp.int32), length, table)
    np.testing.assert_allclose(next_logits(runner, SLOT, len(KEPT)), np.asarray(logits)[0], atol=ATOL, rtol=0)


@pytest.mark.parametrize("drifts_from", [0, 4])
def test_what_stays_drifts_behind_the_first_tokens(runner, tokens, drifts_from):
    config, kv = kit.tiny_model().config, kit.full_pass(tokens)[1]
    values = np.random.default_rng(3).standard_normal((len(kv), 2, *kv.shape[3:])).astype(np.float32)
    drift = Drift(values=values, fingerprint="", window=kit.WINDOW, truncation_ratio=0.5, num_tokens=1)
    drift.check_model(config, "")
    runner.slots.cut(SLOT, KEPT, drift=drift.values, drifts_from=drifts_from)
    moved = kv[:, :, KEPT].copy()
    moved[:, :, drifts_from:] += values[:, :, None]
    expected = rotated(moved, np.arange(len(KEPT)))
    np.testing.assert_allclose(held(runner, SLOT, len(KEPT)), expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize(
    ("num_tokens", "num_anew"),
    [(1, 8), (8, 8), (9, 16), (CHUNK, CHUNK), (CHUNK + 1, CHUNK + 8), (150, 160), (298, NUM_TOKENS), (500, NUM_TOKENS)],
)
def test_first_tokens_anew_are_a_prefill_of_these_and_the_others_stay_bit_for_bit(runner, tokens, num_tokens, num_anew):
    before, other = held(runner, SLOT, NUM_TOKENS), held(runner, OTHER, 200)
    changed = [token ^ 1 for token in tokens]  # So that what was there is not what should be.
    assert runner.recompute_first(SLOT, changed, num_tokens) == num_anew
    after = held(runner, SLOT, NUM_TOKENS)
    expected = rotated(kit.full_pass(changed[:num_anew])[1], np.arange(num_anew))
    np.testing.assert_allclose(after[..., :num_anew, :], expected, atol=ATOL, rtol=0)
    np.testing.assert_array_equal(after[..., num_anew:, :], before[..., num_anew:, :])
    np.testing.assert_array_equal(held(runner, OTHER, 200), other)


@pytest.mark.parametrize("num_chosen", [250, 256])
def test_a_history_is_blended_over_its_own_tokens(runner, num_chosen):
    """All of them anew: what comes out is a prefill's, and what lies behind them is left as it is."""
    ids = kit.prompt(NUM_TOKENS, seed=4)
    kv = kit.full_pass(ids)[1]
    stored = np.zeros((*kv.shape[:2], runner.padded_history(NUM_TOKENS), *kv.shape[3:]), np.float32)
    stored[:, :, num_chosen:NUM_TOKENS] = kv[:, :, num_chosen:]
    plan = plan_repair(num_layers=len(kv), num_tokens=num_chosen, ratio=1.0)
    recomputer = make_recomputer(runner, plan, ids[:num_chosen])
    for layer, part in enumerate(stored):
        found = np.asarray(recomputer.layer(layer, jnp.asarray(part)))
        np.testing.assert_allclose(found[:, :num_chosen], kv[layer, :, :num_chosen], atol=ATOL, rtol=0)
        np.testing.assert_array_equal(found[:, num_chosen:], part[:, num_chosen:])
