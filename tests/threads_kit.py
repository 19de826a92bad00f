"""Processes that are threads of one: several engines that serve as one, in one test.

Not here: what they agree upon; the real ones (`ca_jax.device.processes.JaxProcesses`).
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ca_jax.device.processes import Processes
from ca_jax.errors import ProcessesError

T = TypeVar("T")


class ThreadProcesses(Processes):
    """One of several threads that act as processes; see `ca_jax.device.processes.Processes`. Made by `run_together`."""

    def __init__(self, index: int, barrier: threading.Barrier, answers: list[Any], timeout_s: float) -> None:
        self.index, self.count = index, len(answers)
        self.asked: list[str] = []
        """What was agreed upon so far."""
        self._barrier = barrier
        self._answers = answers
        self._timeout_s = timeout_s

    def gather(self, what: str, value: Any) -> list[Any]:
        """See `Processes`."""
        self.asked.append(what)
        self._answers[self.index] = what, value
        self._wait(what)
        answers = list(self._answers)
        self._wait(what)
        if any(asked != what for asked, _ in answers):
            raise ProcessesError(f"all must be at {what!r}, got {[asked for asked, _ in answers]}")
        return [answer for _, answer in answers]

    def _wait(self, what: str) -> None:
        try:
            self._barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError as error:
            raise ProcessesError(f"all must agree on {what!r}, got one that did not") from error


def run_together(count: int, run: Callable[[ThreadProcesses], T], timeout_s: float = 300.0) -> list[T]:
    """Has each of `count` threads do the same, as one of so many processes, and returns what each returned.

    Raises the first error that one raised; the others, which wait at most `timeout_s`, stop waiting for it.
    """
    barrier = threading.Barrier(count)
    answers: list[Any] = [None] * count

    def guarded(index: int) -> T:
        try:
            return run(ThreadProcesses(index, barrier, answers, timeout_s))
        except BaseException:
            barrier.abort()
            raise

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(guarded, index) for index in range(count)]
        concurrent.futures.wait(futures)
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error.__cause__, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
