"""OpenAI's routes: chat completions, completions, models; their answers in OpenAI's shapes. And vLLM's, which load and
unload LoRA adapters: models that requests name.

Not here: which conversation goes on, what is admitted (`service`, `router`), bodies of requests (`bodies`), clients
that go away or do not read (`state`), computing log-probabilities (`ca_jax.device.sampling`).
Source: OpenAI's API reference (CreateChatCompletionResponse, CreateChatCompletionStreamResponse,
CreateCompletionResponse, ChatCompletionTokenLogprob); vLLM, `POST /v1/load_lora_adapter`, `/v1/unload_lora_adapter`.
"""

from __future__ import annotations

import collections
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

import fastapi
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from ca_jax.server.answering import (
    Answering,
    described,
    echoed,
    event,
    event_begins,
    event_ends,
    listed,
    prompt_logprobs,
    reported,
)
from ca_jax.server.bodies import IGNORED, UNSERVED, ChatRequest, CompletionRequest, StrictBody
from ca_jax.server.engine_loop import Feed, Part
from ca_jax.server.errors import OBJECT, STREAMED, ApiError, responses
from ca_jax.server.router import client_name
from ca_jax.server.service import Service
from ca_jax.server.state import KeyedRoute, OpenRoute, TheService, TheTenant, session_header
from ca_jax.server.tenants import Tenant
from ca_jax.server.tool_calls import CallDelta, Reply, parser_of, read_reply
from ca_jax.session import Job
from ca_jax.turns.requests import FinishReason

ROUTES = fastapi.APIRouter(prefix="/v1", tags=["openai"], route_class=OpenRoute)
ADAPTER_ROUTES = fastapi.APIRouter(prefix="/v1", tags=["adapters"], route_class=KeyedRoute)
_ADAPTER_ANSWERS = responses(400, 401, 403, 404, 408, 409, 413, 429, 503, content=OBJECT)
_CREATED = int(time.time())
_LIST: dict[str, Any] = {"application/json": {"schema": {"type": "array", "items": {"type": "object"}}}}
_SECONDS = ("ttft_s", "queued_s", "load_s", "load_stall_s", "prefill_s", "decode_s")  # Of the first answer's `Usage`.
_COUNTS = ("dropped_tokens", "num_dropped", "repaired_tokens", "missed_chunks")
_Body = dict[str, Any]


_AdapterName = Annotated[str, Field(min_length=1, max_length=128, pattern="^\\S+$")]


class LoadAdapter(StrictBody):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: _AdapterName
    """What to call it."""
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """A directory of the server, as PEFT writes it."""
    load_inplace: Literal[False] | None = UNSERVED
    is_3d_lora_weight: Literal[False] | None = UNSERVED


class UnloadAdapter(StrictBody):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: _AdapterName
    lora_int_id: int | None = IGNORED


@ROUTES.get("/models", responses=responses(401, 503, content=OBJECT))
async def models(service: TheService, tenant: TheTenant) -> JSONResponse:
    """The one model that is served, and the adapters that are loaded for it, which name it as their parent."""
    names = (None, *service.adapters)
    return JSONResponse({"object": "list", "data": [described_model(service, name) for name in names]})


@ROUTES.get("/models/{model:path}", responses=responses(401, 404, 503, content=OBJECT))
async def model(model: str, service: TheService, tenant: TheTenant) -> JSONResponse:
    """One of them, by its name."""
    return JSONResponse(described_model(service, service.adapter_of(model)))


def described_model(service: Service, adapter: str | None) -> _Body:
    """The model as it is listed, or one of its adapters."""
    parent = {} if adapter is None else {"parent": service.model_name}
    return {
        "id": service.model_of(adapter),
        "object": "model",
        "created": _CREATED,
        "owned_by": "ca_jax",
        "max_model_len": service.window,
        **parent,
    }


