"""Packed weights against the numbers they were packed from, and as products of them.

Not here: attention over pages (test_paged_attention).
"""

import tomllib
from functools import partial
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packaging.requirements import Requirement

from ca_jax.models import cpu_kernels
from ca_jax.models.random_weights import random_params
from ca_jax.models.transformer import Transformer
from ca_jax.testing import tiny
from tests.tolerances import ATTENTION_ATOL

pytestmark = pytest.mark.skipif(cpu_kernels.library() is None, reason="the package was built without its CPU kernels")
ATOL = 2 * ATTENTION_ATOL["float32"]  # Both sides round.


def kinds():
    """The kinds of machine that the library was compiled for and this one is, best first."""
    lib = cpu_kernels.library()
    found = [kind for kind in ("plain", "avx2", "avx512", "amx") if lib is not None and lib.ca_use(kind.encode())]
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


# Packed weights.

TYPES = {
    "q4": (gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q4_0),
    "q8": (gguf.GGMLQuantizationType.Q8_0,),
    "bf16": (gguf.GGMLQuantizationType.BF16,),
}


def stored(kind, rows, columns, seed=0, scale=1.0):
    """Weights `[rows, columns]` as a file of that type gives them."""
    return gguf.dequantize(gguf.quantize(scale * normal(seed, rows, columns), kind), kind)


def test_the_kernels_are_compiled_with_the_oldest_jax_that_is_served():
    """An older one than they are compiled with refuses them, and computes nothing at all then."""
    described = tomllib.loads(Path(cpu_kernels.__file__).parents[2].joinpath("pyproject.toml").read_text())

    def taken(name: str, requirements: list[str]) -> list[int]:
        found = next(each for each in map(Requirement, requirements) if each.name == name)
        return [minor for minor in range(30) if f"0.{minor}.0" in found.specifier]

    served = taken("jax", described["project"]["dependencies"])
    assert taken("jaxlib", described["build-system"]["requires"]) == served[:1]


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


@pytest.mark.parametrize("kind", [name for kinds in TYPES.values() for name in kinds])
def test_many_rows_are_multiplied_as_exactly_as_few_whatever_their_size_and_outputs(kind):
    """More rows than are laid out at a time, outputs that end in half a panel, and numbers of very different sizes."""
    matrix = stored(kind, 304, 448).T
    packed = cpu_kernels.pack([matrix])
    x = normal(1, 600, 448) * np.exp2(np.random.default_rng(2).integers(-12, 12, (600, 448))).astype(np.float32)
    exact = x.astype(np.float64) @ matrix
    size = np.abs(x).astype(np.float64) @ np.abs(matrix)
    x[3, 5], found = np.uint32(0x7FFFFFFF).view(np.float32), {}
    others = np.arange(600) != 3
    products = by_each_kind(partial(cpu_kernels.packed_dot, num_outputs=304), x, packed)
    for name, product in zip(KINDS, products, strict=True):
        found[name] = product
        assert np.isnan(product[3]).all(), "what is not a number stays so, in its own row"
        assert (np.abs(product - exact) / size)[others].max() < 2e-6
        alone = np.asarray(cpu_kernels.packed_dot(jnp.asarray(x[517:560]), jnp.asarray(packed), 304))
        np.testing.assert_array_equal(alone, product[517:560], err_msg="a row's product is of no other's doing")
    if "amx" in found:
        assert (found["amx"][others] != found["avx512"][others]).any(), "it must be another computation"
    assert cpu_kernels.serves_rows(32)
    assert cpu_kernels.serves_rows(600) == ("amx" in found)


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
