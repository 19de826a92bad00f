"""The TPU's way to attend, step by step on any backend, with races looked for and NaN in all that was not written."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ca_jax import backend
from ca_jax.models import paged_attention, tpu_attention
from ca_jax.models.kv import LayerKV
from ca_jax.models.paged_attention import read_places, write_places, write_rows
from ca_jax.models.parts import look_up
from ca_jax.models.small_weights import Int8Matrix
from tests.models.test_paged_attention import RAGGED, Case, expect_as_by_blocks
from tests.private_kit import races_found, watching_races

STRICT = watching_races(uninitialized_memory="nan", out_of_bounds_reads="raise")
AMONG = (80, np.sort(np.random.default_rng(6).choice(80, 40, replace=False)))  # Tokens that are computed anew.


@pytest.fixture(autouse=True)
def steps_through(monkeypatch) -> Iterator[None]:
    """The kernel runs step by step, and nothing is read while it is written."""
    for name in ("attend_blocks", "take_pages"):
        kernel = functools.partial(getattr(tpu_attention, name), interpret=STRICT)
        monkeypatch.setattr(tpu_attention, name, kernel)
    yield
    assert not races_found()


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        pytest.param({"heads": (6, 2)}, {}, marks=pytest.mark.slow),
        ({"heads": (6, 2), "rotary_dim": 32}, {"window": 1}),
        ({"heads": (3, 3), "head_dim": 256, "rotary_dim": 64}, {"window": 11}),
        ({"heads": (8, 1), "page": 48}, {"cap": 2.0, "sinks": True}),
        ({"heads": (2, 2), "page": 128}, {"window": 37, "sinks": True}),
        ({"heads": (6, 2), "head_dim": 64, "page": 128}, {"window": 37, "sinks": True}),
        ({"heads": (3, 1), "head_dim": 80, "page": 128, "rotary_dim": 32}, {"cap": 2.0}),
    ],
    ids=str,
)
def test_the_kernel_gives_what_blocks_give(monkeypatch, sizes, options):
    dtype = jnp.bfloat16 if options.get("cap") else jnp.float32
    monkeypatch.setattr(tpu_attention, "MOST_QUERIES", 48)  # So that rows have several blocks.
    case = Case([*RAGGED, AMONG], **{"page": 16, "head_dim": 128, **sizes})
    if options.get("sinks"):
        options = {**options, "sinks": jnp.linspace(-2, 3, case.q.shape[1])}
    expect_as_by_blocks(case, "mosaic", dtype, **options)


@pytest.mark.parametrize(
    ("sizes", "has_scale"),
    [
        ({"heads": (6, 1), "head_dim": 80, "page": 128, "rotary_dim": 16}, False),  # Latents: 64 numbers are values.
        ({"heads": (4, 2), "head_dim": 128, "page": 16}, True),
        ({"heads": (4, 2), "head_dim": 48, "page": 128}, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("one_each", [False, True])
def test_the_kernel_reads_pages_that_hold_no_values(sizes, has_scale, one_each):
    case = Case([(17, 1), (0, 1), (300, 1)] if one_each else [*RAGGED, AMONG], **sizes)
    case.pages, case.new = case.pages[:, :1], LayerKV(case.new.k, None)
    options = {"key_scale": jnp.linspace(0.5, 2, sizes["head_dim"])} if has_scale else {}
    expect_as_by_blocks(case, "mosaic", jnp.bfloat16, one_each=one_each, window=37, **options)


@pytest.mark.parametrize(
    ("heads", "head_dim", "page", "window"), [((6, 2), 128, 32, None), ((16, 8), 128, 32, 70), ((4, 2), 64, 128, 70)]
)
def test_rows_of_one_token_each(heads, head_dim, page, window):
    rows = [(17, 1), (0, 1), (400, 1), (8, 1), (63, 1), (9, 0)]
    case = Case(rows, heads=heads, page=page, head_dim=head_dim, padding=1)
    expect_as_by_blocks(case, "mosaic", one_each=True, window=window)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "page", "expected"),
    [
        (jnp.bfloat16, 128, 128, "mosaic"),
        (jnp.bfloat16, 256, 16, "mosaic"),
        (jnp.float32, 128, 128, "blocks"),
        (jnp.bfloat16, 64, 128, "mosaic"),
        (jnp.bfloat16, 80, 256, "mosaic"),
        (jnp.bfloat16, 72, 128, "blocks"),
        (jnp.bfloat16, 64, 64, "blocks"),
        (jnp.bfloat16, 128, 24, "blocks"),
    ],
)
def test_on_a_tpu_what_fits_is_taken(dtype, head_dim, page, expected):
    with backend.assumed(backend.TPU):
        for parts in (1, 2):
            pages = jax.ShapeDtypeStruct((9, parts, 2, page, head_dim), dtype)
            assert paged_attention.paged_attention(pages) == expected


@pytest.mark.parametrize(("head_dim", "page"), [(128, 16), (64, 128)])
def test_pages_are_taken_by_their_numbers(head_dim, page):
    pages = jax.random.normal(jax.random.key(1), (5, 2, 2, page, head_dim)).astype(jnp.bfloat16)
    numbers = jnp.array([3, 0, 3, 5, 1])
    with backend.assumed(backend.TPU):
        found = jax.jit(paged_attention.take_pages)(pages, numbers)
        kernels = str(jax.make_jaxpr(paged_attention.take_pages)(pages, numbers)).count("take_pages")
    np.testing.assert_array_equal(found[:3], pages[numbers[:3]])
    np.testing.assert_array_equal(found[4], pages[1])
    assert kernels, "not by the kernel"


# Pages are written whole there.


@pytest.mark.parametrize("one_each", [False, True])
def test_whole_pages_come_to_hold_what_scattered_tokens_do(one_each):
    rows = [(17, 1), (0, 1), (9, 0), (31, 1), (39, 1)] if one_each else [*RAGGED, AMONG]
    case = Case(rows, padding=2, seed=3)
    expected = np.asarray(write_rows(case.pages, case.new, case.rows))
    with backend.assumed(backend.TPU):
        write = functools.partial(write_rows, one_each=one_each, has_gaps=not one_each)
        found = jax.jit(write)(case.pages, case.new, case.rows)
        without_gaps = Case(RAGGED, padding=2, seed=3)
        dense = jax.jit(write_rows)(without_gaps.pages, without_gaps.new, without_gaps.rows)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(dense, write_rows(without_gaps.pages, without_gaps.new, without_gaps.rows))


@pytest.mark.parametrize(("size", "start", "count"), [(16, 0, 16), (16, 5, 11), (10, 3, 10), (24, 8, 0), (7, 30, 7)])
def test_whole_pages_come_to_hold_places_of_one_row(size, start, count):
    rng = np.random.default_rng(size)
    pages, kv = (jnp.array(rng.standard_normal(shape), jnp.float32) for shape in ((9, 2, 3, 8, 4), (2, size, 3, 4)))
    arguments = (jnp.array([4, 2, 7, 1, 0]), jnp.int32(start), jnp.int32(count))
    token = np.arange(start, start + count)
    expected = np.array(pages)
    expected[np.asarray(arguments[0])[token // 8], :, :, token % 8] = np.asarray(kv)[:, :count].swapaxes(0, 1)
    with backend.assumed(backend.TPU):
        found = jax.jit(write_places)(pages, kv, *arguments)
        read = jax.jit(read_places)(found, arguments[0], jnp.asarray(token, jnp.int32))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(read, kv[:, :count])


# Tables of embeddings.


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("width", "count", "gathers"), [(40, 3, False), (40, 70, False), (128, 70, True)])
def test_rows_of_a_table_are_found_without_laying_it_out_anew(width, count, gathers, dtype):
    rng = np.random.default_rng(count)
    table = jnp.asarray(rng.standard_normal((33, width)), dtype)
    ids = jnp.asarray(rng.integers(33, size=(2, count)), jnp.int32)
    with backend.assumed(backend.TPU):
        of_rows = functools.partial(look_up, dtype=dtype)
        found = jax.jit(of_rows)(table, ids)
        assert ("gather" in str(jax.make_jaxpr(of_rows)(table, ids))) == gathers
    np.testing.assert_array_equal(found, np.asarray(table)[ids])


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("count", [3, 40, 200])
def test_rows_of_a_table_in_8_bits_are_numbers_times_scales(width, count):
    rng = np.random.default_rng(0)
    numbers, scales = rng.integers(-127, 128, size=(33, width), dtype=np.int8), rng.random(33, np.float32)
    ids = rng.integers(33, size=(2, count))
    with backend.assumed(backend.TPU):
        held = Int8Matrix(jnp.asarray(numbers), jnp.asarray(scales))
        found = jax.jit(functools.partial(look_up, dtype=jnp.bfloat16))(held, jnp.asarray(ids, jnp.int32))
    assert found.dtype == jnp.bfloat16
    expected = jnp.asarray(numbers.astype(np.float32) * scales[:, None], jnp.bfloat16)
    np.testing.assert_array_equal(found, np.asarray(expected)[ids])
