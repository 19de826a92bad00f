"""Bodies over a limit are refused before they are read, or where they say nothing of their length as soon as they are.

Not here: any other check of a request.
"""

from __future__ import annotations

import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ca_jax.server.errors import ApiError


class BodyLimit:
    """Middleware.

    Args:
      app: what is behind it.
      max_bytes: most bytes of a body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request; as ASGI says."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        if length.isdigit() and int(length) > self._max_bytes:
            await self._refuse(send)
            return
        num_bytes, refused, started = 0, False, False

        async def counted() -> Message:
            nonlocal num_bytes, refused
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_bytes and not (refused or started):
                    refused = True
                    await self._refuse(send)
                if refused:  # Whoever reads this gives up.
                    return {"type": "http.disconnect"}
            return message

        async def sent(message: Message) -> None:
            nonlocal started
            started = True
            if not refused:
                await send(message)

        await self._app(scope, counted, sent)

    async def _refuse(self, send: Send) -> None:
        error = ApiError(413, f"the body must be at most {self._max_bytes} bytes", code="request_too_large")
        body = json.dumps(error.body()).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 413, "headers": [*headers, (b"connection", b"close")]})
        await send({"type": "http.response.body", "body": body})
