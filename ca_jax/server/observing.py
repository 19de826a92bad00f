"""Who asked for what and how long it took: a line of JSON in the access log, and a trace.

    event loop   Observer: notes a request -> its end --+
    a thread                                            Recorder: turns ended -> line -> KV saved -> spans

Those that know something of a request say it here (`note_error`, `OBSERVED`); where nobody observes, nothing is noted.
A thread writes both, once a request's turns have ended: nothing waits for a disk or a collector. Neither tells what was
said, nor a key. Where neither is asked for there is no thread, and no request passes through here.

Not here: sending spans (`telemetry.spans`).
Source: OpenTelemetry's semantic conventions for HTTP servers and for generative AI (`gen_ai.*`).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import datetime
import json
import logging
import logging.handlers
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from asgi_correlation_id import correlation_id
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ca_jax.session import Job
from ca_jax.telemetry.spans import Attributes, AttributeValue, RequestSpan, SpanSender


class Took(NamedTuple):
    """What the answers of a request took, together."""

    prompt_tokens: int
    """A prompt of several answers counts once."""
    cached_tokens: int
    """Of these, tokens whose KV was loaded."""
    output_tokens: int
    ttft_s: float | None
    """Seconds to the first answer's first token; None: it had none."""


@dataclasses.dataclass(eq=False)
class Observed:
    """A request, from its head on."""

    request_id: str
    method: str
    path: str
    headers: dict[str, str]
    """Those of W3C Trace Context, by names in lower case."""
    began_s: float = dataclasses.field(default_factory=time.perf_counter)
    at: datetime.datetime = dataclasses.field(default_factory=lambda: datetime.datetime.now(datetime.UTC))
    """When it came."""
    ended_s: float = 0.0
    """When the last byte of its answer was sent; 0 before."""
    route: str | None = None
    """The route that answered, its parameters named; None: no route did."""
    status: int = 0
    """Of the answer; 0: its client went away before it had one."""
    error: str | None = None
    """What went wrong, a word; None: nothing did."""
    tenant: str | None = None
    """Whose it is; None: its key said nobody's."""
    session: str | None = None
    """The conversation, as its client names it; of several answers, the first one's."""
    model: str | None = None
    """That answers, as clients name it."""
    jobs: list[Job] = dataclasses.field(default_factory=list)
    """Its turns."""
    num_choices: int = 1
    """How many of them have the same prompt."""
    is_stream: bool = False

    @property
    def answers(self) -> list[Job]:
        """Its turns, without those that compute chunks."""
        return [job for job in self.jobs if job.chunk is None]

    @property
    def done(self) -> bool:
        """Whether its turns have ended."""
        return all(job.done for job in self.jobs)

    @property
    def saved(self) -> bool:
        """Whether all that is to be stored of its turns is."""
        return all(job.save_times is None or job.save_times.ended for job in self.jobs)

    def took(self) -> Took | None:
        """What its answers took so far; None: it has none."""
        answers = self.answers
        if not answers:
            return None
        usages = [job.usage() for job in answers]
        prompts = usages[:: self.num_choices]
        return Took(
            sum(usage.prompt_tokens for usage in prompts),
            sum(usage.num_cached_tokens for usage in prompts),
            sum(usage.completion_tokens for usage in usages),
            usages[0].ttft_s if answers[0].output_ids else None,
        )

    def finish_reasons(self) -> list[str]:
        """Why each of its answers ended."""
        reasons = [job.finish_reason for job in self.answers]
        return ["error" if reason is None else reason.value for reason in reasons]


OBSERVED: contextvars.ContextVar[Observed | None] = contextvars.ContextVar("ca_jax_observed", default=None)
"""The request that is served; None where nobody observes."""


def note_error(code: str | None, status: int) -> None:
    """Notes what went wrong with the request that is served."""
    if (observed := OBSERVED.get()) is not None:
        observed.error = code or str(status)


def note_tenant(name: str) -> None:
    """Notes whose the request is that is served."""
    if (observed := OBSERVED.get()) is not None:
        observed.tenant = name


class Phase(NamedTuple):
    """A phase of a turn, by the clock of its other times."""

    name: str
    """`queue`, `fetch`, `load`, `prefill`, `decode` or `save`."""
    start_s: float
    end_s: float | None
    """None while it goes on."""
    busy_s: float | None = None
    """Seconds of it that were spent on it, where others ran in between."""
    stall_s: float = 0.0
    """Of a load, seconds in which compute waited for it."""


def phases(job: Job) -> Iterator[Phase]:
    """What happened of a turn so far, in the order in which it began, but that a save goes last."""
    ended_s = job.finished_s or None  # Of a job that was given up before a phase ended, that phase's end too.
    yield Phase("queue", job.submitted_s, job.started_s or ended_s)
    if job.fetch_span_s is not None:
        yield Phase("fetch", *job.fetch_span_s)
    if job.load_span_s is not None:
        yield Phase("load", *job.load_span_s, job.load_s, job.load_stall_s)
    if job.started_s:
        yield Phase("prefill", job.started_s, job.first_token_s or ended_s, job.prefill_s or None)
    if job.first_token_s:
        yield Phase("decode", job.first_token_s, ended_s)
    saves = job.save_times
    if saves is not None and saves.begun_s:
        yield Phase("save", saves.begun_s, (saves.published_s or saves.begun_s) if saves.ended else None)


