"""What goes everywhere in an engine: its config, and those that are told of what happens.

Not here: what each of them does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ca_jax.config import EngineConfig
from ca_jax.device.compute_watch import ComputeWatch
from ca_jax.device.processes import Processes
from ca_jax.telemetry.metrics import EngineMetrics
from ca_jax.telemetry.timeline import Timeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """One engine's."""

    config: EngineConfig
    """The engine's."""
    metrics: EngineMetrics
    """Where what happens is counted."""
    timeline: Timeline
    """Where spans are recorded."""
    watch: ComputeWatch
    """Told of layers that are dispatched."""
    processes: Processes
    """Those that serve as one; each has the KV of its heads."""
    wake: Callable[[], None]
    """Called from any thread when the engine has something to do."""
