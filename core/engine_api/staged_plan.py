"""Plans and results of work that runs in stages. Plain data, no tensors.

Owns the types between `schedulers.staged` and the runners of models whose work is not a loop of
equal steps: a sentence of speech synthesized in one pass, a window of speech transcribed. Such work
is split at the modules of its network, so that no step occupies the device for long.

A job is one or more *units*, whose results are delivered in order. A unit is a chain of *stages*;
the result of each stage determines the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triptych.core.engine_api.plan import Plan
from triptych.core.errors import TriptychError


@dataclass(frozen=True, slots=True)
class Stage:
    """The next stage of a unit.

    Stages of one `name` take time in proportion to their `size` (in the model's own measure:
    phonemes, frames, tokens), and may share a step where the model can batch them.
    """

    name: str
    size: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitStart:
    """A new unit, as the runner receives it. `request` is that of the whole job."""

    job_id: str
    unit: int
    request: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedRow:
    """One unit whose next stage runs in this step."""

    job_id: str
    unit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPlan(Plan):
    """One stage of each of `rows`; `kind` is the stage's name.

    `dropped` are jobs that are no longer needed: the runner releases their units before anything
    else, also in a plan without rows. Units in `starts` have their first stage in the same plan.
    The runner itself releases units that end.
    """

    rows: tuple[StagedRow, ...] = ()
    starts: tuple[UnitStart, ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedRowResult:
    """The result of one row's stage: an optional payload to send, and the next stage.

    Without a `next_stage` the unit is over. An `error` ends only the row's job.
    """

    payload: Any = None
    next_stage: Stage | None = None
    error: TriptychError | None = None