_LOG = logging.getLogger(__name__)
_MOST_WAITING = 4096  # Requests that ended and are not written down yet; beyond that they are lost, and counted.
_TURN_S, _SAVE_S = 10.0, 30.0  # How long a request that has ended is held back for its turns' ends, and for saves.
_LOOK_S = 0.02  # How often it is looked whether they have ended.
_CLOSE_S = 10.0
_CONTEXT_HEADERS = ("traceparent", "tracestate")
_MOST_CHARS = 256  # Of a path that no route has.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
}
"""What is asked for, by route; traces are of these, and of others that have turns."""


class Observer:
    """Middleware: notes each request, and hands it on when it has ended.

    Args:
      app: what is behind it.
      recorder: takes requests.
    """

    def __init__(self, app: ASGIApp, recorder: Recorder) -> None:
        self._app = app
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request; as ASGI says."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"])
        headers = {name: value for name, value in told if name in _CONTEXT_HEADERS}
        observed = Observed(correlation_id.get() or "", scope["method"], scope["path"], headers)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                observed.status = message["status"]
                kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
                observed.is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
            await send(message)

        token = OBSERVED.set(observed)
        try:
            await self._app(scope, receive, noted)
        except Exception:
            observed.status, observed.error = observed.status or 500, "internal_error"
            raise
        finally:
            OBSERVED.reset(token)
            observed.ended_s = time.perf_counter()
            observed.route = getattr(scope.get("route"), "path", None)
            self._recorder.add(observed)


class AccessLog:
    """A file of lines of JSON, one a request, that is opened anew where it was moved away.

    Args:
      path: of the file; `-`: standard output.
      replica: that writes it; empty: there is one server.

    Raises:
      OSError: the file cannot be written.
    """

    def __init__(self, path: str, replica: str) -> None:
        self._handler: logging.Handler
        if path == "-":
            self._handler = logging.StreamHandler(sys.stdout)
        else:
            self._handler = logging.handlers.WatchedFileHandler(Path(path).expanduser(), encoding="utf-8")
        self._handler.handleError = _raise  # type: ignore[method-assign]
        self._replica = {"replica": replica} if replica else {}
        self._warned_s = -60.0

    def write(self, observed: Observed, trace_id: str | None) -> None:
        """Writes the line of a request. One that cannot be written is lost, and said once a minute."""
        line = {**_line(observed), **self._replica, "trace_id": trace_id}
        record = logging.makeLogRecord({"msg": json.dumps(line, ensure_ascii=False)})
        try:
            self._handler.handle(record)
        except (OSError, ValueError) as error:
            if time.monotonic() - self._warned_s > 60.0:
                self._warned_s = time.monotonic()
                _LOG.warning("the access log cannot be written, and loses lines: %s", error)

    def close(self) -> None:
        """Closes the file."""
        self._handler.close()


def _raise(record: logging.LogRecord) -> None:
    """What a handler does where it meets an error; by itself it prints all that led there."""
    raise


def _line(observed: Observed) -> dict[str, Any]:
    """What a request's line says of it."""
    took = observed.took()
    of_answers = {} if took is None else {**took._asdict(), "finish_reasons": observed.finish_reasons()}
    if took is not None and took.ttft_s is not None:
        of_answers["ttft_s"] = round(took.ttft_s, 6)
    return {
        "time": observed.at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "request_id": observed.request_id,
        "method": observed.method,
        "route": observed.route or observed.path[:_MOST_CHARS],
        "status": observed.status or 499,
        "error": observed.error,
        "seconds": round(observed.ended_s - observed.began_s, 6),
        "tenant": observed.tenant,
        "session": observed.session,
        **of_answers,
    }


