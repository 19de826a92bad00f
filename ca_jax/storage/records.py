"""What the AttentionStore tells about itself.

Not here: the index these are read from (sessions).
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import time
from collections.abc import Callable

from ca_jax.errors import check
from ca_jax.telemetry.timeline import NO_TIMELINE, Timeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreRuntime:
    """What every part of a store is given."""

    clock: Callable[[], float] = time.time
    """Seconds since the epoch, which times to live are counted by."""
    on_progress: Callable[[], None] = lambda: None
    """Called from any thread when `AttentionStore.poll` has something to do."""
    on_fetch: Callable[[int, float], None] = lambda num_bytes, seconds: None
    """Given bytes and seconds of fetches from SSD, from any thread, whenever some have ended and none is under way."""
    timeline: Timeline = NO_TIMELINE
    """Gets a span of every fetch and of every flush, each from catalog to catalog; one that fails says why."""


class StoreClosedError(RuntimeError):
    """A call on a store that has been closed."""


class EntryInUseError(RuntimeError):
    """A session's KV was to be shortened or dropped while a load or save of it is open."""


class IoFailure(enum.StrEnum):
    """Why a move failed: the reason a miss or a skipped save is counted under."""

    CORRUPT = "corrupt"
    """What is on disk is not what was written: a checksum, a length or a label is wrong."""
    MISSING = "missing"
    """Nothing is on disk for the block."""
    DEADLINE = "deadline"
    """The device made no progress for too long."""
    NO_SPACE = "no_space"
    """The disk is full, or would be under its floor."""
    CANCELLED = "cancelled"
    """The mover, or the end of the store, gave it up."""
    DEVICE = "device"
    """Anything else that the system or the device reports."""
    CATALOG = "catalog"
    """What says where the blocks are could not be read or written."""


class BlockIoError(Exception):
    """A move that failed. The message says of what and how; `reason` is for counting."""

    def __init__(self, reason: IoFailure, message: str):
        super().__init__(message)
        self.reason = reason
        """Why."""


class Residency(enum.Enum):
    """Where a session's KV is."""

    ABSENT = "absent"
    """Nowhere."""
    PENDING = "pending"
    """Bytes of its first save, of a fetch from SSD, or of all there is of it to SSD, are in flight: not readable."""
    SSD = "ssd"
    """On SSD only: readable once fetched."""
    DRAM = "dram"
    """In the DRAM tier, readable."""


class MissReason(enum.StrEnum):
    """Why a load served nothing."""

    ABSENT = "absent"
    """Never saved, dropped, evicted or expired."""
    PENDING = "pending"
    """Its first save, or its fetch, is not complete."""
    MISMATCH = "mismatch"
    """What is stored begins with another token."""
    ABORTED = "aborted"
    """The caller gave the load up."""
    NO_ROOM = "no_room"
    """It is on SSD, and what is not pinned or in use in DRAM does not make room for it."""
    # Its fetch from SSD failed, see `IoFailure`. What is corrupt or missing is forgotten.
    CORRUPT = "corrupt"
    MISSING = "missing"
    DEADLINE = "deadline"
    DEVICE = "device"
    CATALOG = "catalog"
    CANCELLED = "cancelled"
    OTHER_SHARD = "other_shard"
    """It is there, and another process does not have its shard of it."""
    RECOMPUTED = "recomputed"
    """It is there, and recomputing it was predicted to be faster than loading it."""


class SkipReason(enum.StrEnum):
    """Why a save did not begin."""

    STORE_OFF = "store_off"
    """The store has no blocks."""
    TOO_LARGE = "too_large"
    """The sequence needs more blocks than the tier has, or than its tenant may hold."""
    NO_ROOM = "no_room"
    """What is not pinned, in use or on its way to SSD does not hold enough blocks."""


