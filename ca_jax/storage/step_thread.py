"""A thread that does steps in order, and since when the one under way has made no progress: it may wait for a disk.

Not here: what the steps are.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

_LOG = logging.getLogger(__name__)


class StepThread:
    """A daemon thread; any thread may call.

    Args:
      name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._steps: queue.SimpleQueue[tuple[Callable[[], object], bool] | None] = queue.SimpleQueue()
        self._began_s: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, step: Callable[[], object], *, timed: bool = True) -> None:
        """Has a step done behind those that were put before. One that is not `timed` may take as long as it likes."""
        self._steps.put((step, timed))

    def progressed(self) -> None:
        """The step under way goes on: to be called from it."""
        if self._began_s is not None:
            self._began_s = time.monotonic()

    @property
    def stands_s(self) -> float:
        """Seconds since the step under way began, or went on; 0 where none is timed."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def end(self) -> None:
        """Ends the thread after what was put."""
        self._steps.put(None)

    def join(self, timeout_s: float) -> bool:
        """Waits for its end, at most so long; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._steps.get()) is not None:
            step, timed = item
            self._began_s = time.monotonic() if timed else None
            try:
                step()
            except Exception:  # A defect: what is left open stays so, all else goes on.
                _LOG.exception("a step of %s broke", self._thread.name)
            self._began_s = None