@ADAPTER_ROUTES.post("/load_lora_adapter", responses=_ADAPTER_ANSWERS)
async def load_adapter(body: LoadAdapter, service: TheService, tenant: TheTenant) -> JSONResponse:
    """Loads an adapter from a directory of the server. Requests name it as `MODEL:ADAPTER` from then on."""
    _check_allowed(service, tenant)
    await service.load_adapter(tenant, body.lora_name, body.lora_path)
    return JSONResponse(described_model(service, body.lora_name))


@ADAPTER_ROUTES.post("/unload_lora_adapter", responses=_ADAPTER_ANSWERS)
async def unload_adapter(body: UnloadAdapter, service: TheService, tenant: TheTenant) -> JSONResponse:
    """Unloads an adapter that no answer and no open conversation uses."""
    _check_allowed(service, tenant)
    await service.unload_adapter(tenant, body.lora_name)
    return JSONResponse({"id": service.model_of(body.lora_name), "object": "model", "deleted": True})


def _check_allowed(service: Service, tenant: Tenant) -> None:
    """Raises ApiError where no adapters are loaded, or not by a key of this tenant."""
    if not service.max_adapters:
        raise ApiError(404, "adapters are loaded by a server with --max_adapters above 0", code="adapters_off")
    if not tenant.adapters:
        message = "adapters must be loaded and unloaded with a key whose tenant may (adapters = true)"
        raise ApiError(403, message, code="not_allowed")


@ROUTES.post(
    "/chat/completions",
    response_class=Response,
    responses=responses(400, 401, 403, 404, 408, 409, 413, 429, 503, content=STREAMED),
)
async def chat_completions(
    body: ChatRequest, request: fastapi.Request, service: TheService, tenant: TheTenant
) -> Response:
    """Answers a conversation; the KV of what was said before is reused."""
    return await _Answering(body, service, tenant, session_header(request)).response(request)


@ROUTES.post(
    "/completions",
    response_class=Response,
    responses=responses(400, 401, 403, 404, 408, 413, 429, 503, content=STREAMED),
)
async def completions(
    body: CompletionRequest, request: fastapi.Request, service: TheService, tenant: TheTenant
) -> Response:
    """Continues plain prompts; the KV of what other prompts began with is reused."""
    return await _Answering(body, service, tenant).response(request)


@ROUTES.post("/chat/completions/render", responses=responses(400, 401, 404, 408, 413, 429, 503, content=OBJECT))
async def render_chat(body: ChatRequest, service: TheService, tenant: TheTenant) -> JSONResponse:
    """The token ids of a chat's prompt, as vLLM gives them: routers that know which KV is where ask for these."""
    (token_ids,) = await _rendered(body, service, tenant)
    return JSONResponse({"model": body.model, "token_ids": token_ids})


@ROUTES.post("/completions/render", responses=responses(400, 401, 404, 408, 413, 429, 503, content=_LIST))
async def render_completions(body: CompletionRequest, service: TheService, tenant: TheTenant) -> JSONResponse:
    """The token ids of each plain prompt, likewise."""
    rendered = await _rendered(body, service, tenant)
    return JSONResponse([{"model": body.model, "token_ids": token_ids} for token_ids in rendered])


async def _rendered(body: ChatRequest | CompletionRequest, service: Service, tenant: Tenant) -> list[list[int]]:
    body.check()
    service.adapter_of(body.model)
    return await service.render(tenant, body)


