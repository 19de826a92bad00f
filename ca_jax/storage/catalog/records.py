"""What the catalog keeps: namespaces and sessions, what it says about itself, and how records lie in its tables.

Each row has a checksum: sqlite notices damage only where a page's structure suffers.

Not here: queries (reader, catalog), the file (file).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ca_jax.storage.catalog.file import CatalogError
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.records import check_seconds, domain_of, split_domain
from ca_jax.storage.tokens import PLAIN, Lineage, SsdCopy, TokenPlaces


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
    codec: str = ""
    """What codes blocks (`KVCodec.name`); empty: they lie as in memory."""

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON; without a codec as they were before there were any."""
        fields = {**dataclasses.asdict(self), "layout": self.layout.to_dict()}
        return fields if self.codec else {name: value for name, value in fields.items() if name != "codec"}

    def to_json(self) -> str:
        """The fields as canonical JSON; equal namespaces give equal text."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Namespace:
        """The namespace that `to_json` wrote.

        Raises:
          ValueError: the text is another.
        """
        try:
            fields = json.loads(text)
            return cls(**{**fields, "layout": KVLayout.from_dict(fields["layout"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"a namespace must be as to_json writes it, got {text!r}") from error

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all fields, hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def directory_name(self) -> str:
        """Of the directory for its blocks."""
        return f"blocks-{self.fingerprint[:16]}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SessionRecord(SsdCopy):
    """One stored session: its copy on SSD and whose it is, without what only a load needs (token ids, checksums)."""

    key: str
    """The store's key, hex: never the same for other tenants, weights or layouts."""
    tenant: str
    session_id: str
    """The name its owner knows it by."""
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
    variant: str = ""
    """As `Owner.variant`. In the table it is part of the tenant's name (`domain_of`): for a release that knows no
    variants such sessions are another tenant's."""

    @property
    def expires_s(self) -> float | None:
        """When its time to live is over; None for never."""
        return None if self.ttl_s is None else self.last_used_s + self.ttl_s

    def check(self, layout: KVLayout, *, has_own_ids: bool = False) -> None:
        """Refuses a record that cannot be.

        Args:
          has_own_ids: whether its block ids are known to be different ids of blocks that there are.

        Raises:
          ValueError: no tokens, too few blocks for them, a negative or repeated block id, a negative time to live.
        """
        if not self.num_tokens:
            raise ValueError(f"session {self.session_id!r} must have at least 1 token, got none")
        if self.block_ids.ndim != 1 or self.block_ids.dtype != np.int64:
            raise ValueError(
                f"block_ids must be int64[num_blocks], got {self.block_ids.dtype}{list(self.block_ids.shape)}"
            )
        wanted = layout.num_blocks(self.places.num_places)
        if self.num_blocks < wanted:
            raise ValueError(f"{self.num_tokens} tokens must have at least {wanted} blocks, got {self.num_blocks}")
        table = [0] if has_own_ids else self.block_ids.tolist()
        if min(table) < 0 or len(set(table)) < len(table):
            raise ValueError(f"block_ids must be different ids >= 0, got {table}")
        check_seconds("ttl_s", self.ttl_s)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that is not as it should be, found by `Catalog.integrity_check`."""

    key: str | None
    """Of the session; None where it concerns the file."""
    found: str
    """What was wanted and what was found."""


SESSION_COLUMNS = (
    "key, tenant, session_id, num_dropped, num_plain, generation, block_ids, runs, prefix_hashes, "
    "num_tokens, created_s, last_used_s, pinned, ttl_s, checksum"
)
"""Of table `sessions`, in the order of `session_to_row` and `session_from_row`."""
_NUM_NAMED, _NUM_CHECKED = 6, 9  # The first columns never change without a new row: names and numbers, then blobs.
CONTENTS_COLUMNS = "token_ids, sums, note, contents.checksum"
"""Of table `contents`, in the order of `Contents.to_row`."""


class DamagedRecordError(CatalogError):
    """What the catalog says about one session does not pass its checksum. Others are not concerned."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Contents:
    """What a load of one session needs."""

    token_ids: np.ndarray
    """int32 `[num_tokens]`, read-only."""
    sums: np.ndarray
    """uint32 `[num_blocks, L]`, read-only: what `KVLayout.layer_sums` gives of each block."""
    note: bytes = b""
    """What the session's owner wants kept with it; nothing here looks into it."""

    def to_row(self, key: str) -> tuple[Any, ...]:
        """Values of `CONTENTS_COLUMNS`."""
        blobs = (self.token_ids.astype("<i4").tobytes(), self.sums.astype("<u4").tobytes(), self.note)
        return (*blobs, _checksum((key,), blobs))

    @classmethod
    def from_row(cls, record: SessionRecord, row: tuple[Any, ...], num_layers: int) -> Contents:
        """The contents that `to_row` wrote.

        Raises:
          DamagedRecordError: they are others, or do not fit the record.
        """
        token_ids, sums, note, checksum = row
        try:
            if checksum != _checksum((record.key,), row[:-1]):
                raise ValueError("contents must pass their checksum, got others")
            if len(token_ids) != 4 * record.num_tokens:
                raise ValueError(f"contents must have {record.num_tokens} token ids, got {len(token_ids)} bytes")
            return cls(
                token_ids=np.frombuffer(token_ids, "<i4"),
                sums=np.frombuffer(sums, "<u4").reshape(record.num_blocks, num_layers),
                note=note,
            )
        except (TypeError, ValueError) as error:
            raise DamagedRecordError(f"session {record.key!r}: {error}") from error


