"""`/metrics`: measurements of this process, and the engine's last report.

Owns the metrics of the HTTP side and the translation of a `Heartbeat` into Prometheus families.
Their help texts are in `core.process.metric_table`.
"""

from __future__ import annotations

import asyncio
import itertools
import platform
import time
from collections.abc import Callable, Container, Iterator, Mapping
from importlib.metadata import version

from fastapi import APIRouter
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.responses import Response

from triptych.core.engine_api.client import EngineStatus
from triptych.core.engine_api.journal import JournalEntry
from triptych.core.engine_api.reports import Heartbeat
from triptych.core.http.process_metrics import ProcessCollector
from triptych.core.process.metric_table import FAMILIES
from triptych.core.process.metrics import HISTOGRAM_BOUNDS, split_series
from triptych.core.router.beats import labelled

_SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(120.0, 300.0, 1800.0),
)
_FIRST_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0),
)
_NEXT_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1),
    *(0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)

disable_created_metrics()  # type: ignore[no-untyped-call]


class HttpMetrics:
    """Counts and times of the API process. Only `models` become label values."""

    def __init__(self, models: Container[str] = ()) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._models = models
        self._requests = self._counter("triptych_http_requests_total")
        self._durations = self._histogram("triptych_http_request_seconds", _SECONDS)
        self._first_token = self._histogram("triptych_time_to_first_token_seconds", _FIRST_SECONDS)
        self._next_token = self._histogram("triptych_inter_token_seconds", _NEXT_SECONDS)
        self._first_audio = self._histogram("triptych_time_to_first_audio_seconds", _FIRST_SECONDS)
        self._audio = self._counter("triptych_audio_seconds_total")
        self._image_seconds = self._histogram("triptych_image_seconds", _SECONDS)
        self._waits = self._histogram("triptych_job_wait_seconds", _FIRST_SECONDS)
        self._in_flight = self._gauge("triptych_http_requests_in_flight")
        build = self._gauge("triptych_build_info")
        build.labels(version("triptych"), platform.python_version()).set(1)
        self._processes = ProcessCollector()
        self.registry.register(self._processes)

    def watch(self, status: Callable[[], EngineStatus], num_in_flight: Callable[[], int]) -> None:
        """Read the engine's state and the number of requests whenever metrics are requested."""
        self._in_flight.set_function(num_in_flight)
        self.registry.register(EngineCollector(status))

    async def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        await asyncio.to_thread(self._processes.read)
        return generate_latest(self.registry)

    def _counter(self, name: str) -> Counter:
        return Counter(name, FAMILIES[name].help, FAMILIES[name].labels, registry=self.registry)

    def _gauge(self, name: str) -> Gauge:
        return Gauge(name, FAMILIES[name].help, FAMILIES[name].labels, registry=self.registry)

    def _histogram(self, name: str, bounds: tuple[float, ...]) -> Histogram:
        known = FAMILIES[name]
        return Histogram(name, known.help, known.labels, buckets=bounds, registry=self.registry)

    def observe_request(
        self, *, route: str, status: int, elapsed_s: float, model: str | None = None
    ) -> None:
        """Count a request that was answered or aborted."""
        labels = route, str(status), model if model in self._models else ""
        self._requests.labels(*labels).inc()
        self._durations.labels(*labels).observe(elapsed_s)

    def observe_job(self, job: JournalEntry) -> None:
        """Record the waits of a job that has ended."""
        for reason, waited_s in (job.report.waits if job.report else {}).items():
            self._waits.labels(job.model, reason).observe(waited_s)

    def token_clock(self, model: str, arrived_s: float) -> TokenClock:
        """Create a clock for one request to `model` that arrived at `arrived_s` (monotonic)."""
        return TokenClock(
            self._first_token.labels(model), self._next_token.labels(model), arrived_s
        )

    def audio_clock(self, model: str, arrived_s: float) -> AudioClock:
        """Create a clock for one speech request, like `token_clock` for text."""
        return AudioClock(self._first_audio.labels(model), self._audio.labels(model), arrived_s)

    def observe_image(self, model: str, elapsed_s: float) -> None:
        """Record the time from a request to one finished image."""
        self._image_seconds.labels(model).observe(elapsed_s)