class _Answering:
    """One request for answers, whole or as chunks of a stream.

    Raises:
      ApiError: fields do not go together, or another model is asked for.
    """

    def __init__(
        self, body: ChatRequest | CompletionRequest, service: Service, tenant: Tenant, name: str | None = None
    ) -> None:
        body.check()
        service.adapter_of(body.model)
        self._body, self._service, self._tenant, self._name = body, service, tenant, name
        self._is_chat = isinstance(body, ChatRequest)
        kind = "chat.completion" if self._is_chat else "text_completion"
        response_id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": response_id, "object": kind, "created": int(time.time()), "model": body.model}
        self._chunk_head = self._head | ({"object": f"{kind}.chunk"} if self._is_chat else {})
        self._chunk_begins = event_begins(self._chunk_head)
        options = body.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._counts_on = options is not None and bool(options.continuous_usage_stats)
        self._echoes = isinstance(body, CompletionRequest) and bool(body.echo)
        self._is_mute = isinstance(body, CompletionRequest) and body.max_tokens == 0  # Of the prompt alone is told.

    async def response(self, request: fastapi.Request) -> Response:
        """The answers, whole or streamed."""
        body, service = self._body, self._service
        if isinstance(body, ChatRequest):
            begun = service.chat(self._tenant, body, name=self._name)
        else:
            begun = service.complete(self._tenant, body)
        answering = Answering(service, self._tenant, begun, body.timeout_s, body.num_answers, body.priority)
        return await (answering.streamed(self._pieces) if body.stream else answering.whole(request, self._whole))

    def _whole(self, feed: Feed, parts: Sequence[Part]) -> _Body:
        texts, state = [self._echo(index) for index in range(len(feed.jobs))], None
        for part in parts:
            texts[part.index] += "" if self._is_mute else part.text
            state = part.state
        choices, said = list[_Body](), dict[str, Any]()
        for index, (job, text) in enumerate(zip(feed.jobs, texts, strict=True)):
            said, has_calls = {"text": text}, False
            if self._is_chat:
                reply = read_reply(job)
                said, has_calls = {"message": _message(reply)}, bool(reply.calls)
            logprobs, reason = self._logprobs(job, index, 0), _finish_reason(job, has_calls)
            told = self._prompt_logprobs(job)
            choices.append({"index": index, **said, "logprobs": logprobs, "finish_reason": reason, **told})
        session = self._session(feed)
        if session and state is not None:
            session["session_state"] = state
        return {**self._head, "choices": choices, "usage": self._usage(feed), **session}

    async def _pieces(self, feed: Feed, until_s: float | None) -> AsyncIterator[str]:
        """The stream of events. An error in the middle is the last of them, as OpenAI's clients understand it."""
        try:
            session, jobs = self._session(feed), feed.jobs
            for index in range(len(jobs) if self._is_chat else 0):
                said: _Body = {"delta": {"role": "assistant", "content": "", "refusal": None}}
                yield self._chunk(feed, Part(index, "", 0, done=False), said, None, session)
            sent, echoes = [0] * len(jobs), [self._echo(index) for index in range(len(jobs))]
            readers = [_StreamedReply(job) for job in jobs]
            async for part in feed.parts(until_s):
                said, logprobs = {"text": echoes[part.index] + ("" if self._is_mute else part.text)}, None
                echoes[part.index] = ""
                if self._is_chat:
                    said = {"delta": readers[part.index].delta(part)}
                if part.num_tokens > sent[part.index]:
                    logprobs = self._logprobs(jobs[part.index], part.index, sent[part.index], part.num_tokens)
                    sent[part.index] = part.num_tokens
                state = {"session_state": part.state} if part.state is not None and session else {}
                yield self._chunk(feed, part, said, logprobs, state, readers[part.index].has_calls)
            if self._with_usage:
                yield event({**self._chunk_head, "choices": [], "usage": self._usage(feed)})
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield event(reported(error).body())

    def _chunk(
        self,
        feed: Feed,
        part: Part,
        said: _Body,
        logprobs: _Body | None,
        session: _Body,
        has_calls: bool = False,
    ) -> str:
        """A chunk of an answer's new text."""
        reason = _finish_reason(feed.jobs[part.index], has_calls) if part.done else None
        choice = {"index": part.index, **said, "logprobs": logprobs, "finish_reason": reason}
        usage: _Body = {"usage": None} if self._with_usage else {}
        if self._with_usage and self._counts_on:
            usage = {"usage": _usage_counts(feed.num_prompt_tokens[part.index], part.num_tokens)}
        return self._chunk_begins + event_ends({"choices": [choice], **usage, **session})

    def _usage(self, feed: Feed) -> _Body:
        """What a request took. `ca_jax` adds to OpenAI's fields where KV came from, and what the first answer took."""
        usages = [job.usage() for job in feed.jobs]
        of_prompts, first = usages[:: self._body.num_choices], usages[0]  # Tokens of a prompt count once.
        by_tier: collections.Counter[str] = collections.Counter()
        for usage in of_prompts:
            by_tier.update(usage.cached_tokens)
        num_prompt = sum(usage.prompt_tokens for usage in of_prompts)
        no_predictions = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
        return {
            **_usage_counts(num_prompt, 0 if self._is_mute else sum(usage.completion_tokens for usage in usages)),
            "prompt_tokens_details": {"cached_tokens": by_tier.total(), "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0, **no_predictions},
            "ca_jax": {
                "cached_tokens": dict(by_tier),
                **{name: round(getattr(first, name), 6) for name in _SECONDS},
                **{name: getattr(first, name) for name in _COUNTS},
            },
        }

    def _echo(self, index: int) -> str:
        """The text in front of the answer of a number: its prompt, where that is to be told."""
        if not (self._echoes and isinstance(self._body, CompletionRequest)):
            return ""
        prompt, tokenizer = self._body.prompts()[index // self._body.num_choices], self._service.tokenizer
        if isinstance(prompt, str):
            return prompt
        return "" if tokenizer is None else tokenizer.decode(prompt, skip_special_tokens=False)

    def _prompt_logprobs(self, job: Job) -> _Body:
        """Of the prompt, as vLLM tells it."""
        body = self._body
        if not isinstance(body, CompletionRequest) or body.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._service.tokenizer, job, body.prompt_logprobs)}

    def _logprobs(self, job: Job, index: int, start: int, stop: int | None = None) -> _Body | None:
        """Log-probabilities of the tokens `[start, stop)` of the answer of a number, behind those of an echo."""
        if self._body.num_logprobs is None:
            return None
        each, tokenizer = job.token_logprobs[start : 0 if self._is_mute else stop], self._service.tokenizer
        if self._is_chat:
            return {"content": [described(tokenizer, drawn) for drawn in each], "refusal": None}
        ends = list(itertools.accumulate(map(len, job.token_texts), initial=len(self._echo(index))))
        told = listed(tokenizer, each, ends[start : start + len(each)], self._body.num_logprobs)
        if not start and self._echoes:
            prompt = echoed(tokenizer, job, self._body.num_logprobs)
            told = {name: prompt[name] + told[name] for name in told}
        return told

    def _session(self, feed: Feed) -> _Body:
        """Of a chat: what its next turn may name instead of its history."""
        session = feed.jobs[0].session
        if not self._is_chat or len(feed.jobs) > 1 or session is None or not session.is_kept:
            return {}
        return {"session_id": client_name(self._tenant.domain, session.session_id)}


