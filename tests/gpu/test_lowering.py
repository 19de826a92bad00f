"""The engine's steps can be compiled for CUDA as far as that can be told without one: jax lowers them for it.

In bfloat16, once as they are traced on this machine and once as they are traced on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from ca_jax import backend
from ca_jax.device import steps
from ca_jax.models import gpu_attention
from ca_jax.models.config import ModelConfig
from ca_jax.models.paged_attention import Rows, paged_attention
from ca_jax.recompute.layers import choose_deviating, recompute_layer
from ca_jax.testing import tiny

NUM_ROWS, NUM_NEW, NUM_HISTORY = 4, 32, 64
NUM_PAGES, PAGE, PAGES_OF_ROW = 24, 64, 5
HEAD_DIM = 64


@pytest.fixture(params=["here", "on a GPU"])
def config(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelConfig]:
    """A model of its own for each way: what was traced for one must not be found for the other."""
    if request.param == "here":
        yield tiny.tiny_config(head_dim=HEAD_DIM, mlp_dim=96)
        return
    monkeypatch.setattr(gpu_attention, "kernel_is_served", lambda dtype, head_dim: True)
    with backend.assumed(backend.GPU):
        yield tiny.tiny_config(head_dim=HEAD_DIM, mlp_dim=160)


def shape(*sizes: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def params_of(config: ModelConfig) -> steps.Params:
    return jax.tree.map(lambda leaf: shape(*leaf.shape), tiny.tiny_params(config))


def table_of(config: ModelConfig) -> object:
    return jax.eval_shape(functools.partial(steps.rotation_table, config, PAGES_OF_ROW * PAGE))


def pages_of(config: ModelConfig) -> jax.ShapeDtypeStruct:
    return shape(NUM_PAGES, 2, config.num_kv_heads, PAGE, HEAD_DIM)


def lowered(step: object, *args: object, **options: object) -> str:
    return step.trace(*args, **options).lower(lowering_platforms=("cuda",)).as_text()


def num_donated(text: str) -> int:
    return text.count("tf.aliasing_output") + text.count("jax.buffer_donor")


INTEGERS = functools.partial(shape, dtype=jnp.int32)


def rows_of(num_rows: int, num_tokens: int) -> Rows:
    return Rows(INTEGERS(num_rows, PAGES_OF_ROW), INTEGERS(num_rows + 1), INTEGERS(num_tokens))


@pytest.mark.parametrize("with_attention", [False, True])
def test_a_pass_through_a_layer(config, with_attention):
    layer, pages = params_of(config)["params"]["layer_0"], pages_of(config)
    x = shape(1, 2 * NUM_NEW, config.embed_dim)
    arguments = (config, layer, x, pages, rows_of(NUM_ROWS, 2 * NUM_NEW), table_of(config), NUM_NEW)
    text = lowered(steps.layer_step, *arguments, window=100, with_attention=with_attention)
    assert num_donated(text) == 2
    assert ("triton" in text) == (paged_attention(pages) == "triton")


@pytest.mark.parametrize("with_attention", [False, True])
def test_decode(config, with_attention):
    pages = [pages_of(config)] * config.num_layers
    arguments = (config, params_of(config), pages, INTEGERS(NUM_ROWS), rows_of(NUM_ROWS, NUM_ROWS), table_of(config))
    text = lowered(steps.decode, *arguments, with_attention=with_attention)
    assert num_donated(text) == config.num_layers
    assert ("triton" in text) == (paged_attention(pages[0]) == "triton")


def test_history_into_a_rows_pages(config):
    kv = shape(2, NUM_HISTORY, config.num_kv_heads, HEAD_DIM)
    scalars = (INTEGERS(), INTEGERS(), INTEGERS())
    text = lowered(steps.fill_pages, pages_of(config), kv, INTEGERS(PAGES_OF_ROW), *scalars)
    assert num_donated(text) == 1


@pytest.mark.parametrize("carries", [False, True])
def test_a_layer_of_a_history_computed_anew(config, carries):
    layer, pages, x = params_of(config)["params"]["layer_0"], pages_of(config), shape(1, 2 * NUM_NEW, config.embed_dim)
    rows = rows_of(1, 2 * NUM_NEW)
    bools = functools.partial(shape, dtype=jnp.bool_)
    carried = (bools(1, NUM_NEW), bools(1, PAGES_OF_ROW * PAGE)) if carries else ()
    text = lowered(recompute_layer, config, layer, x, pages, rows, table_of(config), NUM_NEW, carried)
    assert num_donated(text) == 2
    assert ("triton" in text) == (paged_attention(pages) == "triton")
    scalar = INTEGERS()
    assert lowered(choose_deviating, config, layer, x, pages, rows, bools(1, PAGES_OF_ROW * PAGE), scalar, NUM_NEW)
