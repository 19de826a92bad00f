"""KV coded layer by layer, as objects have it: what comes back, how many bytes it takes, and what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ca_jax.storage.codec import CodecError, KVCodec
from ca_jax.storage.layer_codec import LayerCodec
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.planes import Planes, largest_codes
from ca_jax.storage.transform import LEAST_SPREAD

from .codec_kit import (
    DEEP,
    LAYOUT,
    TWO_SHAPES,
    decoded_by_numpy,
    in_steps,
    make_codec,
    make_correlated,
    make_numbers,
    make_predicting,
)


def layers_of(layout: KVLayout, block: np.ndarray) -> list[np.ndarray]:
    """Each layer's KV of a block, `[P, T, K, H]`."""
    groups = layout.by_group(block)
    places = (layout.place(layer) for layer in range(layout.num_layers))
    return [groups[group][index] for group, index in places]


def by_group(layout: KVLayout, layers: list[np.ndarray]) -> list[np.ndarray]:
    """The other way round: `[l, P, T, K, H]` of each group."""
    return [np.stack([layers[layer] for layer in group.layers]) for group in layout.groups]


def round_trip(codec: KVCodec, layout: KVLayout, layers: list[np.ndarray]) -> list[np.ndarray]:
    """Layers as they come back, one after the other."""
    layered = LayerCodec(codec, layout)
    decoder = layered.decoder(layers[0].shape[1])
    return [decoder.decode(layer, data) for layer, data in enumerate(layered.encode(layers))]


def of_tokens(layout: KVLayout, num_tokens: int) -> KVLayout:
    return dataclasses.replace(layout, block_tokens=num_tokens)


@pytest.mark.usefixtures("by_numpy")
@pytest.mark.parametrize("num_tokens", [1, 13, 37, 200])
@pytest.mark.parametrize(
    ("layout", "make", "slack"),
    [(LAYOUT, make_codec, 0.01), (DEEP, make_predicting, 0.01), (TWO_SHAPES, make_predicting, 0.3)],
    ids=["two bundles", "predicted", "two shapes"],
)
def test_layers_come_back_as_numpy_codes_them(layout, make, slack, num_tokens):
    """In steps. A number that is nearly halfway may be rounded either way, and all behind it of its token by then."""
    layout = of_tokens(layout, num_tokens)
    codec = make(layout)
    layers = layers_of(layout, make_correlated(codec, layout))
    found = round_trip(codec, layout, layers)
    assert [(each.shape, each.dtype) for each in found] == [(each.shape, each.dtype) for each in layers]
    wanted = decoded_by_numpy(codec, by_group(layout, layers))
    far = np.zeros(num_tokens)
    for group, *parts in zip(codec.groups, by_group(layout, found), wanted, strict=True):
        gap = np.abs(in_steps(group, parts[0].astype(np.float64) - parts[1])).max((0, 2))
        far = np.maximum(far, gap)
    assert far.max() < 1 + slack
    assert np.mean(far < slack) > 0.9
    if layout.dtype != "float16":
        gap = by_group(layout, [a - b for a, b in zip(found, layers, strict=True)])
        assert max(np.abs(in_steps(*each)).max() for each in zip(codec.groups, gap, strict=True)) < 0.51


@pytest.mark.usefixtures("by_numpy")
def test_they_are_what_a_block_codec_gives_of_the_same_tokens():
    codec = make_predicting(DEEP, bits=32)
    block = make_correlated(codec, DEEP)
    data, sums = codec.encode(block, DEEP)
    codec.decode(data, DEEP, wanted := np.empty_like(block), sums)
    found = np.stack(round_trip(codec, DEEP, layers_of(DEEP, block)))
    assert (np.abs(found - wanted).max((0, 1, 3, 4)) < 1e-4).mean() > 0.95


def test_they_take_about_the_bytes_of_a_block():
    layout = of_tokens(DEEP, 256)
    codec = make_predicting(layout, bits=32)
    block = make_correlated(codec, layout)
    frames = LayerCodec(codec, layout).encode(layers_of(layout, block))
    assert sum(map(len, frames)) < 1.1 * len(codec.encode(block, layout)[0]) < 0.3 * block.nbytes


@pytest.mark.parametrize("make", [make_codec, make_predicting])
def test_tokens_unlike_the_others_are_kept_apart_and_nans_come_back(make):
    """However many they are: here a third of all."""
    codec = make(LAYOUT)
    block = make_correlated(codec, LAYOUT)
    expected = np.stack(round_trip(codec, LAYOUT, list(block)))
    apart = np.arange(0, 30, 3)
    block[:, :, apart] *= 100
    block[1, 0, 10, 1, 3] = np.nan
    block[0, 1, 31] = np.inf
    found = np.stack(round_trip(codec, LAYOUT, list(block)))
    assert np.isnan(found[:, :, [10, 31]]).all()
    scale = np.abs(block[:, :, apart]).max(-1, keepdims=True) / 127
    assert (np.abs(found[:, :, apart] - block[:, :, apart]) <= 0.501 * scale).all()
    others = np.delete(np.arange(LAYOUT.block_tokens), [*apart, 10, 31])
    np.testing.assert_allclose(found[:, :, others], expected[:, :, others], atol=1e-4)
    assert np.isnan(np.stack(round_trip(codec, LAYOUT, list(np.full_like(block, np.nan))))).all()
    assert np.isfinite(np.stack(round_trip(codec, LAYOUT, list(np.full_like(block, 1e30))))).all()


