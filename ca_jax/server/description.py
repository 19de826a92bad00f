"""What OpenAPI says of the server beside bodies of requests: errors, keys, and what answers are.

Not here: what errors say (`errors`), bodies of requests (`bodies`).
"""

from __future__ import annotations

from typing import Any, Literal

import fastapi
import pydantic


class ErrorDetail(pydantic.BaseModel):
    """What went wrong."""

    message: str = pydantic.Field(description="What must be, and what was got.")
    type: str = pydantic.Field(description="What kind of error it is, for programs.")
    param: str | None = pydantic.Field(description="The field of the request that is at fault.")
    code: str | None = pydantic.Field(description="Which error it is, for programs.")


class ErrorAnswer(pydantic.BaseModel):
    """Every error, as OpenAI's API has them."""

    error: ErrorDetail


class StoredAnswer(pydantic.BaseModel):
    """What the store holds of a session."""

    tier: str = pydantic.Field(description="Where its KV is: dram, ssd, pending or absent.")
    num_tokens: int
    dram_bytes: int
    dram_blocks: int
    ssd_tokens: int
    ssd_bytes: int
    pinned: bool
    created_s: float
    last_used_s: float
    ttl_s: float | None


class ListedSession(pydantic.BaseModel):
    """A session as a list shows it."""

    id: str
    object: Literal["session"]
    num_tokens: int
    busy: bool = pydantic.Field(description="Whether a turn of it runs.")
    stored: StoredAnswer | None
    num_dropped: int = pydantic.Field(0, description="Tokens that a truncation has dropped; of open ones.")
    session_state: str = pydantic.Field("", description="Where it stands, as its latest answer said; of open ones.")
    title: str = pydantic.Field("", description="How its first message of the user begins; of open ones.")


class ShownSession(ListedSession):
    """A session with what was said in it."""

    messages: list[dict[str, Any]] = pydantic.Field(description="Each with its role, content and, if any, context.")


class SessionList(pydantic.BaseModel):
    """Sessions of a tenant, a page of them."""

    object: Literal["list"]
    data: list[ListedSession]
    first_id: str | None = pydantic.Field(description="The first one's id; null where there is none.")
    last_id: str | None = pydantic.Field(description="The last one's: what `after` is for the next page.")
    has_more: bool = pydantic.Field(description="Whether others follow.")


_COMES_AGAIN: dict[str, Any] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
_ERRORS: dict[int, dict[str, Any]] = {
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
"""Content of an answer that is one, or a stream of them: of events, as OpenAPI 3.2 says what each is."""


def answers(
    *errors: int, status: int = 200, model: type[pydantic.BaseModel] | None = None, content: dict[str, Any] = OBJECT
) -> dict[int | str, dict[str, Any]]:
    """What a route answers, as FastAPI takes it: a `model` or other `content`, or one of `errors` (statuses)."""
    described: dict[int | str, dict[str, Any]] = {status: {"content": content} if model is None else {"model": model}}
    return described | {error: {"model": ErrorAnswer, **_ERRORS[error]} for error in errors}


def describe(app: fastapi.FastAPI, asks_for_keys: bool) -> None:
    """Has an application describe itself as it is: wrong fields are a 400 here, and keys are asked for or not."""
    of_routes = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        described = of_routes()
        for operations in described["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if not asks_for_keys:
                    operation["responses"].pop("401", None)
                elif "401" in operation["responses"]:
                    operation["security"] = [{"key": []}]
        components = described["components"]
        for name in ("HTTPValidationError", "ValidationError"):
            components["schemas"].pop(name, None)
        if asks_for_keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return described

    app.openapi = openapi  # type: ignore[method-assign]
