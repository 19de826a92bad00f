"""Waiting for something that happens on another thread, without missing what happened just before.

Not here: what is waited for.
"""

from __future__ import annotations

import threading


class Wakeup:
    """A count of events that threads raise and wait for. Any thread may call anything."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.count = 0
        """Events so far: to be read before looking at what they are about, and handed to `wait`."""

    def tell(self) -> None:
        """Something happened."""
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def wait(self, seen: int, timeout_s: float) -> int:
        """Blocks until there were more events than `seen`, at most `timeout_s` seconds.

        Returns:
          Events so far.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.count > seen, timeout_s)
            return self.count
