"""Status messages of replicas, and their combination into the status of one engine.

Owns the message and the sums of counts, bytes and pages over replicas. In metrics each series keeps
the name of its replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from triptych.core.engine_api.client import EngineStatus
from triptych.core.engine_api.reports import Heartbeat, ModelState, ModelStatus, StepReport
from triptych.core.process.metrics import DEVICE_INFO, series, split_series
from triptych.core.router.report import JOB_SECONDS, PREFILL_SECONDS

_STATES: Sequence[ModelState] = ("failed", "unloaded", "loading", "ready")
"""States of a model from worst to best; callers see the best over all replicas."""
Value = TypeVar("Value")
_NOT_SUMS = (f"triptych_{JOB_SECONDS}", f"triptych_{PREFILL_SECONDS}", DEVICE_INFO)


class ReplicaBeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The status of one replica. `steps` are those since the last request, if requested."""

    replica: str
    is_ready: bool
    is_alive: bool
    is_draining: bool
    beat_age_s: float
    beat: Heartbeat | None = None
    reason: str = ""
    steps: tuple[StepReport, ...] = ()

    @classmethod
    def of(
        cls, replica: str, status: EngineStatus, steps: tuple[StepReport, ...] = ()
    ) -> ReplicaBeat:
        """Build the message from the status of the replica's engine."""
        return cls(
            replica=replica,
            is_ready=status.is_ready,
            is_alive=status.is_alive,
            is_draining=status.is_draining,
            beat_age_s=status.beat_age_s,
            beat=status.last_beat,
            reason=status.reason,
            steps=steps,
        )


def joint_status(beats: Sequence[ReplicaBeat], num_restarts: int) -> EngineStatus:
    """Combine all replicas: ready while one is, with the age of the latest heartbeat.

    Without any replica the ingress still counts as alive: Ray restarts replicas.
    """
    found = {each.replica: each.beat for each in beats if each.beat is not None}
    is_ready = any(each.is_ready for each in beats)
    reasons = sorted({each.reason for each in beats if each.reason})
    return EngineStatus(
        is_ready=is_ready,
        is_alive=not beats or any(each.is_alive for each in beats),
        is_draining=bool(beats) and all(each.is_draining for each in beats),
        beat_age_s=min((each.beat_age_s for each in beats), default=0.0),
        num_restarts=num_restarts,
        models=_models(found.values()),
        last_beat=_joint_beat(list(found.values())),
        reason="" if is_ready else "; ".join(reasons) or "no replica is ready",
        num_replicas=sum(each.is_ready for each in beats),
        by_replica=found,
    )


def labelled(beats: Mapping[str, Heartbeat]) -> Heartbeat | None:
    """Merge the metrics of all replicas, with the replica's name as a label of each series."""
    return _merge(
        beats.values(),
        gauges=_relabelled(beats, lambda beat: beat.gauges),
        counters=_relabelled(beats, lambda beat: beat.counters),
        histograms=_relabelled(beats, lambda beat: beat.histograms),
    )


def _relabelled(
    beats: Mapping[str, Heartbeat], part: Callable[[Heartbeat], Mapping[str, Value]]
) -> dict[str, Value]:
    found = {}
    for replica, beat in beats.items():
        for key, value in part(beat).items():
            name, labels = split_series(key)
            found[series(name, **labels, replica=replica)] = value
    return found


def _joint_beat(beats: Sequence[Heartbeat]) -> Heartbeat | None:
    gauges: dict[str, float] = {}
    counters: dict[str, float] = {}
    histograms: dict[str, list[float]] = {}
    for beat in beats:
        for key, value in beat.gauges.items():
            known = gauges.get(key, 0.0)
            gauges[key] = max(known, value) if key.startswith(_NOT_SUMS) else known + value
        for key, value in beat.counters.items():
            counters[key] = counters.get(key, 0.0) + value
        for key, values in beat.histograms.items():
            before = histograms.get(key, [0.0] * len(values))
            histograms[key] = [a + b for a, b in zip(before, values, strict=True)]
    return _merge(beats, gauges=gauges, counters=counters, histograms=histograms)


def _merge(
    beats: Iterable[Heartbeat],
    *,
    gauges: Mapping[str, float],
    counters: Mapping[str, float],
    histograms: Mapping[str, list[float]],
) -> Heartbeat | None:
    beats = list(beats)
    if not beats:
        return None
    return Heartbeat(
        turn=max(beat.turn for beat in beats),
        phase=beats[0].phase,
        stall_budget_s=max(beat.stall_budget_s for beat in beats),
        num_jobs=sum(beat.num_jobs for beat in beats),
        models=_models(beats),
        gauges=dict(gauges),
        counters=dict(counters),
        histograms=dict(histograms),
    )


def _models(beats: Iterable[Heartbeat]) -> tuple[ModelStatus, ...]:
    """The best state of each model, and the context that it has on every replica."""
    best: dict[str, ModelStatus] = {}
    num_loads: dict[str, int] = {}
    contexts: dict[str, int] = {}
    for status in (each for beat in beats for each in beat.models):
        num_loads[status.model] = num_loads.get(status.model, 0) + status.num_loads
        if length := status.reduced_context:
            contexts[status.model] = min(length, contexts.get(status.model, length))
        known = best.get(status.model)
        if known is None or _STATES.index(status.state) > _STATES.index(known.state):
            best[status.model] = status
    return tuple(
        msgspec.structs.replace(
            status, num_loads=num_loads[name], reduced_context=contexts.get(name, 0)
        )
        for name, status in best.items()
    )
