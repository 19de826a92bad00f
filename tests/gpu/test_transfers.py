"""Device to host and back through pinned memory: bit for bit, whatever becomes of buffers, nothing left registered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import ml_dtypes
import numpy as np
import pytest

from ca_jax.device import transfer
from ca_jax.kv.load import LayerLoader
from ca_jax.kv.save import AsyncSaver, DecodedPart, LayerPart
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.store import AttentionStore
from tests.storage.store_helpers import as_bits, make_kv

SHAPE = (2, 1000, 4, 64)  # As a layer's KV; no whole number of pages.


def every_pattern(dtype: str) -> np.ndarray:
    """Numbers of every bit pattern that 16 bits have; of every sign, exponent and some fractions that 32 have."""
    size = int(np.prod(SHAPE))
    if dtype == "bfloat16":
        return np.resize(np.arange(1 << 16, dtype=np.uint16), size).view(ml_dtypes.bfloat16).reshape(SHAPE)
    high = np.resize(np.arange(1 << 16, dtype=np.uint32), size) << 16
    low = np.random.default_rng(0).integers(1 << 16, size=size, dtype=np.uint32)
    return (high | low).view(np.float32).reshape(SHAPE)


def kind_of(array: jax.Array) -> str | None:
    return array.sharding.memory_kind


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_device_to_pinned_host_and_back_is_bit_exact(dtype):
    numbers = every_pattern(dtype)
    on_device = transfer.staging_to_device(numbers.copy())
    pinned = transfer.to_host_memory(on_device, transfer.PINNED_HOST)
    assert kind_of(pinned) == "pinned_host"
    np.testing.assert_array_equal(as_bits(transfer.host_view(pinned)), as_bits(numbers))
    back = jax.device_put(pinned, on_device.sharding)
    assert kind_of(back) == kind_of(on_device) != "pinned_host"
    np.testing.assert_array_equal(as_bits(transfer.to_host(back)), as_bits(numbers))
    again = transfer.staging_to_device(transfer.host_view(pinned).copy())
    np.testing.assert_array_equal(as_bits(transfer.to_host(again)), as_bits(numbers))


@pytest.mark.gpu
def test_what_is_saved_goes_to_pinned_memory_by_itself():
    assert kind_of(transfer.to_host_memory(transfer.to_device(np.ones(SHAPE, np.float32)))) == "pinned_host"


@pytest.mark.gpu
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


@contextlib.contextmanager
def store_for(layout: KVLayout, num_blocks: int) -> Iterator[AttentionStore]:
    config = StoreConfig(dram_gib=num_blocks * layout.block_bytes / GIB, block_tokens=layout.block_tokens)
    store = AttentionStore(layout, config)
    store._dram.slab[...] = np.nan
    yield store
    store.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_saved_from_the_device_is_what_is_loaded_to_it(on_gpu, dtype):
    """Prefilled and decoded KV of every bit pattern; the read buffer holds less than the history, so it goes round."""
    layout = KVLayout(num_layers=6, num_kv_heads=2, head_dim=64, dtype=dtype, block_tokens=16)
    kv, num_prefilled, padded_tokens = make_kv(layout, 45), 40, 64
    with store_for(layout, 8) as store:
        saver = AsyncSaver()
        part = LayerPart(0, transfer.to_device(kv[0]), 40, 0).on_host()
        assert (kind_of(part.kv) == "pinned_host") == on_gpu
        ticket = store.prepare_save("a", 0, range(num_prefilled))
        saver.submit(
            ticket, [LayerPart(i, transfer.to_device(kv[i]), num_prefilled, 0) for i in range(layout.num_layers)]
        )
        steps = tuple(transfer.to_device(np.stack([kv[:, :, i]] * 2, axis=2)) for i in range(num_prefilled, 45))
        ticket = store.prepare_save("a", num_prefilled, range(num_prefilled, 45))
        saver.submit(ticket, [DecodedPart(steps, (1,) * len(steps))])
        for result in saver.poll(wait=True):
            assert result.error is None
            assert store.complete_save(result.ticket)
        saver.close()

        layer_bytes = padded_tokens * layout.token_bytes // layout.num_layers
        loader = LayerLoader(layout, 3 * layer_bytes)
        loader.touch()
        assert loader._is_pinned == on_gpu
        load = loader.open(store.prepare_load("a", range(45)), padded_tokens, depth=1)
        used = {}
        load.begin(used.__getitem__)
        for layer in range(layout.num_layers):
            loaded = load.layer(layer)
            used[layer] = loaded.sum()
            load.computed(layer, used[layer])
            np.testing.assert_array_equal(as_bits(transfer.to_host(loaded)[:, :45]), as_bits(kv[layer]))
            load.used(layer, used[layer])
        load.release()
        store.complete_load(load.ticket)
        loader.close()


class RecordedClient:
    """Passes on to the backend's client what that offers, and writes down what is registered.

    Args:
      client: the backend's; None where it offers no DMA.
    """

    def __init__(self, client: object | None) -> None:
        self._client = client
        self.mapped: dict[int, int] = {}
        self.calls: list[str] = []

    def dma_map(self, address: int, num_bytes: int) -> None:
        if self._client is not None:
            self._client.dma_map(address, num_bytes)
        self.mapped[address] = num_bytes
        self.calls.append("map")

    def dma_unmap(self, address: int) -> None:
        if self._client is not None:
            self._client.dma_unmap(address)
        del self.mapped[address]
        self.calls.append("unmap")


def test_staging_is_registered_for_dma_once_and_no_more_when_closed(monkeypatch, on_gpu):
    """On a GPU the driver's own registration; elsewhere the same calls, to a client that only writes them down."""
    (device, *_) = jax.local_devices()
    client = RecordedClient(device.client if on_gpu else None)
    monkeypatch.setattr(transfer, "_clients", lambda: [client])
    layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=64, dtype="float32", block_tokens=16)
    kv = make_kv(layout, 32)
    with store_for(layout, 4) as store:
        ticket = store.prepare_save("a", 0, range(32))
        ticket.write_all(kv)
        store.complete_save(ticket)
        loader = LayerLoader(layout, 32 * layout.token_bytes)
        loader.device_ahead = loader.device_ahead or 2  # As on an accelerator.
        loader.touch()
        memory = loader.buffer.memory
        assert client.mapped == {memory.ctypes.data: memory.nbytes}
        load = loader.open(store.prepare_load("a", range(32)), 32, depth=3)
        load.begin(lambda layer: pytest.fail(f"room for all layers, and layer {layer} was asked back"))
        for layer in range(layout.num_layers):
            np.testing.assert_array_equal(as_bits(transfer.to_host(load.layer(layer))), as_bits(kv[layer]))
        load.release()
        store.complete_load(load.ticket)
        assert client.mapped, "the load let go of what the next one needs"
        loader.close()
        loader.close()
    assert client.calls == ["map", "unmap"]
