"""Random lives of images: nothing is lost, sent twice, leaked or starved."""

from __future__ import annotations

import math
import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from support.denoise_world import FakeImageRunner, Rig, image_of, measure, request_of
from triptych.core.errors import InternalError, OutOfMemory
from triptych.modalities.diffusion.plan import ImageKey
from triptych.modalities.diffusion.wire import ImageDelta, ImageRequest

REQUESTS = st.builds(
    request_of,
    size=st.sampled_from([16, 32, 64]),
    interval=st.integers(1, 4),
    num_steps=st.integers(1, 9),
    num_images=st.integers(1, 3),
    guidance_scale=st.sampled_from([1.0, 4.0]),
    strength=st.sampled_from([None, 0.5, 1.0]),
    num_partials=st.integers(0, 3),
    has_progress=st.booleans(),
    seed=st.integers(0, 255),
)


def check_outputs(rig: Rig, job_id: str, request: ImageRequest, ended_by: str | None) -> None:
    """A whole story: previews in order, no image twice, and one final output."""
    outputs = rig.outputs.outputs[job_id]
    assert [output.is_final for output in outputs] == [False] * (len(outputs) - 1) + [True]
    deltas = rig.deltas(job_id)
    generated = [each for each in deltas if each.pixels is not None and each.partial_index < 0]
    for delta in generated:
        assert delta.pixels == image_of(ImageKey(job_id, delta.image), request)
        assert delta.step == delta.num_steps == request.num_steps
        check_previews(deltas, delta.image, request)
    assert len({delta.image for delta in generated}) == len(generated)
    waited = [delta.queue_position for delta in deltas if delta.queue_position >= 0]
    assert all(before != after for before, after in pairwise(waited))
    assert request.has_progress or len(deltas) == len(generated) + sum(
        delta.partial_index >= 0 or delta.finish_reason == "cancelled" for delta in deltas
    )
    final = rig.outputs.final(job_id)
    assert final is not None
    reason = None if final.payload is None else final.payload.finish_reason
    if ended_by is None:
        assert len(generated) == request.num_images
        assert reason == "stop"
    elif ended_by == "cancelled":
        assert reason == "cancelled"
    else:
        assert final.error is not None


def check_previews(deltas: list[ImageDelta], image: int, request: ImageRequest) -> None:
    shown = [each.partial_index for each in deltas if each.image == image]
    shown = [index for index in shown if index >= 0]
    assert shown == list(range(len(shown)))
    assert len(shown) <= request.num_partials


class DenoiseMachine(RuleBasedStateMachine):
    """Jobs come, pause, go on, are cancelled and fail while steps begin and end."""

    jobs = Bundle("jobs")

    @initialize(
        max_images=st.integers(1, 5),
        max_rows=st.integers(1, 6),
        max_squares=st.integers(1, 3),
        max_fit=st.sampled_from([1, 2, 10_000]),
        depth=st.integers(1, 2),
    )
    def start(
        self, max_images: int, max_rows: int, max_squares: int, max_fit: int, depth: int
    ) -> None:
        self.max_images = max_images
        self.max_state_bytes = max_squares * 64 * 64
        self.rig = Rig(
            depth=depth,
            runner=FakeImageRunner(max_fit=max_fit),
            max_images=max_images,
            max_rows=max_rows,
            max_state_bytes=self.max_state_bytes,
        )
        self.requests: dict[str, ImageRequest] = {}
        self.ended_by: dict[str, str] = {}

    @rule(target=jobs, request=REQUESTS, breaks_after=st.sampled_from([None, None, None, -1, 0, 3]))
    def submit(self, request: ImageRequest, breaks_after: int | None) -> str:
        job_id = f"j{len(self.requests)}"
        self.requests[job_id] = request
        if breaks_after is not None:
            self.rig.runner.broken[ImageKey(job_id, request.num_images - 1)] = breaks_after
        self.rig.submit(job_id, request)
        return job_id

    @rule(job_id=jobs)
    def cancel(self, job_id: str) -> None:
        if not self.rig.has_ended(job_id):
            self.ended_by[job_id] = "cancelled"
        self.rig.scheduler.cancel(job_id)
        assert self.rig.has_ended(job_id)

    @rule(job_id=jobs, is_paused=st.booleans())
    def pause(self, job_id: str, is_paused: bool) -> None:
        self.rig.scheduler.set_paused(job_id, is_paused)

    @rule(gap_s=st.sampled_from([0.001, 0.012, 0.03, math.inf]))
    def driver(self, gap_s: float) -> None:
        self.rig.scheduler.set_step_budget(gap_s)

    @rule(is_memory=st.booleans())
    def break_a_step(self, is_memory: bool) -> None:
        error = OutOfMemory("no room") if is_memory else InternalError("boom")
        self.rig.runner.errors[len(self.rig.runner.log) + 1] = error

    @precondition(lambda self: len(self.rig.in_flight) < self.rig.depth)
    @rule()
    def launch(self) -> None:
        if self.rig.book():
            held = [
                measure(generated.request).state_bytes
                for generated in self.rig.runner.held.values()
            ]
            assert len(held) <= self.max_images
            assert sum(held) <= self.max_state_bytes

    @precondition(lambda self: self.rig.in_flight)
    @rule()
    def settle(self) -> None:
        self.rig.commit()

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.scheduler.check()
        stats = self.rig.scheduler.stats()
        assert stats.num_waiting + stats.num_running == sum(
            not self.rig.has_ended(job_id) for job_id in self.requests
        )

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for job_id in self.requests:
            self.rig.scheduler.set_paused(job_id, False)
        self.rig.run()
        assert self.rig.runner.held == {}, "nothing is left on the device"
        assert self.rig.scheduler.propose(self.rig.clock()) is None
        assert self.rig.scheduler.stats().gauges["image_state_bytes"] == 0
        for job_id, request in self.requests.items():
            ended_by = self.ended_by.get(job_id)
            if ended_by is None and self.rig.outputs.error_code(job_id) is not None:
                ended_by = "error"
            check_outputs(self.rig, job_id, request, ended_by)


