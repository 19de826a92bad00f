"""What only an accelerator shows of crossing between host and device; all else of it is in tests that run on either."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest

from ca_jax import backend
from ca_jax.device import transfer
from ca_jax.kv.async_saver import Part
from ca_jax.kv.layer_loader import LayerLoader
from ca_jax.storage.layout import KVLayout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(backend.here().shares_memory, reason="wants an accelerator")]

SHAPE = (2, 1000, 4, 64)  # As a layer's KV; no whole number of pages.


def test_what_is_saved_goes_to_pinned_memory_by_itself():
    part = Part.of_layer(0, transfer.to_device(np.ones(SHAPE, np.float32)), 1000).on_host()
    assert part.arrays[0][0].sharding.memory_kind == "pinned_host"


def test_a_copy_to_the_host_outlives_the_donation_of_its_buffer():
    """The copy is issued, and only then the buffer is given to a computation that overwrites it."""
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    for nth in range(8):
        numbers = np.full(SHAPE, nth, np.float32)
        source = transfer.to_device(numbers)
        pinned = transfer.to_host_memory(source)
        doubled = double(source)
        assert source.is_deleted(), "the buffer was not donated: this says nothing"
        np.testing.assert_array_equal(transfer.host_view(pinned), numbers)
        np.testing.assert_array_equal(transfer.to_host(doubled), 2 * numbers)


def test_staging_is_registered_for_dma_with_the_driver():
    layout = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=64, dtype="float32", block_tokens=16)
    with contextlib.closing(LayerLoader(layout, 32 * layout.token_bytes)) as loader:
        loader.touch()
        assert loader._is_pinned
    assert not loader._is_pinned
