"""What goes everywhere in an engine: its config, and those that are told of what happens.

Not here: what each of them does, but for `ComputeWatch`.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable

import jax

from ca_jax.config import EngineConfig
from ca_jax.device.processes import Processes
from ca_jax.telemetry.metrics import EngineMetrics
from ca_jax.telemetry.timeline import ArgValue, Timeline


class ComputeWatch:
    """Records when layers were computed."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._layers: queue.SimpleQueue[tuple[jax.Array, float, dict[str, ArgValue]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if timeline.enabled:
            self._thread = threading.Thread(target=self._run, name="ca_jax-watch", daemon=True)
            self._thread.start()

    def layer(self, output: jax.Array, since_s: float, **args: ArgValue) -> None:
        """A layer was dispatched, since that time, which gives `output`; layers are computed in this order."""
        if self._thread is not None:
            self._layers.put((output, since_s, args))

    def close(self) -> None:
        """Records what is left and ends the thread."""
        if self._thread is not None:
            self._layers.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        last_s = 0.0
        while (item := self._layers.get()) is not None:
            output, since_s, args = item
            output.block_until_ready()
            now_s = time.perf_counter()
            start_s = min(max(since_s, last_s), now_s)
            self._timeline.add("compute", f"layer {args.get('layer')}", start_s, now_s, **args)
            last_s = now_s
            del item, output


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
