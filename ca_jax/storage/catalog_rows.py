"""How the catalog's records lie in its tables, with a checksum over each row.

sqlite notices damage only where a page's structure suffers: the checksums notice the rest.

Not here: queries (catalog, catalog_reader), what the fields mean (catalog_records).
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import numpy as np

from ca_jax.storage.catalog_file import CatalogError
from ca_jax.storage.catalog_records import SessionRecord, SessionState
from ca_jax.storage.lineage import Lineage
from ca_jax.storage.places import TokenPlaces
from ca_jax.storage.ssd_copy import Cuts

BLOCK_ID_BYTES = 8
"""Of one entry of a block table."""
SESSION_COLUMNS = (
    "key, tenant, session_id, block_ids, num_tokens, runs, num_rows, num_dropped, num_plain, created_s, last_used_s, "
    "pinned, ttl_s, state, generation, checksum, prefix_hashes"
)
"""Of table `sessions`, in the order of `to_row` and `from_row`."""


class DamagedRecordError(CatalogError):
    """What the catalog says about one session does not pass its checksum. Others are not concerned."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Contents:
    """What a load of one session needs."""

    token_ids: np.ndarray
    """int32 `[num_tokens]`, read-only."""
    seals: np.ndarray
    """uint64 `[num_blocks, L]`, read-only: a digest of each block's layer, by which a wrong block is known."""
    note: bytes = b""
    """What the session's owner wants kept with it; nothing here looks into it."""

    def to_row(self, key: str) -> tuple[Any, ...]:
        """Values of `token_ids, seals, prefixes, note, checksum`."""
        blobs = (
            np.ascontiguousarray(self.token_ids, "<i4").tobytes(),
            np.ascontiguousarray(self.seals, "<u8").tobytes(),
            b"",
            self.note,
        )
        return (*blobs, _contents_checksum(key, *blobs))


def contents_from_row(key: str, row: tuple[Any, ...], *, num_tokens: int, num_blocks: int, num_layers: int) -> Contents:
    """The contents that `Contents.to_row` wrote.

    Raises:
      DamagedRecordError: they are others, or do not fit the sizes.
    """
    token_ids, seals, prefixes, note, checksum = row
    try:
        if checksum != _contents_checksum(key, token_ids, seals, prefixes, note):
            raise ValueError("wanted contents that pass their checksum, found others")
        if len(token_ids) != 4 * num_tokens or len(seals) != 8 * num_blocks * num_layers:
            raise ValueError(
                f"wanted {num_tokens} token ids and {num_blocks} x {num_layers} seals, "
                f"found {len(token_ids)} and {len(seals)} bytes"
            )
    except (TypeError, ValueError) as error:
        raise DamagedRecordError(f"session {key!r}: {error}") from error
    return Contents(
        token_ids=np.frombuffer(token_ids, "<i4"),
        seals=np.frombuffer(seals, "<u8").reshape(num_blocks, num_layers),
        note=note,
    )


def session_to_row(record: SessionRecord) -> tuple[Any, ...]:
    """Values of `SESSION_COLUMNS`."""
    table = record.block_ids.astype("<i8").tobytes()
    copy = record.copy
    runs = b"" if copy.places.is_dense else copy.places.to_bytes()
    cuts = (runs, copy.num_rows, copy.lineage.num_dropped, copy.lineage.num_plain)
    named = (record.key, record.tenant, record.session_id, table, record.num_tokens, *cuts)
    return (
        *named,
        record.created_s,
        record.last_used_s,
        int(record.pinned),
        record.ttl_s,
        record.state.value,
        record.generation,
        _session_checksum(*named, record.generation, record.prefixes),
        record.prefixes,
    )


def session_from_row(row: tuple[Any, ...]) -> SessionRecord:
    """The record that `session_to_row` wrote.

    Raises:
      DamagedRecordError: it is another.
    """
    key, tenant, session_id, table, num_tokens, runs, num_rows, num_dropped, num_plain = row[:9]
    created_s, used_s, pinned, ttl_s, state, generation, checksum, prefixes = row[9:]
    try:
        cut = runs, num_rows, num_dropped, num_plain
        if checksum != _session_checksum(key, tenant, session_id, table, num_tokens, *cut, generation, prefixes):
            raise ValueError("wanted a row that passes its checksum, found another")
        cuts = None
        if runs or num_rows != num_tokens or num_dropped or num_plain is not None:
            cuts = Cuts(
                places=TokenPlaces.from_bytes(runs) if runs else TokenPlaces.dense(num_tokens),
                num_rows=num_rows,
                lineage=Lineage(num_dropped, num_plain),
            )
        return SessionRecord(
            key=key,
            tenant=tenant,
            session_id=session_id,
            block_ids=np.frombuffer(table, "<i8"),
            num_tokens=num_tokens,
            cuts=cuts,
            prefixes=prefixes,
            created_s=float(created_s),
            last_used_s=float(used_s),
            pinned=bool(pinned),
            ttl_s=None if ttl_s is None else float(ttl_s),
            state=_STATES[state],
            generation=generation,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedRecordError(f"session {key!r}: {error}") from error


_STATES = {state.value: state for state in SessionState}


def _session_checksum(
    key: str,
    tenant: str,
    session_id: str,
    table: bytes,
    num_tokens: int,
    runs: bytes,
    num_rows: int,
    num_dropped: int,
    num_plain: int | None,
    generation: int,
    prefixes: bytes,
) -> int:
    """Of what never changes without a new row, and must not be served if it does."""
    numbers = "\0".join(map(str, (num_tokens, num_rows, num_dropped, num_plain, generation, len(runs))))
    named = f"{key}\0{tenant}\0{session_id}\0{numbers}"
    checksum = zlib.crc32(table, zlib.crc32(runs, zlib.crc32(named.encode("utf-8", "surrogateescape"))))
    return zlib.crc32(prefixes, checksum)  # Last: a row of version 2, which has none, passes as it stands.


def _contents_checksum(key: str, *blobs: bytes) -> int:
    """Of the blobs and where each ends."""
    checksum = zlib.crc32(key.encode())
    for blob in blobs:
        checksum = zlib.crc32(blob, zlib.crc32(len(blob).to_bytes(8, "little"), checksum))
    return checksum
