"""How many blocks are coded at a time, and on how many threads each: beside a model that computes on the same cores.

numpy's products are spread over all cores, whose threads wait for each other by spinning. With others on two cores
(load 6) a block of 5.9 MB took 0.23 to 0.48 s to code so and 0.18 to 0.60 s to decode, on one thread 0.07 and 0.06 s.
So each product has one thread while blocks are coded, in all of the process, and blocks are coded side by side: no
more of them than there are cores, so that they end one by one, and a busy machine is not taken for a disk that does not
answer.

Not here: coding (storage.codec), moving blocks (disk).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

from threadpoolctl import ThreadpoolController

_lock = threading.Lock()
_limits: list[Any] = []  # A place for each that codes now; the first holds the limit, which the last to end takes back.


class Places:
    """Places to code at, of a tier."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(os.cpu_count() or 1)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Waits for a place, and has products take one thread each meanwhile."""
        with self._places, _one_thread_each():
            yield


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    with _lock:
        _limits.append(None if _limits else _controller().limit(limits=1, user_api="blas"))
    try:
        yield
    finally:
        with _lock:
            _limits.pop() if len(_limits) > 1 else _limits.pop().restore_original_limits()


@functools.cache
def _controller() -> ThreadpoolController:
    """Of the libraries that are loaded: numpy's is."""
    return ThreadpoolController()
