"""What can go wrong while pictures are drawn: the real loop, scheduler and runner, a tiny model.

Whatever happens to one picture, its neighbours come out as if it had never been there, and nothing
of it is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support.engine_seams import FakeLoader
from support.image_runner import image_request, open_painter
from support.virtual_engine import Chat, World
from triptych.core.config import Config, DebugOptions
from triptych.core.errors import EngineDown, InternalError, NonFinite, RequestTimeout
from triptych.core.job import Job
from triptych.core.pixels import Pixels
from triptych.core.plan import Plan
from triptych.modalities.diffusion.engine.executor import ImageExecutor
from triptych.modalities.diffusion.engine.runner import DenoiseRunner, PendingPictures
from triptych.modalities.diffusion.plan import DenoisePlan, PictureCost, PictureKey
from triptych.modalities.diffusion.scheduling.scheduler import DenoiseScheduler
from triptych.modalities.diffusion.wire import ImageDelta, ImageRequest

STEP_S = 0.05


class Atelier:
    """A world with one image model; `breaks` is called before each plan is launched."""

    def __init__(self, painter: ImageExecutor, config: Config | None = None) -> None:
        self.painter = painter
        self.runner = DenoiseRunner(painter, torch.device("cpu"))
        self.scheduler = DenoiseScheduler(
            model="images",
            measure=lambda request: PictureCost(state_bytes=1, num_tokens=16, num_pixels=64 * 64),
            max_pictures=4,
            max_state_bytes=4,
            max_jobs=50,
            max_rows=8,
        )
        loader = FakeLoader("images", lambda: (self.scheduler, self))
        config = config or Config()
        self.world = World([Chat().loader, loader], config=config, cost_s=lambda plan: STEP_S)
        self.world.engine.load("images")
        self.errors: dict[int, Exception] = {}
        self.num_launched = 0
        self.is_closed = False

    def launch(self, plan: Plan) -> PendingPictures:
        self.num_launched += 1
        if self.num_launched in self.errors:
            raise self.errors.pop(self.num_launched)
        return self.runner.launch(plan)

    def close(self) -> None:
        self.is_closed = True
        for key in tuple(self.runner._pictures):
            self.runner._drop(key)

    def submit(self, name: str, request: ImageRequest, deadline_s: float | None = None) -> None:
        job = Job(
            job_id=name,
            model="images",
            request=request,
            sink=self.world.outputs,
            arrival_s=self.world.clock(),
            deadline_s=deadline_s,
        )
        self.world.engine.submit(job)

    def turn_until_step(self, name: str, step: int) -> None:
        """Until a picture has taken so many steps on the device."""

        def is_there() -> bool:
            found = self.runner._pictures.get(PictureKey(name, 0))
            return found is not None and found.row.sample.step >= step

        self.world.turn_until(is_there)

    def picture(self, name: str) -> Pixels | None:
        final = self.world.outputs.final(name)
        return final.payload.pixels if final and isinstance(final.payload, ImageDelta) else None

    def num_plans_with(self, name: str) -> int:
        plans = [plan for _, plan in self.world.lanes.started if isinstance(plan, DenoisePlan)]
        return sum(any(row.key.job_id == name for row in plan.rows) for plan in plans)


@pytest.fixture(scope="module")
def painter() -> ImageExecutor:
    return open_painter()


@pytest.fixture
def atelier(painter: ImageExecutor) -> Iterator[Atelier]:
    atelier = Atelier(painter)
    yield atelier
    atelier.submit("after", image_request(num_steps=2))
    atelier.world.finish("after")
    assert atelier.picture("after") is not None
    assert atelier.runner.num_pictures == 0
    assert painter.pools.num_used == 0
    atelier.scheduler.check()


def drawn_alone(painter: ImageExecutor, request: ImageRequest) -> Pixels:
    atelier = Atelier(painter)
    atelier.submit("it", request)
    atelier.world.finish("it")
    pixels = atelier.picture("it")
    assert pixels is not None
    return pixels


def is_close(ours: Pixels | None, theirs: Pixels) -> bool:
    assert ours is not None
    pairs = zip(ours.rgb, theirs.rgb, strict=True)
    return max(abs(mine - other) for mine, other in pairs) <= 1


def test_32_latents_that_are_no_numbers_end_their_own_job_alone(atelier: Atelier) -> None:
    other = image_request(seed=2)
    expected = drawn_alone(atelier.painter, other)
    atelier.submit("bad", image_request(num_steps=8))
    atelier.submit("good", other)
    atelier.turn_until_step("bad", 2)
    sample = atelier.runner._pictures[PictureKey("bad", 0)].row.sample
    with torch.inference_mode():
        sample.pool.write(sample.cells[:1], torch.full((1, *sample.pool.shape), torch.nan))
    atelier.world.finish("bad", "good")
    assert atelier.world.outputs.error_code("bad") == NonFinite.code
    assert is_close(atelier.picture("good"), expected)


def test_28_cancelled_picture_is_gone_within_two_steps(atelier: Atelier) -> None:
    other = image_request(seed=2, num_steps=12)
    expected = drawn_alone(atelier.painter, other)
    atelier.submit("left", image_request(num_steps=50, num_images=2))
    atelier.submit("stays", other)
    atelier.turn_until_step("left", 3)
    num_before, left_s = atelier.num_plans_with("left"), atelier.world.clock()
    atelier.world.engine.cancel(["left"])
    atelier.world.turn_until(lambda: atelier.runner.num_pictures == 1)
    assert atelier.world.clock() - left_s <= 2 * STEP_S
    assert atelier.num_plans_with("left") <= num_before + 1
    atelier.world.finish("stays")
    assert is_close(atelier.picture("stays"), expected)


def test_29_a_slow_reader_stands_still_until_it_reads(atelier: Atelier) -> None:
    atelier.submit("slow", image_request(num_steps=9, has_progress=True))
    atelier.turn_until_step("slow", 3)
    atelier.world.engine.set_paused(["slow"], True)
    atelier.submit("other", image_request(seed=2))
    atelier.world.finish("other")
    step = atelier.runner._pictures[PictureKey("slow", 0)].row.sample.step
    assert step <= 5
    atelier.world.engine.set_paused(["slow"], False)
    atelier.world.finish("slow")
    assert atelier.picture("slow") is not None


def test_a_request_that_takes_too_long_is_ended_and_let_go_of(atelier: Atelier) -> None:
    deadline_s = atelier.world.clock() + 20 * STEP_S
    atelier.submit("late", image_request(num_steps=200), deadline_s=deadline_s)
    atelier.world.finish("late")
    assert atelier.world.outputs.error_code("late") == RequestTimeout.code
    assert deadline_s <= atelier.world.clock() <= deadline_s + 2 * STEP_S


@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_a_step_that_breaks_ends_its_jobs_and_the_next_are_drawn(
    atelier: Atelier, number: int
) -> None:
    """Its text, its first steps, or its pixels."""
    atelier.errors[number] = RuntimeError("a fault of ours")
    atelier.submit("broken", image_request())
    atelier.world.finish("broken")
    assert atelier.world.outputs.error_code("broken") == InternalError.code


def test_every_picture_ends_though_steps_fail_at_random(painter: ImageExecutor) -> None:
    config = Config(debug=DebugOptions(sim_failure=10.0))
    atelier = Atelier(painter, config)
    names = [f"j{index}" for index in range(16)]
    for index, name in enumerate(names):
        atelier.submit(name, image_request(seed=index, num_steps=3 + index % 4))
    atelier.world.finish(*names)
    ends = [atelier.world.outputs.final(name) for name in names]
    assert any(end is not None and end.error is not None for end in ends)
    assert any(atelier.picture(name) is not None for name in names)
    atelier.world.turn_until(lambda: atelier.runner.num_pictures == 0)
    assert painter.pools.num_used == 0


@pytest.mark.parametrize("how", ["stop", "drain"])
def test_an_engine_that_ends_leaves_no_picture_behind(painter: ImageExecutor, how: str) -> None:
    atelier = Atelier(painter)
    atelier.submit("it", image_request(num_steps=6))
    atelier.turn_until_step("it", 2)
    end: Any = getattr(atelier.world.engine, how)
    end()
    atelier.world.engine.run()
    code = atelier.world.outputs.error_code("it")
    assert code == (EngineDown.code if how == "stop" else None)
    assert (atelier.picture("it") is not None) == (how == "drain")
    assert atelier.is_closed
    assert painter.pools.num_used == 0
