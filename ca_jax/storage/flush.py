"""What a flush of a session writes to SSD, and what is there already.

Not here: room on SSD, when something is flushed, beginning and ending moves (ssd).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from ca_jax.storage.catalog.records import SessionRecord
from ca_jax.storage.records import Owner
from ca_jax.storage.sessions import Entry
from ca_jax.storage.tokens import HASH_BYTES, num_common, prefix_hashes


def num_kept_blocks(entry: Entry, block_tokens: int) -> int:
    """How many leading blocks are on SSD as they should be: full ones, or all if only the note is new."""
    if entry.ssd is None:
        return 0
    is_same = entry.num_same_tokens == entry.num_tokens == entry.ssd.num_tokens
    if is_same and entry.num_same_rows == entry.places.num_places:
        return entry.ssd.num_blocks
    return entry.num_same_rows // block_tokens


def shared_on_ssd(
    entry: Entry, get: Callable[[str], Entry | None], is_shared: Callable[[int], bool], block_tokens: int
) -> list[int] | None:
    """Leading blocks of a session that is not on SSD, which are there as another's that shares them in DRAM.

    Args:
      entry: of the session.
      get: gives the entry of a key.
      is_shared: whether several sessions hold a block of DRAM.
      block_tokens: tokens in a block.

    Returns:
      Their ids on SSD; None where more of them are on their way there.
    """
    found = list[int]()
    if entry.ssd is not None or entry.share_group is None:
        return found
    full = entry.block_ids[: entry.places.num_places // block_tokens]
    shared = list(itertools.takewhile(is_shared, full))
    num_coming = 0
    for other in filter(None, map(get, reversed(entry.share_group))):  # Of many, the last ones first.
        if len(found) == len(shared):
            break
        if other is entry:
            continue
        num_alike = num_common(np.array(shared), np.array(other.block_ids))
        if other.flush is not None:  # What it has there is not certain, cut as it may be when that has ended.
            num_coming = max(num_coming, min(num_alike, other.flush.record.num_tokens // block_tokens))
        elif other.ssd is not None and (num_alike := min(num_alike, other.num_same_rows // block_tokens)) > len(found):
            found = other.ssd.block_ids[:num_alike].tolist()
    return found if num_coming <= len(found) else None


def record_of(entry: Entry, kept_ids: Sequence[int], new_ids: Sequence[int], block_tokens: int) -> SessionRecord:
    """What the catalog is to say of a session in DRAM.

    Args:
      entry: of the session.
      kept_ids: leading blocks that it has on SSD, and keeps.
      new_ids: those that come behind them.
      block_tokens: tokens in a block.
    """
    num_plain = entry.lineage.plain_tokens(entry.num_tokens)
    num_known = min(entry.num_same_tokens, num_plain) // block_tokens
    known = b"" if entry.ssd is None else entry.ssd.prefixes[: num_known * HASH_BYTES]
    return SessionRecord(
        key=entry.key,
        tenant=entry.owner.tenant,
        session_id=entry.owner.session_id,
        block_ids=np.array([*kept_ids, *new_ids], np.int64),
        places=entry.places,
        lineage=entry.lineage,
        prefixes=prefix_hashes(entry.token_ids[:num_plain], block_tokens, known),
        created_s=entry.created_s,
        last_used_s=entry.last_used_s,
        pinned=entry.pinned,
        ttl_s=entry.ttl_s,
    )


def entry_of(record: SessionRecord) -> Entry:
    """A session that an earlier process published."""
    return Entry(
        key=record.key,
        owner=Owner(tenant=record.tenant, session_id=record.session_id, ttl_s=record.ttl_s),
        created_s=record.created_s,
        last_used_s=record.last_used_s,
        ttl_s=record.ttl_s,
        pinned=record.pinned,
        ssd=record,
    )
