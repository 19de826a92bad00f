"""Directories of a store, filled as an engine would, for the tests of what looks at them and cleans them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ca_jax.storage.catalog.catalog import Catalog
from ca_jax.storage.catalog.records import Namespace, SessionRecord
from ca_jax.storage.layout import layer_sums
from ca_jax.storage.tiers.disk import DiskTier
from ca_jax.storage.tiers.formats import RawTier, Zarr3Tier
from ca_jax.storage.tokens import TokenPlaces

from .ssd_helpers import make_blocks
from .store_helpers import make_layout

LAYOUT = make_layout()
NAMESPACE = Namespace(weights="aaaa1111weights", layout=LAYOUT)
OTHER_NAMESPACE = Namespace(weights="bbbb2222weights", layout=make_layout("bfloat16"))
NUM_BLOCKS = 16
KEYS = {"first": "a1" + 62 * "0", "second": "a2" + 62 * "0", "third": "b3" + 62 * "0", "other": "c4" + 62 * "0"}


@dataclasses.dataclass
class Kept:
    """What was stored of one session."""

    record: SessionRecord
    token_ids: np.ndarray
    kv: np.ndarray  # [L, 2, T, K, H]


def open_tier(path: Path, kind: str, namespace: Namespace = NAMESPACE) -> DiskTier:
    """The blocks of a namespace as an engine opens them."""
    location = path / namespace.directory_name
    if kind == "raw":
        return RawTier(namespace.layout, location, NUM_BLOCKS * 4096)
    return Zarr3Tier(namespace.layout, location, NUM_BLOCKS * 4096)


def block_file(path: Path, block: int, namespace: Namespace = NAMESPACE) -> Path:
    """The file of a block that is kept by driver zarr3."""
    return path / namespace.directory_name / "zarr3" / "000000" / f"c.{block}.0.0.0.0.0"


def save(
    catalog: Catalog,
    tier: DiskTier,
    key: str,
    block_ids: list[int],
    num_tokens: int,
    *,
    seed: int = 0,
    **fields: Any,
) -> Kept:
    """Writes a session's blocks and publishes it."""
    blocks = make_blocks(tier.layout, len(block_ids), seed=seed)
    tier.write_blocks(block_ids, blocks).result()
    record = SessionRecord(
        key=key,
        block_ids=np.array(block_ids, np.int64),
        places=TokenPlaces.dense(num_tokens),
        **{"tenant": "alice", "session_id": key, "created_s": 1e9, "last_used_s": 1e9, **fields},
    )
    token_ids = np.arange(num_tokens, dtype=np.int32) + 1000 * (seed + 1)
    record = catalog.publish(record, token_ids, np.array([layer_sums(block) for block in blocks]))
    kv = np.concatenate(list(blocks), axis=2)[:, :, :num_tokens]
    return Kept(record=record, token_ids=token_ids, kv=kv)


def fill(path: Path, kind: str) -> Mapping[str, Kept]:
    """Four sessions by name: three of two tenants in one namespace, one in another. Used last: first, second, …

    first   alice  "chat"   10 tokens in blocks 0 1 2, used at 1e9
    second  alice  "notes"   4 tokens in block 3, expired long ago
    third   bob    "chat"    9 tokens in blocks 7 5 6, pinned although its time is over
    other   carol  "x"       5 tokens in blocks 0 1 of the other namespace
    """
    kept = {}
    tier = open_tier(path, kind)
    with Catalog(path, NAMESPACE) as catalog:
        kept["first"] = save(catalog, tier, KEYS["first"], [0, 1, 2], 10, session_id="chat")
        kept["second"] = save(
            catalog, tier, KEYS["second"], [3], 4, seed=1, session_id="notes", last_used_s=1e9 + 1, ttl_s=60.0
        )
        kept["third"] = save(
            catalog,
            tier,
            KEYS["third"],
            [7, 5, 6],
            9,
            seed=2,
            tenant="bob",
            session_id="chat",
            last_used_s=1e9 + 2,
            ttl_s=60.0,
            pinned=True,
        )
    tier.close()
    tier = open_tier(path, kind, OTHER_NAMESPACE)
    with Catalog(path, OTHER_NAMESPACE) as catalog:
        kept["other"] = save(
            catalog, tier, KEYS["other"], [0, 1], 5, seed=3, tenant="carol", session_id="x", last_used_s=1e9 + 3
        )
    tier.close()
    return kept


def files_of(path: Path) -> dict[str, bytes]:
    """All files of blocks below a directory, by relative name."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and not file.name.startswith("catalog.")
    }
