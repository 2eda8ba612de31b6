"""Generation without a network: images are counters, and requests say which of their steps compute.

`cache.interval` k computes the first step, every k-th and the last; `guidance_scale` above 1 has
two branches; `strength` s begins at the step that leaves s of the way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from support.driver import SchedulerDriver
from support.engine_seams import Done
from triptych.core.engine_api.pixels import Pixels
from triptych.core.engine_api.plan import Plan, StepResult
from triptych.core.errors import InvalidRequest, OutOfMemory, TriptychError
from triptych.modalities.diffusion.plan import (
    DenoisePlan,
    ImageCost,
    ImageKey,
    ImageRow,
    ImageRowResult,
    PlannedSteps,
)
from triptych.modalities.diffusion.scheduling.scheduler import DenoiseScheduler
from triptych.modalities.diffusion.wire import ImageDelta, ImageRequest, StepCache

NUM_PROMPT_TOKENS = 7
_PIXELS_PER_TOKEN = 64


def request_of(size: int = 64, interval: int = 1, **fields: Any) -> ImageRequest:
    defaults: dict[str, Any] = {
        "prompt": "a red apple",
        "seed": 1,
        "num_steps": 8,
        "width": size,
        "height": size,
        "cache": StepCache(name="planned", interval=interval),
    }
    return ImageRequest(**{**defaults, **fields})


def planned_steps_of(request: ImageRequest) -> PlannedSteps:
    num_steps, interval = request.num_steps or 8, request.cache.interval or 1
    first = math.floor((1 - request.strength) * num_steps) if request.strength else 0
    num_branches = 2 if (request.guidance_scale or 1.0) > 1 else 1
    num_rows = [
        num_branches if at in (first, num_steps - 1) or not (at - first) % interval else 0
        for at in range(num_steps)
    ]
    num_rows[:first] = [0] * first
    return PlannedSteps(
        num_rows=tuple(num_rows),
        first_step=first,
        num_tokens=request.num_layers or 0,  # to be written, here
        num_prompt_tokens=NUM_PROMPT_TOKENS,
    )


def measure(request: ImageRequest) -> ImageCost:
    num_pixels = request.width * request.height
    if num_pixels > 4096 * 4096:
        raise InvalidRequest("too large", param="size")
    return ImageCost(
        state_bytes=num_pixels,
        num_tokens=max(1, num_pixels // _PIXELS_PER_TOKEN),
        num_pixels=num_pixels,
    )


def linear_costs(
    *, run_s: float = 0.0, row_s: float = 0.01, encode_s: float = 0.02, decode_s: float = 0.03
) -> Callable[[DenoisePlan, Counter[int]], float]:
    """Steps of so much for each run, and for each row of it."""

    def cost_s(plan: DenoisePlan, rows: Counter[int]) -> float:
        if plan.kind == "denoise":
            return sum(run_s + row_s * count for count in rows.values())
        return encode_s * len(plan.starts) if plan.kind == "encode" else decode_s * len(plan.rows)

    return cost_s


@dataclass(slots=True)
class _Generated:
    request: ImageRequest
    planned: PlannedSteps
    done: int
    num_written: int = 0
    is_half_evaluated: bool = False


@dataclass
class FakeImageRunner:
    """A runner that checks its plans as a real one needs them.

    A step with more than `max_fit` images runs out of memory. `broken` maps an image to the
    number of steps after which it fails (-1: its encoding), `errors` the number of a launch to what
    it raises.
    """

    max_fit: int = 10_000
    cost_s: Callable[[DenoisePlan, Counter[int]], float] = field(default_factory=linear_costs)
    broken: dict[ImageKey, int] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    held: dict[ImageKey, _Generated] = field(default_factory=dict)
    log: list[DenoisePlan] = field(default_factory=list)
    rows_run: list[int] = field(default_factory=list)
    elapsed_s: dict[int, float] = field(default_factory=dict)
    _failed: dict[int, frozenset[ImageKey]] = field(default_factory=dict)
    _lost: set[ImageKey] = field(default_factory=set)

    def launch(self, plan: Plan) -> Done:
        assert isinstance(plan, DenoisePlan)
        assert plan.rows or plan.starts or plan.dropped, "a plan does something"
        self.log.append(plan)
        for key in plan.dropped:
            self.held.pop(key, None)
            self._lost.discard(key)
        keys = [row.key for row in plan.rows] + [start.key for start in plan.starts]
        assert len(set(keys)) == len(keys), "an image is in a step once"
        error = self.errors.pop(len(self.log), None)
        if len(keys) > self.max_fit:
            error = OutOfMemory("too many")
        if error is not None:
            self._failed[plan.step_id] = frozenset(keys)
            self.elapsed_s[plan.step_id] = 0.01
            return Done(error)
        computed: Counter[int] = Counter()
        if plan.kind == "encode":
            assert not plan.rows
            rows = tuple(self._begin(start.key, start.request) for start in plan.starts)
        else:
            assert not plan.starts
            rows = tuple(self._row(plan.kind, row, computed) for row in plan.rows)
        self.rows_run += computed.values()
        self.elapsed_s[plan.step_id] = self.cost_s(plan, computed)
        result = StepResult(rows=rows, elapsed_s=self.elapsed_s[plan.step_id])
        return Done(result)

    def on_failure_known(self, plan: DenoisePlan) -> None:
        """The scheduler knows by now that `plan` failed."""
        self._failed.pop(plan.step_id, None)

    def close(self) -> None:
        self.held.clear()

    def _begin(self, key: ImageKey, request: ImageRequest) -> ImageRowResult:
        assert key not in self.held, "an image begins once"
        if self.broken.get(key) == -1:
            return ImageRowResult(error=TriptychError("this one is broken"))
        planned = planned_steps_of(request)
        self.held[key] = _Generated(request, planned, planned.first_step)
        return ImageRowResult(planned=planned)

    def _row(self, kind: str, row: ImageRow, computed: Counter[int]) -> ImageRowResult:
        if any(row.key in keys for keys in self._failed.values()) or row.key not in self.held:
            self._lost.add(row.key)  # planned before the scheduler knew of the failure
            return ImageRowResult(error=TriptychError("not known"))
        assert row.key not in self._lost, "its step is unknown"
        generated = self.held[row.key]
        if kind == "decode":
            assert generated.done == generated.planned.num_steps, "only what is finished is decoded"
            del self.held[row.key]
            return ImageRowResult(pixels=image_of(row.key, generated.request))
        if kind == "write":
            generated.num_written += row.num_tokens
            return ImageRowResult()
        assert generated.num_written == generated.planned.num_tokens, "its tokens are written first"
        steps = generated.planned.num_rows[generated.done : generated.done + row.num_steps]
        assert len(steps) == row.num_steps
        generated.done += row.num_steps
        if 0 <= self.broken.get(row.key, -1) <= generated.done:
            return ImageRowResult(error=TriptychError("this one is broken"))
        if row.evaluates_ahead:
            assert not any(steps), "only steps that are skipped are taken before one is asked of"
            assert generated.planned.num_rows[generated.done] == 2, "there are two to ask"
            num_rows = int(not generated.is_half_evaluated)
        else:
            assert steps, "a step is taken"
            assert not any(steps[:-1]), "only steps that are skipped are taken together"
            num_rows = steps[-1] - generated.is_half_evaluated
        generated.is_half_evaluated = row.evaluates_ahead
        if num_rows:
            computed[measure(generated.request).num_tokens] += num_rows
        return ImageRowResult(
            num_computed=int(not row.evaluates_ahead and steps[-1] > 0),
            num_rows=num_rows,
            pixels=Pixels(width=1, height=1, rgb=bytes(3)) if row.has_preview else None,
        )


def image_of(key: ImageKey, request: ImageRequest) -> Pixels:
    """What comes of an image that is generated to its end."""
    return Pixels(width=1, height=1, rgb=bytes([request.seed % 256, key.image, 255]))


class Rig(SchedulerDriver):
    """The scheduler of images, and the runner of its plans."""

    has_equal_steps = True

    def __init__(self, *, depth: int = 1, runner: FakeImageRunner | None = None, **limits: int):
        defaults = {"max_images": 8, "max_state_bytes": 1 << 30, "max_jobs": 100, "max_rows": 8}
        scheduler = DenoiseScheduler(model="m", measure=measure, **{**defaults, **limits})
        self.runner = runner or FakeImageRunner()
        super().__init__(scheduler, self.runner, model="m", depth=depth, now_s=1000.0)
        self.checks_every = 1

    def over(self, plan: Plan, outcome: StepResult | TriptychError) -> None:
        assert isinstance(plan, DenoisePlan)
        self.clock.advance(self.runner.elapsed_s[plan.step_id])
        if isinstance(outcome, TriptychError):
            self.runner.on_failure_known(plan)

    def settled(self, plan: Plan) -> None:
        if plan.step_id % self.checks_every == 0:
            self.scheduler.check()

    def deltas(self, job_id: str) -> list[ImageDelta]:
        return self.payloads(job_id)

    def images(self, job_id: str) -> dict[int, Pixels]:
        return {
            delta.image: delta.pixels
            for delta in self.deltas(job_id)
            if delta.pixels is not None and delta.partial_index < 0
        }

    def plans(self, kind: str) -> list[DenoisePlan]:
        return [plan for plan in self.runner.log if plan.kind == kind]
