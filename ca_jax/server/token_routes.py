"""Text to tokens and back, as vLLM has it; and what is asked of servers of other models, refused by name.

Not here: tokenizers (`ca_jax.models.tokenizer`), prompts as they are answered (`/v1/completions/render`).
Source: vLLM, `POST /tokenize` and `POST /detokenize`.
"""

from __future__ import annotations

import functools
from typing import Annotated, Literal

import fastapi
from fastapi.responses import JSONResponse
from pydantic import Field

from ca_jax.errors import InvalidRequestError
from ca_jax.pretrained import check_token_ids
from ca_jax.server.answering import token_text
from ca_jax.server.bodies import UNSERVED, ChatMessage, ChatRequest, OpenBody
from ca_jax.server.errors import OBJECT, ApiError, invalid, responses
from ca_jax.server.service import Service
from ca_jax.server.state import OpenRoute, TheService, TheTenant

ROUTES = fastapi.APIRouter(tags=["tokens"], route_class=OpenRoute)
_ANSWERS = responses(400, 401, 404, 408, 413, 429, 503, content=OBJECT)


class Tokenize(OpenBody):
    """Body of `POST /tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    """Whether a prompt begins with what the tokenizer puts in front of a text; by default it does."""
    add_generation_prompt: Literal[True] | None = UNSERVED
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raises ApiError unless it has one of the two."""
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "there must be either a prompt or messages")


class Detokenize(OpenBody):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]


@ROUTES.post("/tokenize", responses=_ANSWERS)
async def tokenize(body: Tokenize, service: TheService, tenant: TheTenant) -> JSONResponse:
    """The tokens of a prompt, or of a chat that is ready to be answered."""
    body.check()
    _check_model(service, body.model)
    tokenizer = service.tokenizer
    if tokenizer is None:
        raise InvalidRequestError("the model must have a tokenizer, and has none")
    if body.messages is not None:
        chat = ChatRequest.model_validate({"model": service.model_name, "messages": body.messages})
        [token_ids] = await service.render(tenant, chat)
    else:
        add_bos = False if body.add_special_tokens is False else None
        encode = functools.partial(tokenizer.encode, body.prompt or "", add_bos)
        [token_ids] = await service.make_texts(tenant, [encode])
    texts = [token_text(tokenizer, token_id) for token_id in token_ids] if body.return_token_strs else None
    told = {"count": len(token_ids), "max_model_len": service.window, "tokens": token_ids, "token_strs": texts}
    return JSONResponse(told)


@ROUTES.post("/detokenize", responses=_ANSWERS)
async def detokenize(body: Detokenize, service: TheService, tenant: TheTenant) -> JSONResponse:
    """The text of tokens, special ones included."""
    _check_model(service, body.model)
    tokenizer = service.tokenizer
    if tokenizer is None:
        raise InvalidRequestError("the model must have a tokenizer, and has none")
    check_token_ids(body.tokens, service.model.config.vocab_size)
    decode = functools.partial(tokenizer.decode, body.tokens, skip_special_tokens=False)
    [text] = await service.make_texts(tenant, [decode])
    return JSONResponse({"prompt": text})


@ROUTES.post("/v1/embeddings", responses=responses(400, 401, 503))
async def embeddings(service: TheService, tenant: TheTenant) -> JSONResponse:
    """Refused: what is served here generates text."""
    message = f"/v1/embeddings is not served: the model {service.model_name!r} generates text and has no pooling"
    raise ApiError(400, message, code="unsupported_endpoint")


def _check_model(service: Service, model: str | None) -> None:
    if model is not None:
        service.adapter_of(model)