class FlushFailure(enum.StrEnum):
    """Why a session's KV did not get from DRAM to SSD. What is on SSD of it already stays."""

    TOO_LARGE = "too_large"
    """It needs more blocks than the tier has, or than its tenant may hold."""
    NO_ROOM = "no_room"
    """What is not pinned or in use on SSD does not hold enough blocks."""
    # The write failed, see `IoFailure`; it is cancelled where the session was dropped or saved anew meanwhile.
    NO_SPACE = "no_space"
    DEADLINE = "deadline"
    DEVICE = "device"
    CATALOG = "catalog"
    CANCELLED = "cancelled"


class Note(bytes):
    """What a session's owner wants kept with it."""

    generation: int
    """Later states of a session have more."""

    def __new__(cls, data: bytes, generation: int) -> Note:
        """Of bytes, and the generation of what they say."""
        note = super().__new__(cls, data)
        note.generation = generation
        return note


_DOMAIN = re.compile(r"(.*)\+([0-9a-f]{64})", re.DOTALL)


def domain_of(tenant: str, variant: str = "") -> str:
    """Names the sessions that may share KV: a tenant's, of one variant. Without one it is the tenant's name."""
    return f"{tenant}+{variant}" if variant else tenant


def split_domain(domain: str) -> tuple[str, str]:
    """Tenant and variant of what `domain_of` gave."""
    found = _DOMAIN.fullmatch(domain) if "+" in domain else None
    return (domain, "") if found is None else (found[1], found[2])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """Whose a session is, told once, when its first save is prepared.

    Raises:
      ValueError: a time to live that is negative or not finite, or a tenant named like a variant of another.
    """

    tenant: str = ""
    """Who pays for its bytes: quotas count by tenant."""
    session_id: str = ""
    """The name its owner knows it by."""
    ttl_s: float | None = None
    """How long it lives after its last use, seconds; None: as the config says."""
    variant: str = ""
    """Fingerprint, 64 hex digits, of what its KV is computed with besides the weights that the store is of: an adapter.
    Empty: there is none. KV of two variants is never shared, not even within a tenant."""

    def __post_init__(self) -> None:
        check_seconds("ttl_s", self.ttl_s)
        is_own = split_domain(self.tenant) == (self.tenant, "")  # Or it would be another's domain.
        check(is_own, "a tenant's name", "one that does not end in + and 64 hex digits", self.tenant)

    @property
    def domain(self) -> str:
        """Names whose KV it may share; see `domain_of`."""
        return domain_of(self.tenant, self.variant)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntryInfo:
    """One stored session."""

    key: str
    """The store's key of it."""
    tenant: str
    """Whose it is."""
    session_id: str
    """The name its owner knows it by."""
    residency: Residency
    """Where its KV is; the DRAM tier, if it is in both."""
    num_tokens: int
    """Tokens that can be read now; on SSD only, what a fetch would bring."""
    num_dropped: int
    """Tokens of the session that were dropped so far, others behind them left."""
    num_blocks: int
    """Blocks of DRAM held, those of unfinished saves included, and those that other sessions hold too."""
    num_bytes: int
    """Bytes of these blocks. What several sessions share counts for each here, and once in `StoreStats`."""
    ssd_tokens: int
    """Tokens that are on SSD, durably."""
    ssd_bytes: int
    """Bytes of its blocks on SSD, likewise."""
    pinned: bool
    """Whether it is pinned, by its owner or by a running turn."""
    in_use: bool
    """Whether a load or a save of it is open."""
    created_s: float
    """When it was first saved; seconds of the store's clock."""
    last_used_s: float
    """When it was last looked up, loaded or saved; seconds of the store's clock."""
    ttl_s: float | None
    """How long it lives after its last use, seconds; None: while room lasts."""
    variant: str = ""
    """As `Owner.variant`."""
    expected_s: float | None = None
    """Up to when its client's word holds that its next turn will come; seconds of the store's clock. None: no word."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockTiers:
    """Where one block of a session is, and how many of its tokens."""

    first_token: int
    """The first of its tokens, counted from the first of the session that is stored."""
    dram_tokens: int
    """Its tokens in DRAM."""
    ssd_tokens: int
    """Of its tokens, those on SSD, durably."""
    saving_tokens: int = 0
    """Tokens behind those in DRAM whose save is not complete."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookAheadWindows:
    """How far placement looks over the job queue, in jobs from its head. A window may be longer than the queue."""

    prefetch_jobs: int
    """The look-ahead prefetch window: what these jobs need is fetched from SSD before they run. 0 while SSD is empty,
    or there is none."""
    eviction_jobs: int
    """The look-ahead eviction window: what these jobs need leaves DRAM behind all else. All that wait, with a policy
    that looks at the queue (`SchedulerAwarePolicy` says why); 0 with one that does not."""


