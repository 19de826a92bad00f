"""KV that is coded on disk: what comes back, of how many bytes, and what is refused; blocks, tiers and stores of it."""

from __future__ import annotations

import dataclasses
import os
import threading
from contextlib import closing

import numpy as np
import pytest
import tensorstore as ts
from threadpoolctl import threadpool_info

from ca_jax.storage import transform
from ca_jax.storage.codec import CodecError, KVCodec
from ca_jax.storage.inspector import StoreInspector, verify
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.records import BlockIoError, Residency
from ca_jax.storage.tiers.formats import RawTier, Zarr3Tier
from ca_jax.storage.transform import GroupCodec
from tests.tolerances import CODED_ATOL

from .codec_kit import (
    BLOCK_TOKENS,
    DEEP,
    LAYOUT,
    TWO_SHAPES,
    in_steps,
    make_codec,
    make_correlated,
    make_numbers,
    make_predicting,
    most_steps,
)
from .store_helpers import (
    NAMESPACE,
    PATIENCE_S,
    assert_same,
    fetch,
    ids,
    load,
    make_layout,
    make_store,
    mask_of,
    save,
)

NAME_OF_VERSION_1 = "67b0bf444448b5fe014185f69d677309156584b0a6aa0f30c890ecbb9bfc5828"


def unit_of(codec: KVCodec, layout: KVLayout, block: np.ndarray) -> float:
    """To how many steps' multiples a block was rounded."""
    return 2.0 ** (float(codec.unpacked(codec.encode(block, layout)[0], layout)[1]) / 4)


def coded(codec: KVCodec, layout: KVLayout, block: np.ndarray) -> np.ndarray:
    """A block as it comes back."""
    data, sums = codec.encode(block, layout)
    assert len(data) <= codec.stored_bytes(layout)
    found = np.full_like(block, 7)
    codec.decode(data, layout, found, sums)
    return found


# A block.


@pytest.fixture(params=["float32", "two bfloat16"])
def atol(request, monkeypatch) -> float:
    """What an arithmetic adds to errors, in steps; what is computed is so by this arithmetic."""
    if request.param == "float32":
        monkeypatch.setattr(transform, "is_served", lambda: False)
    elif not transform.is_served():
        pytest.skip("no library, or a machine without tiles of bfloat16")
    return CODED_ATOL[request.param]


@pytest.mark.parametrize(("layout", "slack"), [(LAYOUT, 0), (TWO_SHAPES, 0.3)], ids=["alike", "two shapes"])
def test_each_number_comes_back_within_half_a_step(layout, slack, atol):
    """Of float16 within what its own rounding adds."""
    codec = make_codec(layout)
    block = make_numbers(codec, layout)
    found = coded(codec, layout, block)
    assert 0.4 < most_steps(codec, layout, found, block) < 0.5 + slack + atol
    assert len(codec.encode(block, layout)[0]) < block.nbytes * (0.5 if layout is LAYOUT else 1)


@pytest.mark.parametrize(
    ("layout", "bits", "slack"), [(DEEP, 8, 0.001), (DEEP, 2.5, 0.001), (DEEP, 1.5, 0.001), (TWO_SHAPES, 8, 0.3)]
)
def test_errors_of_layers_that_predict_others_do_not_add_up(layout, bits, slack, atol):
    """Half a unit in each layer, in steps, where numbers are rounded more coarsely as well."""
    codec = make_predicting(layout, bits)
    block = make_correlated(codec, layout)
    unit = unit_of(codec, layout, block)
    assert (unit > 1) == (bits < 8)
    assert 0.4 < most_steps(codec, layout, coded(codec, layout, block), block) / unit < 0.5 + slack + atol


