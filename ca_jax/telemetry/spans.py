"""Spans for a collector of OpenTelemetry, by OTLP over HTTP.

Spans are made once what they are of is over, with the times that it took, and sent in batches by a thread of the SDK:
a collector that is slow or away delays nothing, and what it does not take is dropped.

Not here: what is a span, and its attributes (`server.observing`); the timeline of a single engine (`timeline`).
Source: OpenTelemetry's tracing SDK; W3C Trace Context for `traceparent`.
"""

from __future__ import annotations

import importlib.metadata
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

_FLUSH_S = 5.0  # That a batch may take to be sent, and all that is left at the end.
AttributeValue = str | bool | int | float | Sequence[str]
"""What an attribute of a span may be."""
Attributes = Mapping[str, AttributeValue]
"""Attributes of a span by name."""


class SpanSender:
    """Makes spans and sends them. Any thread may call anything.

    Args:
      endpoint: a collector's URL; `/v1/traces` is put behind one without a path.
      instance: names this server among others of the same service.
      exporter: sends spans in place of one to `endpoint`.

    Raises:
      ImportError: OpenTelemetry's packages are not installed.
    """

    def __init__(self, endpoint: str, instance: str, exporter: SpanExporter | None = None) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            message = f"otlp_traces_endpoint needs more packages: pip install 'ca-jax[otel]' ({error})"
            raise ImportError(message) from error
        version = importlib.metadata.version("ca-jax")
        own = {"service.name": "ca_jax", "service.version": version, "service.instance.id": instance}
        # What the environment says (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES) counts.
        resource = Resource.create(own).merge(OTELResourceDetector().detect())
        self._exporter = exporter or OTLPSpanExporter(traces_url(endpoint), timeout=_FLUSH_S)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("ca_jax", version)

    def begin(self, name: str, start_s: float, headers: Mapping[str, str]) -> RequestSpan:
        """Begins the span of a request.

        Args:
          name: of it.
          start_s: when it began, seconds of `time.perf_counter`.
          headers: of the request, names in lower case: where they have a `traceparent`, the span is a child of that,
            and recorded where that is.
        """
        return RequestSpan(self._tracer, name, start_s, headers)

    def close(self) -> None:
        """Sends what is left, waiting a few seconds at most."""
        sending = threading.Thread(target=self._provider.shutdown, name="ca_jax-spans", daemon=True)
        sending.start()
        sending.join(_FLUSH_S)
        if sending.is_alive():
            self._exporter.shutdown()


class RequestSpan:
    """The span of a request, and those below it. Made by `SpanSender.begin`; all times are of `time.perf_counter`."""

    def __init__(self, tracer: Tracer, name: str, start_s: float, headers: Mapping[str, str]) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Read once: what is nested stays so where the system's clock is set meanwhile.
        self._since_ns = time.time_ns() - time.perf_counter_ns()
        self._tracer = tracer
        parent = TraceContextTextMapPropagator().extract(headers)
        self._span: Span = tracer.start_span(name, parent, SpanKind.SERVER, start_time=self._wall_ns(start_s))

    @property
    def trace_id(self) -> str:
        """Of its trace, 32 hexadecimal digits as in `traceparent`."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def add(self, name: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        """Adds a span below it: something that is over. It may end behind the request, as a save does."""
        from opentelemetry.trace import set_span_in_context

        if self._span.is_recording():
            context, start_ns = set_span_in_context(self._span), self._wall_ns(start_s)
            span = self._tracer.start_span(name, context, attributes={**attributes}, start_time=start_ns)
            span.end(max(start_ns, self._wall_ns(end_s)))

    def end(self, end_s: float, attributes: Attributes, error: str | None) -> None:
        """Ends it.

        Args:
          end_s: when.
          attributes: of it.
          error: what went wrong, a word; None: nothing did.
        """
        from opentelemetry.trace import StatusCode

        self._span.set_attributes({**attributes})
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end(self._wall_ns(end_s))

    def _wall_ns(self, at_s: float) -> int:
        """Nanoseconds since 1970."""
        return self._since_ns + int(at_s * 1e9)


def traces_url(endpoint: str) -> str:
    """Where spans are sent: what is given, or the usual path of a URL that has none."""
    parts = urllib.parse.urlsplit(endpoint)
    return endpoint if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()
