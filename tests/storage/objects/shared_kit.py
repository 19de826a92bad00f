"""Replicas without engines, for tests of what they share: a real store in DRAM each, and the code that publishes.

Blocks are of four tokens and runs of two blocks. KV follows from the tokens alone, so that equal tokens have equal KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ca_jax.kv.object_coding import ObjectCoding
from ca_jax.kv.object_transfers import SharedKV, Source
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.objects import ownership, parts
from ca_jax.storage.objects.manifest import Manifest, manifest_name
from ca_jax.storage.objects.ownership import Held
from ca_jax.storage.objects.store import ObjectStore
from tests.storage import store_helpers as helpers

SPACE = "5pace" * 12 + "abcd"
OTHER_SPACE = "0ther" * 12 + "abcd"
RUN_TOKENS = 2 * helpers.BLOCK_TOKENS
LAYOUT = helpers.LAYOUT
TOKEN_BYTES = LAYOUT.token_bytes
NOW_S = 1e9
WEEK_S = 7 * 24 * 3600.0


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of `RUN_TOKENS`."""
    monkeypatch.setattr(parts, "RUN_BYTES", 2 * LAYOUT.block_bytes)


def kv_of(token_ids: Sequence[int]) -> np.ndarray:
    """`[L, 2, T, K, H]`."""
    kv = [helpers.make_kv(LAYOUT, 1, seed=seed) for seed in token_ids]
    return np.concatenate(kv, axis=2)


class Replica:
    """Publishes sessions as an engine does."""

    def __init__(
        self,
        objects: ObjectStore,
        name: str = "a",
        namespace: str = SPACE,
        coding: ObjectCoding | None = None,
        layout: KVLayout = LAYOUT,
        kv_of: Callable[[Sequence[int]], np.ndarray] = kv_of,
    ) -> None:
        self.kv = SharedKV(objects, layout, namespace, name, coding)
        self.store = helpers.make_store(256, layout=layout)
        self.held: dict[str, Held | None] = {}
        self.num_written = 0
        """Bytes, by publishes so far."""
        self.kv_of = kv_of

    def claim(self, key: str) -> Manifest | None:
        """Takes a session over; what was published of it."""
        self.held[key] = self.kv.objects.run(ownership.claim(self.kv.namespace, key, self.kv.replica))
        return self.held[key].manifest

    def publish(
        self, key: str, token_ids: Sequence[int], *, tenant: str = "alice", num_plain: int | None = None, **state: Any
    ) -> Manifest:
        """Publishes a session with the KV of these tokens, of which the first are plain; what was published."""
        ids, chain = np.array(token_ids, np.int32), f"{key} {list(token_ids)}"
        self.store.drop(key)
        source, lineage = None, 0 if num_plain is None else 1
        if len(ids):
            ticket = self.store.prepare_save(key, 0, ids, num_dropped=lineage, num_plain=num_plain)
            ticket.write_all(self.kv_of(token_ids))
            assert self.store.complete_save(ticket)
            source = Source(self.store.hold(key, ids, num_dropped=lineage))
        fields = {
            "tenant": tenant,
            "session_id": f"name of {key}",
            "conversation": chain.encode(),
            "chain": chain,
            "lineage": lineage,
            "num_plain": num_plain,
            "is_to_repair": False,
            "token_bytes": self.kv.layout.token_bytes,
            "used_s": NOW_S,
            "ttl_s": None,
            "pinned": False,
            **state,
        }
        published = self.kv.publish(key, self.held.get(key), fields, ids, source, (), lambda: None)
        assert published.is_whole
        self.num_written += published.num_bytes
        if source is not None:
            self.store.let_go(source.ticket)
        self.held[key] = published.held
        return published.held.manifest

    def restored(self, key: str) -> np.ndarray:
        """The KV that a session's manifest names, `[L, 2, T, K, H]`, held against its checksums."""
        manifest = stored(self.kv.objects, key, self.kv.namespace)
        pieces = []
        for part in manifest.parts:
            wait = parts.read_layers(self.kv.objects, part, LAYOUT, 0, LAYOUT.num_layers)
            pieces.append(np.stack([parts.as_layer(data, part, LAYOUT, layer) for layer, data in enumerate(wait())]))
        return np.concatenate(pieces, axis=2)


def stored(objects: ObjectStore, key: str, namespace: str = SPACE) -> Manifest | None:
    """A session's manifest; None where there is none."""
    found = objects.read(manifest_name(namespace, key)).value
    return None if found is None else Manifest.from_bytes(found)


def contents(objects: ObjectStore) -> dict[str, bytes]:
    """All objects, without the lease."""
    return {name: objects.read(name).value for name in objects.names("") if name != "v1/collector"}


def kv_names(objects: ObjectStore, namespace: str = SPACE) -> set[str]:
    """Names of all KV objects."""
    return set(objects.names(parts.parts_prefix(namespace)))


def orphan(objects: ObjectStore, token_ids: list[int], tenant: str = "alice", name: str = "gone") -> set[str]:
    """Leaves the KV of a session whose manifest is no more; the names of objects that only it had."""
    before = kv_names(objects)
    Replica(objects, name).publish(name, token_ids, tenant=tenant)
    objects.write(manifest_name(SPACE, name), None)
    return kv_names(objects) - before
