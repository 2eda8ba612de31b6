"""Plan and result of long work that is done stage by stage. Plain data, no tensors.

Owns the hand-over between `schedulers.staged` and the runners of models whose work is not a loop
of like steps: a sentence of speech made in one go, a window of speech that is written down. Such
work is cut at the joints of its network, so that no step holds the device for long.

A job is one or more *units*, and its answers come in their order. A unit is a chain of *stages*;
only when one is over is it known what the next will be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triptych.core.engine_api.plan import Plan
from triptych.core.errors import TriptychError


@dataclass(frozen=True, slots=True)
class Stage:
    """What a unit needs next.

    Stages of one `name` take time in proportion to their `size` (in a measure of the model's:
    phonemes, frames, tokens), and may share a step where the model can compute them together.
    """

    name: str
    size: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitStart:
    """A unit that begins: all that the runner gets of it. `request` is its whole job's."""

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

    `dropped` are jobs that are no longer needed: the runner releases their units before
    anything else. A plan may do that alone, without rows. Units in `starts` have their first
    stage in the same plan. Units that end are released by the runner itself.
    """

    rows: tuple[StagedRow, ...] = ()
    starts: tuple[UnitStart, ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedRowResult:
    """What one row's stage yielded: something to send, if any, and what comes next.

    Without a `next_stage` the unit is over. An `error` ends the row's job, and no other.
    """

    payload: Any = None
    next_stage: Stage | None = None
    error: TriptychError | None = None
