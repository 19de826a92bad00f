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
from ca_jax.models.attention import SLOT_BLOCK, prefill_attention, slot_attention
from ca_jax.models.config import ModelConfig
from ca_jax.testing import tiny

NUM_SLOTS, NUM_NEW, NUM_HISTORY = 4, 32, 64
CAPACITY = 2 * SLOT_BLOCK
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
    return jax.eval_shape(functools.partial(steps.rotation_table, config, CAPACITY))


def lowered(step: object, *args: object, **options: object) -> str:
    return step.trace(*args, **options).lower(lowering_platforms=("cuda",)).as_text()


SCALAR = shape(dtype=jnp.int32)


@pytest.mark.parametrize("num_history", [0, NUM_HISTORY])
def test_prefill_of_a_layer(config, num_history):
    history = shape(2, num_history, config.num_kv_heads, HEAD_DIM) if num_history else None
    layer = params_of(config)["params"]["layer_0"]
    x = shape(1, NUM_NEW, config.embed_dim)
    text = lowered(steps.prefill_layer, config, layer, x, history, SCALAR, table_of(config))
    is_flash = prefill_attention(BFLOAT16, HEAD_DIM) == "flash"
    assert ("__cudnn$fmha" in text) == is_flash
    assert ("__cudnn$fmhaScaleBias" in text) == (is_flash and num_history > 0)


@pytest.mark.parametrize("num_blocks", [None, 2])
def test_decode(config, num_blocks):
    slots = shape(NUM_SLOTS, config.num_kv_heads, CAPACITY, HEAD_DIM)
    layers = [slots] * config.num_layers
    tokens = lengths = shape(NUM_SLOTS, dtype=jnp.int32)
    arguments = (params_of(config), steps.Slots(layers, list(layers)), tokens, lengths, table_of(config))
    text = lowered(steps.decode, config, *arguments, num_blocks=num_blocks)
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == 2 * config.num_layers
    assert ("triton" in text) == (slot_attention(slots) == "kernel")


def test_insertion_into_a_slot(config):
    slots = shape(NUM_SLOTS, config.num_kv_heads, CAPACITY, HEAD_DIM)
    kv = shape(2, NUM_HISTORY, config.num_kv_heads, HEAD_DIM)
    text = lowered(steps.insert_slot, slots, slots, kv, SCALAR, SCALAR, table_of(config))
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == 2
