"""Counters, gauges and histograms as plain numbers, in the form that a heartbeat carries.

Owns the names (`series`), the bucket bounds and the snapshot form. Rendering for Prometheus
belongs to `core/http/metrics.py`.

Snapshot form: three maps from a series name such as `triptych_step_seconds{kind="decode"}` to a
number (gauges, counters) or to a list (histograms). The list of a histogram with bounds
`b_0 < ... < b_n-1` has n + 2 entries: how many observations fell into each bucket (not
cumulative; entry i counts values in `(b_i-1, b_i]`), how many lay above the last bound, and the
sum of all. Counters and histograms of an engine start from 0 when it restarts;
`core.engine_api.totals` continues them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from triptych.core.ledger import model_of

STEP_SECONDS = "triptych_step_seconds"
DEVICE_INFO = "triptych_device_info"
DEVICE_BUDGET = "triptych_device_memory_budget_bytes"
DEVICE_BYTES = "triptych_device_memory_bytes"

HISTOGRAM_BOUNDS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        STEP_SECONDS: (
            *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
            *(1.0, 2.5, 5.0, 10.0, 30.0),
        )
    }
)
"""Bucket bounds by histogram name, without labels."""

_SERIES = re.compile(r"(\w+)(?:\{(.*)\})?", re.DOTALL)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@lru_cache(maxsize=4096)
def series(name: str, **labels: str) -> str:
    """The name of one series: `name{key="value",...}`, labels sorted, values escaped."""
    if not labels:
        return name
    pairs = (f'{key}="{_escape(value)}"' for key, value in sorted(labels.items()))
    return f"{name}{{{','.join(pairs)}}}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def split_series(series: str) -> tuple[str, dict[str, str]]:
    """Split a series name made by `series` into name and labels."""
    match = _SERIES.fullmatch(series)
    assert match is not None, f"malformed series name {series!r}"
    labels = {
        key: re.sub(r"\\.", lambda escape: _ESCAPES.get(escape[0], escape[0]), value)
        for key, value in _LABEL.findall(match[2] or "")
    }
    return match[1], labels


def labelled_series(
    series: Mapping[str, float], name: str
) -> Iterator[tuple[dict[str, str], float]]:
    """Labels and value of every labelled series called `name`."""
    for key, value in series.items():
        if key.startswith(name + "{"):
            yield split_series(key)[1], value


class Histogram:
    """Counts observations in fixed buckets."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._values = [0.0] * (len(self._bounds) + 2)

    def observe(self, value: float) -> None:
        """Count one value."""
        self._values[bisect_left(self._bounds, value)] += 1
        self._values[-1] += value

    def snapshot(self) -> list[float]:
        """Bucket counts, overflow count, sum: see the module's docstring."""
        return list(self._values)


class Metrics:
    """The series of one owner, created on first use. Not thread-safe: one thread writes."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = {}
        self.gauges: dict[str, float] = {}
        self._histograms: dict[str, Histogram] = {}

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Raise a counter."""
        key = series(name, **labels)
        self.counters[key] = self.counters.get(key, 0.0) + amount

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram listed in `HISTOGRAM_BOUNDS`."""
        key = series(name, **labels)
        histogram = self._histograms.get(key)
        if histogram is None:
            histogram = self._histograms[key] = Histogram(HISTOGRAM_BOUNDS[name])
        histogram.observe(value)

    def histograms(self) -> dict[str, list[float]]:
        """Every histogram in snapshot form."""
        return {key: histogram.snapshot() for key, histogram in self._histograms.items()}


def held_bytes(model: str, gauges: Mapping[str, float]) -> int:
    """Return the bytes on the device whose owners are parts of `model`."""
    owned = labelled_series(gauges, DEVICE_BYTES)
    return round(sum(held for labels, held in owned if model_of(labels["owner"]) == model))
