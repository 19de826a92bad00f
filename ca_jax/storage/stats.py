"""What the store counts while it works.

Not here: what callers are given (records).
"""

from __future__ import annotations

import dataclasses

from ca_jax.storage.records import FlushFailure, MissReason, SkipReason


@dataclasses.dataclass
class Counters:
    """Counts since the store was made; meanings as in `StoreStats` and `SsdStats`."""

    num_hits: int = 0
    num_hits_from_ssd: int = 0
    misses: dict[MissReason, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(MissReason, 0))
    num_saves: int = 0
    num_aborted_saves: int = 0
    skipped_saves: dict[SkipReason, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(SkipReason, 0))
    num_evictions: int = 0
    evicted_bytes: int = 0
    num_expired: int = 0
    loaded_bytes: int = 0
    saved_bytes: int = 0


@dataclasses.dataclass
class SsdCounters:
    """The same for the SSD tier."""

    num_lost_sessions: int = 0
    num_fetches: int = 0
    fetched_bytes: int = 0
    num_flushes: int = 0
    flushed_bytes: int = 0
    failed_flushes: dict[FlushFailure, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(FlushFailure, 0))
    num_evictions: int = 0
    evicted_bytes: int = 0