def session_to_row(record: SessionRecord) -> tuple[Any, ...]:
    """Values of `SESSION_COLUMNS`."""
    lineage, domain = record.lineage, domain_of(record.tenant, record.variant)
    named = (record.key, domain, record.session_id, lineage.num_dropped, lineage.num_plain, record.generation)
    blobs = (record.block_ids.astype("<i8").tobytes(), record.places.to_bytes(), record.prefixes)
    mutable = (record.num_tokens, record.created_s, record.last_used_s, int(record.pinned), record.ttl_s)
    return (*named, *blobs, *mutable, _checksum(named, blobs))


def session_from_row(row: Sequence[Any]) -> SessionRecord:
    """The record that `session_to_row` wrote.

    Raises:
      DamagedRecordError: it is another.
    """
    key, domain, session_id, num_dropped, num_plain, generation, table, runs, prefixes = row[:_NUM_CHECKED]
    num_tokens, created_s, used_s, pinned, ttl_s, checksum = row[_NUM_CHECKED:]
    try:
        if checksum != _checksum(row[:_NUM_NAMED], row[_NUM_NAMED:_NUM_CHECKED]):
            raise ValueError("the row must pass its checksum, got another")
        places = TokenPlaces.from_bytes(runs)
        if num_tokens != places.num_tokens:
            raise ValueError(f"num_tokens must be {places.num_tokens}, got {num_tokens}")
        tenant, variant = split_domain(domain)
        return SessionRecord(
            key=key,
            tenant=tenant,
            variant=variant,
            session_id=session_id,
            block_ids=np.frombuffer(table, "<i8"),
            places=places,
            lineage=PLAIN if not num_dropped and num_plain is None else Lineage(num_dropped, num_plain),
            prefixes=prefixes,
            created_s=float(created_s),
            last_used_s=float(used_s),
            pinned=bool(pinned),
            ttl_s=None if ttl_s is None else float(ttl_s),
            generation=generation,
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise DamagedRecordError(f"session {key!r}: {error}") from error


def _checksum(named: Sequence[Any], blobs: Sequence[bytes]) -> int:
    """Of names and numbers, and of blobs and where each ends.

    Raises:
      TypeError: a blob is none.
    """
    text = repr((*named, *map(len, blobs)))
    return zlib.crc32(b"".join(blobs), zlib.crc32(text.encode()))
