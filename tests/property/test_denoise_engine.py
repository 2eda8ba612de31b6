"""Hundreds of random events through the real scheduler and the real runner, on tiny models.

Images come, are cancelled, pause and run out of memory in the middle of steps, in batches and
alone; whatever survives ends with the latents and the skips that it has when drawn by itself.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from support.driver import SchedulerDriver
from support.image_runner import image_request, open_executor
from triptych.core.engine_api.pixels import Pixels
from triptych.core.engine_api.plan import Plan, StepResult
from triptych.core.errors import OutOfMemory, TriptychError
from triptych.modalities.diffusion.engine.caches.decisions import Decisions
from triptych.modalities.diffusion.engine.costs import GenerationCosts
from triptych.modalities.diffusion.engine.executor import ImageExecutor, RunningImage
from triptych.modalities.diffusion.engine.loader import measure
from triptych.modalities.diffusion.engine.runner import DenoiseRunner, PendingResult
from triptych.modalities.diffusion.plan import ImageRow
from triptych.modalities.diffusion.scheduling.scheduler import DenoiseScheduler
from triptych.modalities.diffusion.wire import ImageDelta, ImageRequest, StepCache

NUM_REQUESTS = 18
CLOSENESS = 1e-5
CACHES = ("off", "planned", "taylorseer", "teacache", "first-block", "magcache")

Skips = list[list[tuple[int, bool]]]


@dataclass(frozen=True)
class Drawn:
    """How an image ended: its latents, and what each branch decided at which step."""

    latents: Tensor
    skips: Skips


class Witness:
    """Sees every image before it is decoded, and can make a step run out of memory half-way."""

    def __init__(self, executor: ImageExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoded: deque[Drawn] = deque()
        self.fails_next = False
        self._advance = executor.advance
        monkeypatch.setattr(executor, "advance", self.advance)
        decided: dict[Decisions, list[tuple[int, bool]]] = {}
        decide, decode = Decisions._decide, DenoiseRunner._decode

        def note_decision(decisions: Decisions, step: int, distance: float) -> bool:
            computes = decide(decisions, step, distance)
            decided.setdefault(decisions, []).append((step, computes))
            return computes

        def note_latents(runner: DenoiseRunner, rows: Sequence[ImageRow]) -> list[PendingResult]:
            self._raise_if_set()
            for row in (runner._images[each.key].row for each in rows):
                slots = [branch.cache for branch in row.branches if branch.cache is not None]
                skips = [decided.pop(slot.decisions) for slot in slots]
                self.decoded.append(Drawn(row.sample.sample.clone(), skips))
            return decode(runner, rows)

        monkeypatch.setattr(Decisions, "_decide", note_decision)
        monkeypatch.setattr(DenoiseRunner, "_decode", note_latents)

    def advance(self, images: list[RunningImage], num_steps: list[int], shown: list[bool]) -> None:
        half = len(images) // 2 * self.fails_next
        self._advance(images[:half], num_steps[:half], shown[:half])
        self._raise_if_set()
        self._advance(images[half:], num_steps[half:], shown[half:])

    def _raise_if_set(self) -> None:
        if self.fails_next:
            self.fails_next = False
            raise torch.OutOfMemoryError("there is none left")


class ImageDriver(SchedulerDriver):
    """The scheduler of images and a real runner; a step takes a second."""

    def __init__(self, executor: ImageExecutor, witness: Witness, num_images: int) -> None:
        costs = GenerationCosts.of(executor.recipe)
        one = measure(executor, costs, image_request(), max_pixels=1 << 20)
        scheduler = DenoiseScheduler(
            model="m",
            measure=lambda request: measure(executor, costs, request, max_pixels=1 << 20),
            max_images=6,
            max_state_bytes=num_images * one.state_bytes,
            max_jobs=1000,
            max_rows=6,
        )
        runner = DenoiseRunner(executor, torch.device("cpu"))
        super().__init__(scheduler, runner, model="m", depth=2)
        self.witness = witness
        self.made: dict[int, tuple[Pixels, Drawn]] = {}

    def launch(self, plan: Plan) -> StepResult | TriptychError:
        self.clock.advance(1.0)
        outcome = super().launch(plan)
        if plan.kind == "decode" and isinstance(outcome, StepResult):
            for row in outcome.rows:
                assert row.pixels is not None
                self.made[id(row.pixels)] = row.pixels, self.witness.decoded.popleft()
        return outcome

    def settled(self, plan: Plan) -> None:
        self.scheduler.check()

    def drawn(self, job_id: str) -> dict[int, Drawn]:
        """The images that a job was sent: what was made and thrown away does not count."""
        deltas = [output.payload for output in self.outputs.outputs[job_id]]
        return {
            delta.image: self.made[id(delta.pixels)][1]
            for delta in deltas
            if isinstance(delta, ImageDelta) and delta.pixels and delta.partial_index < 0
        }


def requests(rng: random.Random) -> list[ImageRequest]:
    """Different in all that rows of a batch may differ in."""
    return [
        image_request(
            seed=100 + index,
            prompt=rng.choice(["a red apple", "a blue car on a yellow background"]),
            width=rng.choice([64, 64, 96]),
            num_steps=rng.randint(3, 7),
            num_images=rng.choice([1, 1, 1, 2]),
            guidance_scale=rng.choice([1.0, 4.0]),
            cache=StepCache(name=CACHES[index % len(CACHES)]),  # type: ignore[arg-type]
            num_partials=rng.randint(0, 2),
            has_progress=rng.random() < 0.3,
        )
        for index in range(NUM_REQUESTS)
    ]


class RandomEvents:
    """Random events of a driver's jobs."""

    def __init__(self, driver: ImageDriver, witness: Witness, asked: list[ImageRequest]) -> None:
        self.driver, self.witness, self.asked = driver, witness, asked
        self.rng = random.Random(11)
        self.jobs: dict[str, ImageRequest] = {}
        self.cancelled: set[str] = set()

    def happen(self) -> None:
        event = self.rng.choices(
            ("come", "cancel", "pause", "gap", "memory", "step"), (5, 3, 3, 1, 1, 12)
        )[0]
        if event == "come":
            job_id = f"j{len(self.jobs)}"
            self.jobs[job_id] = self.rng.choice(self.asked)
            self.driver.submit(job_id, self.jobs[job_id])
        elif event == "gap":
            self.driver.scheduler.set_step_budget(
                self.rng.choice([0.001, float("inf"), float("inf")])
            )
        elif event == "memory":
            self.witness.fails_next = True
        elif event == "step":
            self.driver.step()
        elif self.jobs:
            self.bother(self.rng.choice(list(self.jobs)), event)

    def bother(self, job_id: str, event: str) -> None:
        if event == "pause":
            self.driver.scheduler.set_paused(job_id, self.rng.random() < 0.5)
            return
        if self.driver.outputs.final(job_id) is None:
            self.cancelled.add(job_id)
        self.driver.scheduler.cancel(job_id)

    def end(self) -> None:
        self.witness.fails_next = False
        for job_id in self.jobs:
            self.driver.scheduler.set_paused(job_id, False)
        self.driver.run()


