"""Leaves and parts of them, however a file holds them, and how many are read at once."""

import dataclasses
import threading

import jax
import numpy as np
import pytest

from ca_jax.models import reading
from ca_jax.models.families import FAMILIES
from ca_jax.models.presets import PRESETS
from ca_jax.models.reading import Leaf, StoredTensor
from ca_jax.models.weights import parameter_slots

TINY = {
    "vocab_size": 48,
    "embed_dim": 32,
    "mlp_dim": 24,
    "num_layers": 1,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 6,
    "rope": PRESETS["llama-7b"].rope,
}
CONFIGS = {
    name: dataclasses.replace(PRESETS[name], **TINY)
    for name in ("llama-7b", "qwen2.5-7b", "mixtral-8x7b", "falcon-40b", "pythia-1.4b")
}


def stored(config, chunk_rows=None):
    """A file's tensors for a model, of numbers that are all different; those of fused ones are shared by leaves."""
    names = FAMILIES[config.architecture].hf_names(config)
    tensors = {}
    counted = 0
    for slot in parameter_slots(config):
        origin = reading._origin(slot, names)
        for name in origin.names:
            if name in tensors:
                continue
            size = int(np.prod(origin.shape))
            array = (counted + np.arange(size, dtype=np.float32)).reshape(origin.shape)
            counted += size
            tensors[name] = StoredTensor(
                shape=origin.shape, read_rows=lambda a, b, array=array: array[a:b], chunk_rows=chunk_rows
            )
    return tensors, names


def load(config, chunk_rows=None, hash_content=lambda: "hash", **options):
    tensors, names = stored(config, chunk_rows)
    described = {"path": "here", "name": "it", "tokenizer": None, "stop_token_ids": ()}
    source = reading.Source(config=config, tensors=tensors, names=names, hash_content=hash_content, **described)
    return reading.load(source, dtype=np.dtype(np.float32), **options).params["params"]


def index_of(leaf, axis, part):
    return tuple(part if i == axis else slice(None) for i in range(len(leaf.shape)))


def parts_of(leaf, num_parts):
    """Axes, and indices that divide a leaf over devices along them."""
    for axis, size in enumerate(leaf.shape):
        if size % num_parts == 0:
            step = size // num_parts
            for start in range(0, size, step):
                yield axis, index_of(leaf, axis, slice(start, start + step))


@pytest.mark.parametrize("chunk_rows", [None, 1, 5, 1000])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_part_of_a_leaf_is_that_part_of_the_whole(name, chunk_rows):
    num_parts = 0
    for leaf in jax.tree.leaves(load(CONFIGS[name], chunk_rows, destinations=reading.unread)):
        whole = leaf.read()
        assert whole.shape == leaf.shape
        for axis, index in parts_of(leaf, 2):
            if leaf.slot.axes[axis] == "head_dim":
                continue  # No mesh divides it, and it is not a part of the file's rows or columns.
            part = leaf.read(index)
            np.testing.assert_array_equal(part, whole[index], err_msg=leaf.slot.key)
            assert part.flags.c_contiguous
            assert part.ctypes.data % 64 == 0
            num_parts += 1
    assert num_parts > 20


def rows_read(leaf, index):
    seen = []

    def watch(tensor):
        def read_rows(start, stop):
            seen.append(stop - start)
            return tensor.read_rows(start, stop)

        return dataclasses.replace(tensor, read_rows=read_rows)

    dataclasses.replace(leaf, tensors=tuple(map(watch, leaf.tensors))).read(index)
    return sum(seen)


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_the_file_are_read_alone(name):
    """What is divided by rows of the file is read so, and nothing else; wo and w_down are divided otherwise."""
    by_rows = {"embed.embedding": 0, "attn.wq": 1, "attn.wk": 1, "attn.wv": 1, "mlp.w_up": -1, "head.kernel": 1}
    by_columns = {"attn.wo": 0, "mlp.w_down": -2}
    for leaf in jax.tree.leaves(load(CONFIGS[name], destinations=reading.unread)):
        for axes, is_rows in ((by_rows, True), (by_columns, False)):
            if leaf.slot.key not in axes:
                continue
            axis = axes[leaf.slot.key] % len(leaf.shape)
            index = index_of(leaf, axis, slice(0, leaf.shape[axis] // 2))
            assert leaf.is_rows(index) == is_rows, leaf.slot.key
            assert leaf.is_rows((slice(None),) * len(leaf.shape))
            num_rows = leaf.slot.stored_shape[0] * len(leaf.tensors)
            assert rows_read(leaf, index) == (num_rows // 2 if is_rows else num_rows)


def test_every_number_of_a_fused_tensor_goes_to_one_leaf():
    params = load(CONFIGS["falcon-40b"])["layer_0"]["attn"]
    found = np.concatenate([params[name].reshape(-1) for name in ("wq", "wk", "wv")])
    assert len(np.unique(found)) == len(found) == (8 + 2 * 4) * 6 * 32


def test_leaves_are_handed_on_one_by_one_and_no_more_at_once_than_the_largest():
    lock, now, most, seen = threading.Lock(), [0], [0], []

    def put(leaf: Leaf) -> str:
        with lock:
            now[0] += leaf.nbytes
            most[0] = max(most[0], now[0])
            seen.append(leaf.slot.path)
        leaf.read()
        with lock:
            now[0] -= leaf.nbytes
        return "/".join(leaf.slot.path)

    config = CONFIGS["llama-7b"]
    tree = load(config, destinations=lambda found: put if found is config else None)
    assert tree["layer_0"]["attn"]["wq"] == "layer_0/attn/wq"
    assert sorted(seen) == sorted(slot.path for slot in parameter_slots(config))
    assert most[0] == 48 * 32 * 4


def test_what_a_destination_raises_ends_the_loading():
    def refuse(config):
        raise ValueError("no such mesh")

    def fail(leaf):
        raise OSError("the device is gone")

    with pytest.raises(ValueError, match="no such mesh"):
        load(CONFIGS["llama-7b"], destinations=refuse, hash_content=lambda: pytest.fail("hashed before it was refused"))
    with pytest.raises(OSError, match="the device is gone"):
        load(CONFIGS["llama-7b"], destinations=lambda config: fail)


def test_a_part_that_is_neither_rows_nor_columns_is_refused():
    (wq,) = (
        leaf
        for leaf in jax.tree.leaves(load(CONFIGS["llama-7b"], destinations=reading.unread))
        if leaf.slot.key == "attn.wq"
    )
    with pytest.raises(ValueError, match=r"the part must be of the first of axes \(8, 6\)"):
        wq.read((slice(None), slice(None), slice(0, 3)))
