"""What many replicas are, what is counted of them, and the objects tier behind them: its links, requests and prices.

And what reading one history from there takes, layer by layer, beside local DRAM: a closed calculation over
`pipeline_s`; the simulation of replicas has whole histories in DRAM before a prefill begins.

Not here: when something is written or read (replicas), prices of machines.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import math
from typing import Any

import numpy as np

from ca_jax.errors import check
from ca_jax.kv.costs import pipeline_s
from ca_jax.simulate.clock import Clock, Link
from ca_jax.simulate.config import FittedCost, RooflineCost, SimModel

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


OBJECTS_WRITES = ("turn", "idle", "drain", "none")
"""`turn`: after each turn, what is new. `idle`: once a session has been idle for a while, what is new. `drain`: what a
replica holds when it is drained. `none`: nothing, there is no objects tier. With all but `none` a drained replica
writes what is not there yet."""
TIERS = ("dram", "ssd", "objects", "recomputed")
"""Where tokens of a history come from."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """Many replicas, and what becomes of them.

    Raises:
      ValueError: a number outside its range, or a scale event that is none.
    """

    num_replicas: int | None = None
    """Servers that share the sessions, each with DRAM and SSD of its own. By default one server is simulated, with the
    engine's own store."""
    network_gb_per_s: float = 12.5
    """Of each replica to the objects tier, each way; 12.5 GB/s are 100 Gb/s."""
    objects: ObjectsConfig = dataclasses.field(default_factory=ObjectsConfig)
    """The tier that they share."""
    objects_write: str = "turn"
    """When KV is written to the objects tier, one of `OBJECTS_WRITES`."""
    objects_idle_s: float = 60.0
    """With `idle`: for how long a session is idle first."""
    mtbf_hours: float | None = None
    """Mean time between failures of each replica, exponential; a failure takes its DRAM and SSD. None: none fails."""
    restart_s: float = 300.0
    """From a failure to the replica's return, empty."""
    scale: tuple[str, ...] = ()
    """TIME:COUNT, more behind commas: so many replicas are added at that time in seconds, or with a minus drained."""
    duration_s: float = 3600.0
    """Simulated seconds in all; sessions that are not over then are cut off."""
    warmup_s: float = 1800.0
    """Of these, the first ones, which do not count."""

    def __post_init__(self) -> None:
        check(self.num_replicas is None or self.num_replicas >= 1, "num_replicas", "at least 1", self.num_replicas)
        wanted = f"one of {', '.join(OBJECTS_WRITES)}"
        check(self.objects_write in OBJECTS_WRITES, "objects_write", wanted, self.objects_write)
        for name in ("network_gb_per_s", "mtbf_hours", "duration_s"):
            value = getattr(self, name)
            check(value is None or 0 < value < math.inf, name, "a number above 0", value)
        for name in ("objects_idle_s", "restart_s"):
            check(0 <= getattr(self, name) < math.inf, name, "seconds of at least 0", getattr(self, name))
        check(0 <= self.warmup_s < self.duration_s, "warmup_s", f"less than {self.duration_s:g} s", self.warmup_s)
        _ = self.scale_events

    @property
    def scale_events(self) -> list[tuple[float, int]]:
        """Times and how many replicas come or, below 0, go."""
        events = []
        for text in self.scale:
            time_s, _, count = text.partition(":")
            try:
                events.append((float(time_s), int(count)))
            except ValueError:
                raise ValueError(f"scale must be TIME:COUNT, got {text!r}") from None
            check(0 <= events[-1][0] < math.inf, "scale", "a time of at least 0 s", events[-1][0])
        return events


@dataclasses.dataclass(kw_only=True)
class FleetCounts:
    """What was counted after the warm-up. Of a turn that comes again after a failure, tokens count each time."""

    tokens: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Tokens of histories by `TIERS`; `history`, all of them; `new` and `answer`, the others."""
    ttft_s: array.array[float] = dataclasses.field(default_factory=lambda: array.array("d"))
    turns_of: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    """Turns that each replica served."""
    sessions_moved: int = 0
    """Turns that were served elsewhere than the turn of their session before."""
    turns_retried: int = 0
    """Turns that came again, since their replica had failed."""
    failure_turns: int = 0
    """Turns some of whose history was computed, since a failure had taken it."""
    failure_tokens: int = 0
    """Tokens of these that were computed."""
    num_failures: int = 0
    busy_s: dict[int, float] = dataclasses.field(default_factory=dict)
    """Seconds that each replica computed which is there at the end and was at the beginning."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and answers."""
        return sum(self.tokens[name] for name in ("history", "new", "answer"))

    def row(self, elapsed_s: float) -> dict[str, Any]:
        """Everything as a part of a row of JSON; shares of tiers are of the tokens of histories."""
        busy = np.array(list(self.busy_s.values()) or [0.0])
        turns = np.array([self.turns_of[number] for number in self.busy_s] or [0])
        ttft_s = self.ttft_s or [0.0]
        names = "sessions_moved", "num_failures", "turns_retried", "failure_turns", "failure_tokens"
        return {
            "num_turns": self.turns_of.total(),
            "tokens": {name: self.tokens[name] for name in ("history", *TIERS, "new", "answer")},
            "shares": {name: self.tokens[name] / max(self.tokens["history"], 1) for name in TIERS},
            "ttft_s": {f"p{each}": float(np.percentile(ttft_s, each)) for each in (50, 90, 99)},
            "busy_share": float(busy.mean()) / elapsed_s,
            "most_busy_over_mean": float(busy.max() / max(busy.mean(), 1e-9)),
            "most_turns_over_mean": float(turns.max() / max(turns.mean(), 1e-9)),
            **{name: getattr(self, name) for name in names},
        }


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
