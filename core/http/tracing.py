"""Traces of requests as OpenTelemetry's spans, where the operator enables them.

Owns the spans, their times and attributes, and the exporter (OTLP over HTTP). The spans of a job
are made of the engine's account, once it has ended. Attributes are names, counts and times, after
the GenAI conventions where these have a name; never content. OpenTelemetry is imported only when
traces are enabled, and a collector that fails never delays a request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.core.engine_api.job_report import LOAD, QUEUE, JobReport
from triptych.core.engine_api.journal import JournalEntry, call_of
from triptych.core.errors import ConfigError
from triptych.core.http.disconnect import recorded_status
from triptych.core.http.recent_requests import may_have_work

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span

MAX_CALLS = 4096
CLOSE_S = 3.0
"""How long the shutdown waits for the last spans to leave."""
_WARN_S = 60.0
_GEN_AI_COUNTS = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
}
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _TracedRequest:
    """A request whose span is open or was closed recently."""

    name: str
    span: Span
    context: Context
    scope: Scope | None
    arrived_s: float
    is_answer: bool = False
    route: str = ""
    is_prepared: bool = False
    first_body_s: float | None = None
    is_streamed: bool = False

    def note_body(self, message: Message) -> None:
        """Note the times of a response's body."""
        if message["type"] == "http.response.body" and self.first_body_s is None:
            self.first_body_s = time.monotonic()
            self.is_streamed = bool(message.get("more_body"))


class RequestTracing:
    """Makes and exports the spans of requests and of their jobs."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("triptych", version("triptych"))
        self._extract = TraceContextTextMapPropagator().extract
        self._calls: dict[str, _TracedRequest] = {}

    @classmethod
    def to_endpoint(cls, endpoint: str) -> RequestTracing | None:
        """Export to a collector's URL; `None` for an empty one. Raises `ConfigError`."""
        if not endpoint:
            return None
        url = traces_url(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError(
                "--otlp-traces-endpoint needs OpenTelemetry: run pip install '.[otel]' in the"
                " source folder, or pip install opentelemetry-exporter-otlp-proto-http."
            ) from None
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # failures are logged below
        name = os.environ.get("OTEL_SERVICE_NAME", "triptych")
        about = {"service.name": name, "service.version": version("triptych")}
        provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        exporter = quiet_exporter(OTLPSpanExporter(endpoint=url))
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    async def close(self) -> None:
        """Export the last spans, waiting up to `CLOSE_S`."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_S)

    def begin(self, scope: Scope) -> _TracedRequest:
        """Open the span of a request. The header `traceparent` may name its parent."""
        from opentelemetry.trace import SpanKind

        parent = self._extract(dict(Headers(scope=scope)))
        method, state = scope["method"], scope["state"]
        span = self._tracer.start_span(method, context=parent, kind=SpanKind.SERVER)
        span.set_attribute("http.request.method", method)
        traced = self._follow(span, method, state["call_id"], state["request_id"], scope)
        traced.is_prepared = method != "POST"  # a socket has no work before its messages
        return traced

    def begin_answer(self, call_id: str, answer_id: str) -> _TracedRequest:
        """Open the span of an answer of a socket, whose call is the part before the dot."""
        socket = self._calls.get(call_of(call_id))
        span = self._tracer.start_span("answer", context=None if socket is None else socket.context)
        scope = None if socket is None else socket.scope
        traced = self._follow(span, "answer", call_id, answer_id, scope)
        traced.is_answer = True
        return traced

    def rename(self, call_id: str, request_id: str) -> None:
        """Note another id of a request whose span is open."""
        if traced := self._calls.get(call_id):
            traced.span.set_attribute("triptych.request_id", request_id)

    def _follow(
        self, span: Span, name: str, call_id: str, request_id: str, scope: Scope | None
    ) -> _TracedRequest:
        """Remember a request, in place of the oldest one that has ended."""
        from opentelemetry.trace import set_span_in_context

        span.set_attribute("triptych.request_id", request_id)
        traced = _TracedRequest(name, span, set_span_in_context(span), scope, time.monotonic())
        self._calls[call_id] = traced
        if len(self._calls) > MAX_CALLS:
            ended = (call for call, each in self._calls.items() if each.scope is None)
            del self._calls[next(ended, next(iter(self._calls)))]
        return traced

    def end(self, traced: _TracedRequest, status: int) -> None:
        """Close the span of a request; `status` is that of its response, 0 if it failed."""
        from opentelemetry.trace import Status, StatusCode

        traced.route, traced.scope = _route_of(traced), None
        if traced.is_streamed and traced.first_body_s is not None:
            self._add(traced.context, "stream", traced.first_body_s, time.monotonic())
        span = traced.span
        span.update_name(f"{traced.name} {traced.route}")
        span.set_attribute("http.route", traced.route)
        if status and not traced.is_answer:
            span.set_attribute("http.response.status_code", status)
        if not status or status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def add_job(self, job: JournalEntry) -> None:
        """Add the spans of a job that has ended, if its request is known."""
        traced, report = self._traced(job.job_id), job.report
        if traced is None or report is None:
            return
        if not traced.is_prepared:
            traced.is_prepared = True
            self._add(traced.context, "prepare", traced.arrived_s, job.submitted_s)
        start_s = job.submitted_s
        operation = operation_of(_route_of(traced))
        attributes = _job_attributes(job, report, operation)
        end_s = start_s + report.length_s
        name = f"{operation} {job.model}"
        context = self._add(traced.context, name, start_s, end_s, attributes)
        at_s = start_s
        for reason in (LOAD, QUEUE):
            if waited_s := report.waits.get(reason):
                self._add(context, reason, at_s, at_s + waited_s)
                at_s += waited_s
        for span in report.spans:
            about = {
                "triptych.num_steps": span.num_steps,
                "triptych.num_shared_steps": span.num_shared,
                "triptych.device_s": span.busy_s,
            }
            self._add(context, span.stage, start_s + span.start_s, start_s + span.end_s, about)

    def _traced(self, job_id: str) -> _TracedRequest | None:
        """The answer of a socket that a job is of, else its request."""
        answer = ".".join(job_id.split(".", 2)[:2])
        return self._calls.get(answer) or self._calls.get(call_of(job_id))

    def _add(
        self,
        context: Context,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, Any] | None = None,
    ) -> Context:
        """Add a span that is over, between two times of the monotonic clock."""
        from opentelemetry.trace import set_span_in_context

        start_ns = unix_ns(start_s)
        span = self._tracer.start_span(
            name, context=context, start_time=start_ns, attributes=attributes
        )
        span.end(max(start_ns, unix_ns(end_s)))
        return set_span_in_context(span)


class TraceRequests:
    """ASGI middleware: a span for each request that may have work for a model."""

    def __init__(self, app: ASGIApp, tracing: RequestTracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if not may_have_work(scope):
            await self._app(scope, receive, send)
            return
        traced, status = self._tracing.begin(scope), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            traced.note_body(message)
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._tracing.end(traced, recorded_status(scope, status))


def traces_url(endpoint: str) -> str:
    """Return the URL that spans are posted to. Raises `ConfigError` for anything but HTTP."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint}: traces are sent over HTTP; write the collector's"
            " URL, such as http://localhost:4318 (its port for gRPC, 4317, does not take them)."
        )
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


