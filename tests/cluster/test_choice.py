"""Which replica a key is sent to, which keys are held, and whose a directory is: without Ray."""

import fcntl
import itertools

import pytest

from ca_jax.cluster.choice import Held, Load, order_of, read_times, write_times
from ca_jax.cluster.config import ClusterConfig
from ca_jax.cluster.directories import claim
from ca_jax.storage.config import StoreConfig
from tests import engine_kit as kit

BUSY, IDLE = Load(share=2.0), Load(share=0.25)


@pytest.mark.parametrize(
    ("case", "order"),
    [
        ({"holder": "c"}, "cab"),
        ({"holder": "c", "loads": {"a": IDLE, "c": Load(share=1.9)}}, "cba"),
        ({"holder": "c", "loads": {"a": IDLE, "c": BUSY}}, "bac"),
        ({"holder": "c", "loads": {"a": BUSY, "b": Load(share=3.0), "c": Load(share=2.5)}}, "acb"),
        ({"holder": "c", "loads": {"c": BUSY}, "is_bound": True}, "c"),
        ({"is_bound": True, "was_held": True, "loads": {"a": IDLE}}, "bca"),
        ({"was_held": True, "loads": {"a": IDLE}}, "bca"),
        ({"was_held": True, "loads": {"b": Load(free_bytes=7)}}, "bac"),
        ({}, "abc"),
        ({"loads": {"a": IDLE, "b": IDLE}}, "acb"),
        ({"loads": {"a": BUSY, "b": IDLE}}, "cba"),
    ],
)
def test_a_request_goes_to_its_holder_the_least_loaded_or_by_the_ring(case, order):
    chosen = order_of(list("abc"), case.pop("loads", {}), case.pop("holder", None), **case)
    assert "".join(chosen) == order


def test_every_replica_that_is_there_is_offered_once_unless_the_holder_alone_can_answer():
    loads = [Load(), IDLE, BUSY]
    for given in itertools.product(loads, repeat=3):
        for holder, was_held in itertools.product([None, "a", "c"], [False, True]):
            chosen = order_of(list("abc"), dict(zip("abc", given, strict=True)), holder, was_held=was_held)
            assert sorted(chosen) == ["a", "b", "c"]
    assert order_of([], {}, None) == order_of([], {}, "a", was_held=True) == []


def test_the_keys_that_were_used_last_are_held(tmp_path):
    held = Held[str](2)
    held.use(["one", "two"], "a", 1.0)
    held.use(["one"], "b", 2.5)
    held.use(["three"], "c", 3.0)
    assert [held.get(key) for key in ("one", "two", "three")] == [(2.5, "b"), None, (3.0, "c")]
    assert held.times() == {"one": 2, "three": 3}
    write_times(tmp_path / "keys", held.times())
    assert read_times(tmp_path / "keys") == {"one": 2.0, "three": 3.0}
    held.forget(["one", "never"])
    assert held.times() == {"three": 3}


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"a": "b"}', "{", '{"a": null}'])
def test_a_file_of_keys_that_is_damaged_says_nothing(tmp_path, text):
    (tmp_path / "keys").write_text(text)
    assert read_times(tmp_path / "keys") == read_times(tmp_path / "none") == {}


def test_a_directory_is_one_process_s_and_the_next_replica_s_that_takes_its_place(tmp_path):
    root = tmp_path / "kv"
    first, second = claim(root), claim(root)
    assert [each.directory.name for each in (first, second)] == ["replica-0", "replica-1"]
    assert first.name != second.name
    with (root / "replica-0.lock").open("ab") as another, pytest.raises(BlockingIOError):
        fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
    first.release()
    again = claim(root)
    assert (again.directory, again.name) == (first.directory, first.name)
    again.release()
    with kit.small_engine(store=kit.ssd_store(root / "replica-0")):  # It is no replica, and has the store.
        assert claim(root).directory.name == "replica-2"


def test_a_replica_s_store_is_in_its_own_directory_and_below_the_common_url(tmp_path):
    mine = claim(tmp_path)
    store = StoreConfig(ssd_dir=str(tmp_path), ssd_url="s3://bucket/kv/", dram_gib=0.5)
    own = mine.config(store)
    assert (own.ssd_dir, own.ssd_url) == (str(tmp_path / "replica-0"), f"s3://bucket/kv/{mine.name}")
    assert own.dram_gib == 0.5
    assert mine.config(StoreConfig(ssd_dir=str(tmp_path))).ssd_url is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_replicas": 0}, "num_replicas must be at least 1, got 0"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas must be at least min_replicas, 3, got 2"),
        ({"gpus_per_replica": -1}, "gpus_per_replica must be at least 0"),
        ({"target_ongoing_requests": 0.0}, "target_ongoing_requests must be above 0"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ClusterConfig(**fields)
