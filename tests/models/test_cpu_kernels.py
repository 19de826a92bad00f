"""The CPU kernels against XLA's forms of the same, and packed weights against the numbers they were packed from.

Not here: attention over pages (test_paged_attention).
"""

from functools import partial

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ca_jax.models import cpu_kernels, rope
from ca_jax.models.attention import attend
from ca_jax.models.kv import LayerKV
from ca_jax.models.random_weights import random_params
from ca_jax.models.transformer import Transformer
from ca_jax.testing import tiny
from tests.tolerances import ATTENTION_ATOL

pytestmark = pytest.mark.skipif(cpu_kernels.library() is None, reason="the package was built without its CPU kernels")
ATOL = 2 * ATTENTION_ATOL["float32"]  # Both sides round.


def kinds():
    """The kinds of machine that the library was compiled for and this one is, best first."""
    lib = cpu_kernels.library()
    found = [kind for kind in ("plain", "avx2", "avx512") if lib is not None and lib.ca_use(kind.encode())]
    return found[::-1]  # The best was taken last.


KINDS = kinds()


def by_each_kind(function, *args):
    """What a function gives, as compiled for each kind of machine that this one is."""
    lib, run = cpu_kernels.library(), jax.jit(function)
    try:
        for kind in KINDS:
            assert lib.ca_use(kind.encode())
            yield np.asarray(jax.block_until_ready(run(*args)))
    finally:
        lib.ca_use(KINDS[0].encode())


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# Attention.


whatever_the_heads = pytest.mark.parametrize(
    ("head_dim", "heads"),
    [(4, (4, 4)), (16, (130, 1)), (20, (8, 1)), (48, (9, 3)), (64, (9, 3)), (64, (71, 1)), (80, (4, 4)), (96, (8, 1)),
     (128, (8, 2)), (256, (4, 2))],
    ids=str,
)  # fmt: skip


@whatever_the_heads
@pytest.mark.parametrize("num_new", [1, 2, 70])
def test_new_tokens_over_their_history_whatever_the_heads(head_dim, heads, num_new):
    rng = np.random.default_rng(head_dim + heads[0] + num_new)
    window = int(rng.integers(1, 150)) if rng.random() < 0.5 else None
    check_attend(num_new, int(rng.integers(0, 130)), head_dim, heads, window=window)


@pytest.mark.parametrize(("num_new", "num_history"), [(3, 1000), (300, 0), (150, 700)])
@pytest.mark.parametrize("window", [None, 63, 513])
def test_new_tokens_over_more_than_one_thread_takes(num_new, num_history, window):
    check_attend(num_new, num_history, 32, (6, 2), window=window)


@pytest.mark.parametrize("rotary_dim", [16, 24, 32])
def test_a_part_of_each_head_rotated(rotary_dim):
    check_attend(5, 40, 64, (4, 2), rotary_dim=rotary_dim)
    check_attend(50, 40, 64, (4, 2), rotary_dim=rotary_dim)


def check_attend(num_new, num_history, head_dim, heads, *, window=None, rotary_dim=None):
    """Two sequences, one of which has half the history; NaN lies behind both."""
    num_heads, num_kv = heads
    capacity = num_history + 5
    lengths = np.array([num_history, num_history // 2], np.int32)
    q, k, v = (normal(i, 2, num_new, n, head_dim) for i, n in enumerate((num_heads, num_kv, num_kv)))
    history = normal(3, 2, 2, capacity, num_kv, head_dim)
    for row, length in enumerate(lengths):
        history[:, row, length:] = np.nan
    at = partial(rope.rotation_at, rope.RopeConfig(theta=500.0, rotary_dim=rotary_dim), head_dim)
    positions = lengths[:, None] + np.arange(num_new)
    given = (q, LayerKV(k, v), history, lengths, at(positions), at(jnp.arange(capacity)))
    expected = jax.jit(lambda *args: attend(*args, "blocks", window))(*given)
    for found in by_each_kind(lambda *args: attend(*args, "cpu", window), *given):
        np.testing.assert_allclose(found, expected, atol=ATOL, rtol=0)


# Packed weights.

TYPES = {
    "q4": (gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q4_0),
    "q8": (gguf.GGMLQuantizationType.Q8_0,),
    "bf16": (gguf.GGMLQuantizationType.BF16,),
}


def stored(kind, rows, columns, seed=0, scale=1.0):
    """Weights `[rows, columns]` as a file of that type gives them."""
    return gguf.dequantize(gguf.quantize(scale * normal(seed, rows, columns), kind), kind)


@pytest.mark.parametrize(("packed_as", "kind"), [(name, kind) for name, kinds in TYPES.items() for kind in kinds])
@pytest.mark.parametrize("scale", [1.0, 1e-5])  # The second has scales that are subnormal in 16 bits.
@pytest.mark.parametrize("num_rows", [1, 3, 8, 16])
def test_weights_are_packed_as_their_file_has_them_and_multiply_the_same(packed_as, kind, scale, num_rows):
    matrices = [stored(kind, outputs, 96, seed, scale).T for seed, outputs in enumerate((48, 16))]
    packed = cpu_kernels.pack(matrices)
    assert packed.nbytes == 96 * 64 // 512 * cpu_kernels.KINDS[packed_as]
    x = normal(9, num_rows, 96)
    expected = x.astype(np.float64) @ np.concatenate(matrices, axis=1)
    for product in by_each_kind(partial(cpu_kernels.packed_dot, num_outputs=64), x, jnp.asarray(packed)):
        np.testing.assert_allclose(product, expected, atol=1e-5 * scale, rtol=1e-5)


def test_what_is_of_no_such_type_is_not_packed_and_one_number_that_is_off_is_enough():
    for shape in ((64, 32), (48, 32), (64, 40)):
        assert cpu_kernels.pack([normal(0, *shape)]) is None
    matrix = np.ascontiguousarray(stored(gguf.GGMLQuantizationType.Q4_1, 32, 64).T)
    assert cpu_kernels.pack([matrix]) is not None
    matrix[40, 7] += 1e-3
    assert cpu_kernels.pack([matrix]) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_embeddings": True},
        {"mlp": "gelu", "mlp_bias": True, "out_bias": True, "qkv_bias": True, "norm": "layer"},
    ],
    ids=str,
)
def test_a_model_gives_the_same_logits_with_its_weights_packed(changes):
    config = tiny.tiny_config(**changes)
    drawn = random_params(config, dtype="bfloat16", seed=1)
    assert cpu_kernels.pack_params(config, drawn["params"]) == {}, "weights in another dtype are not packed"
    params = jax.tree.map(lambda leaf: 8 * leaf.astype(jnp.float32), drawn)
    packed = cpu_kernels.pack_params(config, params["params"])
    assert set(packed) == {"unembed", *(f"layer_{i}" for i in range(config.num_layers))}
    assert all(set(packed[f"layer_{i}"]["attn"]) == {"qkv", "out"} for i in range(config.num_layers))
    assert all(set(packed[f"layer_{i}"]["mlp"]) == {"wide", "down"} for i in range(config.num_layers))
    tokens, positions = jnp.array([[1, 17, 5]]), jnp.arange(3)[None]
    apply = jax.jit(Transformer(config).apply)
    expected, _ = apply(params, tokens, positions)
    found, _ = apply({**params, "packed": packed}, tokens, positions)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    assert (np.asarray(found) != np.asarray(expected)).any(), "it must be another computation"