@pytest.mark.usefixtures("by_numpy")
def test_codes_that_do_not_fit_their_width_keep_their_token_apart():
    """Energy alone does not tell of one number among many."""
    codec = make_predicting(DEEP, left=0.5)
    block = make_correlated(codec, DEEP)
    group = codec.groups[0]
    steps = np.zeros((1, group.width))
    steps[0, -1] = 200.0
    row = (steps @ group.inverse[3, 0]).reshape(DEEP.groups[0].num_kv_heads, 2, -1)
    block[3, :, 40] += np.swapaxes(row, 0, 1)
    found = np.stack(round_trip(codec, DEEP, list(block)))
    scale = np.abs(block[:, :, 40]).max(-1, keepdims=True) / 127
    assert (np.abs(found[:, :, 40] - block[:, :, 40]) <= 0.501 * scale).all()
    assert np.abs(in_steps(group, np.delete(found - block, 40, axis=2))).max() < 0.51


@pytest.mark.usefixtures("by_numpy")
@pytest.mark.parametrize("far", [-127, -121, 119, 120, 127])
def test_a_number_far_from_all_others_that_fits_its_width_comes_back(far):
    """Of those that share bytes, in a token that is like the others otherwise: as a layer, and in a block."""

    def code_of(codec: KVCodec, block: np.ndarray) -> int:
        return int(codec.rounded(codec.steps_of([block])[0], 1.0)[0][11, 0, -1, 40])

    codec = make_predicting(DEEP, left=0.5, bits=32)
    block = make_correlated(codec, DEEP)
    group = codec.groups[0]
    steps = np.zeros((1, group.width))
    steps[0, -1] = far - code_of(codec, block)
    row = (steps @ group.inverse[11, 0]).reshape(DEEP.groups[0].num_kv_heads, 2, -1)
    block[11, :, 40] += np.swapaxes(row, 0, 1)
    assert code_of(codec, block) == far
    found = np.stack(round_trip(codec, DEEP, list(block)))
    assert np.abs(in_steps(group, found - block)).max() < 0.51
    data, sums = codec.encode(block, DEEP)
    codec.decode(data, DEEP, found, sums)
    assert np.abs(in_steps(group, found - block)).max() < 0.51


@pytest.mark.parametrize("shares_bytes", [True, False])
def test_each_code_that_fits_comes_back(shares_bytes):
    spread = np.array([20, 0.5, 5, 0.5, 0.1, 0.5, 0.5], np.float32)
    planes, most = Planes(spread, shares_bytes), largest_codes(spread)
    codes = np.clip(np.arange(-32_000, 32_001)[None], -most[:, None], most[:, None]).astype(np.int16)
    codes[spread <= LEAST_SPREAD] = 0
    data = np.empty(planes.num_bytes(codes.shape[1]), np.uint8)
    planes.pack(codes, data)
    np.testing.assert_array_equal(planes.unpack(data, codes.shape[1]), codes)


@pytest.mark.usefixtures("by_numpy")
def test_what_came_back_once_comes_back_the_same():
    """A run of which a part was restored is written anew, with KV that was decoded."""
    codec = make_predicting(DEEP)
    block = make_correlated(codec, DEEP)
    block[:, :, 0] *= 50
    once = round_trip(codec, DEEP, list(block))
    np.testing.assert_allclose(np.stack(round_trip(codec, DEEP, once)), np.stack(once), atol=1e-3, rtol=1e-5)


def test_frames_that_are_others_are_refused():
    codec = make_codec(LAYOUT)
    layered = LayerCodec(codec, LAYOUT)
    frames = layered.encode(list(make_numbers(codec, LAYOUT)))
    for data, found in ((b"none", "a frame of zstd"), (frames[0][:-3], "a frame of zstd"), (b"", "a frame of zstd")):
        with pytest.raises(CodecError, match=f"layer 0 must be {found}"):
            layered.decoder(LAYOUT.block_tokens).decode(0, data)
    with pytest.raises(CodecError, match=r"layer 0 must be of \d+ to \d+ bytes, got"):
        layered.decoder(9).decode(0, frames[0])


def test_layers_are_decoded_in_their_order():
    """Those before say what a layer is predicted to be."""
    codec = make_predicting(DEEP)
    layered = LayerCodec(codec, DEEP)
    frames = layered.encode(list(make_correlated(codec, DEEP)))
    decoder = layered.decoder(DEEP.block_tokens)
    decoder.decode(0, frames[0])
    with pytest.raises(ValueError, match="layer must be 1, the next one, got 2"):
        decoder.decode(2, frames[2])


def test_its_name_is_the_codecs_and_the_forms():
    names = {make_codec(LAYOUT).name, *(LayerCodec(make_codec(LAYOUT, bits=bits), LAYOUT).name for bits in (3, 4))}
    assert len(names) == 3