def test_what_other_layers_predict_takes_fewer_bytes(atol):
    codec = make_predicting(DEEP)
    block = make_correlated(codec, DEEP)
    groups = []
    for group in codec.groups:
        spread = in_steps(group, DEEP.by_group(block)[0] - group.means[:, :, None]).std(-2).reshape(group.spread.shape)
        groups.append(dataclasses.replace(group, earlier=np.zeros(0), spread=spread, energy=np.zeros(0)))
    alone = dataclasses.replace(codec, groups=tuple(groups))
    assert len(codec.encode(block, DEEP)[0]) < 0.75 * len(alone.encode(block, DEEP)[0])
    assert most_steps(alone, DEEP, coded(alone, DEEP, block), block) < 0.5 + atol


def test_numbers_that_share_a_byte_may_be_larger_than_half_of_one(atol):
    codec = make_predicting(DEEP, left=0.5)
    block = make_correlated(codec, DEEP, outliers=0.0001)
    assert most_steps(codec, DEEP, coded(codec, DEEP, block), block) < 0.5 + atol
    payload = codec.unpacked(codec.encode(block, DEEP)[0], DEEP)
    codes = codec._planes.unpack(codec._parts_of(payload, DEEP)[5], DEEP.block_tokens)
    assert np.abs(codes[len(codes) // DEEP.num_layers :]).max() > 8


def test_numbers_that_are_left_out_do_not_spoil_what_they_predict(atol):
    """The coder must predict from zeros, as the decoder does, even where such a number is far off."""
    codec = make_predicting(DEEP)
    (group,) = codec.groups
    spread = np.where(np.arange(group.width) % 2, group.spread, 0.1)
    codec = dataclasses.replace(codec, groups=(dataclasses.replace(group, spread=spread, earlier=0.3 * group.earlier),))
    block = make_correlated(codec, DEEP, outliers=0.0001)
    gap = np.abs(in_steps(group, block - coded(codec, DEEP, block)))  # [l * R, T, D]
    is_kept = spread.reshape(len(gap), 1, -1) > 0.2
    assert (gap * is_kept).max() < 0.501 + atol
    assert gap.max() > 1.5


def test_a_file_of_version_1_is_read_as_one_that_predicts_nothing(tmp_path, atol):
    """Its name, and so the blocks on disk that are of it, are those that they were."""
    codec = make_codec(LAYOUT, version=1)
    codec.save(tmp_path / "codec")
    assert "earlier_0" not in np.load(tmp_path / "codec").files
    found = KVCodec.load(tmp_path / "codec")
    assert found.name == codec.name == NAME_OF_VERSION_1
    assert found.name != make_codec(LAYOUT).name
    block = make_numbers(codec, LAYOUT)
    data, sums = found.encode(block, LAYOUT)
    assert found.unpacked(data, LAYOUT)[0] == 1
    small = [make_codec(LAYOUT, step=1.5, version=version).payload_bytes(LAYOUT) for version in (1, 2)]
    assert small[0] < small[1]  # A byte a number, where now two share one and have room for more elsewhere.
    assert most_steps(codec, LAYOUT, coded(found, LAYOUT, block), block) < 0.5 + atol
    with pytest.raises(CodecError, match="must begin with 2, got 1"):
        make_codec(LAYOUT).decode(data, LAYOUT, np.empty_like(block), sums)
    np.savez(tmp_path / "later.npz", version=3)
    with pytest.raises(ValueError, match="version must be 1 or 2, got 3"):
        KVCodec.load(tmp_path / "later.npz")


@pytest.mark.usefixtures("atol")
def test_what_came_back_once_comes_back_the_same():
    codec = make_codec(LAYOUT)
    once = coded(codec, LAYOUT, make_numbers(codec, LAYOUT))
    np.testing.assert_allclose(coded(codec, LAYOUT, once), once, atol=1e-5)


@pytest.mark.usefixtures("atol")
@pytest.mark.parametrize("predicts", [False, True])
def test_tokens_unlike_the_others_are_kept_apart_and_nans_come_back(predicts):
    codec = make_predicting(LAYOUT) if predicts else make_codec(LAYOUT)
    block = (make_correlated if predicts else make_numbers)(codec, LAYOUT)
    expected = coded(codec, LAYOUT, block)
    block[:, :, 5] *= 100
    block[1, 0, 9, 1, 3] = np.nan
    block[0, 1, 30] = np.inf
    block[:, :, 31] = 0
    found = coded(codec, LAYOUT, block)
    assert np.isnan(found[:, :, [9, 30]]).all()
    scale = np.abs(block[:, :, 5]).max(-1, keepdims=True) / 127
    assert (np.abs(found[:, :, 5] - block[:, :, 5]) <= 0.501 * scale).all()
    others = np.delete(np.arange(BLOCK_TOKENS), [5, 9, 30, 31])
    np.testing.assert_array_equal(found[:, :, others], expected[:, :, others])
    assert np.isnan(coded(codec, LAYOUT, np.full_like(block, np.nan))).all()


@pytest.mark.parametrize("left", [1.5, 0.15])
def test_which_tokens_are_kept_apart_does_not_depend_on_the_step(left):
    """Even where most numbers are left out."""
    codec = make_predicting(DEEP, left=left)
    block = make_correlated(codec, DEEP)
    means = codec.groups[0].means
    block[:, :, 5] = means + 2.5 * (block[:, :, 5] - means)
    payload = codec.unpacked(codec.encode(block, DEEP)[0], DEEP)
    assert payload[2:4].tolist() == [1, 0]
    assert codec._parts_of(payload, DEEP)[2][0] == 5


@pytest.mark.usefixtures("atol")
@pytest.mark.parametrize("bits", [0.5, 1.0, 2.0, 4.0, 8.0])
def test_a_block_takes_no_more_than_its_room_however_it_is(bits):
    codec = make_codec(LAYOUT, bits)
    errors = []
    for factor in (1, 5):  # Five times as far from the mean as was expected.
        block = make_numbers(codec, LAYOUT)
        for group, part in zip(codec.groups, LAYOUT.by_group(block), strict=True):
            part[:] = (part - group.means[:, :, None]) * factor + group.means[:, :, None]
        errors.append(most_steps(codec, LAYOUT, coded(codec, LAYOUT, block), block))
    assert 0.4 < errors[0] <= errors[1]
    with pytest.raises(CodecError, match="must take at most"):
        codec.encode(np.full_like(block, 1e30), LAYOUT)


def test_fewer_bits_lose_more():
    large, errors = make_layout(block_tokens=512, num_layers=3, num_kv_heads=2, head_dim=8), []
    for bits in (1.0, 2.0, 3.0, 5.0):
        codec = make_codec(large, bits)
        block = make_numbers(codec, large)
        errors.append(most_steps(codec, large, coded(codec, large, block), block))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5 * errors[0]


@pytest.mark.usefixtures("atol")
def test_any_changed_byte_is_found():
    codec = make_codec(LAYOUT)
    block = make_numbers(codec, LAYOUT)
    block[:, :, 3] *= 50
    data, sums = codec.encode(block, LAYOUT)
    other = codec.encode(make_numbers(codec, LAYOUT, 1), LAYOUT)[0]
    rng, into = np.random.default_rng(0), np.empty_like(block)
    bad = [other, data[:-1], b"", data + b"x", other[:100] + data[100:]]
    for at in rng.choice(len(data), 200, replace=False):
        bad.append(data[:at] + bytes([data[at] ^ int(rng.integers(1, 256))]) + data[at + 1 :])
    for each in bad:
        try:
            codec.decode(each, LAYOUT, into, sums)
        except CodecError:
            continue
        np.testing.assert_array_equal(into, coded(codec, LAYOUT, block))  # A byte of zstd's that says nothing.


def test_a_codec_goes_through_a_file_and_has_one_name(tmp_path):
    codec = make_codec(TWO_SHAPES)
    codec.save(tmp_path / "codec")
    found = KVCodec.load(tmp_path / "codec")
    assert found.name == codec.name != make_codec(TWO_SHAPES, seed=1).name
    assert make_codec(TWO_SHAPES, bits=3).name != codec.name
    block = make_numbers(codec, TWO_SHAPES)
    assert found.encode(block, TWO_SHAPES)[0] == codec.encode(block, TWO_SHAPES)[0]
    np.savez(tmp_path / "other.npz", a=1)
    for path, error in ((tmp_path / "other.npz", ValueError), (tmp_path / "none", FileNotFoundError)):
        with pytest.raises(error):
            KVCodec.load(path)


def test_kv_of_another_model_is_refused():
    codec = make_codec(LAYOUT)
    codec.check(LAYOUT, f"{NAMESPACE.weights} window 64")
    with pytest.raises(ValueError, match="must be of the model with fingerprint other"):
        codec.check(LAYOUT, "other")
    with pytest.raises(ValueError, match=r"KV \[\(3, 2, 2, 5\)\], got one of .*\(3, 2, 2, 8\)"):
        codec.check(make_layout(), NAMESPACE.weights)
    with pytest.raises(ValueError, match="as it is computed, got int8"):
        codec.check(make_layout("int8", num_layers=3, num_kv_heads=2, head_dim=8), NAMESPACE.weights)
    with pytest.raises(ValueError, match="must have an inverse"):
        GroupCodec(means=np.zeros((1, 2, 1, 4)), forward=np.ones((1, 1, 8, 8)), spread=np.ones((1, 1, 8)))
    with pytest.raises(ValueError, match=r"\[l, J, R, D, D\] and .*, \[1, 8, 8\]"):
        GroupCodec(
            means=np.zeros((1, 2, 1, 4)),
            forward=np.eye(8)[None, None],
            spread=np.ones((1, 1, 8)),
            earlier=np.ones((1, 8, 8)),
        )
    with pytest.raises(ValueError, match="must have matrices"):
        GroupCodec(means=np.zeros((1, 2, 1, 4)), forward=np.ones((1, 1, 8, 8)), spread=np.ones((1, 2, 4)))


# A tier.


def test_a_tier_keeps_coded_blocks_that_tensorstore_reads_alone(tmp_path):
    codec = make_codec(LAYOUT, bits=6)
    tier = Zarr3Tier(LAYOUT, tmp_path, 40 * codec.stored_bytes(LAYOUT), codec=codec)
    assert tier.num_blocks == 40
    blocks = np.stack([make_numbers(codec, LAYOUT, seed) for seed in range(3)])
    sums = np.zeros((3, 3), np.uint32)
    tier.write_blocks([7, 1, 33], blocks, sums)
    found = np.empty_like(blocks)
    tier.read_blocks([7, 1, 33], found, sums)
    for index in range(3):
        np.testing.assert_array_equal(found[index], coded(codec, LAYOUT, blocks[index]))
    spec = {"driver": "zarr3", "kvstore": f"file://{tmp_path}/zarr3/000000/"}
    payload = ts.open(spec, open=True).result()[7].read().result()
    np.testing.assert_array_equal(payload, codec.unpacked(codec.encode(blocks[0], LAYOUT)[0], LAYOUT))
    with pytest.raises(BlockIoError, match="layer 0 must have crc32c"):
        tier.read_blocks([1], found[:1], sums[:1])
    with pytest.raises(BlockIoError, match="must hold block 2"):
        tier.read_blocks([2], found[:1], sums[:1])
    tier.delete_blocks([7])
    assert tier.stored_block_ids() == [1, 33]
    tier.close()


def blas_threads() -> set[int]:
    """Of products by numpy, in this process."""
    return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}


def test_no_more_blocks_are_coded_at_a_time_than_there_are_cores(tmp_path, monkeypatch):
    """And on one thread each. A disk that answers is not taken for one that does not because all end at once."""
    codec = make_codec(LAYOUT)
    together, most, lock, threads, all_places = [0], [0], threading.Lock(), set(), threading.Barrier(3)

    def counted(name):
        do = getattr(KVCodec, name)

        def call(*arguments):
            with lock:
                together[0] += 1
                most[0] = max(most[0], together[0])
            all_places.wait(PATIENCE_S)  # Blocks are coded three at a time, or this fails.
            threads.update(blas_threads())
            try:
                return do(*arguments)
            finally:
                with lock:
                    together[0] -= 1

        return call

    before = blas_threads()
    for name in ("encode", "decode"):
        monkeypatch.setattr(KVCodec, name, counted(name))
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    tier = Zarr3Tier(LAYOUT, tmp_path, 12 * codec.stored_bytes(LAYOUT), codec=codec)
    blocks = np.stack([make_numbers(codec, LAYOUT, seed) for seed in range(12)])
    tier.write_blocks(list(range(12)), blocks)
    assert most == [3]
    most[0] = 0
    tier.read_blocks(list(range(12)), np.empty_like(blocks))
    assert most == [3]
    assert threads == {1}
    assert blas_threads() == before
    tier.close()


def test_a_tier_at_a_url_keeps_them_too():
    codec = make_codec(LAYOUT)
    tier = Zarr3Tier(LAYOUT, "memory://codec/", 4 * codec.stored_bytes(LAYOUT), codec=codec)
    block, sums, found = make_numbers(codec, LAYOUT), np.zeros((1, 3), np.uint32), np.empty(LAYOUT.block_shape, "f4")
    tier.write_blocks([2], [block], sums)
    tier.read_blocks([2], [found], sums)
    np.testing.assert_array_equal(found, coded(codec, LAYOUT, block))
    with pytest.raises(BlockIoError, match="must hold block 1"):
        tier.read_blocks([1], [found], sums)
    tier.close()


def test_slots_of_one_size_take_no_coded_blocks(tmp_path):
    with pytest.raises(ValueError, match="must be zarr3 with a codec, got raw"):
        RawTier(LAYOUT, tmp_path, 1 << 20, codec=make_codec(LAYOUT))


# A store: blocks of four tokens of three layers.

SMALL = make_layout()


@pytest.fixture
def codec(tmp_path) -> KVCodec:
    codec = make_codec(SMALL)
    codec.save(tmp_path / "codec.npz")
    return codec


@pytest.fixture
def options(tmp_path, codec) -> dict[str, object]:
    return {"ssd_dir": tmp_path / "store", "ssd_codec": str(tmp_path / "codec.npz"), "ssd_blocks": 40}


def numbers_of(codec: KVCodec, num_tokens: int, seed: int) -> np.ndarray:
    """KV `[L, 2, T, K, H]` as the codec expects it."""
    means = codec.groups[0].means[:, :, None]
    shape = (SMALL.num_layers, *SMALL.groups[0].shape(num_tokens))
    return (means + np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def expect_near(found: np.ndarray | None, wanted: np.ndarray, codec: KVCodec) -> None:
    assert found is not None
    assert np.abs(in_steps(codec.groups[0], found - wanted)).max() < 0.51


def test_sessions_are_coded_on_their_way_out_and_read_by_the_next_store(options, codec):
    kv = {key: numbers_of(codec, num_tokens, seed) for seed, (key, num_tokens) in enumerate((("a", 10), ("b", 8)))}
    with closing(make_store(8, **options)) as store:
        for key, each in kv.items():
            assert save(store, key, ids(each.shape[2]), each)
        assert store.settle(PATIENCE_S)
        assert_same(load(store, "a", ids(11)), kv["a"])  # In DRAM it is as it was.
    with closing(make_store(8, **options)) as store:
        for key, each in kv.items():
            fetch(store, key)
            expect_near(load(store, key, ids(each.shape[2] + 1)), each, codec)
    with StoreInspector(options["ssd_dir"]) as inspector:
        (namespace,) = inspector.namespaces()
        assert namespace.codec == codec.name
        verdicts = list(verify(inspector))
        assert len(verdicts) == 2
        assert all(each.ok for each in verdicts)
    (options["ssd_dir"] / namespace.directory_name / "codec.npz").unlink()
    with StoreInspector(options["ssd_dir"]) as inspector, pytest.raises(ValueError, match="must hold the codec"):
        inspector.open_blocks(namespace)


def test_what_is_added_and_cut_is_coded_as_it_stands(options, codec):
    kv = numbers_of(codec, 14, 0)
    with closing(make_store(8, **options)) as store:
        assert save(store, "a", ids(6), kv[:, :, :6])
        assert store.settle(PATIENCE_S)
    with closing(make_store(8, **options)) as store:
        fetch(store, "a")
        once = load(store, "a", ids(7))
        assert save(store, "a", ids(14)[6:], kv[:, :, 6:], start_token=6)  # The second block is written anew.
        assert store.settle(PATIENCE_S)
        store.discard("a", mask_of(14, (4, 5, 6, 9)))
        assert store.settle(PATIENCE_S)
    with closing(make_store(8, **options)) as store:
        fetch(store, "a")
        kept = np.delete(np.arange(14), (4, 5, 6, 9))
        found = load(store, "a", [*np.array(ids(14))[kept].tolist(), 1], num_dropped=4)
        expect_near(found, kv[:, :, kept], codec)
        np.testing.assert_allclose(found[:, :, :4], once[:, :, :4], atol=1e-6)


def test_blocks_that_sessions_share_have_the_sums_of_what_is_on_disk(options, codec):
    """The second is flushed from memory that has not been coded, or has: the first one's sums hold for both."""
    kv = numbers_of(codec, 11, 0)
    with closing(make_store(12, **options)) as store:
        assert save(store, "a", ids(8), kv[:, :, :8])
        assert store.settle(PATIENCE_S)
        assert store.copy_prefix("a", "b", ids(8)) == 8
        assert save(store, "b", ids(11)[8:], kv[:, :, 8:], start_token=8)
        assert store.settle(PATIENCE_S)
        assert store.stats().ssd.flushed_bytes == 3 * SMALL.block_bytes
        with StoreInspector(options["ssd_dir"]) as inspector:
            assert [each.ok for each in verify(inspector)] == [True, True]
    with closing(make_store(12, **options)) as store:
        for key, num_tokens in (("b", 11), ("a", 8)):
            fetch(store, key)
            expect_near(load(store, key, ids(num_tokens + 1)), kv[:, :, :num_tokens], codec)


def test_a_store_of_another_codec_or_of_none_begins_anew_and_leaves_what_is_there(options, codec, tmp_path):
    with closing(make_store(8, **options)) as store:
        assert save(store, "a", ids(8), numbers_of(codec, 8, 0))
        assert store.settle(PATIENCE_S)
    make_codec(SMALL, seed=3).save(tmp_path / "other.npz")
    for other in (str(tmp_path / "other.npz"), None):
        with closing(make_store(8, **{**options, "ssd_codec": other})) as store:
            assert store.residency("a") is Residency.ABSENT
    with closing(make_store(8, **options)) as store:
        fetch(store, "a")
        assert load(store, "a", ids(9)) is not None


def test_more_blocks_fit_on_the_same_disk(tmp_path):
    plain = Zarr3Tier(LAYOUT, tmp_path / "plain", 1 << 20)
    packed = Zarr3Tier(LAYOUT, tmp_path / "coded", 1 << 20, codec=make_codec(LAYOUT, bits=4))
    assert (plain.num_blocks, packed.num_blocks) == (85, 256)  # Of three pages, and of one.
    plain.close()
    packed.close()


@pytest.mark.parametrize(
    ("changes", "error", "found"),
    [
        ({"ssd_driver": "raw"}, ValueError, "must be zarr3 with an ssd_codec, got raw"),
        ({"ssd_dir": None}, ValueError, "must have an ssd_dir whose blocks it codes"),
        ({"ssd_codec": "/nowhere/codec.npz"}, FileNotFoundError, "nowhere"),
    ],
)
def test_what_a_store_refuses(options, changes, error, found):
    with pytest.raises(error, match=found):
        make_store(8, **{**options, **changes})


def test_a_store_refuses_another_models_codec(options):
    wide = make_layout(num_kv_heads=3)
    with pytest.raises(ValueError, match="must be of the model"):
        make_store(8, layout=wide, **options)