def operation_of(route: str) -> str:
    """Return the operation of a route, as the GenAI conventions name it."""
    if "embed" in route:
        return "embeddings"
    if any(part in route for part in ("chat", "messages", "responses")):
        return "chat"
    is_text = route.endswith("/completions") or route == "/api/generate"
    return "text_completion" if is_text else "generate_content"


def unix_ns(monotonic_s: float) -> int:
    """Convert a time of the monotonic clock to nanoseconds of Unix time."""
    return time.time_ns() - round((time.monotonic() - monotonic_s) * 1e9)


def _route_of(traced: _TracedRequest) -> str:
    scope = traced.scope
    return traced.route if scope is None else getattr(scope.get("route"), "path", "unmatched")


def _job_attributes(job: JournalEntry, report: JobReport, operation: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "triptych",
        "gen_ai.request.model": job.model,
        "triptych.job_id": job.job_id,
        "triptych.state": report.state,
        "triptych.jobs_ahead": report.jobs_ahead,
    }
    if job.error:
        found["error.type"] = job.error
    if report.first_output_s is not None:
        found["triptych.first_output_s"] = report.first_output_s
    for name, count in report.counts.items():
        found[_GEN_AI_COUNTS.get(name, f"triptych.{name}")] = count
    for reason, waited_s in report.waits.items():
        found[f"triptych.wait.{reason}_s"] = waited_s
    return found


def quiet_exporter(exporter: SpanExporter) -> SpanExporter:
    """Wrap an exporter: failures are logged once a minute, with the number of lost spans."""
    from opentelemetry.sdk.trace.export import SpanExporter as Exporter
    from opentelemetry.sdk.trace.export import SpanExportResult as Result

    class QuietExporter(Exporter):
        def __init__(self) -> None:
            self._next_s = 0.0
            self._num_lost = 0

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            try:
                result = exporter.export(spans)
            except Exception as error:  # a bug of the exporter must not end its thread
                _log.debug("exporting spans failed: %s", error)
                result = Result.FAILURE
            if result is not Result.SUCCESS:
                self._warn(len(spans))
            return result

        def _warn(self, num_spans: int) -> None:
            self._num_lost += num_spans
            if time.monotonic() >= self._next_s:
                self._next_s = time.monotonic() + _WARN_S
                _log.warning("traces cannot be exported: %d spans were lost", self._num_lost)
                self._num_lost = 0

        def shutdown(self) -> None:
            exporter.shutdown()

    return QuietExporter()
