"""The GPU's ways to attend, on any backend: each against the CPU's, in float32, and lowered for CUDA in bfloat16.

The kernel runs step by step here; what cuDNN computes is computed by XLA, which takes the same arguments.
"""

import functools
import logging
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ca_jax.models import attention, gpu_attention, rope
from ca_jax.models.attention import SLOT_BLOCK, attend, attend_slots
from ca_jax.models.config import RopeConfig
from ca_jax.models.kv import LayerKV
from tests.tolerances import ATTENTION_ATOL

ATOL = ATTENTION_ATOL["float32"]
HEAD_DIM = 16


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """Matrix products in float32, also where the backend would take fewer bits."""
    with jax.default_matmul_precision("highest"):
        yield


def run(function, *arguments, **options) -> np.ndarray:
    return np.asarray(jax.jit(functools.partial(function, **options))(*arguments))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def prefill_arguments(num_new: int, lengths: tuple[int, ...], capacity: int) -> tuple:
    """What `attend` takes, for rows of so much history, NaN behind each; 4 KV heads and 8 query heads."""
    rows = len(lengths)
    q, k, v = (normal(i, rows, num_new, heads, HEAD_DIM) for i, heads in enumerate((8, 4, 4)))
    old = [normal(i, rows, capacity, 4, HEAD_DIM) for i in (3, 4)]
    for row, length in enumerate(lengths):
        for part in old:
            part[row, length:] = np.nan
    config = RopeConfig(theta=500.0)
    positions = jnp.asarray(lengths)[:, None] + jnp.arange(num_new)
    return (
        jnp.asarray(q),
        LayerKV(jnp.asarray(k), jnp.asarray(v)),
        jnp.stack(old) if capacity else None,
        jnp.asarray(lengths, jnp.int32),
        rope.rotation_at(config, HEAD_DIM, positions),
        rope.rotation_at(config, HEAD_DIM, jnp.arange(capacity)) if capacity else None,
    )


def slot_arguments(lengths: tuple[int, ...], num_kv: int, groups: int, capacity: int, dtype=np.float32) -> tuple:
    """What `attend_slots` takes, for rows of so many keys, NaN behind each and in a slot that is not in use."""
    q = normal(0, len(lengths), num_kv, groups, HEAD_DIM)
    keys, values = (normal(i, len(lengths) + 1, num_kv, capacity, HEAD_DIM) for i in (1, 2))
    for part in (keys, values):
        part[-1] = np.nan
        for row, length in enumerate(lengths):
            part[row, :, length:] = np.nan
    return (*(jnp.asarray(part, dtype) for part in (q, keys, values)), jnp.asarray(lengths, jnp.int32))


PREFILLS = [(1, (0,), 0, None), (9, (0, 0), 0, 7), (9, (5, 0, 8), 8, None), (9, (5, 0, 8), 8, 7)]


@pytest.mark.parametrize(
    ("implementation", "num_new", "lengths", "capacity", "window"),
    [
        *((implementation, *prefill) for implementation in ("batched", "flash") for prefill in PREFILLS),
        ("batched", attention.BATCHED_QUERY_BLOCK + 30, (40,), 64, 37),
    ],
)
def test_each_way_to_prefill_gives_the_same(monkeypatch, implementation, num_new, lengths, capacity, window):
    monkeypatch.setattr(gpu_attention, "FLASH", "xla")
    arguments = prefill_arguments(num_new, lengths, capacity)
    expected = run(attend, *arguments, implementation="blocks", window=window)
    assert np.isfinite(expected).all()
    found = run(attend, *arguments, implementation=implementation, window=window)
    np.testing.assert_allclose(found, expected, atol=ATOL, rtol=0)


