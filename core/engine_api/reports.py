"""Reports of an engine: heartbeats, model states, and the steps it ran.

Owns these types. `core.transport` sends them between processes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from triptych.core.errors import ErrorInfo

ASLEEP = "sleep"
"""The phase of an engine whose models are out of memory until it is woken."""

ModelState = Literal["unloaded", "loading", "ready", "failed"]


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The state of one model in the engine.

    `idle_s` is how long no job has used it, `num_loads` how many loads of it have begun. After
    `keep_s` idle seconds it is unloaded; -1: never. `reduced_context` is its context in tokens
    where the model's own does not fit into memory, as far as it is known.
    """

    model: str
    state: ModelState
    progress: float = 0.0
    error: ErrorInfo | None = None
    idle_s: float = 0.0
    num_loads: int = 0
    keep_s: float = -1.0
    reduced_context: int = 0


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Proof that the loop turns. Sent by the loop itself, at least every half second when idle.

    `turn` counts loop turns; `phase` is the loop's activity ("load", "step", "idle", ...);
    `stall_budget_s` is how long the next beat may take before the engine counts as hung. `gauges`
    and `counters` carry the metrics snapshot under Prometheus names with `{label="x"}` parts.
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
    """A finished step, or several short steps of one kind combined.

    It began at `start_s` by the engine's clock (the system's monotonic one) and ended `length_s`
    later; for `busy_s` of that time it was the device's only work. A failed step has no rows.
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
    """The step now running on the device."""

    model: str
    kind: str
    start_s: float


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Steps since the previous report, by start time, and the running one; sent while watched.

    `num_dropped` is the number of oldest steps left out of `steps` because there were too many.
    """

    steps: tuple[StepRecord, ...] = ()
    running: RunningStep | None = None
    num_dropped: int = 0