def drawn_alone(
    executor: ImageExecutor, witness: Witness, asked: list[ImageRequest]
) -> list[list[Drawn]]:
    """What comes of each request when there is no other, image by image."""
    found = []
    for request in asked:
        driver = ImageDriver(executor, witness, num_images=20)
        driver.submit("it", request)
        driver.run()
        found.append([drawn for _, drawn in sorted(driver.drawn("it").items())])
    return found


def check_ends(events: RandomEvents) -> int:
    """Every job had one final output, and all it should have; returns how many were drawn."""
    outputs, num_drawn = events.driver.outputs, 0
    for job_id, request in events.jobs.items():
        finals = [output.is_final for output in outputs.outputs[job_id]]
        assert finals == [False] * (len(finals) - 1) + [True]
        error = outputs.error_code(job_id)
        if job_id in events.cancelled:
            assert error is None
        elif error is not None:
            assert error == OutOfMemory.code
        else:
            assert len(events.driver.drawn(job_id)) == request.num_images
            num_drawn += 1
    return num_drawn


@pytest.mark.parametrize(
    ("pipeline", "num_events"), [("FluxPipeline", 100), ("PixArtSigmaPipeline", 300)]
)
def test_survivors_of_random_events_are_as_if_alone(
    pipeline: str, num_events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = open_executor(pipeline)
    witness = Witness(executor, monkeypatch)
    asked = requests(random.Random(3))
    alone = drawn_alone(executor, witness, asked)
    events = RandomEvents(ImageDriver(executor, witness, num_images=5), witness, asked)
    for _ in range(num_events):
        events.happen()
    events.end()

    assert check_ends(events) > num_events / 15
    for job_id, request in events.jobs.items():
        for index, drawn in events.driver.drawn(job_id).items():
            expected = alone[asked.index(request)][index]
            assert drawn.skips == expected.skips
            scale = float(expected.latents.abs().max())
            assert float((drawn.latents - expected.latents).abs().max()) <= CLOSENESS * scale
    decisions = [each for row in alone for drawn in row for skips in drawn.skips for each in skips]
    assert sum(not computes for _, computes in decisions) > 20, "there is something to decide"

    assert events.driver.runner.num_images == 0
    assert executor.pools.num_used == 0
    executor.close()
