"""What `store` and `policy`, the suites that need no engine, are asked and answer; rows' fields are the JSON's.

Not here: measuring (`bench_storage`, `bench_policy`), the rest of the JSON (`bench_report`).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ca_jax.launch.bench_schema import Spread
from ca_jax.storage.config import GIB
from ca_jax.storage.layout import KVLayout

STORAGE_SUITES = ("store", "policy")
"""What can be measured without an engine."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreBenchConfig:
    """How fast the tiers move bytes. The layout is SmolLM2-135M's by default.

    Raises:
      ValueError: a number that is not positive, an unknown dtype, or less room than one block.
    """

    suite: ClassVar[str] = "store"

    num_layers: int = 30
    """L of a block."""
    num_kv_heads: int = 3
    """K of a block."""
    head_dim: int = 64
    """H of a block."""
    dtype: str | None = None
    """Of KV; None: float32."""
    block_tokens: int = 128
    """Tokens in a block."""
    session_tokens: int = 2048
    """Tokens of the session that is loaded from DRAM."""
    store_gib: float = 1.0
    """Blocks that are written to disk and read from it in one sample, GiB. In memory once more."""
    ssd_dir: str | None = None
    """Where; a directory of its own is made there and removed. None: where the system keeps temporary files."""
    repeats: int = 5
    """Samples a median is of."""
    seed: int = 0
    """Of the bytes, which are random: speed does not depend on them."""

    def __post_init__(self) -> None:
        _check_positive(self, "session_tokens", "repeats")
        num_bytes = int(self.store_gib * GIB)
        if num_bytes < self.layout.block_bytes:
            raise ValueError(
                f"store_gib wanted room for at least one block of {self.layout.block_bytes} bytes, found {num_bytes}"
            )

    @property
    def layout(self) -> KVLayout:
        """The shape of a block."""
        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype or "float32",
            block_tokens=self.block_tokens,
        )

    @property
    def num_disk_blocks(self) -> int:
        """Blocks written and read in one sample."""
        return int(self.store_gib * GIB) // self.layout.block_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreRow:
    """Bytes moved, against the plain way to move as many. GB is 1e9 bytes."""

    measured: str
    """`dram_load`: all layers of a session into staging. `ssd_read_cold`, `ssd_read_warm`: from disk into memory that
    is reused, with an empty and with a full page cache. `ssd_write`: durably. `crc32c`: the checksum, by one thread."""
    driver: str | None
    """Of the SSD tier; None where no disk is concerned."""
    num_bytes: int
    """In one sample."""
    gb_per_s: float
    """Ours."""
    cpu_s_per_gb: float
    """CPU time of all threads of the process; of a load, copies are all there is."""
    plain: str | None
    """What it is compared with: the fastest of `plain_gb_per_s_of`, but a copy by one thread for `dram_load`."""
    plain_gb_per_s: float | None
    """Of that."""
    plain_cpu_s_per_gb: float | None
    """Of that."""
    plain_gb_per_s_of: dict[str, float]
    """Of all plain ways that were tried."""
    ratio: float | None
    """`gb_per_s` over `plain_gb_per_s`."""
    spread: Spread
    """See `Spread`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyBenchConfig:
    """What bookkeeping costs with many sessions, and what the choices are worth.

    Raises:
      ValueError: a number that is not positive, or a queue that is deeper than there are sessions.
    """

    suite: ClassVar[str] = "policy"

    num_sessions: int = 100_000
    """Sessions stored, when choices are timed and in the catalog of the start-up."""
    num_jobs: int = 10_000
    """Jobs that wait when choices are timed."""
    num_steps: int = 2000
    """Choices timed for each eviction policy, and searches for a prefix: what the percentiles are of."""
    loop_sessions: int = 1000
    """Sessions of the loop: revisited in the same order, 5 % over capacity."""
    queue_depth: float = 0.5
    """Jobs that wait in the loop, as a share of its sessions, for the summary; other depths have rows too."""
    ssd_dir: str | None = None
    """Where the catalog is written, as for `StoreBenchConfig`."""
    repeats: int = 5
    """Start-ups a median is of."""
    seed: int = 0
    """Of sizes and of who comes next."""

    def __post_init__(self) -> None:
        _check_positive(self, "num_sessions", "num_jobs", "num_steps", "loop_sessions", "repeats")
        if not 0 < self.queue_depth <= 1:
            raise ValueError(f"queue_depth wanted a share in (0, 1], found {self.queue_depth}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecisionRow:
    """One step of the bookkeeping: a job leaves the queue's head, one joins its tail, lookup, plan, victims."""

    measured: str = "decision"
    policy: str
    """Of eviction."""
    num_sessions: int
    """Stored, a tenth of them in DRAM too."""
    num_jobs: int
    """Waiting."""
    p50_ms: float
    """Median of the steps."""
    p99_ms: float
    """Of a hundred steps one is slower."""
    max_ms: float
    """The slowest step."""
    fetches_per_plan: float
    """Mean of the steps: how much there was to plan."""
    p50_ms_of: dict[str, float]
    """Medians of the parts: `queue` (leave and join), `lookup` (of both sessions, as uses), `plan` (as many fetches as
    it may have, with room made for each), `victims` (room for a session, in DRAM and on SSD)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartupRow:
    """A store that opens what an earlier process left: until sessions, free lists and orders are ready."""

    measured: str = "startup"
    num_sessions: int
    """In the catalog."""
    num_blocks: int
    """That they hold."""
    catalog_bytes: int
    """Size of the catalog's file."""
    startup_s: float
    """With the catalog in the page cache, as after a restart of the process."""
    cold_startup_s: float | None
    """With an empty page cache, as after a restart of the machine; None where it cannot be emptied."""
    store_bytes: int | None
    """How much larger the process is with the store open, but for freed memory that it had; None where that is not
    told."""
    spread: Spread
    """See `Spread`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixRow:
    """A new conversation that looks for the session on SSD that it begins like: all of them share a prompt."""

    measured: str = "prefix"
    num_sessions: int
    """On SSD."""
    shared_tokens: int
    """Of the prompt that they begin with."""
    prompt_tokens: int
    """Of the new conversation, the shared ones first."""
    p50_ms: float
    """Median of the searches, before each of which a session was used."""
    p99_ms: float
    """Of a hundred searches one is slower."""
    max_ms: float
    """The slowest search."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopRow:
    """Sessions of equal size revisited in the same order, more than there is room for."""

    measured: str = "loop"
    policy: str
    """Of eviction; `belady` knows the future."""
    num_sessions: int
    """In the loop."""
    over_capacity: float
    """By how much they exceed the room, as a share of it."""
    queue_depth: float | None
    """Jobs that wait, as a share of the sessions; None where the queue is not looked at."""
    hit_rate: float
    """Of the jobs behind the first round, in which nobody can hit."""
    vs_belady: float
    """`hit_rate` over Belady's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnRow:
    """The host's work for one turn behind a history whose KV is in DRAM, without a model's."""

    measured: str = "turn"
    history_tokens: int
    """Tokens of the conversation before the turns that are timed."""
    new_tokens: int
    """Tokens of each of these."""
    num_messages: int
    """Of the conversation."""
    total_ms: float
    """Median of the turns."""
    ms_of: dict[str, float]
    """Medians of the parts: `render` (the chat template, not on the engine's thread where it is much), `queue` (the
    prompt), `load` (what of it is stored, and how it is read), `save` (of what is new), `adopt` (the turn becomes part
    of the conversation), `keep` (that outlives the process)."""


PolicyRow = DecisionRow | StartupRow | PrefixRow | TurnRow | LoopRow


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} wanted at least 1, found {getattr(config, name)}")
