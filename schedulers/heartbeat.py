"""The heartbeat: when the loop beats, how long it may be silent, and the metrics in a beat.

Owns the content and the timing of beats. A beat proves progress, so none is sent while the loop
merely waits for a step: a hanging step is detected by the silence. The duration of a step of a new
kind is unknown (its code may be compiled, a large image generated on a small machine): the loop
beats during it for a while, so that a stopped process is still detected at once, and only a hanging
step of that kind is detected later. Knows nothing of its receivers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from triptych.core.engine_api.reports import Heartbeat, ModelStatus
from triptych.core.ledger import Ledger
from triptych.core.process.metrics import DEVICE_BUDGET, DEVICE_BYTES, Metrics, series
from triptych.schedulers.base import LoadedModel

IDLE_BEAT_S = 0.5
BUSY_BEAT_S = 0.05
STALL_FACTOR = 20.0
COLD_STALL_FACTOR = 10.0
"""Multiple of the minimal budget that a step of a new kind gets, with beats during it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """The state of the loop at a beat."""

    turn: int
    phase: str
    stall_budget_s: float
    num_jobs: int
    models: tuple[ModelStatus, ...]


class HeartbeatSender:
    """Makes heartbeats, with the metrics of engine, ledger and schedulers."""

    def __init__(self, *, ledger: Ledger, metrics: Metrics, min_stall_budget_s: float) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self._min_stall_budget_s = min_stall_budget_s
        self._last_beat_s = -math.inf
        self._sent_budget_s = 0.0

    def stall_budget_s(self, slow_step_s: float, in_flight_s: float) -> float:
        """How long silence may last, from recent slow steps and the predicted ones in flight."""
        return max(self._min_stall_budget_s, STALL_FACTOR * max(slow_step_s, in_flight_s))

    def beats_during(self, cold_step_s: float) -> bool:
        """Whether to beat during a step of a new kind that has run for `cold_step_s`."""
        return cold_step_s < (COLD_STALL_FACTOR - 1) * self._min_stall_budget_s

    def is_due(self, now_s: float, stall_budget_s: float) -> bool:
        """Whether a beat is due, or the loop may be silent for longer than last announced."""
        return now_s - self._last_beat_s >= BUSY_BEAT_S or stall_budget_s > self._sent_budget_s

    def idle_until_s(self) -> float:
        """When an idle loop must beat next."""
        return self._last_beat_s + IDLE_BEAT_S

    def beat(self, state: LoopState, ready: Mapping[str, LoadedModel], now_s: float) -> Heartbeat:
        """The heartbeat to send now."""
        self._last_beat_s, self._sent_budget_s = now_s, state.stall_budget_s
        gauges, counters = self._snapshot(ready)
        return Heartbeat(
            turn=state.turn,
            phase=state.phase,
            stall_budget_s=state.stall_budget_s,
            num_jobs=state.num_jobs,
            models=state.models,
            gauges=gauges,
            counters=counters,
            histograms=self._metrics.histograms(),
        )

    def _snapshot(
        self, ready: Mapping[str, LoadedModel]
    ) -> tuple[dict[str, float], dict[str, float]]:
        gauges, counters = dict(self._metrics.gauges), dict(self._metrics.counters)
        gauges[DEVICE_BUDGET] = self._ledger.capacity_bytes
        for owner, num_bytes in self._ledger.by_owner().items():
            gauges[series(DEVICE_BYTES, owner=owner)] = num_bytes
        for model, loaded in ready.items():
            stats = loaded.scheduler.stats()
            gauges[series("triptych_jobs_waiting", model=model)] = stats.num_waiting
            gauges[series("triptych_jobs_running", model=model)] = stats.num_running
            for name, value in stats.gauges.items():
                gauges[series(f"triptych_{name}", model=model)] = value
            for name, value in stats.counters.items():
                key = series(f"triptych_{name}", model=model)
                counters[key] = counters.get(key, 0.0) + value  # with those of earlier loads
        return gauges, counters
