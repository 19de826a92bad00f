"""Kernels for weights in 4 bits, step by step on any backend, against numpy's product of the numbers they stand for."""

import functools
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ca_jax import backend
from ca_jax.models import int4_product
from ca_jax.models.parts import project
from ca_jax.models.small_weights import Int4Matrix
from tests import engine_kit as kit
from tests.private_kit import races_found, watching_races

STRICT = watching_races(uninitialized_memory="nan")
KERNELS = {
    "triton": functools.partial(int4_product.gpu_product, interpret=True),
    "mosaic": functools.partial(int4_product.tpu_product, interpret=STRICT),
}
# Most that a product may be off, as a part of what its terms add up to without their signs: a TPU rounds twice.
RTOL = {"triton": 1e-6, "mosaic": 2**-8}


def weights_of(num_groups: int, num_outputs: int, num_experts: int = 2, seed: int = 0) -> Int4Matrix:
    """All codes; nothing of the first expert is a number."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 256, (num_experts, num_groups * 16, num_outputs), np.uint8)
    scales = rng.uniform(0.5, 1.5, (num_experts, num_groups, num_outputs)).astype(ml_dtypes.bfloat16)
    offsets = rng.normal(size=scales.shape).astype(ml_dtypes.bfloat16) - 8
    scales[0] = np.nan
    return Int4Matrix(*map(jnp.asarray, (numbers, scales, offsets)))


def expected(x: jax.Array, weights: Int4Matrix, expert: int) -> tuple[np.ndarray, np.ndarray]:
    """By numpy, and the same without signs."""
    rows = np.asarray(x, np.float64)
    matrix = kit.in_float32(Int4Matrix(*(each[expert] for each in weights))).astype(x.dtype).astype(np.float64)
    return rows @ matrix, np.abs(rows) @ np.abs(matrix)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 64, 140])
@pytest.mark.parametrize(("num_groups", "num_outputs"), [(18, 33), (43, 136)])
def test_a_kernel_multiplies_by_what_the_codes_stand_for(kernel, num_rows, num_groups, num_outputs):
    weights = weights_of(num_groups, num_outputs)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(num_rows, num_groups * 32)), jnp.bfloat16)
    found = KERNELS[kernel](jnp.ones(1, jnp.int32), x, weights, dtype=jnp.float32)
    wanted, size = expected(x, weights, 1)
    assert found.shape == wanted.shape
    assert (np.abs(np.asarray(found) - wanted) <= RTOL[kernel] * size).all()
    assert not races_found()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_xla_does_the_same(dtype):
    weights = weights_of(18, 33)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, 18 * 32)), dtype)
    wanted, size = expected(x, weights, 1)
    for found in (
        project(x, weights, expert=jnp.int32(1)).astype(jnp.float32),
        int4_product.by_xla(x, Int4Matrix(*(each[1] for each in weights)), dtype=jnp.float32),
    ):
        atol = (1e-6 if dtype == jnp.float32 else 2**-8) * size
        assert (np.abs(np.asarray(found) - wanted) <= atol).all()


def test_the_assembly_makes_the_numbers_that_the_codes_stand_for():
    """By the semantics that NVIDIA's "PTX ISA" gives the instructions, for every byte."""
    rng = np.random.default_rng(2)
    packed = rng.permutation(256).astype(np.uint8)
    scale, offset = rng.normal(size=(2, 256)).astype(ml_dtypes.bfloat16)
    inputs = dict(
        zip(
            ("$2", "$3", "$4", "$5", "$6"),
            (
                packed.view(np.uint32),
                *(each.reshape(64, 2, 2).view(np.uint32)[:, i, 0] for each in (scale, offset) for i in (0, 1)),
            ),
            strict=True,
        )
    )
    for shift, codes in ((0, packed % 16), (4, packed // 16)):
        held = run(int4_product._ASM % shift, dict(inputs))
        found = np.stack([held["$0"], held["$1"]], axis=1).view(ml_dtypes.bfloat16).reshape(-1)
        wanted = codes.astype(np.float32) * scale.astype(np.float32) + offset.astype(np.float32)
        np.testing.assert_array_equal(found, wanted.astype(ml_dtypes.bfloat16))


def run(assembly: str, held: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Executes assembly over registers u32 `[n]`, by their names."""

    def pairs(word: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(word)[:, None].view(ml_dtypes.bfloat16).astype(np.float64)

    def select(low: np.ndarray, high: np.ndarray, which: np.ndarray) -> np.ndarray:
        both = np.stack([low, high], axis=1).view(np.uint8)
        chosen = [both[:, int(which[0]) >> 4 * place & 7] for place in range(4)]
        return np.stack(chosen, axis=1).view(np.uint32)[:, 0]

    does = {
        "shr.b32": np.right_shift,
        "and.b32": np.bitwise_and,
        "mov.b32": lambda value: value,
        "prmt.b32": select,
        "fma.rn.bf16x2": lambda a, b, c: (
            (pairs(a) * pairs(b) + pairs(c)).astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint32)[:, 0]
        ),
    }
    count = len(held["$2"])
    for name, operands in re.findall(r"^([a-z][\w.]+) (.+);$", assembly, re.MULTILINE):
        into, *given = operands.split(", ")
        held[into] = does[name](
            *(held[each] if each in held else np.full(count, int(each, 0), np.uint32) for each in given)
        )
    return held


# Which is taken.


@pytest.fixture
def fresh_trials() -> Iterator[None]:
    """Nothing has been tried, nor has when the test is over."""
    int4_product.kernel_is_served.cache_clear()
    yield
    int4_product.kernel_is_served.cache_clear()


DEVICES = {"triton": ("gpu_product", backend.GPU), "mosaic": ("tpu_product", backend.TPU)}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("is_off", [False, True])
def test_a_kernel_is_tried_while_a_function_is_traced_and_taken_if_it_is_right(
    monkeypatch, fresh_trials, caplog, kernel, is_off
):
    name, device = DEVICES[kernel]
    used = []

    def noted(chosen, x, weights, **options):
        used.append(x.shape)
        return KERNELS[kernel](chosen, x, weights, **options) + is_off

    def on_one_device(kernel: str, dtype: str):
        """What is interpreted has effects, which nothing on a mesh may have."""
        return lambda chosen, x, *held: noted(chosen, x, Int4Matrix(*held), dtype=dtype)

    monkeypatch.setattr(int4_product, name, noted)
    monkeypatch.setattr(int4_product, "_on_mesh", on_one_device)
    weights = weights_of(18, 33)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 3, 18 * 32)), jnp.bfloat16)
    with backend.assumed(device):
        found = jax.jit(project)(x, weights, expert=jnp.int32(1))
    wanted, size = expected(x[0], weights, 1)
    assert (np.abs(np.asarray(found[0], np.float32) - wanted) <= 2**-7 * size).all()
    assert ((3, 18 * 32) in used) == (not is_off)
    assert ("4 bits is not used, it was off by" in caplog.text) == is_off


@pytest.mark.parametrize(
    ("device", "dtype", "num_groups"),
    [(backend.CPU, jnp.bfloat16, 18), (backend.GPU, jnp.float32, 18), (backend.TPU, jnp.bfloat16, 15)],
)
def test_where_none_fits_nothing_is_tried(monkeypatch, device, dtype, num_groups):
    monkeypatch.setattr(int4_product, "kernel_is_served", lambda *_: pytest.fail("a kernel was tried"))
    weights = weights_of(num_groups, 33)
    with backend.assumed(device):
        assert project(jnp.ones((2, num_groups * 32), dtype), weights, expert=jnp.int32(1)).shape == (2, 33)


def test_what_does_not_run_is_not_taken(monkeypatch, fresh_trials, caplog):
    def broken(*_, **__):
        raise NotImplementedError("no such device")

    monkeypatch.setattr(int4_product, "gpu_product", broken)
    assert not int4_product.kernel_is_served("triton", jnp.dtype(jnp.bfloat16))
    assert "it does not run here: no such device" in caplog.text
