"""A layout of several layer groups: of other shapes, of one part instead of two, wherever KV lies."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from ca_jax.storage.inspector import StoreInspector, read_session
from ca_jax.storage.layout import KVLayout, LayerGroup
from tests.storage import store_helpers as kit

WIDE = LayerGroup(layers=(0, 3), num_kv_heads=2, head_dim=5, window=7)
LATENT = LayerGroup(layers=(1, 2, 4), num_kv_heads=1, head_dim=9, num_parts=1)


def layout_of(dtype: str) -> KVLayout:
    return KVLayout(groups=(WIDE, LATENT), dtype=dtype, block_tokens=kit.BLOCK_TOKENS)


def make_layers(layout: KVLayout, num_tokens: int, seed: int) -> list[np.ndarray]:
    """Of each layer `[P, T, K, H]` of random bits."""
    bits = np.random.default_rng(seed).bytes(layout.token_bytes * num_tokens)
    numbers, layers, start = np.frombuffer(bits, layout.numpy_dtype), [], 0
    for layer in range(layout.num_layers):
        shape = layout.layer_shape(layer, num_tokens)
        size = int(np.prod(shape))
        layers.append(numbers[start : start + size].reshape(shape))
        start += size
    return layers


def save(store, key: str, start: int, token_ids: np.ndarray, layers: list[np.ndarray]) -> None:
    ticket = store.prepare_save(key, start, token_ids)
    assert all(ticket.write(layer, kv[:, start : start + len(token_ids)]) for layer, kv in enumerate(layers))
    assert store.complete_save(ticket)


def assert_loads(store, key: str, token_ids: np.ndarray, layers: list[np.ndarray], num_dropped: int = 0) -> None:
    ticket = store.prepare_load(key, token_ids, num_dropped=num_dropped)
    assert ticket is not None
    assert ticket.num_tokens == len(token_ids)
    for layer, wanted in enumerate(layers):
        found = np.zeros(store.layout.layer_shape(layer, len(token_ids) + 2), store.layout.numpy_dtype)
        ticket.read(layer, found).result()
        kit.assert_same(found[:, :-2], wanted)
        assert not kit.as_bits(found[:, -2:]).any(), "a load wrote past its tokens"
    store.complete_load(ticket)


def test_a_block_has_the_groups_one_behind_the_other():
    layout = layout_of("float32")
    assert layout.num_layers == 5
    assert layout.token_bytes == 4 * (2 * 2 * 2 * 5 + 3 * 9)
    blocks = np.arange(2 * layout.block_bytes // 4, dtype=np.float32).reshape(2, *layout.block_shape)
    wide, latent = layout.by_group(blocks)
    assert (wide.shape, latent.shape) == ((2, 2, 2, 4, 2, 5), (2, 3, 1, 4, 1, 9))
    np.testing.assert_array_equal(np.concatenate([wide.reshape(2, -1), latent.reshape(2, -1)], 1), blocks)
    sums = layout.layer_sums(blocks[0])
    latent[0, 1, 0, 3, 0, 8] += 1  # Layer 2's last number.
    assert (layout.layer_sums(blocks[0]) != sums).tolist() == [False, False, True, False, False]
    assert KVLayout.from_dict(layout.to_dict()) == layout


@pytest.mark.parametrize("layers", [((0, 1), (1, 2)), ((0,), (2,)), ((1, 0),), ((),)])
def test_groups_that_do_not_have_each_layer_once_are_refused(layers):
    with pytest.raises(ValueError, match="layers"):
        KVLayout(
            groups=tuple(LayerGroup(layers=each, num_kv_heads=1, head_dim=2) for each in layers),
            dtype="int8",
            block_tokens=4,
        )


@pytest.mark.parametrize("driver", ["zarr3", "raw"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_layers_of_two_shapes_are_saved_shared_cut_flushed_and_fetched(tmp_path, dtype, driver):
    layout, token_ids = layout_of(dtype), np.array(kit.ids(23))
    layers = make_layers(layout, 23, seed=3)
    location = {"ssd_dir": tmp_path, "ssd_driver": driver}
    with closing(kit.make_store(24, layout=layout, ssd_blocks=24, **location)) as store:
        save(store, "a", 0, token_ids[:10], layers)
        save(store, "a", 10, token_ids[10:], layers)
        assert_loads(store, "a", token_ids, layers)
        assert store.copy_prefix("a", "b", token_ids[:14]) == 14
        save(store, "b", 14, token_ids[14:18], [kv[:, ::-1] for kv in layers])
        assert_loads(store, "b", token_ids[:14], [kv[:, :14] for kv in layers])
        assert_loads(store, "a", token_ids, layers)
        store.drop("b")
        kept = np.r_[0:2, 10:23:4]
        store.discard("a", ~np.isin(np.arange(23), kept))
        kit.wait_until(store, lambda: len(store.blocks("a")) == 2)  # Copied together: what stays lay in five.
        assert_loads(store, "a", token_ids[kept], [kv[:, kept] for kv in layers], num_dropped=17)
        assert store.settle()
    with closing(kit.make_store(24, layout=layout, ssd_blocks=24, **location)) as store:
        kit.fetch(store, "a")
        assert_loads(store, "a", token_ids[kept], [kv[:, kept] for kv in layers], num_dropped=17)
    with StoreInspector(tmp_path) as inspector:
        found = {each.record.session_id: read_session(inspector, each) for each in inspector.sessions().sound}
    for group, kv in zip(layout.groups, found["a"].groups, strict=True):
        for layer, read in zip(group.layers, kv, strict=True):
            kit.assert_same(read, layers[layer][:, kept])
