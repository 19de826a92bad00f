"""Loading onto meshes of several devices. `tests/test_mesh.py` starts the process that has them."""

from __future__ import annotations

import math
from functools import partial

import flax.traverse_util
import jax
import numpy as np
import pytest

from ca_jax.models.sharding import bytes_per_device, model_sharding
from ca_jax.models.weights import parameter_slots, resolve_dtype
from ca_jax.pretrained import load_model
from ca_jax.testing import tiny

# 2 KV heads on 4 devices are on two each; a vocabulary of 258 is whole on each of 4.
CONFIG = tiny.tiny_config(num_layers=2, vocab_size=258)
PARAMS = tiny.tiny_params(CONFIG)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(tiny.write_tiny_hf(tmp_path_factory.mktemp("models"), CONFIG, PARAMS))


def layout(data, tensor):
    return partial(model_sharding, data_parallel_size=data, tensor_parallel_size=tensor)


@pytest.mark.parametrize(("mesh", "dtype"), [((1, 2), "bfloat16"), ((1, 4), "float32"), ((2, 2), "float32")], ids=str)
def test_every_device_gets_its_part(directory, mesh, dtype):
    model = load_model(directory, dtype=dtype, layout=layout(*mesh))
    assert dict(model.sharding.mesh.shape)["data"] == mesh[0]
    found = flax.traverse_util.flatten_dict(model.params["params"])
    wanted = flax.traverse_util.flatten_dict(PARAMS["params"])
    on_paper = 0
    for slot in parameter_slots(CONFIG):
        leaf, array = found[slot.path], wanted[slot.path].astype(resolve_dtype(dtype))
        where = model.sharding.of_slot(slot)
        assert leaf.sharding == where, slot.key
        assert leaf.committed
        for shard in leaf.addressable_shards:
            assert shard.data.shape == where.shard_shape(slot.shape)
            np.testing.assert_array_equal(np.asarray(shard.data), array[shard.index], err_msg=slot.key)
        on_paper += math.prod(where.shard_shape(slot.shape)) * array.itemsize
    whole = sum(array.nbytes for array in wanted.values()) // 4 * resolve_dtype(dtype).itemsize
    assert bytes_per_device(model.params) == on_paper < whole


def test_heads_that_cannot_be_divided_so_are_refused_before_a_weight_is_read(directory):
    with pytest.raises(ValueError, match=r"^tensor_parallel_size must be one of 1, 2, 4, .* got 3"):
        load_model(directory, layout=layout(1, 3), progress=lambda *_: pytest.fail("read"))


def test_without_a_mesh_weights_are_bound_to_none(directory):
    model = load_model(directory, dtype="float32")
    assert not any(leaf.committed for leaf in jax.tree.leaves(model.params))
