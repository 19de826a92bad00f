"""Who follows the events knows which blocks are stored: of a store under random operations, and of a server by ZeroMQ.

Batches are decoded by structs declared as vLLM 0.26 declares its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis.stateful import invariant, rule

pytest.importorskip("msgspec")
pytest.importorskip("zmq")

import msgpack
import msgspec
import zmq

from ca_jax.server.config import ServerConfig
from ca_jax.server.kv_events import KVEvents, StoredBlocks
from tests import engine_kit as kit
from tests import server_kit as sk
from tests.server_kit import user
from tests.storage import store_helpers
from tests.storage.store_machine import KEYS, TENANTS
from tests.storage.store_reference import ids_of
from tests.storage.test_store_properties import StoreMachine, run

NUM_EXAMPLES = 15
END = (-1).to_bytes(8, "big", signed=True)
Prefix = tuple[str, tuple[int, ...]]  # A tenant, and a block's tokens behind all before.


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


DECODER = msgspec.msgpack.Decoder(type=KVEventBatch)


class Follower:
    """A router's index: what each block that it was told of has in it."""

    def __init__(self) -> None:
        self.blocks: dict[bytes | int, Prefix] = {}

    def take(self, batch: bytes) -> KVEventBatch:
        decoded = DECODER.decode(batch)
        for event in decoded.events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    gone = self.blocks.pop(name)
                    assert not any(
                        tenant == gone[0] and len(ids) > len(gone[1]) and ids[: len(gone[1])] == gone[1]
                        for tenant, ids in self.blocks.values()
                    ), "a block is removed before those behind it"
            else:
                self._store(event)
        return decoded

    def _store(self, event: BlockStored) -> None:
        size, keys = event.block_size, event.extra_keys or [None] * len(event.block_hashes)
        assert len(event.token_ids) == size * len(event.block_hashes) == size * len(keys)
        tenant = keys[0][0] if event.parent_block_hash is None and keys[0] else ""
        before: Prefix = (tenant, ())
        if event.parent_block_hash is not None:
            before = self.blocks[event.parent_block_hash]
        for index, name in enumerate(event.block_hashes):
            assert name not in self.blocks, "a block is told once"
            before = before[0], (*before[1], *event.token_ids[index * size : (index + 1) * size])
            self.blocks[name] = before

    def is_of(self) -> set[Prefix]:
        assert len(set(self.blocks.values())) == len(self.blocks), "no block has two names"
        return set(self.blocks.values())


def prefixes(tenant: str, token_ids: list[int], num_plain: int, size: int) -> set[Prefix]:
    """Of the full blocks of leading tokens."""
    return {(tenant, tuple(token_ids[:stop])) for stop in range(size, num_plain + 1, size)}


# A store, beside a reference that knows tokens.


class FollowedMachine(StoreMachine):
    """The machine of the store's own tests, with a follower of its events."""

    def make_store(self) -> None:
        super().make_store()
        self.stored, self.follower = StoredBlocks(), Follower()
        self.is_new = True
        self.unknown = set[Prefix]()  # What gets to SSD, or is there, with no token ids at hand in DRAM.
        self.store.watch(self.tell)

    def tell(self, keys) -> None:
        self.follower.take(msgpack.packb([0.0, self.stored.changes(self.store, keys), 0]))

    @invariant()
    def the_follower_knows_what_is_stored(self) -> None:
        changed, self.store._index.watched = self.store._index.watched, {}
        self.tell(changed)
        in_dram, on_ssd = set[Prefix](), set[Prefix]()
        for key, reference in self.reference.items():
            for found, tokens, lineage in (
                (in_dram, reference.tokens, reference.lineage),
                (on_ssd, reference.ssd or [], reference.ssd_lineage),
            ):
                num_plain = lineage.plain_tokens(len(tokens))
                found |= prefixes(TENANTS[key], ids_of(tokens), num_plain, store_helpers.BLOCK_TOKENS)
        if self.is_new:
            self.is_new, self.unknown = False, on_ssd  # By an earlier store.
        assert in_dram | (on_ssd - self.unknown) <= self.follower.is_of() <= in_dram | on_ssd

    @rule(key=KEYS)
    def leave_dram(self, key) -> None:
        """What a flush writes goes on its way."""
        tokens = self.reference[key].tokens if key in self.reference else []
        self.unknown |= prefixes(TENANTS[key], ids_of(tokens), len(tokens), store_helpers.BLOCK_TOKENS)
        super().leave_dram(key)


class FollowedSsdMachine(FollowedMachine):
    driver = "zarr3"


@pytest.mark.parametrize("machine", [FollowedMachine, FollowedSsdMachine])
def test_events_tell_what_a_store_has(machine):
    run(machine, NUM_EXAMPLES)


# A server.