class _StreamedReply:
    """What of one answer's text is content, reasoning and calls, as it comes."""

    def __init__(self, job: Job) -> None:
        self._job, self._parser = job, parser_of(job)
        self.has_calls = False
        """Whether a whole call came."""

    def delta(self, part: Part) -> _Body:
        """What a step gave."""
        delta = self._parser.feed(part.text)
        if part.done:
            delta = delta + self._parser.finish(self._job.finish_reason is FinishReason.STOP)
        told: _Body = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
        if delta.content:
            told["content"] = delta.content
        if delta.calls:
            told["tool_calls"] = [_described_call(call) for call in delta.calls]
            self.has_calls |= any(call.is_whole for call in delta.calls)
        return told


def _described_call(call: CallDelta) -> _Body:
    """What became certain of a call, as OpenAI streams it."""
    if not call.is_first:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": function}


def _message(reply: Reply) -> _Body:
    """A whole answer as OpenAI's messages have it; `reasoning_content` is as others add it."""
    content = reply.content if reply.content or not reply.calls else None
    return {**reply.message(), "content": content, "refusal": None}


def _finish_reason(job: Job, has_calls: bool) -> str:
    """OpenAI's word for why an answer ended; one that was given up was cut short."""
    if job.finish_reason is not FinishReason.STOP:
        return "length"
    return "tool_calls" if has_calls else "stop"


def _usage_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Tokens of a prompt and of what was generated so far."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
