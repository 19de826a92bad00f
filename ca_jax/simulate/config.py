"""What a simulated server is: its model, its devices and what computing takes on them, the tiers of its store.

Not here: serving (server), costs fitted to measurements (fitted), the paper's set-ups (paper).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

from ca_jax.overflow.config import OverflowConfig

BELADY = "belady"
"""The eviction policy that knows when sessions come back: a bound, for `StoreSizes.eviction_policy`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimModel:
    """A transformer's sizes."""

    name: str
    num_params: float
    num_layers: int
    """L."""
    num_heads: int
    """N, query heads."""
    num_kv_heads: int
    """K."""
    head_dim: int
    """H."""
    window: int
    dtype_bytes: int = 2
    """Bytes of a weight, and of a number of KV."""

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.num_params * self.dtype_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator."""

    name: str
    flops: float
    """Peak operations a second, dense, at the dtype of the weights."""
    hbm_bytes: float
    hbm_bytes_per_s: float
    """Bandwidth of that."""
    link_bytes_per_s: float
    """Bandwidth of its link to the host, one way."""


_MODEL_FIELDS = "num_params", "num_layers", "num_heads", "num_kv_heads", "head_dim", "window", "dtype_bytes"
_MODELS: dict[str, tuple[float, int, int, int, int, int, int]] = {
    "llama-13b": (13.0e9, 40, 40, 40, 128, 4096, 2),
    "llama-65b": (65.2e9, 80, 64, 64, 128, 2048, 2),
    "llama-70b": (69.0e9, 80, 64, 8, 128, 4096, 2),
    "falcon-40b": (41.8e9, 60, 128, 8, 64, 2048, 2),
    "mistral-7b": (7.2e9, 32, 32, 8, 128, 32768, 2),
    "smollm2-135m": (134.5e6, 30, 9, 3, 64, 8192, 4),
}
MODELS = {
    name: SimModel(name=name, **dict(zip(_MODEL_FIELDS, sizes, strict=True)))  # type: ignore[arg-type]
    for name, sizes in _MODELS.items()
}
"""The models of the paper, as published, and the one that the benchmarks measure, as they do: in float32."""

DEVICES = {
    device.name: device
    for device in (
        Device(name="a100-40", flops=312e12, hbm_bytes=40e9, hbm_bytes_per_s=1.555e12, link_bytes_per_s=26e9),
        Device(name="a100-80", flops=312e12, hbm_bytes=80e9, hbm_bytes_per_s=2.039e12, link_bytes_per_s=26e9),
        Device(name="h100", flops=989e12, hbm_bytes=80e9, hbm_bytes_per_s=3.35e12, link_bytes_per_s=52e9),
        Device(name="a40", flops=149.7e12, hbm_bytes=48e9, hbm_bytes_per_s=696e9, link_bytes_per_s=26e9),
    )
}
"""Data sheets; links as PCIe of their generation delivers it, 26 GB/s for 16 lanes of the fourth (the paper, 2.3)."""


class CostModel(Protocol):
    """What computing takes."""

    def prefill_s(self, history_tokens: int, new_tokens: int) -> float:
        """Seconds of a prefill of one job, its history on the device."""
        ...

    def decode_s(self, num_jobs: int, context_tokens: int) -> float:
        """Seconds of a decode step of `num_jobs` jobs, with `context_tokens` in all their contexts together."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class RooflineCost:
    """A `CostModel` of data sheets: operations and bytes over what devices do of them; the slower of the two counts.

    Raises:
      ValueError: a share outside (0, 1], or no device.
    """

    model: SimModel
    device: Device
    num_devices: int
    """How many share each layer's work."""
    flops_share: float = 0.6
    """Share of peak operations that a prefill reaches. The paper's own 360 ms for 2,048 tokens of a model of 65 G
    weights on four A100 are 0.6."""
    bytes_share: float = 0.7
    """Share of the memory's bandwidth that a step reaches."""
    step_s: float = 0.0
    """Seconds of every pass through the layers, however small."""

    def __post_init__(self) -> None:
        for name in ("flops_share", "bytes_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a share in (0, 1], got {getattr(self, name)}")
        if self.num_devices < 1:
            raise ValueError(f"num_devices must be at least 1, got {self.num_devices}")
        if not 0 <= self.step_s < math.inf:
            raise ValueError(f"step_s must be seconds of at least 0, got {self.step_s}")

    def prefill_s(self, history_tokens: int, new_tokens: int) -> float:
        """See `CostModel`."""
        pairs = new_tokens * (history_tokens + new_tokens / 2)
        return self._step_s(new_tokens, pairs, history_tokens + new_tokens)

    def decode_s(self, num_jobs: int, context_tokens: int) -> float:
        """See `CostModel`."""
        return self._step_s(num_jobs, context_tokens, context_tokens)

    def _step_s(self, num_tokens: int, num_pairs: float, kv_tokens: int) -> float:
        model = self.model
        flops = 2 * model.num_params * num_tokens + 4 * model.num_layers * model.num_heads * model.head_dim * num_pairs
        num_bytes = model.weight_bytes + model.token_bytes * kv_tokens
        compute_s = flops / (self.num_devices * self.device.flops * self.flops_share)
        memory_s = num_bytes / (self.num_devices * self.device.hbm_bytes_per_s * self.bytes_share)
        return self.step_s + max(compute_s, memory_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreSizes:
    """The tiers of a simulated store.

    Raises:
      ValueError: a size or rate outside its range.
    """

    dram_bytes: float
    """Capacity of DRAM."""
    ssd_bytes: float = 0.0
    """Capacity of SSD; 0 for none."""
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
    cost: CostModel
    link_bytes_per_s: float
    """Bandwidth between DRAM and the devices, each way."""
    hbm_tokens: float = math.inf
    """Most tokens whose KV the devices hold."""
    max_batch_size: int = 24
    """Decode slots."""
    prefills_block: bool = True
    """Whether nothing is decoded while a job can be prefilled, as in the paper; if not, each job in a slot decodes a
    token between two prefills, as in this engine."""
    store: StoreSizes | None = None
    """Where KV is kept between turns; None to recompute it."""
    overflow: OverflowConfig = dataclasses.field(default_factory=lambda: OverflowConfig(keep_first_tokens=0))
    """What happens when a context is full; `method` `ca`, or `of` where what is stored is lost then. Repair takes no
    simulated time."""
    warmup_turns: int = 0
    """First turns that are not counted."""