def test_flash_attention_gets_no_nan_since_it_adds_to_masked_scores(monkeypatch):
    replaced = jax.nn.dot_product_attention

    def added(q, k, v, *, mask, is_causal, implementation):
        assert implementation == "cudnn"
        return replaced(q, k, v, bias=jnp.where(mask, 0.0, -1e30), is_causal=is_causal)

    monkeypatch.setattr(jax.nn, "dot_product_attention", added)
    arguments = prefill_arguments(9, (5, 0, 8), 8)
    expected = run(attend, *arguments, implementation="blocks")
    found = run(attend, *arguments, implementation="flash")
    np.testing.assert_allclose(found, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize(
    ("num_kv", "groups", "window"),
    [(2, 3, None), (2, 3, 64), (2, 3, 300), (1, 1, None), (1, 1, 5), (40, 1, None)],  # 40: a program for each share.
)
def test_the_decode_kernel_gives_the_same(num_kv, groups, window):
    block = gpu_attention.KEY_BLOCK
    lengths = (1, 0, block, block + 1, 2 * SLOT_BLOCK)
    arguments = slot_arguments(lengths, num_kv, groups, 2 * SLOT_BLOCK)
    expected = run(attend_slots, *arguments, implementation="blocks", window=window)
    found = run(gpu_attention.attend_slots_kernel, *arguments, window=window, interpret=True)
    np.testing.assert_allclose(found, expected, atol=ATOL, rtol=0)
    np.testing.assert_array_equal(found[1], 0.0)


def test_the_decode_kernel_of_a_window_is_lowered_for_cuda():
    """Without one, and prefilling: see tests/gpu/test_lowering.py."""
    arguments = slot_arguments((3, 0, 3 * SLOT_BLOCK), 8, 4, 3 * SLOT_BLOCK, jnp.bfloat16)
    decode = functools.partial(attend_slots, implementation="kernel", window=700)
    lowered = jax.jit(decode).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in lowered
    assert "stablehlo.while" not in lowered, "the loop over keys is the kernel's"


# Which is taken.


@pytest.fixture
def fresh_trials() -> Iterator[None]:
    """No implementation has been tried, nor has when the test is over."""
    trials = (gpu_attention.flash_is_served, gpu_attention.kernel_is_served)
    for trial in trials:
        trial.cache_clear()
    yield
    for trial in trials:
        trial.cache_clear()


BFLOAT16 = jnp.dtype(jnp.bfloat16)


def slots_of(dtype: np.dtype, head_dim: int, capacity: int = SLOT_BLOCK, num_slots: int = 2) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((num_slots, 2, capacity, head_dim), dtype)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="on a GPU others are taken")
def test_off_the_gpu_blocks_are_taken_and_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(gpu_attention, "_is_right", lambda *_: pytest.fail("an implementation was tried"))
    assert attention.prefill_attention(BFLOAT16, 64) == "blocks"
    assert attention.slot_attention(slots_of(BFLOAT16, 64)) == "blocks"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "prefill", "decode"),
    [
        (jnp.bfloat16, 64, "flash", "kernel"),
        (jnp.float16, 128, "flash", "kernel"),
        (jnp.float32, 64, "batched", "blocks"),
        (jnp.bfloat16, 80, "flash", "blocks"),
        (jnp.bfloat16, 256, "batched", "kernel"),
        (jnp.bfloat16, 12, "batched", "blocks"),
    ],
)
def test_on_a_gpu_what_fits_and_is_served_is_taken(monkeypatch, fresh_trials, dtype, head_dim, prefill, decode):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpu_attention, "_is_right", lambda *_: True)
    assert attention.prefill_attention(jnp.dtype(dtype), head_dim) == prefill
    assert attention.slot_attention(slots_of(jnp.dtype(dtype), head_dim)) == decode


@pytest.mark.parametrize("slots", [slots_of(BFLOAT16, 64, capacity=100), slots_of(BFLOAT16, 64, num_slots=1 << 15)])
def test_slots_that_the_kernel_cannot_address_do_not_fit(slots):
    assert gpu_attention.fits_kernel(slots_of(BFLOAT16, 64))
    assert not gpu_attention.fits_kernel(slots)


def test_what_does_not_run_is_not_taken(monkeypatch, fresh_trials, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def broken(*_):
        raise NotImplementedError("not on this device")

    monkeypatch.setattr(gpu_attention, "attend_flash", broken)
    monkeypatch.setattr(gpu_attention, "attend_slots_kernel", broken)
    with caplog.at_level(logging.WARNING):
        assert attention.prefill_attention(BFLOAT16, 64) == "batched"
        assert attention.slot_attention(slots_of(BFLOAT16, 64)) == "blocks"
    assert caplog.text.count("does not run here: not on this device") == 2


@pytest.mark.parametrize("error", [0.0, np.nan])
def test_trials_run_while_a_function_is_traced_and_find_what_is_wrong(monkeypatch, fresh_trials, error):
    kernel = gpu_attention.attend_slots_kernel
    monkeypatch.setattr(gpu_attention, "FLASH", "xla")
    monkeypatch.setattr(
        gpu_attention, "attend_slots_kernel", lambda *arguments: kernel(*arguments, interpret=True) + error
    )

    @jax.jit
    def traced(x: jax.Array) -> tuple[jax.Array, bool, bool]:
        return x, gpu_attention.flash_is_served(BFLOAT16, 64), gpu_attention.kernel_is_served(BFLOAT16, 64)

    _, flash, decode = traced(jnp.zeros(()))
    assert (bool(flash), bool(decode)) == (True, error == 0.0)
