"""Errors as OpenAI's API reports them: a status, and a body `{"error": {message, type, param, code}}`. The routes of
Messages report them as Anthropic's API does.

An error that is the server's own fault says so, and nothing of its inside.

Not here: what is raised inside (`ca_jax.errors`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import fastapi
import pydantic
import starlette.exceptions
from asgi_correlation_id import correlation_id
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.routing import Match

from ca_jax import errors
from ca_jax.server.observing import note_error
from ca_jax.storage.catalog.file import CatalogLateError
from ca_jax.storage.objects.store import ObjectsError

_LOG = logging.getLogger(__name__)
_UNSERVED = frozenset(
    {
        *("functions", "function_call", "store", "service_tier"),
        *("modalities", "suffix", "best_of", "prompt", "text", "tools", "tool_choice"),
        *("no_stop_trim", "return_hidden_states", "continue_final_message"),
        *("load_inplace", "is_3d_lora_weight"),
    }
)
"""Fields of OpenAI, vLLM and SGLang that are taken where they ask for nothing, and are an error otherwise."""
_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "images are"),
    **dict.fromkeys(("audio", "input_audio"), "audio is"),
    **dict.fromkeys(("file", "input_file", "document"), "files are"),
    **dict.fromkeys(("video", "video_url"), "videos are"),
}
"""Types of parts of a message that other models take."""
# OpenAI's clients retry 408 and 409 by themselves unless told not to: the same deadline would pass again, and a session
# that has moved on, or still answers, has to be looked at first.
_NOT_AGAIN = {"X-Should-Retry": "false"}
_HEADERS = {408: _NOT_AGAIN, 409: _NOT_AGAIN, 401: {"WWW-Authenticate": "Bearer"}, 413: {"Connection": "close"}}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_MESSAGES = "/v1/messages"  # Where errors are told as Anthropic's API tells them.
_MESSAGES_TYPES = {
    **_TYPES,
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_KNOWN: tuple[tuple[type[errors.CaJaxError], int, str], ...] = (
    (errors.ContextWindowError, 400, "context_length_exceeded"),
    (errors.EmptyMessageError, 400, "empty_message"),
    (errors.InvalidRequestError, 400, "invalid_value"),
    (errors.SessionBusyError, 409, "session_busy"),
    (errors.SessionMovedError, 409, "session_moved"),
    (errors.UnknownAdapterError, 404, "model_not_found"),
    (errors.AdapterError, 400, "invalid_adapter"),
    (errors.AdapterInUseError, 409, "adapter_in_use"),
    (errors.TenantError, 404, "session_not_found"),  # Other tenants' sessions look like sessions that do not exist.
    (errors.UnknownSessionError, 404, "session_not_found"),
    (errors.SessionClosedError, 503, "shutting_down"),
    (CatalogLateError, 503, "store_late"),
    (ObjectsError, 503, "store_late"),
)


class ApiError(starlette.exceptions.HTTPException):
    """A request that is refused.

    Args:
      status: of HTTP.
      message: what must be, and what was got.
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
        headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        super().__init__(status, message, headers | _HEADERS.get(status, {}))
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = _TYPES.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str) -> JSONResponse:
        """The answer to a request of a path."""
        body = messages_error(self) if path.startswith(_MESSAGES) else self.body()
        return JSONResponse(body, self.status_code, self.headers)


def messages_error(error: ApiError) -> dict[str, Any]:
    """The body of an error as Anthropic's API has it."""
    kind = _MESSAGES_TYPES.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "api_error")
    told = {"type": kind, "message": error.detail}
    return {"type": "error", "error": told, "request_id": correlation_id.get()}


def invalid(param: str | None, message: str) -> ApiError:
    """The error of a field whose value is wrong."""
    return ApiError(400, message, param=param, code="invalid_value")


