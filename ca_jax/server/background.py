"""Responses that are generated while nobody waits for them: each with its events so far, for whoever reads along.

Those that have ended are remembered a while for their events; the conversation keeps the response itself.

Not here: what the events are (`response_items`), a response that is kept (`places`).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from ca_jax.server.engine_loop import Feed

_MOST_ENDED = 64  # Of a tenant, whose events are remembered.
_Body = dict[str, Any]


class Run:
    """One response. Belongs to the event loop.

    Args:
      feed: its answer, as it is generated.
      response: the response so far, as it is told; each event that has one replaces it.
      is_kept: says whether a conversation has it, once it has ended.
    """

    def __init__(self, feed: Feed, response: _Body, is_kept: Callable[[], bool]) -> None:
        self.feed, self.response = feed, response
        self.events: list[_Body] = []
        """All so far, in order."""
        self.has_ended = False
        self._is_kept = is_kept
        self._moved = asyncio.Event()

    @property
    def is_kept(self) -> bool:
        """Whether it is a conversation's by now: that says then what it is, and whether it is still there."""
        return self.has_ended and self._is_kept()

    def add(self, event: _Body) -> None:
        """Takes its next event."""
        self.events.append(event)
        self.response = event.get("response", self.response)
        self._wake()

    def end(self) -> None:
        """No event follows."""
        self.has_ended = True
        self._wake()

    async def follow(self, start: int = 0) -> AsyncIterator[_Body]:
        """Its events from a number on, until it has ended. Several may follow."""
        while True:
            moved = self._moved
            while start < len(self.events):
                yield self.events[start]
                start += 1
            if self.has_ended:
                return
            if moved is self._moved:
                await moved.wait()

    async def ended(self) -> None:
        """Waits until it has ended."""
        async for _ in self.follow(len(self.events)):
            pass

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()


class Background:
    """Those of all tenants, by their ids. Belongs to the event loop."""

    def __init__(self) -> None:
        self._runs: collections.defaultdict[str, dict[str, Run]] = collections.defaultdict(dict)
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(
        self, tenant: str, response_id: str, run: Run, events: AsyncIterator[_Body], ends: contextlib.AsyncExitStack
    ) -> None:
        """Generates a response, in a task of its own.

        Args:
          tenant: whose it is.
          response_id: its id.
          run: takes its events.
          events: all of them; they do not raise.
          ends: is closed with the last of them.
        """
        runs = self._runs[tenant]
        runs[response_id] = run
        ended = [name for name, each in runs.items() if each.has_ended]
        for name in ended[: max(len(ended) - _MOST_ENDED, 0)]:
            del runs[name]

        async def generate() -> None:
            try:
                async with ends:
                    async for event in events:
                        run.add(event)
            finally:
                run.end()

        task = asyncio.create_task(generate())
        self._tasks.add(task)  # The event loop alone would let it be collected.
        task.add_done_callback(self._tasks.discard)

    def find(self, tenant: str, response_id: str) -> Run | None:
        """A tenant's response of that id; None where none is, or was lately, generated in the background."""
        return self._runs[tenant].get(response_id)

    def forget(self, tenant: str, response_id: str) -> None:
        """Forgets one that has ended, and its events."""
        self._runs[tenant].pop(response_id, None)

    async def wait(self, timeout_s: float) -> None:
        """Lets those that are generated end, for so many seconds."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
