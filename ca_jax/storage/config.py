"""What a user may say about the AttentionStore, and where each of several processes keeps its shard of it.

Not here: the shape of KV (`KVLayout`), which follows from the model.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ca_jax.storage.placement.policy import EVICTION_POLICIES
from ca_jax.storage.records import check_seconds

GIB = 1 << 30
SSD_DRIVERS = ("zarr3", "raw")
OBJECTS_WRITES = ("turn", "idle", "drain")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Sizes and policies of the AttentionStore.

    Raises:
      ValueError: a cap, floor, quota or time that is negative or not finite, an SSD without room or without the DRAM
        that its blocks pass through, a block of no tokens, an unknown policy or driver.
    """

    dram_gib: float = 2.0
    """Cap of the DRAM tier, GiB; a hard one, allocated at start. 0 turns the store off: all saves are skipped."""
    dram_free_fraction: float = 0.1
    """Share of DRAM that eviction to SSD keeps free in the background, so that a save or fetch finds room at once.
    Without an SSD nothing is evicted before its room is needed."""
    ssd_dir: str | None = None
    """Directory of the SSD tier: catalog and blocks. None: DRAM only. One engine at a time may use a directory."""
    ssd_gib: float = 8.0
    """Cap of the SSD tier's blocks, GiB; the catalog, under 1 % of it, comes on top."""
    ssd_free_floor_gib: float = 1.0
    """Free space that stays on the disk whatever the cap says, GiB."""
    ssd_driver: str = "zarr3"
    """How blocks are kept: `zarr3` (TensorStore, one file a block) or `raw` (one file of slots, read and
    written past the page cache: faster where the disk is). Each has its own blocks."""
    ssd_url: str | None = None
    """Where blocks are kept instead of in `ssd_dir`, as a TensorStore URL (`s3://…`, `gs://…`, `memory://…`); the
    catalog stays in `ssd_dir`. `zarr3` only, and without a floor of free space."""
    ssd_codec: str | None = None
    """File of the model's codec (`ca_jax codec` makes one), by which blocks on SSD take a few bits a number, and the
    cap holds as many more; `zarr3` only. What comes back is a little other: see `ca_jax.storage.codec`. None: they
    lie there as in DRAM."""
    ssd_deadline_s: float = 5.0
    """Seconds without progress after which a read or write of the SSD tier is given up, and the KV recomputed."""
    objects_url: str | None = None
    """Where sessions are published for other replicas, as a TensorStore URL (`s3://…`, `gs://…`, `file://…` on a file
    system that they share) or its JSON spec; None: nowhere. See `ca_jax.kv.shared_sessions`."""
    objects_write: str = "turn"
    """When: after each `turn`, once a session has been `idle` for half a minute, or as the engine is closed (`drain`).
    What was not published is lost with its machine."""
    objects_codec: str | None = None
    """File of the model's codec, by which KV takes a few bits a number there, as `ssd_codec` has it on SSD. Replicas
    with another one, or with none, do not find it. What comes back is a little other, and takes the host time to
    decode. None: it lies there as it is computed."""
    objects_deadline_s: float = 5.0
    """Seconds after which a request to that store is given up. No turn fails for it: KV is recomputed, and what could
    not be published is tried again."""
    ttl_s: float | None = None
    """How long a session is kept after its last use, seconds, unless it has a time of its own; None: while there is
    room."""
    tenant_quota_gib: float | None = None
    """Most that one tenant may hold in each tier, GiB; None: no limit. Over it, its own sessions are evicted. Blocks
    that sessions share count once."""
    tenant_quotas: Mapping[str, int] | Iterable[tuple[str, int]] = ()
    """The same for tenants that are named, bytes by tenant, in place of `tenant_quota_gib`: a mapping or pairs, kept as
    sorted pairs. By the engine's name of a tenant: on a server that is `Tenant.domain`, which a salt is part of."""
    block_tokens: int = 128
    """Tokens in a block. Measured on 2 CPU cores, 2,048 tokens of 30 layers x 3 KV heads x 64, fp32: loads ran at
    23 / 25 / 27 / 27 GB/s with blocks of 32 / 64 / 128 / 256 tokens, so 128 is where speed ends to grow; a session
    wastes half a block on average, which is 3 MB then and 6 MB at 256."""
    eviction_policy: str = "scheduler_aware"
    """Which session is evicted when a tier is full: `scheduler_aware` (first those without a waiting job, the least
    recently used of them first; then the one whose next job is last), `return_aware` (the same, but of those without a
    job the one whose bytes are expected to save least), `lru` (least recently used) or `fifo` (first stored)."""

    def __post_init__(self) -> None:
        for name in ("dram_gib", "ssd_gib", "ssd_free_floor_gib", "tenant_quota_gib"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a number of GiB >= 0, got {value}")
        if not 0 <= self.dram_free_fraction < 1:
            raise ValueError(f"dram_free_fraction must be a share in [0, 1), got {self.dram_free_fraction}")
        for name in ("ssd_deadline_s", "objects_deadline_s"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0):
                raise ValueError(f"{name} must be seconds above 0, got {value}")
        if self.objects_write not in OBJECTS_WRITES:
            raise ValueError(f"objects_write must be one of {', '.join(OBJECTS_WRITES)}; got {self.objects_write!r}")
        if self.objects_url is not None and not self.dram_gib:
            raise ValueError("dram_gib must be above 0 with an objects_url, whose KV passes through DRAM; got 0")
        if self.objects_codec is not None and self.objects_url is None:
            raise ValueError(f"objects_codec must have an objects_url, got none beside {self.objects_codec!r}")
        if self.block_tokens <= 0:
            raise ValueError(f"block_tokens must be positive, got {self.block_tokens}")
        if self.eviction_policy not in EVICTION_POLICIES:
            wanted = ", ".join(EVICTION_POLICIES)
            raise ValueError(f"eviction_policy must be one of {wanted}; got {self.eviction_policy!r}")
        if self.ssd_driver not in SSD_DRIVERS:
            raise ValueError(f"ssd_driver must be one of {', '.join(SSD_DRIVERS)}; got {self.ssd_driver!r}")
        check_seconds("ttl_s", self.ttl_s)
        object.__setattr__(self, "tenant_quotas", _sorted_quotas(self.tenant_quotas))
        if self.ssd_dir is None:
            if self.ssd_url is not None:
                raise ValueError(f"ssd_url must have an ssd_dir for its catalog, got none beside {self.ssd_url!r}")
            if self.ssd_codec is not None:
                raise ValueError(f"ssd_codec must have an ssd_dir whose blocks it codes, got none: {self.ssd_codec!r}")
            return
        if not self.ssd_dir:
            raise ValueError("ssd_dir must be a directory, got an empty name")
        if not self.ssd_gib:
            raise ValueError(
                f"ssd_gib must be above 0 with an ssd_dir, got 0 for {self.ssd_dir}; leave ssd_dir out instead"
            )
        if not self.dram_gib:
            raise ValueError("dram_gib must be above 0 with an ssd_dir, whose blocks pass through DRAM; got 0")
        for name in ("ssd_url", "ssd_codec"):
            if getattr(self, name) is not None and self.ssd_driver != "zarr3":
                raise ValueError(f"ssd_driver must be zarr3 with an {name}, got {self.ssd_driver}")

    @property
    def dram_bytes(self) -> int:
        """Cap of the DRAM tier, bytes."""
        return int(self.dram_gib * GIB)

    @property
    def ssd_directory(self) -> Path | None:
        """Directory of the SSD tier, `~` expanded; None without one."""
        return None if self.ssd_dir is None else Path(self.ssd_dir).expanduser()

    @property
    def ssd_bytes(self) -> int:
        """Cap of the SSD tier, bytes."""
        return int(self.ssd_gib * GIB)

    @property
    def ssd_free_floor_bytes(self) -> int:
        """Free space that stays on the disk, bytes; none is watched over at a URL."""
        return 0 if self.ssd_url is not None else int(self.ssd_free_floor_gib * GIB)

    @property
    def tenant_quota_bytes(self) -> int | None:
        """Most that one tenant may hold in each tier, bytes."""
        return None if self.tenant_quota_gib is None else int(self.tenant_quota_gib * GIB)


def _sorted_quotas(quotas: Mapping[str, int] | Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Quotas by tenant as pairs.

    Raises:
      ValueError: a tenant named twice, or a quota that is no number of bytes >= 0.
    """
    named = quotas.items() if isinstance(quotas, Mapping) else quotas
    try:
        pairs = [(tenant, num_bytes) for tenant, num_bytes in named]
    except (TypeError, ValueError) as error:
        raise ValueError(f"tenant_quotas must be pairs of a tenant and bytes, got {quotas!r}") from error
    for tenant, num_bytes in pairs:
        if not isinstance(tenant, str) or not isinstance(num_bytes, int) or num_bytes < 0:
            raise ValueError(f"tenant_quotas must be bytes >= 0 by tenant, got {tenant!r}: {num_bytes!r}")
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"tenant_quotas must name each tenant once, got {pairs}")
    return tuple(sorted(pairs))


_SHARD = re.compile(r"shard-(\d+)-of-(\d+)")


def shard_config(config: StoreConfig, index: int, count: int) -> StoreConfig:
    """The config of one process's store: what it says of a directory or URL is of that shard's below it.

    Args:
      config: of all of them together. Sizes are those of each process.
      index: which process.
      count: how many there are; 1: the config as it is.

    Raises:
      ValueError: the directory holds shards of another number of processes, or the store of a single one.
    """
    directory = config.ssd_directory
    if directory is None:
        return config
    found = {int(match[2]) for path in _entries(directory) if (match := _SHARD.fullmatch(path.name))}
    has_catalog = any(path.name.startswith("catalog.") for path in _entries(directory))
    others = sorted((found | ({1} if has_catalog else set())) - {count})
    if others:
        raise ValueError(
            f"{directory} must be the store of {_processes(count)}, got that of {_processes(others[0])}; "
            "start as many, or name another directory"
        )
    if count == 1:
        return config
    name = f"shard-{index}-of-{count}"
    url = None if config.ssd_url is None else f"{config.ssd_url.rstrip('/')}/{name}"
    return dataclasses.replace(config, ssd_dir=str(directory / name), ssd_url=url)


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
