"""Slots that are cut and drift, in half precision, against rows inserted at their new places; others bit for bit.

Not here: the same in float32, and what batches decode then (test_overflow_exact, test_overflow_turns).
"""

import jax.numpy as jnp
import numpy as np
import pytest

from ca_jax.device import steps
from ca_jax.testing import tiny

CONFIG = tiny.tiny_config()
NUM_SLOTS, CAPACITY, NUM_TOKENS = 3, 128, 100
TABLE = steps.rotation_table(CONFIG, 2 * CAPACITY)


def kv(slot: int) -> np.ndarray:
    """Unrotated, `[L, 2, T, K, H]`."""
    shape = (CONFIG.num_layers, 2, NUM_TOKENS, CONFIG.num_kv_heads, CONFIG.head_dim)
    return np.random.default_rng(slot).standard_normal(shape).astype(np.float32)


def filled(slots_kv: list[np.ndarray]) -> steps.Slots:
    """Slots in bfloat16 that hold unrotated rows, inserted at places 0 and on."""
    slots = steps.make_slots(CONFIG, NUM_SLOTS, CAPACITY, "bfloat16")
    for slot, layers in enumerate(slots_kv):
        for layer, part in enumerate(layers):
            slots.keys[layer], slots.values[layer], _ = steps.insert_slot(
                slots.keys[layer], slots.values[layer], jnp.asarray(part), jnp.int32(slot), jnp.int32(0), TABLE
            )
    return slots


def held(slots: steps.Slots) -> np.ndarray:
    """`[2, L, slots, K, C, H]`."""
    assert {buffer.dtype for part in slots for buffer in part} == {jnp.dtype("bfloat16")}
    return np.stack([[np.asarray(buffer, np.float32) for buffer in part] for part in slots])


@pytest.mark.parametrize("drifts", [None, (0, 52), (4, 30), (5, 5)])
def test_half_precision_slots_are_cut_in_half_precision(drifts):
    """Rotated once more, and rounded once more."""
    kept, rows = np.r_[0:4, 52:NUM_TOKENS], [kv(slot) for slot in range(NUM_SLOTS)]
    whole, moved, drift = held(filled(rows)), rows[1][:, :, kept], ()
    if drifts is not None:
        values = kv(7)[:, :, 0]
        moved[:, :, slice(*drifts)] += values[:, :, None]
        drift = (jnp.asarray(values), jnp.array(drifts, jnp.int32))
    places, turned = np.zeros(CAPACITY, np.int32), np.zeros(CAPACITY, np.int32)
    places[: len(kept)], turned[: len(kept)] = kept, kept - np.arange(len(kept))
    found = held(steps.cut_slot(filled(rows), jnp.int32(1), jnp.asarray(places), jnp.asarray(turned), TABLE, *drift))
    expected = held(filled([rows[0], moved, rows[2]]))[:, :, 1, :, : len(kept)]
    np.testing.assert_allclose(found[:, :, 1, :, : len(kept)], expected, atol=2**-7 * np.abs(expected).max(), rtol=0)
    np.testing.assert_array_equal(found[:, :, [0, 2]], whole[:, :, [0, 2]])
    if drifts is None:
        np.testing.assert_array_equal(found[1, :, 1, :, : len(kept)], whole[1, :, 1][:, :, kept])  # Only moved.