GAP_BOUNDS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""Upper bounds of a `GapHistogram`'s buckets, seconds; the last bucket has none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GapHistogram:
    """How long after it was evicted from a tier a session was wanted again."""

    counts: tuple[int, ...] = (0,) * (len(GAP_BOUNDS_S) + 1)
    """Gaps of each bucket: at most its bound, and more than the one before it."""
    sum_s: float = 0.0
    """Of all gaps."""


@dataclasses.dataclass(kw_only=True)
class TierStats:
    """What both tiers have: sizes now, and counts since the store was made."""

    capacity_bytes: int = 0
    """Bytes of all blocks; of those on SSD each is rounded up to whole pages."""
    used_bytes: int = 0
    """Bytes of blocks held by sessions, or by moves that have not settled."""
    free_bytes: int = 0
    """Bytes of free blocks."""
    num_evictions: int = 0
    """Sessions evicted from the tier."""
    evicted_bytes: int = 0
    """Bytes of the blocks that this freed."""
    evict_to_reuse: GapHistogram = GapHistogram()
    """How long after it was evicted a session was wanted again: from DRAM, whether SSD had it or not; from SSD, where
    no tier had it."""


@dataclasses.dataclass(kw_only=True)
class SsdStats(TierStats):
    """The SSD tier."""

    num_sessions: int = 0
    """Sessions on SSD."""
    num_lost_sessions: int = 0
    """Sessions that the catalog named at start and that were unusable: damaged, or beyond a smaller cap."""
    num_fetches: int = 0
    """Sessions fetched to DRAM."""
    fetched_bytes: int = 0
    """Bytes of their blocks."""
    num_flushes: int = 0
    """Sessions written, or written on, and published."""
    flushed_bytes: int = 0
    """Bytes of the blocks that took: what is there already, as another session's that shares it, is not written."""
    failed_flushes: dict[FlushFailure, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(FlushFailure, 0))
    """Flushes that were not published, by reason."""


@dataclasses.dataclass(kw_only=True)
class StoreStats(TierStats):
    """The DRAM tier, and the store."""

    num_sessions: int = 0
    """Sessions stored or being stored, in any tier."""
    num_dram_sessions: int = 0
    """Those of them with blocks of DRAM."""
    num_hits: int = 0
    """Loads that were completed."""
    num_hits_from_ssd: int = 0
    """Those of them whose KV had just been fetched from SSD."""
    misses: dict[MissReason, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(MissReason, 0))
    """Loads that served nothing, by reason."""
    num_saves: int = 0
    """Saves that were published."""
    num_aborted_saves: int = 0
    """Saves that were begun and not published."""
    skipped_saves: dict[SkipReason, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(SkipReason, 0))
    """Saves that did not begin, by reason."""
    num_expired: int = 0
    """Sessions whose time to live was over."""
    loaded_bytes: int = 0
    """Bytes copied out by completed loads."""
    saved_bytes: int = 0
    """Bytes published."""
    ssd: SsdStats | None = None
    """The SSD tier; None where there is none."""


def check_seconds(name: str, seconds: float | None) -> None:
    """Refuses a time to live, or to come back, that is none.

    Raises:
      ValueError: it is negative or not finite.
    """
    if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{name} must be a number of seconds >= 0, or None, got {seconds}")
