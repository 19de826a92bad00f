"""How long an answer is worked on: until its client goes away, reads no more, or has no use for it any more.

Not here: deadlines themselves (`service`), what an answer says (`openai_routes`, `session_routes`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import fastapi
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ca_jax.server.errors import ApiError

_READING_S = 5.0
T = TypeVar("T")


class EventStream(StreamingResponse):
    """Server-sent events. What they are of ends when it does, however that is.

    Args:
      events: as they are sent.
      ends: what is to end then.
      until_s: when no more comes, seconds of the event loop's clock; a client has a little longer to read it.
    """

    def __init__(
        self, events: AsyncIterator[str] | AsyncIterator[bytes], ends: contextlib.AsyncExitStack, until_s: float | None
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._ends = ends
        self._until_s = None if until_s is None else until_s + _READING_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request; as ASGI says."""
        async with self._ends:
            with contextlib.suppress(TimeoutError):  # The connection is closed then.
                async with asyncio.timeout_at(self._until_s):
                    await super().__call__(scope, receive, send)


async def while_connected(request: fastapi.Request, answering: Awaitable[T]) -> T:
    """Waits for an answer, and gives it up where its client goes away.

    Raises:
      ApiError: it did (499, which nobody reads).
      Exception: whatever the answer raises.
    """
    task = asyncio.ensure_future(answering)
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client went away", code="client_disconnected")
        return task.result()
    finally:
        for each in (task, leaving):
            each.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _left(request: fastapi.Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def too_late() -> ApiError:
    """What a client is told whose deadline has passed."""
    return ApiError(408, "the answer was not there in time", code="timeout")
