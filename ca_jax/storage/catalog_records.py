"""What the catalog keeps: namespaces and sessions, and what it says about itself.

Not here: how they are kept (catalog), the file they are kept in (catalog_file).
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json

import numpy as np

from ca_jax.storage.expiry import check_ttl
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.lineage import Lineage
from ca_jax.storage.prefix import prefix_hashes
from ca_jax.storage.ssd_copy import Cuts, SsdCopy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Namespace:
    """Whose KV may meet: same weights, layout and versions. Each namespace has blocks and sessions of its own."""

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
            raise ValueError(f"wanted a namespace as JSON, found {text!r}") from error

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all fields, hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def directory_name(self) -> str:
        """Of the directory for its blocks."""
        return f"blocks-{self.fingerprint[:16]}"


class SessionState(enum.StrEnum):
    """Whether a stored session may be served."""

    READY = "ready"
    """It may."""
    DAMAGED = "damaged"
    """A block of it was found unreadable. Kept to be told about, never served."""


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
    state: SessionState = SessionState.READY
    """Whether it may be served."""
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
            raise ValueError(f"block_ids wanted different ids >= 0, found {self.block_ids.tolist()}")

    def check_sizes(self, layout: KVLayout) -> None:
        """Does all of `check` but look at the ids in the block table: that is faster for many sessions at once.

        Raises:
          ValueError: no tokens, places or rows that are not theirs, too few blocks for them, a negative time to live.
        """
        if self.num_tokens <= 0:
            raise ValueError(f"session {self.session_id!r} wanted num_tokens > 0, found {self.num_tokens}")
        num_places = self.num_tokens if self.cuts is None else self.cuts.places.num_places
        if self.cuts is not None and self.cuts.places.num_tokens != self.num_tokens:
            raise ValueError(
                f"session {self.session_id!r} wanted places of its {self.num_tokens} tokens, "
                f"found {self.cuts.places.num_tokens}"
            )
        block_ids = self.block_ids
        if block_ids.ndim != 1 or block_ids.dtype != np.int64:
            raise ValueError(f"block_ids wanted int64[num_blocks], found {block_ids.dtype}{list(block_ids.shape)}")
        if self.num_blocks < layout.num_blocks(num_places):
            raise ValueError(
                f"{self.num_tokens} tokens wanted at least {layout.num_blocks(num_places)} blocks of "
                f"{layout.block_tokens}, found {self.num_blocks}"
            )
        if self.cuts is not None and not num_places <= self.cuts.num_rows <= self.num_blocks * layout.block_tokens:
            raise ValueError(
                f"session {self.session_id!r} wanted {num_places} to {self.num_blocks * layout.block_tokens} rows "
                f"written, found {self.cuts.num_rows}"
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
