"""What a simulated server is: its model, its device, the tiers of its store.

Not here: serving (simulator), what computing takes (machine, fitted), the paper's set-ups (paper).
"""

from __future__ import annotations

import dataclasses
import math

from ca_jax.overflow.config import OverflowConfig
from ca_jax.simulate.machine import CostModel, SimModel

BELADY = "belady"
"""The eviction policy that knows when sessions come back: a bound, for `StoreSizes.eviction_policy`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreSizes:
    """The tiers of a simulated store.

    Raises:
      ValueError: a size or rate that cannot be.
    """

    dram_bytes: float
    """Cap of DRAM."""
    ssd_bytes: float = 0.0
    """Cap of SSD; 0 for none."""
    ssd_read_bytes_per_s: float = 5e9
    """Bandwidth of fetches. The paper has disks of less than 5 GB/s (section 2.4)."""
    ssd_write_bytes_per_s: float = 5e9
    """Bandwidth of flushes."""
    eviction_policy: str = "scheduler_aware"
    """As in `StoreConfig`, or `BELADY`."""
    looks_ahead: bool = True
    """Whether the store knows of waiting jobs. If not, KV is fetched when its job is the next."""
    ttl_s: float | None = None
    """As in `StoreConfig`."""
    block_tokens: int = 128
    """As in `StoreConfig`."""

    def __post_init__(self) -> None:
        for name in ("dram_bytes", "ssd_read_bytes_per_s", "ssd_write_bytes_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number above 0, got {getattr(self, name)}")
        if not 0 <= self.ssd_bytes < math.inf:
            raise ValueError(f"ssd_bytes must be a number of at least 0, got {self.ssd_bytes}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """A simulated server."""

    model: SimModel
    """What it serves."""
    cost: CostModel
    """What computing takes."""
    link_bytes_per_s: float
    """Between DRAM and the devices, each way."""
    hbm_tokens: float = math.inf
    """Most tokens whose KV the devices hold."""
    max_batch_size: int = 24
    """Slots."""
    prefills_block: bool = True
    """Whether nothing is decoded while a job can be prefilled, as in the paper; if not, each job in a slot decodes a
    token between two prefills, as in this engine."""
    read_buffer_layers: int | None = None
    """Layers that may be loaded before their job begins; None for all."""
    store: StoreSizes | None = None
    """Where KV is kept between turns; None to recompute it."""
    overflow: OverflowConfig = dataclasses.field(default_factory=lambda: OverflowConfig(keep_first_tokens=0))
    """What happens when a context is full; `method` `ca`, or `of` where what is stored is lost then. Repair takes no
    simulated time."""
    warmup_turns: int = 0
    """First turns that are not counted."""