class Recorder:
    """Writes down requests that have ended, on a thread of its own.

    Args:
      log: where lines go; None: nowhere.
      spans: where traces go; None: nowhere.
      replica: the server, in traces; empty: there is one.
    """

    def __init__(self, log: AccessLog | None, spans: SpanSender | None, replica: str) -> None:
        self._log, self._spans = log, spans
        self._replica: Attributes = {"ca_jax.replica": replica} if replica else {}
        self._came: queue.Queue[Observed | None] = queue.Queue(_MOST_WAITING)  # None: nothing comes any more.
        self._num_lost = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ca_jax-recorder", daemon=True)
        self._thread.start()

    def add(self, observed: Observed) -> None:
        """Takes a request that has ended. Never waits."""
        try:
            self._came.put_nowait(observed)
        except queue.Full:
            if not self._num_lost:
                _LOG.warning("the access log or traces are too slow: requests go unrecorded")
            self._num_lost += 1

    def close(self) -> None:
        """Writes down what is left, waiting a few seconds at most."""
        self._closing = True
        with contextlib.suppress(queue.Full):
            self._came.put_nowait(None)
        self._thread.join(_CLOSE_S)
        if self._num_lost:
            _LOG.warning("%d requests went unrecorded", self._num_lost)
        if self._spans is not None:
            self._spans.close()
        if self._log is not None and not self._thread.is_alive():
            self._log.close()

    def _run(self) -> None:
        running: list[Observed] = []
        saving: list[tuple[Observed, RequestSpan]] = []
        is_last = False
        while not is_last:
            is_last = self._closing  # Once more after nothing comes, and whatever has not ended is told as it is.
            running += self._take(0.0 if is_last else _LOOK_S if running or saving else None)
            held, running = running, []
            for observed in held:
                if not (is_last or observed.done or _is_late(observed, _TURN_S)):
                    running.append(observed)
                elif (begun := self._told(observed)) is not None:
                    saving.append((observed, begun))
            begun_spans, saving = saving, []
            for observed, span in begun_spans:
                if is_last or observed.saved or _is_late(observed, _SAVE_S):
                    self._trace(observed, span)
                else:
                    saving.append((observed, span))

    def _take(self, wait_s: float | None) -> list[Observed]:
        """Requests that have come; waits for the first."""
        came: list[Observed | None] = []
        with contextlib.suppress(queue.Empty):
            came.append(self._came.get(timeout=wait_s))
            while True:
                came.append(self._came.get_nowait())
        return [each for each in came if each is not None]

    def _told(self, observed: Observed) -> RequestSpan | None:
        """Writes a request's line, and begins its span, where it has one."""
        span, operation = None, _operation(observed)
        try:
            if self._spans is not None and (operation is not None or observed.jobs):
                name = f"{operation or observed.method} {observed.model or observed.route}"
                span = self._spans.begin(name, observed.began_s, observed.headers)
            if self._log is not None:
                self._log.write(observed, None if span is None else span.trace_id)
        except Exception:
            _LOG.exception("a request could not be written down")
        return span

    def _trace(self, observed: Observed, span: RequestSpan) -> None:
        """Adds what a request's turns took, and ends its span."""
        try:
            ended_s = max([observed.ended_s, *(job.finished_s for job in observed.jobs)])
            for number, job in enumerate(observed.jobs):
                of_job: dict[str, AttributeValue] = {"ca_jax.answer": number} if len(observed.jobs) > 1 else {}
                if job.chunk is not None:
                    of_job["ca_jax.chunk"] = True
                for phase in phases(job):
                    told = dict(of_job)
                    if phase.busy_s is not None:
                        told["ca_jax.busy_s"] = phase.busy_s
                    if phase.name == "load":
                        told |= {"ca_jax.stall_s": phase.stall_s, "ca_jax.tier": job.cached_tier}
                    if phase.name == "save" and job.save_times is not None:
                        told["ca_jax.saved_tokens"] = job.save_times.num_published
                    span.add(phase.name, phase.start_s, ended_s if phase.end_s is None else phase.end_s, told)
            span.end(ended_s, {**_attributes(observed), **self._replica}, _error(observed))
        except Exception:
            _LOG.exception("a request could not be traced")


def _is_late(observed: Observed, most_s: float) -> bool:
    return time.perf_counter() - observed.ended_s > most_s


def _operation(observed: Observed) -> str | None:
    return _OPERATIONS.get(observed.route or "") if observed.method == "POST" else None


def _error(observed: Observed) -> str | None:
    """What went wrong with a request, a word: the server's code, or how its turns ended."""
    if observed.error is not None or observed.status >= 400:
        return observed.error or str(observed.status)
    reasons = observed.finish_reasons()
    return next((reason for reason in ("error", "cancelled") if reason in reasons), None)


def _attributes(observed: Observed) -> dict[str, AttributeValue]:
    """Of a request's span."""
    took, operation = observed.took(), _operation(observed)
    told: dict[str, AttributeValue | None] = {
        "http.request.method": observed.method,
        "http.route": observed.route,
        "http.response.status_code": observed.status or 499,
        "ca_jax.request_id": observed.request_id,
        "ca_jax.tenant": observed.tenant,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "ca_jax" if operation else None,
        "gen_ai.request.model": observed.model,
        "gen_ai.conversation.id": observed.session,
    }
    if took is not None:
        params, reasons = observed.answers[0].params, observed.finish_reasons()
        told |= {
            "gen_ai.response.model": observed.model,
            "gen_ai.request.stream": observed.is_stream,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.choice.count": observed.num_choices if observed.num_choices > 1 else None,
            "gen_ai.response.finish_reasons": reasons,
            "gen_ai.response.time_to_first_chunk": took.ttft_s if observed.is_stream else None,
            "gen_ai.usage.input_tokens": took.prompt_tokens,
            "gen_ai.usage.output_tokens": took.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": took.cached_tokens,
            "ca_jax.ttft_s": took.ttft_s,
            "ca_jax.cached_tier": observed.answers[0].cached_tier if took.cached_tokens else None,
        }
    return {name: value for name, value in told.items() if value is not None}
