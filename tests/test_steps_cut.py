"""Slots that are cut or drift, against unrotated rows inserted at their new places; all else stays bit for bit."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from ca_jax.device import steps
from ca_jax.testing import tiny
from tests.tolerances import PROJECTION_ATOL

ATOL = PROJECTION_ATOL["float32"]
CONFIG = tiny.tiny_config()
NUM_SLOTS = 3
CAPACITY = 128
NUM_TOKENS = 100
LENGTHS = (NUM_TOKENS, NUM_TOKENS, 40)


@functools.cache
def table():
    return steps.rotation_table(CONFIG, 2 * CAPACITY)


@functools.cache
def kv(slot: int) -> np.ndarray:
    """Unrotated, `[L, 2, T, K, H]`."""
    shape = (CONFIG.num_layers, 2, LENGTHS[slot], CONFIG.num_kv_heads, CONFIG.head_dim)
    return np.random.default_rng(slot).standard_normal(shape).astype(np.float32)


def filled(rows: dict[int, np.ndarray], dtype: str = "float32") -> steps.Slots:
    """Slots that hold unrotated rows, inserted at places 0 and on."""
    slots = steps.make_slots(CONFIG, NUM_SLOTS, CAPACITY, dtype)
    for slot, layers in rows.items():
        for layer, part in enumerate(layers):
            slots.keys[layer], slots.values[layer], _ = steps.insert_slot(
                slots.keys[layer], slots.values[layer], jnp.asarray(part), jnp.int32(slot), jnp.int32(0), table()
            )
    return slots


def held(slots: steps.Slots) -> np.ndarray:
    """`[2, L, slots, K, C, H]`."""
    return np.stack([[np.asarray(buffer) for buffer in part] for part in slots])


def cut(slots: steps.Slots, slot: int, kept: np.ndarray, *drift: np.ndarray) -> steps.Slots:
    """`drift`: what is added, and to which of the tokens that stay."""
    places = np.zeros(CAPACITY, np.int32)
    places[: len(kept)] = kept
    turned = np.zeros(CAPACITY, np.int32)
    turned[: len(kept)] = kept - np.arange(len(kept))
    at = (jnp.asarray(places), jnp.asarray(turned))
    return steps.cut_slot(slots, jnp.int32(slot), *at, table(), *map(jnp.asarray, drift))


KEPT = {
    "all": np.arange(NUM_TOKENS),
    "the first and the last half": np.r_[0:4, 52:NUM_TOKENS],
    "every third": np.arange(1, NUM_TOKENS, 3),
    "the last": np.array([NUM_TOKENS - 1]),
}


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_what_stays_is_as_if_it_had_been_inserted_at_its_new_places(kept):
    slot = 1
    before = {each: kv(each) for each in range(NUM_SLOTS)}
    whole = held(filled(before))
    found = held(cut(filled(before), slot, kept))
    expected = held(filled({**before, slot: kv(slot)[:, :, kept]}))
    np.testing.assert_allclose(
        found[:, :, slot, :, : len(kept)], expected[:, :, slot, :, : len(kept)], atol=ATOL, rtol=0
    )
    np.testing.assert_array_equal(found[1, :, slot, :, : len(kept)], whole[1, :, slot][:, :, kept])  # Only moved.
    others = [each for each in range(NUM_SLOTS) if each != slot]
    np.testing.assert_array_equal(found[:, :, others], whole[:, :, others])


@pytest.mark.parametrize(("start", "stop"), [(0, 52), (4, 30), (7, 8), (5, 5)])
def test_what_stays_drifts_as_unrotated_kv_does(start, stop):
    before, kept = {each: kv(each) for each in range(NUM_SLOTS)}, KEPT["the first and the last half"]
    shape = (CONFIG.num_layers, 2, CONFIG.num_kv_heads, CONFIG.head_dim)
    drift = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    found = held(cut(filled(before), 1, kept, drift, np.array([start, stop], np.int32)))
    moved = kv(1)[:, :, kept].copy()
    moved[:, :, start:stop] += drift[:, :, None]
    places = slice(0, len(kept))
    expected = held(filled({**before, 1: moved}))
    np.testing.assert_allclose(found[:, :, 1][:, :, :, places], expected[:, :, 1][:, :, :, places], atol=ATOL, rtol=0)
    rest, without = np.setdiff1d(np.arange(CAPACITY), np.arange(start, stop)), held(cut(filled(before), 1, kept))
    np.testing.assert_array_equal(found[:, :, 1][:, :, :, rest], without[:, :, 1][:, :, :, rest])
    np.testing.assert_array_equal(found[:, :, [0, 2]], without[:, :, [0, 2]])


def test_half_precision_slots_are_cut_in_half_precision():
    """Rotated once more, and rounded once more."""
    kept = KEPT["the first and the last half"]
    found = cut(filled({0: kv(0)}, "bfloat16"), 0, kept)
    assert {buffer.dtype for part in found for buffer in part} == {jnp.dtype("bfloat16")}
    expected = held(filled({0: kv(0)[:, :, kept]}))[:, :, 0, :, : len(kept)]
    np.testing.assert_allclose(
        held(found).astype(np.float32)[:, :, 0, :, : len(kept)], expected, atol=2**-7 * np.abs(expected).max(), rtol=0
    )
