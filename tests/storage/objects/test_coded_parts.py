"""Objects whose layers are coded: what they hold, who finds them, what is damaged, and how many bytes are counted."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from ca_jax.kv.object_coding import ObjectCoding
from ca_jax.storage.codec import KVCodec
from ca_jax.storage.layer_codec import LayerCodec
from ca_jax.storage.objects import collector, parts, survey
from ca_jax.storage.objects.manifest import Manifest, PartRef
from ca_jax.storage.objects.parts import PartError
from ca_jax.storage.objects.store import ObjectStore
from tests.storage.codec_kit import decoded_by_numpy, make_codec, make_predicting
from tests.storage.objects import shared_kit as kit
from tests.storage.objects.shared_kit import Replica
from tests.storage.store_helpers import BLOCK_TOKENS, load, make_layout

LAYOUT = make_layout(head_dim=32)
RUN_TOKENS = 2 * BLOCK_TOKENS
IDS = list(range(100, 100 + 2 * RUN_TOKENS + 3))
CODEC, PREDICTING = make_codec(LAYOUT), make_predicting(LAYOUT)


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "RUN_BYTES", 2 * LAYOUT.block_bytes)


@pytest.fixture
def objects() -> ObjectStore:
    return ObjectStore("memory://", 5.0)


def coding(codec: KVCodec = CODEC) -> ObjectCoding:
    return ObjectCoding(LayerCodec(codec, LAYOUT))


def numbers_of(token_ids: Sequence[int], codec: KVCodec = CODEC) -> np.ndarray:
    """KV `[L, 2, T, K, H]` that follows from the tokens alone, as the codec expects it."""
    means = codec.groups[0].means
    rows = [np.random.default_rng(token).normal(size=means.shape).astype(np.float32) for token in token_ids]
    return means[:, :, None] + np.stack(rows, axis=2)


def make_replica(objects: ObjectStore, name: str = "a", codec: KVCodec | None = CODEC, **options: str) -> Replica:
    of = None if codec is None else coding(codec)
    return Replica(objects, name, coding=of, layout=LAYOUT, kv_of=numbers_of, **options)


def restored_here(replica: Replica, key: str = "s") -> tuple[np.ndarray | None, Exception | None]:
    """The KV that a replica has in DRAM once it has restored a session; and what went wrong."""
    manifest = kit.stored(replica.kv.objects, key, replica.kv.namespace)
    replica.store.drop(key)
    moves = [
        (replica.store.prepare_save(key, part.first, IDS[part.first : part.stop], may_be_read=True), part)
        for part in manifest.parts
    ]
    arrival = replica.kv.arrival([part for _, part in moves])
    num_done = replica.kv.restore(moves, arrival)
    for ticket, _ in moves[:num_done]:
        assert replica.store.complete_save(ticket)
    error = arrival.error
    return load(replica.store, key, IDS[: moves[num_done - 1][1].stop]) if num_done else None, error


@pytest.mark.usefixtures("by_numpy")
@pytest.mark.parametrize("codec", [CODEC, PREDICTING], ids=["alone", "predicted"])
def test_a_session_comes_back_as_numpy_codes_it(objects, codec):
    """But for numbers that are nearly halfway, and what they predict."""
    replica = make_replica(objects, codec=codec)
    manifest = replica.publish("s", IDS)
    assert [part.num_tokens for part in manifest.parts] == [RUN_TOKENS, RUN_TOKENS, 3]
    found, error = restored_here(replica)
    assert error is None
    gap = np.abs(found - decoded_by_numpy(codec, [numbers_of(IDS)])[0]).max((0, 1, 3, 4))
    assert (gap < 1e-3).mean() > 0.8
    assert np.abs(found - numbers_of(IDS)).max() > 0.01


def test_objects_take_fewer_bytes_and_are_counted_so(objects):
    """By the manifest, the survey and the collector, none of which knows the codec."""
    plain, coded = make_replica(objects, codec=None), make_replica(objects, namespace=kit.OTHER_SPACE)
    manifests = [replica.publish("s", IDS) for replica in (plain, coded)]
    sizes = [
        {name: len(objects.read(name).value) - 8192 for name in kit.kv_names(objects, space)}
        for space in (kit.SPACE, kit.OTHER_SPACE)
    ]
    num_bytes = [sum(each.values()) for each in sizes]
    assert num_bytes == [manifest.num_bytes for manifest in manifests]
    assert num_bytes[1] < 0.5 * num_bytes[0] == 0.5 * len(IDS) * LAYOUT.token_bytes
    for part in manifests[1].parts:
        assert sum(part.layer_bytes) == sizes[1][part.name]
        assert parts.measure_part(objects, part.name)[1] == 8192 + sizes[1][part.name]
    verdicts = list(survey.verify(objects))
    assert [each.ok for each in verdicts] == [True, True]
    assert sorted(each.num_bytes for each in verdicts) == sorted(num_bytes)
    assert collector.collect(objects, dry_run=True, now_s=kit.NOW_S).kept_bytes == sum(num_bytes)
    assert coded.num_written == num_bytes[1] + 8192 * len(sizes[1])


def test_what_begins_alike_is_named_and_not_coded_again(objects, monkeypatch):
    replica = make_replica(objects)
    replica.publish("s", IDS)
    monkeypatch.setattr(LayerCodec, "encode", None)
    other = make_replica(objects, "b")
    manifest = other.publish("t", IDS[: 2 * RUN_TOKENS])
    assert manifest.parts == kit.stored(objects, "s").parts[:2]
    assert other.num_written == 0
    assert other.kv.find_runs("alice", np.array(IDS, np.int32)) == list(manifest.parts)


@pytest.mark.parametrize("layer", range(LAYOUT.num_layers))
@pytest.mark.parametrize("which", [0, 1])
def test_a_byte_that_changed_is_found_and_its_layer_named(objects, layer, which):
    replica = make_replica(objects)
    part = replica.publish("s", IDS).parts[which]
    data = bytearray(objects.read(part.name).value)
    data[8192 + sum(part.layer_bytes[: layer + 1]) - 1] ^= 1
    objects.write(part.name, bytes(data))
    found, error = restored_here(replica)
    assert (None if found is None else found.shape[2]) == (part.first or None)
    assert error.name == part.name
    assert isinstance(error.error, PartError)
    assert str(error.error).startswith(f"layer {layer} of {part.name} must have crc32c {part.sums[layer]:#010x}")
    with pytest.raises(PartError, match=f"layer {layer} of .* must have crc32c"):
        parts.check_part(objects, part, kit.SPACE)


def test_what_passes_its_checksum_and_is_none_of_the_codecs_is_an_error_of_the_object(objects):
    """So that it is written anew."""
    make_replica(objects, codec=make_codec(LAYOUT, seed=3, step=9.0)).publish("s", IDS)  # Most numbers share a byte.
    _, error = restored_here(make_replica(objects, "b"))
    assert isinstance(error.error, PartError)
    assert "must hold what its codec coded: layer 0 must be of" in str(error.error)


def test_many_layers_of_many_objects_are_decoded_in_their_order(objects, monkeypatch):
    """Side by side, of each object one behind the other; one that waits for another does not stop the rest."""
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr("ca_jax.kv.object_transfers._READ_BYTES", 1)
    token_ids = list(range(100, 100 + 9 * RUN_TOKENS))
    monkeypatch.setattr("tests.storage.objects.test_coded_parts.IDS", token_ids)
    replica = make_replica(objects, codec=PREDICTING)
    replica.publish("s", token_ids)
    together, all_there = set(), threading.Barrier(3)
    decode = type(replica.kv.coding.codec.decoder(1)).decode

    def watched(self, layer, data):
        if layer == 0 and len(together) < 3:
            together.add(threading.get_ident())
            all_there.wait(60.0)
        return decode(self, layer, data)

    monkeypatch.setattr(type(replica.kv.coding.codec.decoder(1)), "decode", watched)
    found, error = restored_here(replica)
    assert error is None
    assert len(together) == 3
    assert found.shape[2] == len(token_ids)


def test_the_names_of_codecs_are_in_the_namespace():
    spaces = {each.namespace(b"salt") for each in (coding(), coding(), coding(PREDICTING))}
    assert len(spaces | {b"salt".hex()}) == 3


def test_a_manifest_without_sizes_is_read_and_one_that_needs_none_has_none(objects):
    """As replicas before there were codecs wrote and read them."""
    replica = make_replica(objects, codec=None)
    manifest = replica.publish("s", IDS)
    fields = json.loads(manifest.to_bytes().partition(b"\n")[2])
    assert {"name", "first", "num_tokens", "tokens", "sums"} == set(fields["parts"][0])
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    np.testing.assert_array_equal(restored_here(replica)[0], numbers_of(IDS))
    coded = dataclasses.replace(manifest, parts=(PartRef("n", 0, 4, "t", (1, 2, 3), (7, 8, 9)),))
    assert Manifest.from_bytes(coded.to_bytes()) == coded
    assert coded.num_bytes == 24
