"""What the catalog keeps: namespaces and sessions, what it says about itself, and how records lie in its tables.

Each row has a checksum: sqlite notices damage only where a page's structure suffers.

Not here: queries (reader, catalog), the file (file).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from typing import Any

import numpy as np

from ca_jax.storage.catalog.file import CatalogError
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.records import check_ttl
from ca_jax.storage.tokens import Cuts, Lineage, SsdCopy, TokenPlaces, prefix_hashes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Namespace:
    """Sessions that may share KV: same weights, layout and versions. Each namespace has its own blocks."""

    weights: str
    """Fingerprint of the weights, and of whatever else decides what KV they give."""
    layout: KVLayout
    """Of a block."""
    position_encoding: str = "unrotated"
    """How positions are in the stored keys."""
    mesh_shard: str = ""
    """Which part of the KV heads is stored, where several processes share them."""
    driver: str = "zarr3"
    """How blocks are kept: the other way's are not this one's to read, count or overwrite."""
    location: str = ""
    """Where blocks are kept, if not beside the catalog."""
    format_version: int = 1
    """Of the block files."""

    def to_json(self) -> str:
        """The fields as canonical JSON; equal namespaces give equal text."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Namespace:
        """The namespace that `to_json` wrote.

        Raises:
          ValueError: the text is another.
        """
        try:
            fields = json.loads(text)
            return cls(**{**fields, "layout": KVLayout(**fields["layout"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"there must be a namespace as JSON, got {text!r}") from error

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all fields, hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def directory_name(self) -> str:
        """Of the directory for its blocks."""
        return f"blocks-{self.fingerprint[:16]}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SessionRecord:
    """One stored session, without what only a load needs (token ids, seals)."""

    key: str
    """The store's key, hex: never the same for other tenants, weights or layouts."""
    tenant: str
    """Whose it is."""
    session_id: str
    """The name its owner knows it by."""
    block_ids: np.ndarray
    """The block table: int64 `[num_blocks]`, in token order."""
    num_tokens: int
    """Tokens whose KV is stored, > 0."""
    cuts: Cuts | None = None
    """What cutting has left of it; None if it was never cut."""
    prefixes: bytes = b""
    """As `SsdCopy.prefixes`; empty where they are not known."""
    created_s: float
    """When it was first saved; seconds since the epoch."""
    last_used_s: float
    """When it was last used, as far as it was written down; seconds since the epoch."""
    pinned: bool = False
    """Whether it is never evicted and never expires."""
    ttl_s: float | None = None
    """How long it lives after its last use, seconds; None for ever."""
    generation: int = 0
    """How many times it was published or cut; the catalog counts."""

    @property
    def copy(self) -> SsdCopy:
        """What of the session is stored, and where."""
        return SsdCopy(num_tokens=self.num_tokens, block_ids=self.block_ids, cuts=self.cuts, prefixes=self.prefixes)

    @property
    def num_rows(self) -> int:
        """Rows that were written in its blocks, up to the last one."""
        return self.copy.num_rows

    @property
    def lineage(self) -> Lineage:
        """What was dropped from it."""
        return self.copy.lineage

    def prefixes_of(self, token_ids: np.ndarray, layout: KVLayout) -> bytes:
        """`prefixes` as these tokens, int32 `[num_tokens]`, have them."""
        return prefix_hashes(token_ids[: self.lineage.plain_tokens(self.num_tokens)], layout.block_tokens)

    @property
    def num_blocks(self) -> int:
        """Blocks held."""
        return len(self.block_ids)

    @property
    def expires_s(self) -> float | None:
        """When its time to live is over; None for never."""
        return None if self.ttl_s is None else self.last_used_s + self.ttl_s

    def check(self, layout: KVLayout) -> None:
        """Refuses a record that cannot be.

        Raises:
          ValueError: no tokens, places or rows that are not theirs, too few blocks for them, a negative or repeated
            block id, a negative time to live.
        """
        self.check_sizes(layout)
        if self.block_ids.min() < 0 or len(np.unique(self.block_ids)) < self.num_blocks:
            raise ValueError(f"block_ids must be different ids >= 0, got {self.block_ids.tolist()}")

    def check_sizes(self, layout: KVLayout) -> None:
        """Does all of `check` but look at the ids in the block table: that is faster for many sessions at once.

        Raises:
          ValueError: no tokens, places or rows that are not theirs, too few blocks for them, a negative time to live.
        """
        if self.num_tokens <= 0:
            raise ValueError(f"session {self.session_id!r} must be num_tokens > 0, got {self.num_tokens}")
        num_places = self.num_tokens if self.cuts is None else self.cuts.places.num_places
        if self.cuts is not None and self.cuts.places.num_tokens != self.num_tokens:
            raise ValueError(
                f"session {self.session_id!r} must be places of its {self.num_tokens} tokens, "
                f"got {self.cuts.places.num_tokens}"
            )
        block_ids = self.block_ids
        if block_ids.ndim != 1 or block_ids.dtype != np.int64:
            raise ValueError(f"block_ids must be int64[num_blocks], got {block_ids.dtype}{list(block_ids.shape)}")
        if self.num_blocks < layout.num_blocks(num_places):
            raise ValueError(
                f"{self.num_tokens} tokens must be at least {layout.num_blocks(num_places)} blocks of "
                f"{layout.block_tokens}, got {self.num_blocks}"
            )
        if self.cuts is not None and not num_places <= self.cuts.num_rows <= self.num_blocks * layout.block_tokens:
            raise ValueError(
                f"session {self.session_id!r} must be {num_places} to {self.num_blocks * layout.block_tokens} rows "
                f"written, got {self.cuts.num_rows}"
            )
        check_ttl(self.ttl_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that is not as it should be, found by `Catalog.integrity_check`."""

    key: str | None
    """Of the session; None where it concerns the file."""
    found: str
    """What was wanted and what was found."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamespaceInfo:
    """One namespace of a catalog, and the size of what is stored in it."""

    namespace: Namespace
    """Which."""
    created_s: float = 0.0
    """When it was first opened; seconds since the epoch, 0 for never."""
    num_sessions: int = 0
    """Sessions stored."""
    num_tokens: int = 0
    """Tokens whose KV is stored."""
    num_blocks: int = 0
    """Blocks held by sessions; one that several share counts for each."""
    num_bytes: int = 0
    """Bytes of these blocks."""


BLOCK_ID_BYTES = 8
"""Of one entry of a block table."""
SESSION_COLUMNS = (
    "key, tenant, session_id, block_ids, num_tokens, runs, num_rows, num_dropped, num_plain, created_s, last_used_s, "
    "pinned, ttl_s, state, generation, checksum, prefix_hashes"
)
"""Of table `sessions`, in the order of `session_to_row` and `session_from_row`."""
_READY = "ready"  # The one state of a session's row.


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
            raise ValueError("there must be contents that pass their checksum, got others")
        if len(token_ids) != 4 * num_tokens or len(seals) != 8 * num_blocks * num_layers:
            raise ValueError(
                f"there must be {num_tokens} token ids and {num_blocks} x {num_layers} seals, "
                f"got {len(token_ids)} and {len(seals)} bytes"
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
        _READY,
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
            raise ValueError("there must be a row that passes its checksum, got another")
        if state != _READY:
            raise ValueError(f"state must be {_READY!r}, got {state!r}")
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
            generation=generation,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedRecordError(f"session {key!r}: {error}") from error


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
