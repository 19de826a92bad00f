"""One request for answers, from its admission to its end: given whole, as a stream of events, or in the background.

Not here: what is asked and answered (the routes), who is admitted (`service`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import fastapi
from fastapi.responses import JSONResponse, Response

from ca_jax.server.engine_loop import Feed, Part
from ca_jax.server.service import Service
from ca_jax.server.state import EventStream, while_connected
from ca_jax.server.tenants import Tenant
from ca_jax.server.told import reported

Events = Callable[[Feed, float | None], AsyncIterator[str]]
"""The events of answers that are being generated, until seconds of the event loop's clock."""


@dataclasses.dataclass(frozen=True)
class Answering:
    """A request whose answers are about to be begun. Belongs to the event loop.

    Raises:
      ApiError: its tenant may not have so many answers, by each way to give them.
      CaJaxError: the answers cannot be begun, likewise.
    """

    service: Service
    tenant: Tenant
    begun: contextlib.AbstractAsyncContextManager[Feed]
    """Begins the answers, and ends them with the block."""
    timeout_s: float | None
    """How long it may take; None: as long as the server lets it."""
    num_answers: int = 1
    priority: int | None = None

    async def whole(
        self, request: fastapi.Request, tell: Callable[[Feed, Sequence[Part]], dict[str, Any]]
    ) -> JSONResponse:
        """The answers when they have ended, as a function tells them. They end if the client goes away."""
        with self._admitted():
            return JSONResponse(await while_connected(request, self._ended(tell)))

    async def streamed(self, events: Events) -> Response:
        """The answers as they come. What is wrong with the request is a status: they are begun before the stream is."""
        async with contextlib.AsyncExitStack() as stack:
            feed, until_s = await self.begin(stack)
            return EventStream(events(feed, until_s), stack.pop_all(), until_s)

    async def begin(self, stack: contextlib.AsyncExitStack) -> tuple[Feed, float | None]:
        """Begins the answers, which end with a stack; and when they must have ended, by the event loop's clock."""
        stack.enter_context(self._admitted())
        async with self.service.deadline(self.timeout_s) as deadline:
            feed = await stack.enter_async_context(self.begun)
        return feed, deadline.when()

    def _admitted(self) -> contextlib.AbstractContextManager[None]:
        return self.service.admission.answering(self.tenant, self.num_answers, self.priority)

    async def _ended(self, tell: Callable[[Feed, Sequence[Part]], dict[str, Any]]) -> dict[str, Any]:
        try:
            async with self.service.deadline(self.timeout_s), self.begun as feed:
                parts = [part async for part in feed.parts()]
        except Exception as error:
            raise reported(error) from error
        return tell(feed, parts)
