"""Images beside a conversation: the real loop in virtual time, where tokens hardly feel them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from support.denoise_world import FakeImageRunner, image_of, linear_costs, measure, request_of
from support.engine_seams import FakeFrames, FakeLoader, FrameRequest, FrameRunner
from support.virtual_engine import Chat, World, answer, ask, prompt_of
from triptych.core.engine_api.model_changes import LoadModel
from triptych.core.engine_api.plan import Plan, TokenPlan
from triptych.modalities.diffusion.plan import DenoisePlan, ImageKey
from triptych.modalities.diffusion.scheduling.scheduler import DenoiseScheduler
from triptych.modalities.diffusion.wire import ImageDelta
from triptych.schedulers.timeline import NUM_NARROW, WIDE_S

StepCosts = Callable[[DenoisePlan, Counter[int]], float]

FULL = linear_costs(row_s=0.01, encode_s=0.005, decode_s=0.01)
"""A device that one row fills. Text and pixels take no longer than a step."""
ROOMY = linear_costs(run_s=0.008, row_s=0.002, encode_s=0.005, decode_s=0.01)
"""Eight rows in the time of two and a half."""
FRAME_S = 0.03


class MixedLoad:
    """A chat model and an image model on one device."""

    def __init__(self, token_s: float, runner: FakeImageRunner, *others: FakeLoader) -> None:
        self.token_s = token_s
        self.runner = runner
        self.scheduler = DenoiseScheduler(
            model="images",
            measure=measure,
            max_images=16,
            max_state_bytes=1 << 30,
            max_jobs=100,
            max_rows=16,
        )
        images = FakeLoader("images", lambda: (self.scheduler, runner))
        self.world = World([Chat().loader, images, *others], cost_s=self._cost_s)
        for loader in (images, *others):
            self.world.engine.change(LoadModel(loader.name))

    def chat(self, num_tokens: int) -> None:
        self.world.submit("talk", "chat", ask(prompt_of(1), num_tokens))

    def generate(self, num_images: int, num_steps: int = 30, guidance: float = 1.0) -> list[str]:
        names = [f"image{index}" for index in range(num_images)]
        for index, name in enumerate(names):
            request = request_of(
                num_steps=num_steps,
                interval=1 + index % 2,
                has_progress=True,
                guidance_scale=guidance,
            )
            self.world.submit(name, "images", request)
        return names

    def token_times(self) -> list[float]:
        """When the steps that yielded a token were over."""
        return [
            start_s + self.token_s
            for start_s, plan in self.world.executors.started
            if isinstance(plan, TokenPlan)
        ]

    def deltas(self, name: str) -> list[ImageDelta]:
        """The deltas that an image's job was sent."""
        outputs = self.world.outputs.outputs[name]
        return [each.payload for each in outputs if isinstance(each.payload, ImageDelta)]

    def images_between(self, start_s: float, end_s: float) -> list[DenoisePlan]:
        """Steps of the image model that began in a span of time."""
        return [
            plan
            for moment_s, plan in self.world.executors.started
            if isinstance(plan, DenoisePlan) and start_s <= moment_s < end_s
        ]

    def _cost_s(self, plan: Plan) -> float:
        if isinstance(plan, TokenPlan):
            return self.token_s
        if isinstance(plan, DenoisePlan):
            return self.runner.elapsed_s[plan.step_id]
        return FRAME_S


def gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


@pytest.mark.parametrize("token_s", [0.015, 0.018])
@pytest.mark.parametrize("costs", [FULL, ROOMY], ids=["full", "roomy"])
def test_tokens_come_at_half_their_pace_at_worst(token_s: float, costs: StepCosts) -> None:
    mixed = MixedLoad(token_s, FakeImageRunner(cost_s=costs))
    mixed.chat(450)
    mixed.world.turn_until(lambda: len(mixed.token_times()) > 40)
    idle = gaps(mixed.token_times())
    mixed.world.finish(*mixed.generate(8, num_steps=20))
    assert mixed.world.outputs.final("talk") is None, "the talk outlasts the images"
    together = gaps(mixed.token_times())[len(idle) :]
    assert p95(idle) == pytest.approx(token_s)
    assert len(together) > 60
    assert p95(together) <= 2 * token_s
    mixed.world.finish("talk")
    assert mixed.world.tokens("talk") == answer(prompt_of(1), 450)


@pytest.mark.parametrize("token_s", [0.0136, 0.015])
@pytest.mark.parametrize("costs", [FULL, ROOMY], ids=["full", "roomy"])
def test_a_guided_step_is_shared_between_two_gaps(token_s: float, costs: StepCosts) -> None:
    """Where two branches are too long for a gap one is asked ahead, and the step is taken later."""
    mixed = MixedLoad(token_s, FakeImageRunner(cost_s=costs))
    mixed.chat(600)
    mixed.world.turn_until(lambda: len(mixed.token_times()) > 20)
    names = mixed.generate(4, num_steps=20, guidance=3.0)
    start_s = mixed.world.clock()
    mixed.world.finish(*names)
    gaps_s = gaps([at for at in mixed.token_times() if at > start_s])
    assert sum(gap_s > 2 * token_s for gap_s in gaps_s) <= 2 + len(gaps_s) / NUM_NARROW
    asked = [plan for plan in mixed.runner.log if any(row.evaluates_ahead for row in plan.rows)]
    assert len(asked) > 20
    for name in names:
        reported = [delta for delta in mixed.deltas(name) if delta.queue_position < 0]
        progress = [delta.step for delta in reported if delta.pixels is None]
        assert progress == sorted(set(progress)), "a step begun is not reported"
        (image,) = (delta.pixels for delta in reported if delta.pixels is not None)
        assert image == image_of(ImageKey(name, 0), request_of())
    assert mixed.scheduler.stats().counters["denoise_rows_total"] == sum(mixed.runner.rows_run)
    mixed.scheduler.check()


