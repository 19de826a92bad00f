"""When the device computed what: spans of layers, for a timeline that records.

A thread waits for the outputs of layers, which are never donated. Where nothing is recorded there is no thread.

Not here: the timeline itself, what the host does meanwhile (engine).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

import jax

from ca_jax.timeline import ArgValue, Timeline


class ComputeWatch:
    """Records when layers were computed.

    Args:
      timeline: where to.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._passes: queue.SimpleQueue[tuple[Sequence[jax.Array], float, dict[str, ArgValue]] | None]
        self._passes = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if timeline.enabled:
            self._thread = threading.Thread(target=self._run, name="ca_jax-watch", daemon=True)
            self._thread.start()

    def layers(self, outputs: Sequence[jax.Array], **args: ArgValue) -> None:
        """A pass was dispatched, whose layers give these outputs, in order."""
        if self._thread is not None:
            self._passes.put((tuple(outputs), time.perf_counter(), args))

    def close(self) -> None:
        """Records what is left and ends the thread."""
        if self._thread is not None:
            self._passes.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        last_s = 0.0
        while (item := self._passes.get()) is not None:
            outputs, dispatched_s, args = item
            for layer, output in enumerate(outputs):
                output.block_until_ready()
                now_s = time.perf_counter()
                self._timeline.add(
                    "compute", f"layer {layer}", max(min(dispatched_s, now_s), last_s), now_s, layer=layer, **args
                )
                last_s = now_s
            del outputs, item
