"""Which blocks of KV are stored here, told over ZeroMQ as vLLM tells it, so that routers of other projects can follow.

    frames     topic | number of the batch, 8 bytes, big-endian | batch
    batch      [time, [event, ...], 0], msgpack; each event a map, with its `type` (before vLLM 0.24 a list)
    replay     a client sends b"" | first number that it wants; it gets b"" | number | batch of each, then -1 and b""

A block is as many tokens as the store's, its name a hash of them and of all before: it is told once the first session
has it in DRAM, and removed once the last one has it in no tier. Only KV that any session of its tenant may use is told:
what was computed behind a cut or a blended chunk is not. Names of two tenants never meet, nor those of two
adapters, and `extra_keys` of first blocks has the name of their domain (`Owner.domain`), as vLLM's has a salt. What an
earlier process left on SSD is told once it has been fetched, and so is what gets there when DRAM has forgotten it:
before, the token ids are not at hand.

The first event of a server, and its last, is `AllBlocksCleared`. Who subscribes late asks for a replay, or learns of
what is stored from then on.

Not here: what is stored (`ca_jax.storage`), who is sent where (other projects' routers).
Source: vLLM, `vllm/distributed/kv_events.py`, as of version 0.26.
"""

from __future__ import annotations

import collections
import hashlib
import queue
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any

import msgpack
import numpy as np
import zmq

from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tokens import HASH_BYTES, num_common, prefix_hashes

Event = dict[str, Any]

MEDIUM = "CPU"
"""Where blocks are, in vLLM's words: in host memory, or as near as one fetch."""
_KEPT_BATCHES = 10_000  # For replays.
_MAX_UNREAD = 100_000  # Batches that wait for one subscriber. One that is further behind misses some, and sees a gap.
_LOOK_S = 0.05  # How often the thread looks for requests for a replay.
_CLEARED: Event = {"type": "AllBlocksCleared"}