def test_nothing_is_asked_ahead_where_both_branches_fit() -> None:
    mixed = MixedLoad(0.06, FakeImageRunner(cost_s=FULL))
    mixed.chat(60)
    mixed.world.turn_until(lambda: len(mixed.token_times()) > 5)
    mixed.world.finish(*mixed.generate(2, guidance=3.0))
    asked = [plan for plan in mixed.runner.log if any(row.evaluates_ahead for row in plan.rows)]
    assert len(asked) <= 4, "only until it is known how long a branch takes"


def test_a_step_that_cannot_be_cut_is_felt_once() -> None:
    """Pixels that take eight tokens' time: never two such images, or more, between two tokens."""
    costs = linear_costs(row_s=0.01, encode_s=0.02, decode_s=0.12)
    mixed = MixedLoad(0.016, FakeImageRunner(cost_s=costs))
    mixed.chat(450)
    mixed.world.finish(*mixed.generate(8, num_steps=20))
    assert max(gaps(mixed.token_times())[2:]) <= 0.12 + 0.016 + 0.01 + 1e-6, "and a row before it"


def test_what_fits_no_gap_is_generated_together_and_felt_seldom() -> None:
    """Runs of 20 ms and more beside tokens of 10: few gaps are long, and then runs are full."""
    runner = FakeImageRunner(cost_s=linear_costs(run_s=0.016, row_s=0.004, encode_s=0.005))
    mixed = MixedLoad(0.01, runner)
    mixed.chat(2000)
    mixed.world.turn_until(lambda: len(mixed.token_times()) > 20)
    start_s = mixed.world.clock()
    mixed.world.finish(*mixed.generate(8, num_steps=20))
    gaps_s = gaps([at for at in mixed.token_times() if at > start_s])
    assert p95(gaps_s) <= 0.0175 + 1e-6
    assert sorted(gaps_s)[-3] <= WIDE_S + 0.01 + 1e-6, "but for steps not known yet"
    assert sum(runner.rows_run) / len(runner.rows_run) > 5
    assert sum(runner.elapsed_s.values()) > 0.15 * (mixed.world.clock() - start_s)


@pytest.mark.parametrize("costs", [FULL, ROOMY], ids=["full", "roomy"])
def test_images_still_get_a_good_third_of_the_device(costs: StepCosts) -> None:
    runner = FakeImageRunner(cost_s=costs)
    mixed = MixedLoad(0.016, runner)
    mixed.chat(400)
    names = mixed.generate(4)
    start_s = mixed.world.clock()
    mixed.world.finish(*names)
    elapsed_s = mixed.world.clock() - start_s
    assert sum(runner.elapsed_s.values()) >= 0.35 * elapsed_s
    for name in names:
        final = mixed.world.outputs.final(name)
        assert final is not None
        assert isinstance(final.payload, ImageDelta)
        assert final.payload.pixels == image_of(ImageKey(name, 0), request_of())


def test_runs_are_full_again_when_the_others_have_done() -> None:
    mixed = MixedLoad(0.016, FakeImageRunner(cost_s=ROOMY))
    mixed.chat(60)
    names = mixed.generate(8)
    mixed.world.finish("talk")
    talked_s = mixed.world.clock()
    sizes = [
        len(plan.rows) + len(plan.starts) for plan in mixed.images_between(0.0, talked_s - 0.1)
    ]
    num_wide = 1 + 60 // NUM_NARROW
    assert sum(size > 2 for size in sizes) <= 3 * num_wide, "but for wide gaps"
    assert sum(size <= 2 for size in sizes) > 30
    mixed.world.finish(*names)
    rows = [
        len(plan.rows)
        for plan in mixed.images_between(talked_s + 0.2, mixed.world.clock())
        if plan.kind == "denoise"
    ]
    assert max(rows) == 8


def test_speech_with_both_is_in_time() -> None:
    """Frames of 30 ms, one wanted every 100 ms: with tokens and images they are still on time."""
    frames = FakeFrames("voice")
    loader = FakeLoader("voice", lambda: (frames, FrameRunner()))
    mixed = MixedLoad(0.016, FakeImageRunner(cost_s=FULL), loader)
    mixed.chat(400)
    names = mixed.generate(6)
    mixed.world.submit("voice", "voice", FrameRequest(num_frames=40, period_s=0.1))
    mixed.world.finish("voice")
    assert max(frames.lateness_s) <= FRAME_S + 1e-9
    mixed.world.finish(*names, "talk")


def test_images_alone_are_not_cut() -> None:
    mixed = MixedLoad(0.016, FakeImageRunner(cost_s=ROOMY))
    mixed.world.finish(*mixed.generate(8))
    assert max(mixed.runner.rows_run) == 8
    assert len(mixed.runner.rows_run) <= 36
