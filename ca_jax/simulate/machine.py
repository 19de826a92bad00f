"""Models and devices as a simulation knows them, and what computing takes on them, from first principles.

Not here: rates fitted to measurements (`ca_jax.kv.rates`), what is computed when (simulator).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimModel:
    """A transformer's sizes."""

    name: str
    """As it is called."""
    num_params: float
    """Weights."""
    num_layers: int
    """L."""
    num_heads: int
    """N, query heads."""
    num_kv_heads: int
    """K."""
    head_dim: int
    """H."""
    window: int
    """Most tokens of a context."""
    dtype_bytes: int = 2
    """Of a weight, and of a number of KV."""

    @property
    def weight_bytes(self) -> float:
        """Of all weights."""
        return self.num_params * self.dtype_bytes

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator."""

    name: str
    """As it is called."""
    flops: float
    """Most operations a second, dense, at the dtype of the weights."""
    hbm_bytes: float
    """Its memory."""
    hbm_bytes_per_s: float
    """Bandwidth of that."""
    link_bytes_per_s: float
    """Bandwidth of its link to the host, one way."""


MODELS = {
    model.name: model
    for model in (
        SimModel(
            name="llama-13b", num_params=13.0e9, num_layers=40, num_heads=40, num_kv_heads=40, head_dim=128, window=4096
        ),
        SimModel(
            name="llama-65b", num_params=65.2e9, num_layers=80, num_heads=64, num_kv_heads=64, head_dim=128, window=2048
        ),
        SimModel(
            name="llama-70b", num_params=69.0e9, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128, window=4096
        ),
        SimModel(
            name="falcon-40b", num_params=41.8e9, num_layers=60, num_heads=128, num_kv_heads=8, head_dim=64, window=2048
        ),
        SimModel(
            name="mistral-7b", num_params=7.2e9, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, window=32768
        ),
        SimModel(
            name="smollm2-135m",
            num_params=134.5e6,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            window=8192,
            dtype_bytes=4,
        ),
    )
}
"""The models of the paper, as published, and the one that the benches measure, as they do: in float32."""

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
        """Seconds of a decode step.

        Args:
          num_jobs: that get a token each.
          context_tokens: of all of them.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class RooflineCost:
    """Operations and bytes over what devices do of them; the slower of the two counts.

    Raises:
      ValueError: a share outside (0, 1], or no device.
    """

    model: SimModel
    """What is computed."""
    device: Device
    """On what."""
    num_devices: int
    """How many share each layer's work."""
    flops_share: float = 0.6
    """Share of the operations a second that a prefill reaches. The paper's own 360 ms for 2,048 tokens of a model of
    65 G weights on four A100 are 0.6."""
    bytes_share: float = 0.7
    """Share of the memory's bandwidth that a step reaches."""
    step_s: float = 0.0
    """Of every pass through the layers, however small."""

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
