"""What restoring one history layer by layer from the objects tier takes, beside local DRAM.

A closed calculation over `pipeline_s`; the simulation of replicas has whole histories in DRAM before a prefill begins.

Not here: doing it, sessions beside each other (replicas).
"""

from __future__ import annotations

import dataclasses
import math

from ca_jax.errors import check
from ca_jax.kv.costs import pipeline_s
from ca_jax.simulate.config import FittedCost, RooflineCost, SimModel
from ca_jax.simulate.fleet import MIB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restore:
    """One history that is loaded layer by layer, from the objects tier and from local DRAM.

    Raises:
      ValueError: a number outside its range.
    """

    model: SimModel
    cost: RooflineCost | FittedCost
    history_tokens: int
    new_tokens: int
    link_bytes_per_s: float
    """Between DRAM and the devices."""
    network_bytes_per_s: float = 12.5e9
    """100 Gb/s."""
    latency_s: float = 5e-3
    """Of each request."""
    object_bytes: int = 32 * MIB
    """Objects hold one layer of some tokens; small layers share one."""
    requests_in_flight: int = 16
    """GETs that wait for their answers at once."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[2:]:
            least = 0 if field.name == "latency_s" else 1
            check(getattr(self, field.name) >= least, field.name, f"at least {least}", getattr(self, field.name))

    @property
    def layer_bytes(self) -> float:
        """Of the history in one layer."""
        return self.history_tokens * self.model.token_bytes / self.model.num_layers

    @property
    def group_layers(self) -> int:
        """Layers that come together, since an object holds them."""
        return max(1, min(self.model.num_layers, int(self.object_bytes // self.layer_bytes)))

    @property
    def compute_s(self) -> float:
        """Prefill of the new tokens with the history on the device."""
        return self.cost.prefill_s(self.history_tokens, self.new_tokens)

    @property
    def objects_bytes_per_s(self) -> float:
        """What GETs in flight give together: the network's rate, if there are enough of them."""
        of_each = self.object_bytes / (self.latency_s + self.object_bytes / self.network_bytes_per_s)
        return min(self.network_bytes_per_s, self.requests_in_flight * of_each)

    @property
    def from_dram_s(self) -> float:
        """Time to the first token with the history in local DRAM, nothing of it loaded ahead."""
        num_layers = self.model.num_layers
        load_s = self.layer_bytes / self.link_bytes_per_s
        return pipeline_s(load_s, self.compute_s / num_layers, num_layers, num_layers, head_start_s=0.0)

    @property
    def from_objects_s(self) -> float:
        """The same with the history in the objects tier: each object goes on to the device as it comes.

        The first byte is late by a request's latency, the last one of each layer by the copy of one object to the
        device; between them loads follow each other at the slower of both links.
        """
        num_groups = math.ceil(self.model.num_layers / self.group_layers)
        slowest = min(self.objects_bytes_per_s, self.link_bytes_per_s)
        load_s = self.layer_bytes * self.model.num_layers / num_groups / slowest
        last_copy_s = min(self.object_bytes, self.layer_bytes * self.group_layers) / self.link_bytes_per_s
        late_s = self.latency_s + last_copy_s
        return pipeline_s(load_s, self.compute_s / num_groups, num_groups, num_groups, head_start_s=-late_s)

    @property
    def over_dram(self) -> float:
        """Times as long from objects as from local DRAM."""
        return self.from_objects_s / self.from_dram_s


def least_new_tokens(restore: Restore, most_over_dram: float) -> int | None:
    """The fewest new tokens from which on a restore is at most so many times as long; None: not below the history's.

    Beyond the length at which computing hides loading the ratio only falls, since what is not hidden stays the same.
    """

    def is_close(new_tokens: int) -> bool:
        return dataclasses.replace(restore, new_tokens=new_tokens).over_dram <= most_over_dram

    if not is_close(restore.history_tokens):
        return None
    low, high = 0, restore.history_tokens
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_close(middle) else (middle, high)
    return high