def as_api_error(error: Exception) -> ApiError:
    """The error that a client gets for one that was raised while it was served."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid_body(error)
    if isinstance(error, TimeoutError):
        return ApiError(408, "the answer was not there in time", code="timeout")
    for kind, status, code in _KNOWN:
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code)
    return ApiError(500, "the server met an error that is not this request's fault", code="internal_error")


def add_error_handlers(app: fastapi.FastAPI, count: Callable[[int], None]) -> None:
    """Has an application answer errors in this shape.

    Args:
      app: which.
      count: is called with the status of each.
    """

    async def answer(request: fastapi.Request, error: Any) -> JSONResponse:
        told = as_api_error(error)
        if isinstance(error, starlette.exceptions.HTTPException) and error is not told:
            told = _of_http(request, error)
        if told.code == "internal_error":
            _LOG.error("%s %s broke (%s)", request.method, request.url.path, correlation_id.get(), exc_info=error)
        count(told.status_code)
        note_error(told.code, told.status_code)
        response = told.response(request.url.path)
        if told.code == "internal_error":  # Answered outside of all middleware.
            response.headers["X-Request-ID"] = correlation_id.get() or ""
        return response

    kinds: list[type[Exception]] = [starlette.exceptions.HTTPException, errors.CaJaxError, RequestValidationError]
    for kind in [*kinds, TimeoutError, Exception]:
        app.add_exception_handler(kind, answer)


def _of_http(request: fastapi.Request, error: starlette.exceptions.HTTPException) -> ApiError:
    """The error of what FastAPI refuses by itself: a wrong path or method, a body that it cannot parse."""
    if error.status_code == 400 and "parsing the body" in error.detail:
        return ApiError(400, "the body must be JSON", code="invalid_json")
    told = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    told.headers = dict(error.headers or {})
    if error.status_code == 405:  # Starlette's header names the methods of one route of the path.
        scopes = {method: {**request.scope, "method": method} for method in ("DELETE", "GET", "HEAD", "POST")}
        routes = request.app.routes
        taken = [each for each in scopes if any(route.matches(scopes[each])[0] is Match.FULL for route in routes)]
        told.headers["Allow"] = ", ".join(taken)
    return told


def _order(wrong: Mapping[str, Any]) -> tuple[bool, bool, int]:
    """Which wrong field is told: an unknown one; else one that says what a part is; else the outermost."""
    is_kind = wrong["type"] == "literal_error" and wrong["loc"][-1:] == ("type",)
    return wrong["type"] != "extra_forbidden", not (is_kind or wrong["type"] == "union_tag_invalid"), len(wrong["loc"])


def _invalid_body(error: RequestValidationError) -> ApiError:
    """The error of a request's first wrong field, named as a path; unknown fields come first."""
    first = min(error.errors(), key=_order)
    path = [
        str(part)
        for part in first["loc"][1:]
        if not (isinstance(part, str) and ("[" in part or "-" in part or part[:1].isupper()))
    ]
    param = ".".join(path) or None
    if first["type"] == "json_invalid":
        return ApiError(400, "the body must be JSON, got something else", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"not a field that is served: {param}", code="unknown_parameter", param=param)
    if first["type"] == "missing":
        return ApiError(400, f"missing field: {param or 'the body'}", code="missing_required_parameter", param=param)
    if path and path[0] in _UNSERVED:
        return ApiError(400, f"not served: {param}", code="unsupported_parameter", param=param)
    given = first.get("input")
    kind = given.get("type") if isinstance(given, Mapping) else given
    if isinstance(kind, str) and kind in _MEDIA and first["type"] in ("literal_error", "union_tag_invalid"):
        return invalid(param, f"{param}: {_MEDIA[kind]} not served: the model reads text alone")
    return invalid(param, f"{param or 'the body'}: {first['msg']}")


# What OpenAPI says of answers.


class ErrorDetail(pydantic.BaseModel):
    """What went wrong."""

    message: str = pydantic.Field(description="What must be, and what was got.")
    type: str = pydantic.Field(description="What kind of error it is, for programs.")
    param: str | None = pydantic.Field(description="The field of the request that is at fault.")
    code: str | None = pydantic.Field(description="Which error it is, for programs.")


class ErrorAnswer(pydantic.BaseModel):
    """Every error, as OpenAI's API has them."""

    error: ErrorDetail


class MessagesErrorDetail(pydantic.BaseModel):
    """What went wrong, in few words."""

    type: str = pydantic.Field(description="What kind of error it is, for programs.")
    message: str = pydantic.Field(description="What must be, and what was got.")


class MessagesErrorAnswer(pydantic.BaseModel):
    """Every error of Messages, as Anthropic's API has them."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str | None = pydantic.Field(description="The request's name, as its header has it.")


_COMES_AGAIN: dict[str, Any] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
_STATUSES: dict[int, dict[str, Any]] = {
    400: {"description": "A body that is no JSON, or a field that is wrong, unknown or not served."},
    401: {"description": "No key, or one that is not known."},
    403: {"description": "The key's tenant may not."},
    404: {"description": "No such model or session."},
    408: {"description": "The answer was not there in time."},
    409: {"description": "A turn of the session runs, or it does not stand where the request says."},
    413: {"description": "The body is too large."},
    429: {"description": "Too many requests.", "headers": _COMES_AGAIN},
    503: {"description": "Not ready, or not any more.", "headers": _COMES_AGAIN},
}
OBJECT: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
"""Content of an answer that is an object."""
_EVENT: dict[str, Any] = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
STREAMED: dict[str, Any] = {**OBJECT, "text/event-stream": {"itemSchema": _EVENT}}
"""Likewise, or a stream of events, as OpenAPI 3.2 says of these."""


def responses(
    *statuses: int, content: dict[str, Any] | None = None, error: type[pydantic.BaseModel] = ErrorAnswer
) -> dict[int | str, dict[str, Any]]:
    """What a route answers, as FastAPI takes it: content that no model describes, and errors of some statuses."""
    described: dict[int | str, dict[str, Any]] = {} if content is None else {200: {"content": content}}
    return described | {each: {"model": error, **_STATUSES[each]} for each in statuses}
