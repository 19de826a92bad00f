"""The engine's steps can be compiled for CUDA as far as that can be told without one: jax lowers them for it.

In bfloat16, once as they are traced on this machine and once as they are traced on a GPU.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from ca_jax.device import steps
from ca_jax.models import gpu_attention
from ca_jax.models.attention import prefill_attention
from ca_jax.models.config import ModelConfig
from ca_jax.models.paged_attention import Rows, paged_attention
from ca_jax.testing import tiny

NUM_ROWS, NUM_NEW, NUM_HISTORY = 4, 32, 64
NUM_PAGES, PAGE, PAGES_OF_ROW = 24, 64, 5
HEAD_DIM = 64
BFLOAT16 = jnp.dtype(jnp.bfloat16)


@pytest.fixture(params=["here", "on a GPU"])
def config(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    """A model of its own for each way: what was traced for one must not be found for the other."""
    if request.param == "here":
        return tiny.tiny_config(head_dim=HEAD_DIM, mlp_dim=96)
    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpu_attention, "flash_is_served", lambda dtype, head_dim: True)
    monkeypatch.setattr(gpu_attention, "kernel_is_served", lambda dtype, head_dim: True)
    return tiny.tiny_config(head_dim=HEAD_DIM, mlp_dim=160)


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
ROWS = Rows(INTEGERS(NUM_ROWS, PAGES_OF_ROW), INTEGERS(NUM_ROWS + 1), INTEGERS(NUM_ROWS))


@pytest.mark.parametrize("num_history", [0, NUM_HISTORY])
def test_prefill_of_a_layer(config, num_history):
    history = shape(2, num_history, config.num_kv_heads, HEAD_DIM) if num_history else None
    layer = params_of(config)["params"]["layer_0"]
    x = shape(1, NUM_NEW, config.embed_dim)
    text = lowered(steps.prefill_layer, config, layer, x, history, INTEGERS(), table_of(config))
    is_flash = prefill_attention(BFLOAT16, HEAD_DIM) == "flash"
    assert ("__cudnn$fmha" in text) == is_flash
    assert ("__cudnn$fmhaScaleBias" in text) == (is_flash and num_history > 0)


@pytest.mark.parametrize("with_attention", [False, True])
def test_a_pass_through_a_layer(config, with_attention):
    layer, pages = params_of(config)["params"]["layer_0"], pages_of(config)
    x = shape(1, 2 * NUM_NEW, config.embed_dim)
    arguments = (config, layer, x, pages, ROWS, table_of(config), NUM_NEW)
    text = lowered(steps.layer_step, *arguments, window=100, with_attention=with_attention)
    assert num_donated(text) == 2
    assert ("triton" in text) == (paged_attention(pages) == "kernel")


@pytest.mark.parametrize("with_attention", [False, True])
def test_decode(config, with_attention):
    pages = [pages_of(config)] * config.num_layers
    arguments = (config, params_of(config), pages, INTEGERS(NUM_ROWS), ROWS, table_of(config))
    text = lowered(steps.decode, *arguments, with_attention=with_attention)
    assert num_donated(text) == config.num_layers
    assert ("triton" in text) == (paged_attention(pages[0]) == "kernel")


def test_history_into_a_rows_pages(config):
    kv = shape(2, NUM_HISTORY, config.num_kv_heads, HEAD_DIM)
    scalars = (INTEGERS(), INTEGERS(), INTEGERS())
    text = lowered(steps.fill_pages, pages_of(config), kv, INTEGERS(PAGES_OF_ROW), *scalars)
    assert num_donated(text) == 1
