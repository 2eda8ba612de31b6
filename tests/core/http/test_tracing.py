"""Traces: the spans that a collector gets, over real HTTP, and that it harms no request."""

from __future__ import annotations

import asyncio
import http.server
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra [otel]")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider

from support.accounts import REPORT, ReportingEngine
from support.http import chat, in_process, live, make_app, until
from triptych.core.errors import ConfigError
from triptych.core.http import tracing
from triptych.core.http.tracing import RequestTracing, operation_of, traces_url, unix_ns

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "the password is swordfish"


class Collector:
    """An OTLP collector that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: dict[str, Span] = {}
        self.resource: dict[str, str] = {}
        self.raw = b""

    def take(self, body: bytes) -> None:
        self.raw += body
        request = ExportTraceServiceRequest.FromString(body)
        for part in request.resource_spans:
            self.resource = {a.key: a.value.string_value for a in part.resource.attributes}
            for scope in part.scope_spans:
                self.spans.update({span.name: span for span in scope.spans})


@contextmanager
def collecting(status: int = 200) -> Iterator[tuple[str, Collector]]:
    collector = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            if status == 200:
                collector.take(body)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def attributes(span: Span) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


async def trace(folder: Path, endpoint: str, **fields: Any) -> httpx.Response:
    """Answer one request, and export its spans."""
    app = make_app(folder, ReportingEngine(), otlp_traces_endpoint=endpoint)
    async with in_process(app) as client:
        answer = await client.post(
            "/v1/chat/completions",
            json=chat(messages=[{"role": "user", "content": SECRET}], max_tokens=3, **fields),
            headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
        )
    await app.state.tracing.close()
    return answer


async def test_a_request_and_its_job_are_a_tree_of_spans(tmp_path: Path) -> None:
    with collecting() as (endpoint, collector):
        answer = await trace(tmp_path, endpoint)
    spans = collector.spans
    assert answer.status_code == 200
    assert set(spans) == {
        "POST /v1/chat/completions",
        "prepare",
        "chat tiny",
        "queue",
        "prefill",
        "decode",
    }
    request, job = spans["POST /v1/chat/completions"], spans["chat tiny"]
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert (request.parent_span_id.hex(), request.kind) == (PARENT, Span.SPAN_KIND_SERVER)
    assert spans["prepare"].parent_span_id == job.parent_span_id == request.span_id
    for stage in ("queue", "prefill", "decode"):
        assert spans[stage].parent_span_id == job.span_id
    assert attributes(request) == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "triptych.request_id": answer.headers["x-request-id"],
    }
    found = attributes(job)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == "tiny"
    assert found["gen_ai.usage.input_tokens"] == REPORT.counts["prompt_tokens"]
    assert found["gen_ai.usage.cache_read.input_tokens"] == REPORT.counts["cached_tokens"]
    assert found["triptych.wait.preempted_s"] == REPORT.waits["preempted"]
    for span, timed in zip(REPORT.spans, ("prefill", "decode"), strict=True):
        start_s = (spans[timed].start_time_unix_nano - job.start_time_unix_nano) / 1e9
        end_s = (spans[timed].end_time_unix_nano - job.start_time_unix_nano) / 1e9
        assert (start_s, end_s) == (
            pytest.approx(span.start_s, 0.01),
            pytest.approx(span.end_s, 0.01),
        )
        assert attributes(spans[timed])["triptych.num_steps"] == span.num_steps
    assert collector.resource["service.name"] == "triptych"


async def test_a_stream_has_a_span_and_no_span_has_content(tmp_path: Path) -> None:
    with collecting() as (endpoint, collector):
        answer = await trace(tmp_path, endpoint, stream=True)
    assert "data:" in answer.text
    assert collector.spans["stream"].parent_span_id
    assert b"swordfish" not in collector.raw
    assert b"quick brown" not in collector.raw


async def test_a_parent_that_is_not_sampled_is_not_traced(tmp_path: Path) -> None:
    with collecting() as (endpoint, collector):
        app = make_app(tmp_path, ReportingEngine(), otlp_traces_endpoint=endpoint)
        async with in_process(app) as client:
            head = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
            await client.post("/v1/chat/completions", json=chat(max_tokens=2), headers=head)
        await app.state.tracing.close()
    assert collector.spans == {}


async def test_an_error_is_a_status_of_its_span(tmp_path: Path) -> None:
    with collecting() as (endpoint, collector):
        app = make_app(tmp_path, ReportingEngine(), otlp_traces_endpoint=endpoint)
        async with in_process(app) as client:
            await client.post("/v1/chat/completions", json={})
            await client.get("/v1/models")
        await app.state.tracing.close()
    (span,) = collector.spans.values()
    assert attributes(span)["http.response.status_code"] == 400
    assert not span.parent_span_id


def test_a_caller_that_leaves_is_no_error(tmp_path: Path) -> None:
    with collecting() as (endpoint, collector):
        engine = ReportingEngine(is_endless=True, step_s=0.01)
        app = make_app(tmp_path, engine, otlp_traces_endpoint=endpoint)
        with live(app) as server:
            with httpx.Client(timeout=0.3) as client, pytest.raises(httpx.ReadTimeout):
                client.post(f"{server.url}/v1/chat/completions", json=chat())
            until(lambda: not len(app.state.in_flight))
        asyncio.run(app.state.tracing.close())
    span = collector.spans["POST /v1/chat/completions"]
    assert attributes(span)["http.response.status_code"] == 499, "as in the access log"
    assert span.status.code == Status.STATUS_CODE_UNSET


async def test_a_request_that_fails_is_an_error(tmp_path: Path) -> None:
    with collecting() as (endpoint, collector):
        engine = ReportingEngine(error=RuntimeError("a bug"))
        app = make_app(tmp_path, engine, otlp_traces_endpoint=endpoint)
        async with in_process(app) as client:
            await client.post("/v1/chat/completions", json=chat())
        await app.state.tracing.close()
    span = collector.spans["POST /v1/chat/completions"]
    assert "http.response.status_code" not in attributes(span)
    assert span.status.code == Status.STATUS_CODE_ERROR


@pytest.mark.parametrize("kind", ["absent", "refusing"])
async def test_a_collector_that_fails_harms_nothing(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "CLOSE_S", 0.5)
    with collecting(status=400) as (endpoint, _), caplog.at_level(logging.WARNING):
        url = endpoint if kind == "refusing" else "http://127.0.0.1:9"
        answer = await trace(tmp_path, url)
    assert answer.status_code == 200
    ours = [each for each in caplog.records if "opentelemetry" in each.name]
    assert ours == [], "one line of ours, not one for every batch"
    if kind == "refusing":
        assert "traces cannot be exported: 6 spans were lost" in caplog.text


async def test_without_an_endpoint_there_are_no_traces(tmp_path: Path) -> None:
    assert RequestTracing.to_endpoint("") is None
    assert make_app(tmp_path, ReportingEngine()).state.tracing is None


async def test_what_is_remembered_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MAX_CALLS", 2)
    with collecting() as (endpoint, _):
        app = make_app(tmp_path, ReportingEngine(), otlp_traces_endpoint=endpoint)
        async with in_process(app) as client:
            for _ in range(4):
                await client.post("/v1/chat/completions", json=chat(max_tokens=2))
        assert len(app.state.tracing._calls) == 2
        await app.state.tracing.close()


def test_a_socket_is_remembered_while_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers are inside its span, however many requests there are meanwhile."""
    monkeypatch.setattr(tracing, "MAX_CALLS", 3)
    traces = RequestTracing(TracerProvider())

    def begin(method: str, call_id: str) -> Any:
        state = {"call_id": call_id, "request_id": "r"}
        route = SimpleNamespace(path="/v1/x")
        return traces.begin({"method": method, "state": state, "headers": [], "route": route})

    socket = begin("GET", "socket")
    for number in range(5):
        traces.end(begin("POST", f"c{number}"), 200)
    answer = traces.begin_answer("socket.resp_1", "resp_1")
    assert answer.span.parent.span_id == socket.span.get_span_context().span_id
    traces.end(answer, 200)
    assert answer.span.name == "answer /v1/x"
    for number in range(5):
        begin("POST", f"open{number}")
    assert list(traces._calls) == ["open2", "open3", "open4"], "open ones are bounded, too"


def test_the_endpoint_is_a_url_of_http() -> None:
    assert traces_url("http://localhost:4318") == "http://localhost:4318/v1/traces"
    assert traces_url("http://localhost:4318/") == "http://localhost:4318/v1/traces"
    assert traces_url("https://otel.example/in/traces") == "https://otel.example/in/traces"
    for url in ("localhost:4317", "grpc://localhost:4317", "http://", "x"):
        with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
            traces_url(url)


@pytest.mark.parametrize(
    ("route", "operation"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/messages", "chat"),
        ("/api/chat", "chat"),
        ("/v1/completions", "text_completion"),
        ("/api/generate", "text_completion"),
        ("/v1/embeddings", "embeddings"),
        ("/v1/images/generations", "generate_content"),
        ("/v1/audio/speech", "generate_content"),
    ],
)
def test_operations_have_the_names_of_the_conventions(route: str, operation: str) -> None:
    assert operation_of(route) == operation


def test_times_are_unix_times() -> None:
    assert unix_ns(10.0) - unix_ns(8.0) == pytest.approx(2e9, abs=1e8)