class StoredBlocks:
    """The blocks that are told to be stored, and the events that take them to what is stored now."""

    def __init__(self) -> None:
        self._chains: dict[str, tuple[np.ndarray, bytes]] = {}  # By key: tokens in DRAM, and hashes of their blocks.
        self._blocks: dict[str, list[int]] = {}  # By key, in token order; those on SSD alone among them.
        self._num_holders = collections.Counter[int]()

    def __iter__(self) -> Iterator[int]:
        """Their names."""
        return iter(self._num_holders)

    def changes(self, store: AttentionStore, keys: Collection[str]) -> list[Event]:
        """What has become of some sessions since they were last looked at.

        Args:
          store: that they are in.
          keys: of sessions; of those that are gone, too.
        """
        events, left = [], list[int]()
        for key in keys:
            left += self._blocks.pop(key, ())
            events += self._stored(store, key)
        removed = []
        for block in reversed(left):  # Of a chain the last one first: no block is told whose parent is gone.
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                del self._num_holders[block]
                removed.append(block)
        if removed:
            events.append({"type": "BlockRemoved", "block_hashes": removed, "medium": MEDIUM})
        return events

    def _stored(self, store: AttentionStore, key: str) -> list[Event]:
        """Takes in what a session has; the event of those of its blocks that no other has."""
        prefix = store.plain_prefix(key)
        if prefix is None:
            self._chains.pop(key, None)
            return []
        size, domain, token_ids = store.layout.block_tokens, prefix.domain, prefix.token_ids
        before, hashes = self._chains.get(key, (token_ids[:0], b""))
        known = hashes[: num_common(before, token_ids) // size * HASH_BYTES]
        hashes = prefix_hashes(token_ids, size, known)
        self._chains[key] = token_ids, hashes
        blocks = _names(domain, hashes)
        num_known = sum(block in self._num_holders for block in blocks)  # These come first: so does each one's parent.
        in_dram = set(blocks)
        on_ssd = (each for each in _names(domain, prefix.ssd_hashes) if each in self._num_holders)
        self._blocks[key] = blocks + [each for each in on_ssd if each not in in_dram]
        self._num_holders.update(self._blocks[key])
        new = blocks[num_known:]
        if not new:
            return []
        event = {
            "type": "BlockStored",
            "block_hashes": new,
            "parent_block_hash": blocks[num_known - 1] if num_known else None,
            "token_ids": token_ids[num_known * size : len(blocks) * size].tolist(),
            "block_size": size,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": None,
        }
        if domain:
            event["extra_keys"] = [None if num_known or index else (domain,) for index in range(len(new))]
        return [event]


class KVEvents:
    """Tells subscribers what is stored, from a thread of its own.

    Args:
      url: to listen on.
      replay_url: to answer requests for earlier batches on; None: there are no replays.
      topic: in front of each batch.

    Raises:
      ValueError: an address cannot be listened on.
    """

    def __init__(self, url: str, replay_url: str | None = None, topic: str = "") -> None:
        self._topic = topic.encode()
        self._stored = StoredBlocks()
        self._batches: queue.SimpleQueue[list[Event] | None] = queue.SimpleQueue()  # None behind the last.
        self._sent: collections.deque[tuple[bytes, bytes]] = collections.deque(maxlen=_KEPT_BATCHES)
        self._context = zmq.Context()
        try:
            self._publisher = _bound(self._context, zmq.PUB, url)
            self._replays = None if replay_url is None else _bound(self._context, zmq.ROUTER, replay_url)
        except ValueError:
            self._context.destroy(linger=0)
            raise
        self._batches.put([_CLEARED])
        self._thread = threading.Thread(target=self._run, name="ca_jax-kv-events", daemon=True)
        self._thread.start()

    def tell(self, store: AttentionStore, keys: Collection[str]) -> None:
        """Tells what has become of sessions. Never blocks; one thread at a time, the store's."""
        events = self._stored.changes(store, keys)
        if events:
            self._batches.put(events)

    def close(self) -> None:
        """Tells that nothing is stored any more, and lets go of the addresses. Waits a second for subscribers."""
        self._batches.put([_CLEARED])
        self._batches.put(None)
        self._thread.join()
        self._context.destroy(linger=1000)

    def _run(self) -> None:
        number, is_open = 0, True
        while is_open:
            try:
                events = self._batches.get(timeout=_LOOK_S if self._replays is not None else None)
            except queue.Empty:
                events = []
            is_open = events is not None
            if events:
                batch = msgpack.packb([time.time(), events, 0])
                self._sent.append((number.to_bytes(8, "big"), batch))
                self._publisher.send_multipart([self._topic, *self._sent[-1]])
                number += 1
            while self._replays is not None and self._replays.poll(0):
                self._replay(self._replays)

    def _replay(self, replays: zmq.Socket[bytes]) -> None:
        """Answers a request for what was sent from a number on; one of another form is dropped."""
        client, *asked = replays.recv_multipart()
        if len(asked) != 2 or len(asked[1]) != 8:
            return
        for number, batch in self._sent:
            if number >= asked[1]:
                replays.send_multipart([client, b"", number, batch])
        replays.send_multipart([client, b"", (-1).to_bytes(8, "big", signed=True), b""])


def _bound(context: zmq.Context[Any], kind: int, url: str) -> zmq.Socket[bytes]:
    try:
        socket = context.socket(kind)
        socket.set_hwm(_MAX_UNREAD)
        socket.bind(url)
    except zmq.ZMQError as error:
        raise ValueError(f"kv_events_url must be an address to listen on, got {url!r}: {error}") from error
    return socket


def _names(tenant: str, hashes: bytes) -> list[int]:
    """Names of blocks by their hashes: unsigned, of 64 bits."""
    each = [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
    if tenant:
        each = [hashlib.sha256(tenant.encode("utf-8", "surrogatepass") + raw).digest()[:HASH_BYTES] for raw in each]
    return [int.from_bytes(raw, "big") for raw in each]
