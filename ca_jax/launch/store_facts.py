"""What `ca_jax.launch.store` tells of a store, as JSON values: sizes in bytes, times in seconds since the epoch.

Not here: how they are shown (store_report).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ca_jax.storage.catalog.records import Namespace, NamespaceInfo
from ca_jax.storage.collect import NamespaceGarbage
from ca_jax.storage.inspector import DamagedRow, DiskUse, Listing, StoredSession
from ca_jax.storage.verify import Verdict

Facts = dict[str, Any]
"""JSON values by name."""
SUMS = ("num_sessions", "num_tokens", "num_blocks", "num_bytes")
"""What is summed up for a namespace and for each tenant."""


def session_facts(session: StoredSession, now_s: float) -> Facts:
    """What the catalog says of a session."""
    record = session.record
    return {
        "session_id": record.session_id,
        "key": record.key,
        "tenant": record.tenant,
        "namespace": session.namespace.directory_name,
        "weights": session.namespace.weights,
        "num_tokens": record.num_tokens,
        "num_dropped": record.lineage.num_dropped,
        "num_blocks": record.num_blocks,
        "num_bytes": session.num_bytes,
        "created_s": record.created_s,
        "last_used_s": record.last_used_s,
        "ttl_s": record.ttl_s,
        "expires_s": record.expires_s,
        "expired": session.expired(now_s),
        "pinned": record.pinned,
        "state": "ready",
        "generation": record.generation,
    }


def row_facts(row: DamagedRow) -> Facts:
    """What is left of a damaged row."""
    return {"key": row.key, "namespace": row.namespace.directory_name, "found": row.found}


def namespace_facts(namespace: Namespace) -> Facts:
    """A namespace's name and what makes it."""
    return {"name": namespace.directory_name, **dataclasses.asdict(namespace)}


def verdict_facts(verdict: Verdict, now_s: float) -> Facts:
    """A session and what is wrong with it."""
    return {
        "key": verdict.key,
        "namespace": verdict.namespace.directory_name,
        "session": None if verdict.session is None else session_facts(verdict.session, now_s),
        "damages": [{**dataclasses.asdict(each), "reason": each.reason.value} for each in verdict.damages],
    }


def garbage_facts(garbage: NamespaceGarbage, now_s: float) -> Facts:
    """What goes of a namespace."""
    return {
        "namespace": garbage.namespace.directory_name,
        "weights": garbage.namespace.weights,
        "dropped": garbage.dropped,
        "forgotten": [
            {
                "key": each.key,
                "reason": each.reason.value,
                "session": None if each.session is None else session_facts(each.session, now_s),
            }
            for each in garbage.forgotten
        ],
        "num_blocks": garbage.num_blocks,
        "num_bytes": garbage.num_bytes,
        "num_leftovers": garbage.num_leftovers,
    }


def usage_facts(info: NamespaceInfo, listing: Listing, use: DiskUse | None, now_s: float) -> Facts:
    """What a namespace holds, by tenant, and takes on disk. A block that sessions of a tenant share counts once."""
    tenants: dict[str, Facts] = {}
    held: dict[str, set[int]] = {}
    for session in listing.sound:
        record = session.record
        sums = tenants.setdefault(record.tenant, {"tenant": record.tenant, **dict.fromkeys(SUMS, 0), "num_expired": 0})
        held.setdefault(record.tenant, set()).update(record.block_ids.tolist())
        num_blocks = len(held[record.tenant])
        sums["num_sessions"] += 1
        sums["num_tokens"] += record.num_tokens
        sums |= {"num_blocks": num_blocks, "num_bytes": num_blocks * info.namespace.layout.block_bytes}
        sums["num_expired"] += session.expired(now_s)
    return {
        "namespace": namespace_facts(info.namespace),
        "created_s": info.created_s,
        **{name: sum(each[name] for each in tenants.values()) for name in SUMS},
        "num_damaged_rows": len(listing.damaged),
        "tenants": [tenants[name] for name in sorted(tenants)],
        "disk": None if use is None else dataclasses.asdict(use),
    }
