"""Waiting for events of other threads: none is missed, and nobody waits for what has happened."""

from __future__ import annotations

import threading

from ca_jax.telemetry.wakeup import Wakeup

LONG_S = 60.0


def test_what_happened_before_the_wait_is_not_waited_for():
    wakeup = Wakeup()
    seen = wakeup.count
    wakeup.tell()
    wakeup.tell()
    assert wakeup.wait(seen, LONG_S) == seen + 2
    assert wakeup.count == seen + 2


def test_without_an_event_the_wait_ends_by_itself():
    wakeup = Wakeup()
    wakeup.tell()
    assert wakeup.wait(1, timeout_s=0.0) == 1
    assert wakeup.wait(5, timeout_s=0.0) == 1


def test_all_who_wait_are_woken():
    wakeup = Wakeup()
    found: list[int] = []
    waiting = threading.Barrier(4)

    def wait() -> None:
        waiting.wait(LONG_S)
        found.append(wakeup.wait(0, LONG_S))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    waiting.wait(LONG_S)
    wakeup.tell()
    for thread in threads:
        thread.join(LONG_S)
    assert found == [1, 1, 1]


def test_no_event_of_many_threads_is_lost():
    wakeup = Wakeup()

    def tell() -> None:
        for _ in range(200):
            wakeup.tell()

    threads = [threading.Thread(target=tell) for _ in range(4)]
    for thread in threads:
        thread.start()
    seen = 0
    while seen < 800:
        now = wakeup.wait(seen, LONG_S)
        assert now > seen, "an event was missed"
        seen = now
    for thread in threads:
        thread.join(LONG_S)
    assert wakeup.count == 800
