"""The GPU's way to attend, on any backend: against blocks, in float32, and lowered for CUDA in bfloat16."""

import functools
import logging
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ca_jax import backend
from ca_jax.models import gpu_attention, paged_attention
from tests.accelerators.chips import H100
from tests.models.test_paged_attention import RAGGED, Case, expect_as_by_blocks


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """Matrix products in float32, also where the backend would take fewer bits."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def steps_through(monkeypatch) -> None:
    """The kernel runs step by step."""
    kernel = functools.partial(gpu_attention.attend_pages_kernel, interpret=True)
    monkeypatch.setattr(gpu_attention, "attend_pages_kernel", kernel)


def options_of(case: Case, window: int | None) -> dict[str, object]:
    """Scores are capped, and there are sinks, where there is a window."""
    return {} if window is None else {"window": window, "cap": 2.0, "sinks": jnp.linspace(-2, 3, case.q.shape[1])}


@pytest.mark.usefixtures("steps_through")
@pytest.mark.parametrize(
    ("sizes", "window", "programs"),
    [
        ({"heads": (6, 2), "page": 64}, None, 1),  # One share of the keys; a block of three heads' queries.
        ({"heads": (6, 2), "rotary_dim": 8}, 1, 256),
        ({"heads": (8, 1), "head_dim": 40, "rotary_dim": 12}, 11, 256),
        ({"heads": (8, 1), "page": 48}, None, 256),
        ({"heads": (2, 2), "head_dim": 64}, 37, 1),
        ({"heads": (4, 1), "head_dim": 256, "page": 32}, 37, 256),
    ],
    ids=str,
)
def test_the_kernel_over_pages_gives_the_same(monkeypatch, sizes, window, programs):
    monkeypatch.setattr(gpu_attention, "PROMPTS", gpu_attention.PROMPTS._replace(num_programs=programs))
    among = (80, np.sort(np.random.default_rng(6).choice(80, 40, replace=False)))  # Tokens that are computed anew.
    case = Case([*RAGGED, among], **{"page": 16, **sizes})
    expect_as_by_blocks(case, "triton", **options_of(case, window))


@pytest.mark.usefixtures("steps_through")
@pytest.mark.parametrize(("heads", "window"), [((6, 2), None), ((6, 2), 70), ((40, 40), None), ((8, 1), 5)], ids=str)
def test_the_kernel_over_pages_for_rows_of_one_token_each(heads, window):  # 40: no shares.
    rows = [(17, 1), (0, 1), (400, 1), (8, 1), (63, 1), (64, 1), (127, 1)]
    case = Case(rows, heads=heads, page=32)
    expect_as_by_blocks(case, "triton", one_each=True, **options_of(case, window))


@pytest.mark.usefixtures("steps_through")
@pytest.mark.parametrize("one_each", [False, True])
def test_the_kernel_over_pages_of_bfloat16(one_each):
    case = Case([(17, 1), (0, 1), (200, 1)] if one_each else RAGGED, page=16, head_dim=32, padding=2)
    expect_as_by_blocks(case, "triton", jnp.bfloat16, one_each=one_each)


@pytest.mark.parametrize("one_each", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim", "window"), [(128, 128, 700), (80, 32, None), (256, 64, None)])
def test_the_kernel_over_pages_is_lowered_for_cuda(one_each, head_dim, rotary_dim, window):
    """In steps: see tests/gpu/test_lowering.py."""
    shape = jax.ShapeDtypeStruct
    rows = shape((8, 16), jnp.int32), shape((9,), jnp.int32), shape((8,), jnp.int32)  # Tokens at 8 places.
    rotation = (shape((16 * 128, rotary_dim // 2), jnp.float32),) * 2
    q, pages = shape((8, 6, head_dim), jnp.bfloat16), shape((99, 2, 2, 128, head_dim), jnp.bfloat16)
    kernel = jax.jit(functools.partial(gpu_attention.attend_pages_kernel, window=window, one_each=one_each))
    with H100.as_default():
        lowered = kernel.trace(q, pages, rows, rotation).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in lowered
    assert "stablehlo.while" not in lowered, "the loop over keys is the kernel's"


# Which is taken.


@pytest.fixture
def fresh_trials() -> Iterator[None]:
    """Nothing has been tried, nor has when the test is over."""
    gpu_attention.kernel_is_served.cache_clear()
    yield
    gpu_attention.kernel_is_served.cache_clear()


BFLOAT16 = jnp.dtype(jnp.bfloat16)


def chosen(dtype: np.dtype, head_dim: int, page: int = 128) -> str:
    return paged_attention.paged_attention(jax.ShapeDtypeStruct((9, 2, 2, page, head_dim), dtype))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="on a GPU others are taken")
def test_off_the_gpu_blocks_are_taken_and_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(gpu_attention, "kernel_is_served", lambda *_: pytest.fail("the kernel was tried"))
    assert chosen(BFLOAT16, 64) == "blocks"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "page", "expected"),
    [
        (jnp.bfloat16, 64, 128, "triton"),
        (jnp.float16, 128, 128, "triton"),
        (jnp.float32, 64, 128, "blocks"),
        (jnp.bfloat16, 80, 128, "triton"),
        (jnp.bfloat16, 256, 128, "triton"),
        (jnp.bfloat16, 512, 128, "blocks"),
        (jnp.bfloat16, 12, 128, "blocks"),
        (jnp.bfloat16, 64, 24, "blocks"),
    ],
)
def test_on_a_gpu_what_fits_and_is_served_is_taken(monkeypatch, dtype, head_dim, page, expected):
    monkeypatch.setattr(gpu_attention, "kernel_is_served", lambda *_: True)
    with backend.assumed(backend.GPU):
        assert chosen(jnp.dtype(dtype), head_dim, page) == expected


def test_what_does_not_run_is_not_taken(monkeypatch, fresh_trials, caplog):

    def broken(*_, **__):
        raise NotImplementedError("not on this device")

    monkeypatch.setattr(gpu_attention, "attend_pages_kernel", broken)
    with caplog.at_level(logging.WARNING), backend.assumed(backend.GPU):
        assert chosen(BFLOAT16, 64) == "blocks"
    assert caplog.text.count("does not run here: not on this device") == 1


@pytest.mark.parametrize("error", [0.0, np.nan])
def test_a_trial_runs_while_a_function_is_traced_and_finds_what_is_wrong(monkeypatch, fresh_trials, error):
    kernel = functools.partial(gpu_attention.attend_pages_kernel, interpret=True)
    monkeypatch.setattr(
        gpu_attention, "attend_pages_kernel", lambda *arguments, **options: kernel(*arguments, **options) + error
    )

    @jax.jit
    def traced(x: jax.Array) -> tuple[jax.Array, bool]:
        return x, gpu_attention.kernel_is_served(BFLOAT16, 64)

    _, is_served = traced(jnp.zeros(()))
    assert bool(is_served) == (error == 0.0)
