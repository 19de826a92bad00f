"""Threads for what waits for a store of objects, or codes KV on its way there.

Not here: what they are given to do (shared_sessions, object_coding).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Threads:
    """Threads that do one thing after the other. They go on until the interpreter ends, also while it does.

    A pool of the standard library takes nothing more by the time that engines are closed at exit.

    Args:
      on_done: called, from a thread, whenever one thing is done.
    """

    def __init__(self, number: int, name: str, on_done: Callable[[], object] = lambda: None) -> None:
        self._on_done = on_done
        self._asked: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._asked = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(number)]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Has a thread call a function; its result, or what it raises."""
        future: Future[Any] = Future()
        self._asked.put((future, function, args))
        return future

    def close(self) -> None:
        """Ends the threads, once they have done what was submitted."""
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            future, function, args = asked
            try:
                future.set_result(function(*args))
            except Exception as error:
                future.set_exception(error)
            self._on_done()
            del asked, future, args  # What it was called with may be large.
