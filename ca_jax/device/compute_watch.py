"""When the device computed what: spans of layers, for a timeline that records.

A thread waits for the outputs of layers, which are never donated. Where nothing is recorded there is no thread.

Not here: the timeline itself, what the host does meanwhile (engine).
"""

from __future__ import annotations

import queue
import threading
import time

import jax

from ca_jax.telemetry.timeline import ArgValue, Timeline


class ComputeWatch:
    """Records when layers were computed.

    Args:
      timeline: where to.
    """

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