TestDenoiseMachine = DenoiseMachine.TestCase
TestDenoiseMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class RandomJobs:
    """Jobs of all kinds that come, go, pause and fail at random, and who was sent away."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.rng = random.Random(seed)
        self.requests: dict[str, ImageRequest] = {}
        self.cancelled: set[str] = set()

    def come(self) -> None:
        rng, runner = self.rng, self.rig.runner
        job_id = f"j{len(self.requests)}"
        self.requests[job_id] = request_of(
            size=rng.choice([16, 32, 64, 128]),
            interval=rng.randint(1, 4),
            num_steps=rng.randint(1, 12),
            num_images=rng.choice([1, 1, 2]),
            guidance_scale=rng.choice([1.0, 4.0]),
            num_partials=rng.randint(0, 3),
            has_progress=rng.random() < 0.5,
        )
        if rng.random() < 0.05:
            runner.broken[ImageKey(job_id, 0)] = rng.randint(-1, 5)
        if rng.random() < 0.02:
            runner.errors[len(runner.log) + 1] = OutOfMemory("no room")
        self.rig.submit(job_id, self.requests[job_id])

    def disturb(self) -> None:
        job_id = f"j{self.rng.randrange(len(self.requests))}"
        event = self.rng.randrange(6)
        if event == 0:
            if not self.rig.has_ended(job_id):
                self.cancelled.add(job_id)
            self.rig.scheduler.cancel(job_id)
        elif event == 1:
            self.rig.scheduler.set_paused(job_id, self.rng.random() < 0.5)
        elif event == 2:
            self.rig.scheduler.set_step_budget(self.rng.choice([0.012, math.inf]))

    def check(self) -> None:
        num_failed = 0
        for job_id, request in self.requests.items():
            ended_by = "cancelled" if job_id in self.cancelled else None
            if ended_by is None and self.rig.outputs.error_code(job_id) is not None:
                ended_by = "error"
                num_failed += 1
            check_outputs(self.rig, job_id, request, ended_by)
        assert num_failed < 0.08 * len(self.requests), "only what was broken, or was too much alone"


def test_a_thousand_jobs_come_and_go() -> None:
    rig = Rig(
        depth=2,
        runner=FakeImageRunner(max_fit=6),
        max_jobs=1000,
        max_state_bytes=6 * 64 * 64,
        max_rows=6,
    )
    rig.checks_every = 20
    jobs_at_random = RandomJobs(rig, seed=7)
    for _ in range(1000):
        jobs_at_random.come()
        jobs_at_random.disturb()
        for _ in range(jobs_at_random.rng.randrange(8)):
            rig.step()
    for job_id in jobs_at_random.requests:
        rig.scheduler.set_paused(job_id, False)
    rig.run()
    assert rig.runner.held == {}
    jobs_at_random.check()


@settings(max_examples=40, deadline=None)
@given(
    others=st.lists(st.tuples(st.sampled_from([16, 32, 64]), st.integers(1, 6)), max_size=6),
    size=st.sampled_from([16, 64]),
    depth=st.integers(1, 2),
    is_shared=st.booleans(),
)
def test_no_image_waits_for_ever(
    others: list[tuple[int, int]], size: int, depth: int, is_shared: bool
) -> None:
    """However many come after it, an image is done within a bound of the work before it."""
    rig = Rig(depth=depth, max_images=3, max_state_bytes=64 * 64, max_rows=2)
    if is_shared:
        rig.scheduler.set_step_budget(0.01)
    for index, (other, num_steps) in enumerate(others):
        rig.submit(f"before{index}", request_of(other, num_steps=num_steps))
    rig.submit("it", request_of(size, num_steps=4))
    num_after = 0
    while not rig.has_ended("it"):
        if num_after < 60:
            rig.submit(f"after{num_after}", request_of(16, num_steps=6))
            num_after += 1
        rig.step()
        assert len(rig.runner.log) < 8 * (10 + sum(num_steps for _, num_steps in others) + 4) + 80
