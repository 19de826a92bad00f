"""Sharded KV on its way to four devices and back. For a process that has them: `test_mesh.py` starts it."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ca_jax.device import transfer
from ca_jax.kv.load import LayerLoader
from ca_jax.kv.save import AsyncSaver, DecodedPart, LayerPart
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.store import AttentionStore
from tests.storage.store_helpers import as_bits, load, make_kv

LAYOUT = KVLayout(num_layers=3, num_kv_heads=4, head_dim=8, dtype="bfloat16", block_tokens=4)
NUM_TOKENS, PADDED = 11, 16
KV = make_kv(LAYOUT, PADDED)
SPECS = {
    "by heads": PartitionSpec(None, None, "model", None),
    "by both": PartitionSpec(None, "data", "model", None),
    "by all devices": PartitionSpec(None, None, ("data", "model"), None),
    "replicated": PartitionSpec(),
}
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    devices = jax.devices()[:4]
    assert len(devices) == 4, "there must be four devices: this file is run by tests/test_mesh.py"
    return Mesh(np.array(devices).reshape(2, 2), ("data", "model"))


@pytest.fixture
def store():
    store = AttentionStore(LAYOUT, StoreConfig(dram_gib=16 * LAYOUT.block_bytes / GIB, block_tokens=4))
    yield store
    store.close()


@specs
def test_each_device_gets_its_part_of_staging_and_no_other(mesh, spec, monkeypatch):
    sharding = NamedSharding(mesh, spec)
    put: dict[jax.Device, np.ndarray] = {}

    def device_put(part: np.ndarray, device: jax.Device, original=jax.device_put) -> jax.Array:
        put[device] = part
        return original(part, device)

    monkeypatch.setattr(jax, "device_put", device_put)
    array = transfer.staging_to_device(KV[0].copy(), sharding)
    monkeypatch.undo()
    assert array.sharding == sharding
    indices = sharding.devices_indices_map(KV[0].shape)
    assert put.keys() == indices.keys() == set(jax.devices()[:4])
    for device, part in put.items():
        np.testing.assert_array_equal(as_bits(part), as_bits(KV[0][indices[device]]))
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(as_bits(np.asarray(shard.data)), as_bits(KV[0][shard.index]))
    pinned = transfer.to_host_memory(array, transfer.PINNED_HOST)
    assert pinned.sharding.memory_kind == "pinned_host"
    assert (pinned.sharding.spec, pinned.sharding.device_set) == (spec, array.sharding.device_set)
    for each in (array, pinned):
        np.testing.assert_array_equal(as_bits(transfer.host_view(each)), as_bits(KV[0]))


def test_replicas_are_read_once(mesh, monkeypatch):
    array = transfer.staging_to_device(KV[0].copy(), NamedSharding(mesh, SPECS["by heads"]))
    num_read = []

    def asarray(data: jax.Array) -> np.ndarray:
        num_read.append(data.nbytes)
        return np.asarray(data)

    monkeypatch.setattr(transfer, "np", types.SimpleNamespace(asarray=asarray, empty=np.empty))
    np.testing.assert_array_equal(as_bits(transfer.host_view(array)), as_bits(KV[0]))
    assert sum(num_read) == KV[0].nbytes


@specs
def test_sharded_kv_is_saved_as_if_it_were_whole(mesh, spec, store):
    saver = AsyncSaver()
    prefilled, decoded = store.prepare_save("a", 0, range(7)), store.prepare_save("a", 7, range(7, NUM_TOKENS))
    sharding = NamedSharding(mesh, spec)
    saver.submit(
        prefilled,
        [LayerPart(i, transfer.staging_to_device(KV[i].copy(), sharding), 7, 0) for i in range(LAYOUT.num_layers)],
    )
    of_steps = NamedSharding(mesh, PartitionSpec(None, None, None, "model", None))
    steps = tuple(
        transfer.staging_to_device(np.stack([KV[:, :, token]] * 2, axis=2), of_steps) for token in range(7, NUM_TOKENS)
    )
    saver.submit(decoded, [DecodedPart(steps, (0, 1, 1, 0))])
    for result in saver.poll(wait=True):
        assert result.error is None
        assert store.complete_save(result.ticket)
    saver.close()
    np.testing.assert_array_equal(as_bits(load(store, "a", range(NUM_TOKENS))), as_bits(KV[:, :, :NUM_TOKENS]))


@pytest.mark.parametrize("device_ahead", [0, 1])
@specs
def test_layers_are_loaded_to_all_devices(mesh, spec, device_ahead, store):
    """With room for two layers of three, so that staging is used again while shards are computed from."""
    ticket = store.prepare_save("a", 0, range(NUM_TOKENS))
    ticket.write_all(KV[:, :, :NUM_TOKENS])
    store.complete_save(ticket)
    sharding = NamedSharding(mesh, spec)
    region_bytes = PADDED * LAYOUT.token_bytes // LAYOUT.num_layers
    loader = LayerLoader(LAYOUT, 2 * region_bytes, sharding=sharding)
    loader.device_ahead = device_ahead
    read = loader.open(store.prepare_load("a", range(NUM_TOKENS)), PADDED, depth=0)
    doubled = {}
    read.begin(lambda layer: doubled[layer])
    for layer in range(LAYOUT.num_layers):
        array = read.layer(layer)
        assert array.sharding == sharding
        np.testing.assert_array_equal(
            as_bits(transfer.host_view(array)[:, :NUM_TOKENS]), as_bits(KV[layer, :, :NUM_TOKENS])
        )
        doubled[layer] = array * 2
        read.computed(layer, doubled[layer])
    read.release()
    store.complete_load(read.ticket)