class TokenClock:
    """Times the tokens of one request, sample by sample."""

    def __init__(self, first: Histogram, following: Histogram, arrived_s: float) -> None:
        self._first = first
        self._following = following
        self._arrived_s = arrived_s
        self._last_s: dict[int, float] = {}

    def tick(self, index: int, num_tokens: int) -> None:
        """Record the arrival of `num_tokens` tokens of sample `index`."""
        if not num_tokens:
            return
        now_s = time.monotonic()
        last_s = self._last_s.get(index)
        if last_s is None:
            self._first.observe(now_s - self._arrived_s)
        else:
            for _ in range(num_tokens):
                self._following.observe((now_s - last_s) / num_tokens)
        self._last_s[index] = now_s


class AudioClock:
    """Times the first audio of one request, and counts its seconds."""

    def __init__(self, first: Histogram, seconds: Counter, arrived_s: float) -> None:
        self._first = first
        self._seconds = seconds
        self._arrived_s = arrived_s
        self._is_silent = True

    def tick(self, duration_s: float) -> None:
        """Record the arrival of `duration_s` seconds of audio."""
        if duration_s and self._is_silent:
            self._is_silent = False
            self._first.observe(time.monotonic() - self._arrived_s)
        self._seconds.inc(duration_s)


class EngineCollector(Collector):
    """The engine's status and last heartbeat as Prometheus families."""

    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield the current metric families."""
        now = self._status()
        state = {
            "triptych_engine_alive": float(now.is_alive),
            "triptych_engine_ready": float(now.is_ready),
            "triptych_engine_beat_age_seconds": now.beat_age_s,
        }
        yield from _families(state, "gauge")
        yield from _families({"triptych_engine_restarts_total": now.num_restarts}, "counter")
        if now.by_replica:
            yield from _families({"triptych_replicas_ready": now.num_replicas}, "gauge")
        beat = labelled(now.by_replica) or now.last_beat
        if beat is not None:
            yield from _from_heartbeat(beat)

    def describe(self) -> list[Metric]:
        """Return no families: they depend on the engine's report."""
        return []


def _from_heartbeat(beat: Heartbeat) -> Iterator[Metric]:
    yield from _families(beat.gauges, "gauge")
    yield from _families(beat.counters, "counter")
    families: dict[str, Metric] = {}
    for series, values in beat.histograms.items():
        name, labels = split_series(series)
        family = families.setdefault(name, Metric(name, _help(name), "histogram"))
        _add_histogram(family, labels, values)
    yield from families.values()


def _families(values: Mapping[str, float], kind: str) -> Iterator[Metric]:
    families: dict[str, Metric] = {}
    for series, value in values.items():
        name, labels = split_series(series)
        base_name = name.removesuffix("_total")
        family = families.setdefault(name, Metric(base_name, _help(name), kind))
        family.add_sample(name, labels, value)
    yield from families.values()


def _help(name: str) -> str:
    family = FAMILIES.get(name)
    return family.help if family is not None else "Reported by an engine of another version."


def _add_histogram(family: Metric, labels: dict[str, str], values: list[float]) -> None:
    """Add one series from a snapshot of `core.process.metrics`, with cumulative buckets."""
    name = family.name
    bounds = [*map(str, HISTOGRAM_BOUNDS[name]), "+Inf"]
    totals = list(itertools.accumulate(values[:-1]))
    for bound, total in zip(bounds, totals, strict=True):
        family.add_sample(f"{name}_bucket", {**labels, "le": bound}, total)
    family.add_sample(f"{name}_count", labels, totals[-1])
    family.add_sample(f"{name}_sum", labels, values[-1])


def metrics_router(metrics: HttpMetrics) -> APIRouter:
    """Create the route `/metrics`, in Prometheus' text format."""
    router = APIRouter(tags=["health"])

    @router.get("/metrics", response_class=Response)
    async def show_metrics() -> Response:
        """Show the metrics of this process and the engine."""
        return Response(await metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router
