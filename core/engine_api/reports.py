"""Reports of an engine about itself: heartbeats, model states, and the steps it ran.

Owns these types. How they cross between processes is `core.transport`'s.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from triptych.core.errors import ErrorInfo

ModelState = Literal["unloaded", "loading", "ready", "failed"]


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Where one model of the engine stands."""

    model: str
    state: ModelState
    progress: float = 0.0
    error: ErrorInfo | None = None


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Proof that the loop turns. Sent by the loop itself, at least every half second when idle.

    `turn` counts loop turns; `phase` is what the loop is about ("load", "step", "idle", ...);
    `stall_budget_s` is how long the next beat may take before the engine counts as hung. `gauges`
    and `counters` carry the metrics snapshot, named as Prometheus names with `{label="x"}` parts.
    """

    turn: int
    phase: str
    stall_budget_s: float
    num_jobs: int
    models: tuple[ModelStatus, ...]
    gauges: dict[str, float]
    counters: dict[str, float]
    histograms: dict[str, list[float]]


class StepRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A step that is over, or several short ones of a kind as one.

    It began at `start_s` by the engine's clock (the system's monotonic one) and ended `length_s`
    later; for `busy_s` of it, it was the device's only work. A step that failed has no rows.
    """

    model: str
    kind: str
    num_rows: int
    start_s: float
    length_s: float
    busy_s: float
    num_steps: int = 1
    is_failed: bool = False


class RunningStep(msgspec.Struct, frozen=True, kw_only=True):
    """The step that is on the device now."""

    model: str
    kind: str
    start_s: float


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """What ran since the report before, by its start, and what runs now; sent while watched.

    The oldest `num_dropped` steps of the time are not among `steps`: there were too many.
    """

    steps: tuple[StepRecord, ...] = ()
    running: RunningStep | None = None
    num_dropped: int = 0
