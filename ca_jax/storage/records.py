"""What the AttentionStore tells about itself.

Not here: the books these are read from.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping


class Residency(enum.Enum):
    """Where a session's KV is."""

    ABSENT = "absent"
    """Nowhere."""
    PENDING = "pending"
    """Bytes of its first save are in flight: found, not readable."""
    DRAM = "dram"
    """In the DRAM tier, readable."""


class MissReason(enum.StrEnum):
    """Why a load served nothing."""

    ABSENT = "absent"
    """Never saved, dropped or evicted."""
    PENDING = "pending"
    """Its first save is not complete."""
    MISMATCH = "mismatch"
    """What is stored begins with another token."""
    ABORTED = "aborted"
    """The caller gave the load up."""


class SkipReason(enum.StrEnum):
    """Why a save did not begin."""

    STORE_OFF = "store_off"
    """The store has no blocks."""
    TOO_LARGE = "too_large"
    """The sequence needs more blocks than the tier has."""
    NO_ROOM = "no_room"
    """What is not pinned or in use does not hold enough blocks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lookup:
    """Answer of `AttentionStore.lookup`."""

    residency: Residency
    """Where the KV is."""
    num_tokens: int
    """Tokens that can be read now."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntryInfo:
    """One stored session."""

    key: str
    """Session id."""
    residency: Residency
    """Where its KV is."""
    num_tokens: int
    """Tokens that can be read now."""
    num_blocks: int
    """Blocks held, those of unfinished saves included."""
    num_bytes: int
    """Bytes of these blocks."""
    pinned: bool
    """Whether it is pinned."""
    in_use: bool
    """Whether a load or a save of it is open."""
    created_s: float
    """When it was first saved; seconds of the store's clock."""
    last_used_s: float
    """When it was last looked up, loaded or saved; seconds of the store's clock."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreStats:
    """Sizes now, and counts since the store was made."""

    capacity_bytes: int
    """Bytes of all blocks."""
    used_bytes: int
    """Bytes of blocks held by sessions, those of unfinished saves included."""
    free_bytes: int
    """Bytes of free blocks."""
    num_sessions: int
    """Sessions stored or being stored."""
    num_hits: int
    """Loads that were completed."""
    misses: Mapping[MissReason, int]
    """Loads that served nothing, by reason."""
    num_saves: int
    """Saves that were published."""
    num_aborted_saves: int
    """Saves that were begun and not published."""
    skipped_saves: Mapping[SkipReason, int]
    """Saves that did not begin, by reason."""
    num_evictions: int
    """Sessions evicted."""
    evicted_bytes: int
    """Bytes of their blocks."""
    loaded_bytes: int
    """Bytes copied out by completed loads."""
    saved_bytes: int
    """Bytes published."""
