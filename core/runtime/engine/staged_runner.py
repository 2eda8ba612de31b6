"""Runs staged plans: long work that a model splits into stages.

Owns the running units of work between their stages. The model defines what a stage computes; the
scheduler chooses which unit runs next. Knows no network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch

from triptych.core.engine_api.plan import Plan, StepResult
from triptych.core.engine_api.staged_plan import Stage, StagedPlan, StagedRowResult
from triptych.core.errors import OutOfMemory, TriptychError
from triptych.core.runtime.devices.device import end_of_work
from triptych.core.runtime.devices.stream import StepStream


class Work(Protocol):
    """One running unit of work."""

    @property
    def next_stage(self) -> Stage | None:
        """The next stage; `None` once the unit is done. Known on the host after each stage."""


AnyWork = TypeVar("AnyWork", bound=Work)
Yield: TypeAlias = Any
"""Result of a stage: nothing, a payload, a call that waits for the device and returns one, or the
`TriptychError` that ends this unit's job."""


class StagedModel(Protocol[AnyWork]):
    """A model that runs in stages. All calls come from the device thread, in inference mode."""

    def begin(self, request: Any, unit: int) -> AnyWork:
        """Start one unit of a request. Raises `TriptychError` if it cannot be run."""

    def advance(self, works: Sequence[AnyWork]) -> Sequence[Yield]:
        """Run the next stage of each of `works`; all have the same next stage.

        If memory runs out with several of them, each must still be able to run that stage.
        """


class StagedRunner(Generic[AnyWork]):
    """Implements `core.engine_api.plan.Runner` for `StagedPlan`s."""

    def __init__(self, model: StagedModel[AnyWork], device: torch.device) -> None:
        self._model = model
        self._device = device
        self._stream = StepStream(device)
        self._works: dict[str, dict[int, AnyWork]] = {}

    def launch(self, plan: Plan) -> PendingStage:
        """Start a step; on a CPU the work is done when this returns. Raises `OutOfMemory`."""
        assert isinstance(plan, StagedPlan)
        for job_id in plan.dropped:
            self._works.pop(job_id, None)
        try:
            with torch.inference_mode(), self._stream.current():
                rows = self._run(plan)
                wait = end_of_work(self._device)
        except BaseException as error:  # units that began in a failed step are dropped
            for start in plan.starts:
                self._forget(start.job_id, start.unit)
            if isinstance(error, torch.OutOfMemoryError):
                raise OutOfMemory("The step did not fit in device memory.") from error
            raise
        return PendingStage(rows, wait)

    def close(self) -> None:
        """Release the model and all running units."""
        self._works.clear()
        del self._model

    @property
    def num_works(self) -> int:
        """The number of running units."""
        return sum(map(len, self._works.values()))

    def _run(self, plan: StagedPlan) -> list[tuple[Yield, Stage | None]]:
        refused: dict[tuple[str, int], TriptychError] = {}
        for start in plan.starts:
            try:
                work = self._model.begin(start.request, start.unit)
            except TriptychError as error:
                refused[start.job_id, start.unit] = error
            else:
                self._works.setdefault(start.job_id, {})[start.unit] = work
        keys = [(row.job_id, row.unit) for row in plan.rows]
        live = [key for key in keys if key not in refused]
        works = [self._works[job_id][unit] for job_id, unit in live]
        given = dict(zip(live, self._model.advance(works) if works else (), strict=True))
        stages = {key: work.next_stage for key, work in zip(live, works, strict=True)}
        for key, work in zip(live, works, strict=True):
            if work.next_stage is None or isinstance(given[key], TriptychError):
                self._forget(*key)
        return [(refused.get(key, given.get(key)), stages.get(key)) for key in keys]

    def _forget(self, job_id: str, unit: int) -> None:
        units = self._works.get(job_id, {})
        units.pop(unit, None)
        if not units:
            self._works.pop(job_id, None)


class PendingStage:
    """A launched step."""

    def __init__(
        self, rows: Sequence[tuple[Yield, Stage | None]], wait: Callable[[], None]
    ) -> None:
        self._rows = rows
        self._wait = wait

    def result(self) -> StepResult:
        """Wait for the device and copy the results of the stages to the host."""
        self._wait()
        return StepResult(rows=tuple(_result(given, stage) for given, stage in self._rows))


def advance_each(advance: Callable[[AnyWork], Yield], works: Sequence[AnyWork]) -> list[Yield]:
    """Advance works one by one, for models without batches; an error affects that work only."""
    return [_caught(advance, work) for work in works]


def _caught(advance: Callable[[AnyWork], Yield], work: AnyWork) -> Yield:
    try:
        return advance(work)
    except TriptychError as error:
        return error


def _result(given: Yield, stage: Stage | None) -> StagedRowResult:
    if callable(given):
        try:
            given = given()
        except TriptychError as error:
            given = error
    if isinstance(given, TriptychError):
        return StagedRowResult(error=given)
    return StagedRowResult(payload=given, next_stage=stage)
