"""Waiting for something that happens on another thread, without missing what happened just before; and a lock that
tells who holds it that others want it.

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


class CountedLock:
    """A lock that one thread at a time has, which may take it again, and that tells who has it that others want it."""

    def __init__(self) -> None:
        self.quietly = threading.RLock()
        """The same lock, for those that can wait as long as it takes: they are not counted."""
        self.num_asked = 0
        """How often `ask` was called. Who holds the lock should end long work once it has grown."""
        self._waiting: set[int] = set()  # Threads.

    @property
    def is_awaited(self) -> bool:
        """Whether a thread waits for it that is counted."""
        return bool(self._waiting)

    def ask(self) -> None:
        """Counts somebody who wants something of who holds it, and does not wait for it."""
        self.num_asked += 1

    def __enter__(self) -> None:
        if self.quietly.acquire(blocking=False):
            return
        self._waiting.add(threading.get_ident())
        try:
            self.quietly.acquire()
        finally:
            self._waiting.discard(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self.quietly.release()
