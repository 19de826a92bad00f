"""The objects tier behind all replicas: its links, its requests, and what they cost.

Not here: when something is written or read (replicas), a restore layer by layer (restore), prices of machines.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ca_jax.errors import check
from ca_jax.simulate.clock import Clock, Link

MIB = 1 << 20
GB = 1e9
_HOURS_OF_MONTH = 730.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectsConfig:
    """An objects tier. Prices are list prices of S3 Standard in us-east-1, in dollars.

    Raises:
      ValueError: a number outside its range.
    """

    objects_gb_per_s: float = 1000.0
    """Most that it gives and, beside that, takes in all, GB/s; for each replica --network_gb_per_s is the limit."""
    objects_latency_ms: float = 30.0
    """Of each read and write, once: its requests are made side by side. S3 answers first bytes within tens of
    milliseconds; a gateway in the same rack within 5."""
    object_mib: float = 32.0
    """Size of an object. What a turn adds, and is smaller, is one."""
    objects_keep_hours: float = 24.0
    """How long objects are kept, for the price of their storage; within a simulation none is deleted."""
    price_put: float = 5e-6
    """Of a PUT: 0.005 dollars for 1,000."""
    price_get: float = 4e-7
    """Of a GET: 0.0004 dollars for 1,000."""
    price_gb_month: float = 0.023
    """Of a GB that is kept for a month."""
    price_gb: float = 0.0
    """Of a GB that is read or written. Within a region S3 asks for none; across zones of EC2 it is 0.01 each way."""

    def __post_init__(self) -> None:
        for name in ("objects_gb_per_s", "object_mib"):
            check(0 < getattr(self, name) < math.inf, name, "a number above 0", getattr(self, name))
        names = "objects_latency_ms", "objects_keep_hours", "price_put", "price_get", "price_gb_month", "price_gb"
        for name in names:
            check(0 <= getattr(self, name) < math.inf, name, "a number of at least 0", getattr(self, name))

    def num_objects(self, num_bytes: float) -> int:
        """Objects that so many bytes are."""
        return math.ceil(num_bytes / (self.object_mib * MIB))


class ObjectsTier:
    """The shared tier: moves bytes from and to replicas, and counts them.

    Args:
      config: of it.
      clock: of the simulation.
    """

    def __init__(self, config: ObjectsConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        rate = config.objects_gb_per_s * GB
        self._read, self._write = Link(clock, rate), Link(clock, rate)
        self.reset()

    def reset(self) -> None:
        """Counts from here on."""
        self.read_bytes = self.written_bytes = 0.0
        self.num_gets = self.num_puts = 0

    def look(self) -> None:
        """Reads the manifest of a session: one small GET that takes no time of its own."""
        self.num_gets += 1

    def read(self, network: Link, num_bytes: float) -> float:
        """Reads over a replica's network; returns when all is there."""
        self.read_bytes += num_bytes
        self.num_gets += self._config.num_objects(num_bytes)
        return max(network.move(num_bytes), self._read.move(num_bytes)) + self._config.objects_latency_ms / 1e3

    def write(self, network: Link, num_bytes: float) -> float:
        """Writes objects and the session's manifest; returns when all is durable."""
        self.written_bytes += num_bytes
        self.num_puts += self._config.num_objects(num_bytes) + 1
        return max(network.move(num_bytes), self._write.move(num_bytes)) + self._config.objects_latency_ms / 1e3

    def row(self, elapsed_s: float, num_tokens: int) -> dict[str, Any]:
        """What was counted as a part of a row of JSON.

        Args:
          elapsed_s: since counting began.
          num_tokens: that were served in that time, for the price of a million of them.
        """
        config, hours = self._config, elapsed_s / 3600
        num_bytes = self.read_bytes + self.written_bytes
        kept_gb = self.written_bytes / GB / hours * config.objects_keep_hours
        prices = {
            "puts": config.price_put * self.num_puts / hours,
            "gets": config.price_get * self.num_gets / hours,
            "storage": config.price_gb_month * kept_gb / _HOURS_OF_MONTH,
            "transfer": config.price_gb * num_bytes / GB / hours,
        }
        return {
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "num_gets": self.num_gets,
            "num_puts": self.num_puts,
            "network_gb_per_s": num_bytes / GB / elapsed_s,
            "requests_per_s": (self.num_gets + self.num_puts) / elapsed_s,
            "prices_per_hour": prices,
            "price_per_hour": sum(prices.values()),
            "price_per_million_tokens": sum(prices.values()) * hours / max(num_tokens / 1e6, 1e-9),
        }