class Subscriber:
    """Follows a server by ZeroMQ, and asks for a replay of what was sent before the server knew of it."""

    def __init__(self, url: str, replay_url: str, topic: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.connect(url)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.replay_url, self.topic = replay_url, topic
        self.follower = Follower()
        self.batches: list[KVEventBatch] = []
        self.is_known = False  # Something came that was not asked for: from then on everything does.

    def catch_up(self) -> set[Prefix]:
        while self.socket.poll(50):
            topic, number, batch = self.socket.recv_multipart()
            assert topic.decode() == self.topic
            if not self.is_known:
                self._ask()
            self.is_known = True
            self._take(int.from_bytes(number, "big"), batch)
        if not self.is_known:
            self._ask()
        return self.follower.is_of()

    def _ask(self) -> None:
        for number, batch in replay(self.replay_url, len(self.batches)):
            self._take(number, batch)

    def _take(self, number: int, batch: bytes) -> None:
        if number >= len(self.batches):  # An earlier one came with the replay.
            assert number == len(self.batches), "none is missing"
            self.batches.append(self.follower.take(batch))


def replay(url: str, start: int) -> Iterator[tuple[int, bytes]]:
    """What a server sends again."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(url)
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            assert socket.poll(1000 * sk.DEADLINE_S)
            _, number, batch = socket.recv_multipart()
            if number == END:
                return
            yield int.from_bytes(number, "big"), batch


def stored(server: sk.Running) -> set[Prefix]:
    """What the store has, as it says itself."""
    with server.engine._lock:
        store = server.engine._kv.store
        found = [store.plain_prefix(each.key) for each in store.list()]
        sets = (prefixes(each.domain, each.token_ids.tolist(), len(each.token_ids), kit.BLOCK_TOKENS) for each in found)
        return set().union(*sets)


def test_a_subscriber_knows_what_a_server_has(tmp_path):
    urls = [f"ipc://{tmp_path}/{name}" for name in ("events", "replay")]
    config = {"kv_events_url": urls[0], "kv_events_replay_url": urls[1], "kv_events_topic": "kv@here@tiny"}
    subscriber = Subscriber(*urls, "kv@here@tiny")
    with sk.running(server=config, store=kit.store_of(12)) as server, server.client() as client, server.http() as http:
        seen = []

        def follow() -> None:
            server.engine.wait_for_saves()
            server.engine.keep()
            sk.wait_for(lambda: subscriber.catch_up() == stored(server))
            seen.append(subscriber.follower.is_of())

        said = sk.chat(client, [user("What happened on the first day of all?")])
        follow()
        assert seen[-1]
        again = [user("What happened on the first day of all?"), sk.assistant(sk.text_of(said)), user("And then?")]
        said = sk.chat(client, again)
        follow()
        assert seen[-1] > seen[-2], "a turn adds blocks"
        where = f"/v1/sessions/{said.session_id}"
        assert http.post(f"{where}/discard", json={"start": 16, "stop": 24}).status_code == 200
        follow()
        assert seen[-1] < seen[-2], "what is behind a cut is nobody else's"
        assert http.delete(where).status_code == 200
        follow()
        assert not seen[-1]
        for day in itertools.takewhile(lambda day: day < 6 or not subscriber.is_known, itertools.count()):
            sk.chat(client, [user(f"{day} is a day of which there is very much to tell, and who could tell it all?")])
            follow()
        assert any(not later >= earlier for earlier, later in itertools.pairwise(seen[4:])), "some were evicted"

        missed = list(replay(urls[1], 0))
        late = Follower()
        for _, batch in missed:
            late.take(batch)
        assert late.is_of() == seen[-1]
        assert [number for number, _ in missed] == list(range(len(missed)))
        assert [number for number, _ in replay(urls[1], 3)] == list(range(3, len(missed)))
    assert not subscriber.catch_up(), "a server that ends has nothing"
    assert all(each.data_parallel_rank == 0 and each.ts > 0 for each in subscriber.batches)
    subscriber.context.destroy()


def test_nothing_is_noted_where_nobody_follows():
    with kit.small_engine() as engine:
        assert engine._kv.store._index.watched is None


def test_an_address_that_is_none_says_so():
    with pytest.raises(ValueError, match="address to listen on, got 'tcp://nowhere'"):
        KVEvents("tcp://nowhere")


def test_replicas_of_a_machine_have_ports_of_their_own():
    config = ServerConfig(kv_events_url="tcp://*:5557", kv_events_replay_url="tcp://[::1]:5657")
    numbered = config.of_replica(3)
    assert (numbered.kv_events_url, numbered.kv_events_replay_url) == ("tcp://*:5560", "tcp://[::1]:5660")
    assert ServerConfig().of_replica(3) == ServerConfig()
    with pytest.raises(ValueError, match="kv_events_url must be an address with a port"):
        ServerConfig(kv_events_url="ipc:///tmp/events").of_replica(0)
    with pytest.raises(ValueError, match="kv_events_url must be given with a kv_events_replay_url"):
        ServerConfig(kv_events_replay_url="tcp://*:5657")
