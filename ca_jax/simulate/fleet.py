"""What many replicas are, what becomes of them, and what is counted of it.

Not here: serving (replicas), the tier that they share (objects).
"""

from __future__ import annotations

import array
import collections
import dataclasses
import math
from typing import Any

import numpy as np

from ca_jax.errors import check
from ca_jax.simulate.objects import ObjectsConfig

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
