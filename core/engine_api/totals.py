"""Counters and histograms that continue over restarts of an engine.

Owns the sums of the engines that have ended. Gauges are those of the current engine.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from triptych.core.engine_api.reports import Heartbeat


class RunningTotals:
    """Adds the totals of earlier engines to each heartbeat."""

    def __init__(self) -> None:
        self._before: Heartbeat | None = None
        self._latest: Heartbeat | None = None

    def add(self, beat: Heartbeat) -> Heartbeat:
        """Return `beat` with the totals of all engines so far."""
        before = self._before
        if before is not None:
            beat = structs.replace(
                beat,
                counters=_sum(before.counters, beat.counters),
                histograms=_sum_buckets(before.histograms, beat.histograms),
            )
        self._latest = beat
        return beat

    def restart(self) -> None:
        """Keep the latest totals: the next heartbeats are those of a new engine."""
        self._before = self._latest


def _sum(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    return {key: before.get(key, 0.0) + now.get(key, 0.0) for key in {**before, **now}}


def _sum_buckets(
    before: Mapping[str, list[float]], now: Mapping[str, list[float]]
) -> dict[str, list[float]]:
    found = {**before, **now}
    for key in before.keys() & now.keys():
        found[key] = [a + b for a, b in zip(before[key], now[key], strict=True)]
    return found
