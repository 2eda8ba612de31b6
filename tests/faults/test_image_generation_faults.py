"""What can go wrong while images are generated: the real loop, scheduler and runner, a tiny model.

Whatever happens to one image, its neighbours come out as if it had never been there, and nothing
of it is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support.engine_seams import FakeLoader
from support.image_runner import image_request, open_executor
from support.virtual_engine import Chat, World
from triptych.core.engine_api.job import Job
from triptych.core.engine_api.model_changes import LoadModel
from triptych.core.engine_api.pixels import Pixels
from triptych.core.engine_api.plan import Plan
from triptych.core.errors import EngineDown, InternalError, NonFinite, RequestTimeout
from triptych.core.options.config import Config, DebugOptions
from triptych.modalities.diffusion.engine.executor import ImageExecutor
from triptych.modalities.diffusion.engine.runner import DenoiseRunner, PendingImages
from triptych.modalities.diffusion.plan import DenoisePlan, ImageCost, ImageKey
from triptych.modalities.diffusion.scheduling.scheduler import DenoiseScheduler
from triptych.modalities.diffusion.wire import ImageDelta, ImageRequest

STEP_S = 0.05


class FaultRig:
    """A world with one image model; `breaks` is called before each plan is launched."""

    def __init__(self, executor: ImageExecutor, config: Config | None = None) -> None:
        self.executor = executor
        self.runner = DenoiseRunner(executor, torch.device("cpu"))
        self.scheduler = DenoiseScheduler(
            model="images",
            measure=lambda request: ImageCost(state_bytes=1, num_tokens=16, num_pixels=64 * 64),
            max_images=4,
            max_state_bytes=4,
            max_jobs=50,
            max_rows=8,
        )
        loader = FakeLoader("images", lambda: (self.scheduler, self))
        config = config or Config()
        self.world = World([Chat().loader, loader], config=config, cost_s=lambda plan: STEP_S)
        self.world.engine.change(LoadModel("images"))
        self.errors: dict[int, Exception] = {}
        self.num_launched = 0
        self.is_closed = False

    def launch(self, plan: Plan) -> PendingImages:
        self.num_launched += 1
        if self.num_launched in self.errors:
            raise self.errors.pop(self.num_launched)
        return self.runner.launch(plan)

    def close(self) -> None:
        self.is_closed = True
        for key in tuple(self.runner._images):
            self.runner._drop(key)

    def submit(self, name: str, request: ImageRequest, deadline_s: float | None = None) -> None:
        now_s = self.world.clock()
        job = Job(
            job_id=name,
            model="images",
            request=request,
            sink=self.world.outputs,
            arrival_s=now_s,
            limit_s=None if deadline_s is None else deadline_s - now_s,
        )
        self.world.engine.submit(job)

    def turn_until_step(self, name: str, step: int) -> None:
        """Until an image has taken so many steps on the device."""

        def is_there() -> bool:
            found = self.runner._images.get(ImageKey(name, 0))
            return found is not None and found.row.sample.step >= step

        self.world.turn_until(is_there)

    def image(self, name: str) -> Pixels | None:
        final = self.world.outputs.final(name)
        return final.payload.pixels if final and isinstance(final.payload, ImageDelta) else None

    def num_plans_with(self, name: str) -> int:
        plans = [plan for _, plan in self.world.executors.started if isinstance(plan, DenoisePlan)]
        return sum(any(row.key.job_id == name for row in plan.rows) for plan in plans)


@pytest.fixture(scope="module")
def executor() -> ImageExecutor:
    return open_executor()


@pytest.fixture
def rig(executor: ImageExecutor) -> Iterator[FaultRig]:
    rig = FaultRig(executor)
    yield rig
    rig.submit("after", image_request(num_steps=2))
    rig.world.finish("after")
    assert rig.image("after") is not None
    assert rig.runner.num_images == 0
    assert executor.pools.num_used == 0
    rig.scheduler.check()


def generated_alone(executor: ImageExecutor, request: ImageRequest) -> Pixels:
    rig = FaultRig(executor)
    rig.submit("it", request)
    rig.world.finish("it")
    pixels = rig.image("it")
    assert pixels is not None
    return pixels


def is_close(ours: Pixels | None, theirs: Pixels) -> bool:
    assert ours is not None
    pairs = zip(ours.rgb, theirs.rgb, strict=True)
    return max(abs(mine - other) for mine, other in pairs) <= 1


def test_latents_that_are_no_numbers_end_their_own_job_alone(rig: FaultRig) -> None:
    other = image_request(seed=2)
    expected = generated_alone(rig.executor, other)
    rig.submit("bad", image_request(num_steps=8))
    rig.submit("good", other)
    rig.turn_until_step("bad", 2)
    sample = rig.runner._images[ImageKey("bad", 0)].row.sample
    with torch.inference_mode():
        sample.pool.write(sample.cells[:1], torch.full((1, *sample.pool.shape), torch.nan))
    rig.world.finish("bad", "good")
    assert rig.world.outputs.error_code("bad") == NonFinite.code
    assert is_close(rig.image("good"), expected)


def test_cancelled_image_is_gone_within_two_steps(rig: FaultRig) -> None:
    other = image_request(seed=2, num_steps=12)
    expected = generated_alone(rig.executor, other)
    rig.submit("left", image_request(num_steps=50, num_images=2))
    rig.submit("stays", other)
    rig.turn_until_step("left", 3)
    num_before, left_s = rig.num_plans_with("left"), rig.world.clock()
    rig.world.engine.cancel(["left"])
    rig.world.turn_until(lambda: rig.runner.num_images == 1)
    assert rig.world.clock() - left_s <= 2 * STEP_S
    assert rig.num_plans_with("left") <= num_before + 1
    rig.world.finish("stays")
    assert is_close(rig.image("stays"), expected)


def test_a_slow_reader_stands_still_until_it_reads(rig: FaultRig) -> None:
    rig.submit("slow", image_request(num_steps=9, has_progress=True))
    rig.turn_until_step("slow", 3)
    rig.world.engine.set_paused(["slow"], True)
    rig.submit("other", image_request(seed=2))
    rig.world.finish("other")
    step = rig.runner._images[ImageKey("slow", 0)].row.sample.step
    assert step <= 5
    rig.world.engine.set_paused(["slow"], False)
    rig.world.finish("slow")
    assert rig.image("slow") is not None


def test_a_request_that_takes_too_long_is_ended_and_let_go_of(rig: FaultRig) -> None:
    deadline_s = rig.world.clock() + 20 * STEP_S
    rig.submit("late", image_request(num_steps=200), deadline_s=deadline_s)
    rig.world.finish("late")
    assert rig.world.outputs.error_code("late") == RequestTimeout.code
    assert deadline_s <= rig.world.clock() <= deadline_s + 2 * STEP_S


@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_a_step_that_breaks_ends_its_jobs_and_the_next_are_generated(
    rig: FaultRig, number: int
) -> None:
    """Its text, its first steps, or its pixels."""
    rig.errors[number] = RuntimeError("a fault of ours")
    rig.submit("broken", image_request())
    rig.world.finish("broken")
    assert rig.world.outputs.error_code("broken") == InternalError.code


def test_every_image_ends_though_steps_fail_at_random(executor: ImageExecutor) -> None:
    config = Config(debug=DebugOptions(sim_failure=10.0))
    rig = FaultRig(executor, config)
    names = [f"j{index}" for index in range(16)]
    for index, name in enumerate(names):
        rig.submit(name, image_request(seed=index, num_steps=3 + index % 4))
    rig.world.finish(*names)
    ends = [rig.world.outputs.final(name) for name in names]
    assert any(end is not None and end.error is not None for end in ends)
    assert any(rig.image(name) is not None for name in names)
    rig.world.turn_until(lambda: rig.runner.num_images == 0)
    assert executor.pools.num_used == 0


@pytest.mark.parametrize("how", ["stop", "drain"])
def test_an_engine_that_ends_leaves_no_image_behind(executor: ImageExecutor, how: str) -> None:
    rig = FaultRig(executor)
    rig.submit("it", image_request(num_steps=6))
    rig.turn_until_step("it", 2)
    end: Any = getattr(rig.world.engine, how)
    end()
    rig.world.engine.run()
    code = rig.world.outputs.error_code("it")
    assert code == (EngineDown.code if how == "stop" else None)
    assert (rig.image("it") is not None) == (how == "drain")
    assert rig.is_closed
    assert executor.pools.num_used == 0
