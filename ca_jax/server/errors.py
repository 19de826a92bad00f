"""Errors as OpenAI's API tells them: a status, and a body `{"error": {message, type, param, code}}`.

Nothing of the server's inside is told: an error that is nobody's fault but ours says that it is, and no more.

Not here: what is raised inside (`ca_jax.errors`).
"""

from __future__ import annotations

from typing import Any

from ca_jax.errors import (
    CaJaxError,
    ContextWindowError,
    EmptyMessageError,
    InvalidRequestError,
    SessionBusyError,
    SessionClosedError,
    SessionMovedError,
    TenantError,
    UnknownSessionError,
)
from ca_jax.storage.catalog.file import CatalogLateError


class ApiError(Exception):
    """A request that is not served.

    Args:
      status: of HTTP.
      message: what was wanted and found.
      code: a word for programs.
      param: the field of the request that is at fault.
      retry_after_s: when to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """What the client is told."""
        told = {"message": self.message, "type": _type_of(self.status), "param": self.param, "code": self.code}
        return {"error": told}

    def headers(self) -> dict[str, str]:
        """What is told beside the body."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status in _NOT_AGAIN:
            headers["X-Should-Retry"] = "false"
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def as_api_error(error: Exception, param: str | None = None) -> ApiError:
    """What a client is told of an error that serving it gave.

    Args:
      error: what was raised.
      param: the field of the request that most likely is at fault.
    """
    if isinstance(error, ApiError):
        return error
    for kind, status, code in _KNOWN:
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code, param=param if status == 400 else None)
    return ApiError(500, "the server met an error that is not this request's fault", code="internal_error")


_NOT_AGAIN = (408, 409)
"""Statuses after which OpenAI's clients ask again by themselves unless they are told not to: the same deadline would
run out again, and a session that has moved on, or still answers, is to be looked at first."""
_KNOWN: tuple[tuple[type[CaJaxError], int, str | None], ...] = (
    (ContextWindowError, 400, "context_length_exceeded"),
    (EmptyMessageError, 400, "empty_message"),
    (InvalidRequestError, 400, "invalid_value"),
    (SessionBusyError, 409, "session_busy"),
    (SessionMovedError, 409, "session_moved"),
    (TenantError, 404, "session_not_found"),  # As of one that does not exist: ids of others are not told.
    (UnknownSessionError, 404, "session_not_found"),
    (SessionClosedError, 503, "shutting_down"),
    (CatalogLateError, 503, "store_late"),
)


def _type_of(status: int) -> str:
    types = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return types.get(status, "invalid_request_error" if status < 500 else "server_error")
