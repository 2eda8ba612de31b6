"""`/metrics`: measurements of this process, and the engine's last report.

Owns the metrics of the HTTP side and the translation of a `Heartbeat` into Prometheus families.
Knows no metric of the engine by name.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.responses import Response

from triptych.core.engine_api.client import EngineStatus
from triptych.core.engine_api.reports import Heartbeat
from triptych.core.process.metrics import HISTOGRAM_BOUNDS, split_series
from triptych.core.router.beats import labelled

_HELP = "Reported by the engine."
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class HttpMetrics:
    """Counts and times of the API process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._requests = Counter(
            "triptych_http_requests_total",
            "Requests by route and status.",
            ("route", "status"),
            registry=self.registry,
        )
        self._durations = Histogram(
            "triptych_http_request_seconds",
            "Time from a request's headers to the end of its response.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._first_token = self._histogram(
            "triptych_time_to_first_token_seconds", "Time from a request to its first token."
        )
        self._next_token = self._histogram(
            "triptych_inter_token_seconds", "Time between the tokens of one answer."
        )
        self._first_audio = self._histogram(
            "triptych_time_to_first_audio_seconds", "Time from a request to its first audio."
        )
        self._audio = Counter(
            "triptych_audio_seconds_total",
            "Seconds of audio sent.",
            ("model",),
            registry=self.registry,
        )
        self._image_seconds = self._histogram(
            "triptych_image_seconds", "Time from a request to each of its finished images."
        )
        self._in_flight = Gauge(
            "triptych_http_requests_in_flight",
            "Requests in progress.",
            registry=self.registry,
        )

    def watch(self, status: Callable[[], EngineStatus], num_in_flight: Callable[[], int]) -> None:
        """Read the engine's state and the number of requests whenever metrics are requested."""
        self._in_flight.set_function(num_in_flight)
        self.registry.register(EngineCollector(status))

    def _histogram(self, name: str, description: str) -> Histogram:
        return Histogram(name, description, ("model",), buckets=_SECONDS, registry=self.registry)

    def observe_request(self, *, route: str, status: int, elapsed_s: float) -> None:
        """Count a request that was answered or aborted."""
        self._requests.labels(route, str(status)).inc()
        self._durations.labels(route).observe(elapsed_s)

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
        family = families.setdefault(name, Metric(name, _HELP, "histogram"))
        _add_histogram(family, labels, values)
    yield from families.values()


def _families(values: Mapping[str, float], kind: str) -> Iterator[Metric]:
    families: dict[str, Metric] = {}
    for series, value in values.items():
        name, labels = split_series(series)
        family = families.setdefault(name, Metric(name.removesuffix("_total"), _HELP, kind))
        family.add_sample(name, labels, value)
    yield from families.values()


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
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router
