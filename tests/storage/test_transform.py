"""The transform's products against float64, by numpy and on tiles of bfloat16, and blocks that one codes for the other.

Not here: blocks, which are coded with them (test_codec).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ca_jax import native
from ca_jax.storage import transform
from ca_jax.storage.transform import MOST_CODE, DecodedSteps, GroupCodec

ATOL = {"numpy": 0.001, "tiles": 0.002}
"""Steps: matrices here are turned and stretched alike in all directions, and steps are about 40."""
# l, P, K, H, R, T, J: wide as a model's; odd; two bundles; heads that are no 16s; more layers before than there are.
SHAPES = [(4, 2, 3, 64, 1, 128, 2), (5, 2, 2, 5, 1, 37, 2), (3, 1, 4, 8, 2, 17, 1), (2, 2, 4, 24, 2, 50, 0)]
SHAPES += [(3, 2, 1, 40, 1, 1, 5), (2, 1, 1, 48, 1, 33, 1)]


def make_group(shape: tuple[int, ...], fits_bfloat16: bool = False) -> GroupCodec:
    num_layers, num_parts, num_heads, head_dim, num_bundles, _, num_earlier = shape
    rng, width = np.random.default_rng(0), num_parts * num_heads * head_dim // num_bundles

    def turns(*many: int) -> np.ndarray:
        return np.linalg.qr(rng.normal(size=(*many, num_bundles, width, width)))[0]

    earlier = turns(num_layers, num_earlier) * 0.8 / max(num_earlier, 1)
    if fits_bfloat16:
        earlier = earlier.astype(ml_dtypes.bfloat16)
    return GroupCodec(
        means=rng.normal(size=(num_layers, num_parts, num_heads, head_dim)),
        forward=40 * turns(num_layers),
        spread=np.where(rng.random((num_layers, num_bundles, width)) < 0.1, 0.1, 20),
        earlier=earlier,
    )


def make_part(group: GroupCodec, num_tokens: int, seed: int = 1) -> np.ndarray:
    num_layers, num_parts, num_heads, head_dim = group.shape
    numbers = np.random.default_rng(seed).normal(size=(num_layers, num_parts, num_tokens, num_heads, head_dim))
    return (group.means[:, :, None] + numbers).astype(np.float32)


def steps_of(group: GroupCodec, part: np.ndarray) -> np.ndarray:
    """`[l, R, D, T]` in float64, by another way."""
    num_bundles = group.forward.shape[1]
    found = np.empty((*group.spread.shape, part.shape[2]))
    for layer, numbers in enumerate(part.astype(np.float64) - group.means[:, :, None]):
        for bundle, heads in enumerate(np.split(numbers, num_bundles, axis=2)):
            rows = np.concatenate([heads[p, :, k] for k in range(heads.shape[2]) for p in range(len(heads))], axis=-1)
            found[layer, bundle] = (rows @ group.forward[layer, bundle].astype(np.float64)).T
    return found


def decoded_of(group: GroupCodec, codes: np.ndarray, unit: float) -> np.ndarray:
    """Steps that codes stand for, `[l, R, D, T]` in float64."""
    found: list[np.ndarray] = []
    for layer, each in enumerate(codes * unit):
        for matrix, before in zip(group.earlier[layer].astype(np.float64), found[::-1], strict=False):
            each = each + np.einsum("rio,rit->rot", matrix, before)
        found.append(each)
    return np.stack(found)


@pytest.fixture(params=["numpy", "tiles"])
def atol(request, monkeypatch) -> float:
    use(request.param, monkeypatch)
    return ATOL[request.param]


def use(arithmetic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_served = transform.is_served()
    if arithmetic == "tiles" and not is_served:
        pytest.skip("no library, or a machine without tiles of bfloat16")
    monkeypatch.setattr(transform, "is_served", lambda: arithmetic == "tiles")


def decoded(group: GroupCodec, codes: np.ndarray, unit: float, like: np.ndarray) -> np.ndarray:
    into = np.full(like.shape, 7, like.dtype)
    group.decode(codes, unit, into)
    return into


@pytest.mark.parametrize("fits_bfloat16", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_float64(shape, fits_bfloat16, atol):
    group = make_group(shape, fits_bfloat16)
    part = make_part(group, shape[5])
    wanted = steps_of(group, part)
    steps = group.coded(part)
    np.testing.assert_allclose(steps, wanted, atol=atol, rtol=0)
    for unit in (1.0, 1.7):
        codes = group.rounded(steps, unit)
        assert codes.dtype == np.int16
        assert not codes[~group.is_kept].any()
        back = decoded_of(group, codes, unit)
        assert (np.abs(back - wanted)[group.is_kept] < unit / 2 + atol).all()
        found = decoded(group, codes, unit, part)
        np.testing.assert_allclose(steps_of(group, found), back, atol=atol, rtol=0)


@pytest.mark.usefixtures("atol")
@pytest.mark.parametrize("shape", SHAPES)
def test_layers_one_by_one_are_what_all_of_them_are(shape):
    """Two parts of different tokens in turn, as objects arrive."""
    group = make_group(shape)
    codes = group.rounded(group.coded(make_part(group, shape[5])), 1.0)
    parts = [codes, np.ascontiguousarray(codes[..., : shape[5] // 2 + 1])]
    like = [np.zeros((*group.shape[:2], each.shape[-1], *group.shape[2:]), np.float32) for each in parts]
    known, found = [DecodedSteps() for _ in parts], [np.full_like(each, 7) for each in like]
    for layer in range(len(codes)):
        for each, steps, into in zip(parts, known, found, strict=True):
            group.decode_layer(layer, each[layer], 1.0, steps, into[layer])
    for each, into in zip(parts, found, strict=True):
        np.testing.assert_array_equal(into, decoded(group, each, 1.0, into))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("coder", ["numpy", "tiles"])
def test_what_one_arithmetic_codes_the_other_decodes(shape, coder, monkeypatch):
    group = make_group(shape)
    part = make_part(group, shape[5])
    with monkeypatch.context() as patch:
        use(coder, patch)
        steps = group.coded(part)
        codes = group.rounded(steps, 1.0)
        same = decoded(group, codes, 1.0, part)
    with monkeypatch.context() as patch:
        use({"numpy": "tiles", "tiles": "numpy"}[coder], patch)
        other = decoded(group, codes, 1.0, part)
    np.testing.assert_allclose(steps_of(group, other), steps_of(group, same), atol=0.002, rtol=0)


@pytest.mark.usefixtures("atol")
def test_a_token_that_is_no_number_or_huge_spoils_no_other():
    group = make_group(SHAPES[1])
    part = make_part(group, 37)
    steps = group.coded(part)
    codes = group.rounded(steps, 1.0)
    part[1, 0, 3, 1, 2] = np.nan
    part[1, 0, 4, 1, 2] = np.uint32(0x7FFFFFFF).view(np.float32)  # Not a number either, and rounded up it would be one.
    part[2, 1, 20] = np.inf
    part[:, :, 36] = 1e30
    others = np.delete(np.arange(37), [3, 4, 20, 36])
    with np.errstate(all="ignore"):
        found = group.coded(part)
    np.testing.assert_array_equal(found[..., others], steps[..., others])
    assert (~np.isfinite(found).all((0, 1, 2))).nonzero()[0].tolist() == [3, 4, 20]
    found[..., [3, 4, 20]] = 0
    with np.errstate(all="ignore"):
        found = group.rounded(found, 1.0)
    np.testing.assert_array_equal(found[..., others], codes[..., others])
    assert np.abs(found[0, ..., 36]).max() == MOST_CODE


@pytest.mark.usefixtures("atol")
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_numbers_come_back_in_the_dtype_and_the_place_that_are_asked_for(shape, dtype):
    group = make_group(shape)
    part = make_part(group, shape[5])
    room = np.zeros((*part.shape[:3], part.shape[3] + 1, part.shape[4]), np.float32)
    room[..., 1:, :] = part
    codes = group.rounded(group.coded(room[..., 1:, :]), 1.0)
    np.testing.assert_array_equal(codes, group.rounded(group.coded(part), 1.0))
    exact = decoded(group, codes, 1.0, part)
    np.testing.assert_array_equal(decoded(group, codes, 1.0, part.astype(dtype)), exact.astype(dtype))
    wide = np.zeros((*part.shape[:2], 2 * shape[5], *part.shape[3:]), np.float32)
    group.decode(codes[..., ::-1], 1.0, wide[:, :, ::-2])
    np.testing.assert_array_equal(wide[:, :, 1::2], exact)
    assert not wide[:, :, ::2].any()


@pytest.mark.skipif(not transform.is_served(), reason="no library, or a machine without tiles of bfloat16")
def test_numpy_computes_where_a_machine_has_no_tiles(monkeypatch):
    group = make_group(SHAPES[1])
    part = make_part(group, 37)
    library = native.library()
    found = group.coded(part)
    try:
        assert library.ca_use(b"plain")
        assert not transform.is_served()
        plain = group.coded(part)
    finally:
        library.ca_use(b"amx")
    use("numpy", monkeypatch)
    np.testing.assert_array_equal(plain, group.coded(part))
    assert (found != plain).any()
