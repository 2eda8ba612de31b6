"""Images that share steps: order, progress and memory. In virtual time."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from support.denoise_world import (
    NUM_PROMPT_TOKENS,
    FakeImageRunner,
    Rig,
    image_of,
    linear_costs,
    request_of,
)
from triptych.core.engine_api.job import JobState
from triptych.core.errors import InternalError, InvalidRequest, OutOfMemory, Overloaded
from triptych.modalities.diffusion.plan import ImageKey
from triptych.modalities.diffusion.wire import ImageDelta

FLAT = linear_costs(run_s=0.01, row_s=0.0001)
"""An empty device: rows are all but free."""


def test_an_image_is_encoded_denoised_and_decoded() -> None:
    rig = Rig()
    rig.submit("a", request_of(num_steps=3))
    rig.run()
    assert [plan.kind for plan in rig.runner.log] == ["encode", *["denoise"] * 3, "decode"]
    assert rig.deltas("a") == [
        ImageDelta(
            step=3,
            num_steps=3,
            num_computed=3,
            pixels=image_of(ImageKey("a", 0), request_of()),
            num_prompt_tokens=NUM_PROMPT_TOKENS,
            finish_reason="stop",
        )
    ]
    assert rig.jobs["a"].state is JobState.FINISHED
    assert rig.runner.held == {}
    assert rig.scheduler.propose(rig.clock()) is None


def test_a_job_ends_with_the_last_of_its_images() -> None:
    rig = Rig(max_images=2)
    rig.submit("a", request_of(num_images=3))
    rig.run()
    assert set(rig.images("a")) == {0, 1, 2}
    reasons = [delta.finish_reason for delta in rig.deltas("a")]
    assert reasons == [None, None, "stop"]
    assert len({pixels.rgb for pixels in rig.images("a").values()}) == 3


def test_steps_that_skip_are_taken_on_the_way() -> None:
    rig = Rig()
    rig.submit("a", request_of(num_steps=10, interval=4))  # computes 0, 4, 8, 9
    rig.run()
    assert [plan.rows[0].num_steps for plan in rig.plans("denoise")] == [1, 4, 4, 1]
    delta = rig.deltas("a")[-1]
    assert (delta.step, delta.num_steps, delta.num_computed) == (10, 10, 4)
    assert rig.scheduler.stats().counters["denoise_steps_skipped_total"] == 6


def test_an_image_made_of_another_takes_the_rest_of_the_way() -> None:
    rig = Rig()
    rig.submit("a", request_of(num_steps=10, strength=0.4, has_progress=True))
    rig.run()
    steps = [delta.step for delta in rig.deltas("a") if delta.num_steps]
    assert steps == [6, 7, 8, 9, 10, 10]


@pytest.mark.parametrize("depth", [1, 2])
def test_images_at_different_steps_share_every_run(depth: int) -> None:
    """Plans of unlike phases and lengths, four at a time: runs are full until the ends."""
    rig = Rig(depth=depth, max_rows=4, max_images=12, runner=FakeImageRunner(cost_s=FLAT))
    for index in range(12):
        size = {"num_steps": 12 + index % 5, "interval": 1 + index % 4}
        rig.submit(f"j{index}", request_of(**size))
    rig.run()
    num_computed = sum(rig.runner.rows_run)
    assert num_computed == rig.scheduler.stats().counters["denoise_rows_total"]
    assert len(rig.runner.rows_run) <= num_computed / 4 + 4
    assert max(rig.runner.rows_run) == 4
    assert all(rig.has_ended(f"j{index}") for index in range(12))


def test_new_image_joins_the_next_step() -> None:
    rig = Rig()
    rig.submit("old", request_of(num_steps=20))
    for _ in range(5):
        rig.step()
    rig.submit("new", request_of(num_steps=20))
    rig.step()
    rig.step()
    encode, denoise = rig.runner.log[-2:]
    assert [start.key.job_id for start in encode.starts] == ["new"]
    assert {row.key.job_id for row in denoise.rows} == {"old", "new"}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_cancelled_image_is_let_go_of_within_one_step(depth: int) -> None:
    rig = Rig(depth=depth, max_images=1)
    rig.submit("a", request_of(num_steps=20))
    rig.submit("b", request_of(num_steps=2))
    for _ in range(4):
        rig.step()
    before = rig.num_steps
    rig.scheduler.cancel("a")
    rig.scheduler.cancel("a")
    assert rig.deltas("a") == [ImageDelta(finish_reason="cancelled")]
    rig.book()
    plan = rig.runner.log[before]
    assert plan.dropped == (ImageKey("a", 0),)
    assert [start.key.job_id for start in plan.starts] == ["b"]
    rig.run()
    assert rig.has_ended("b")
    assert len(rig.outputs.outputs["a"]) == 1


def test_what_was_dropped_is_let_go_of_even_if_nothing_else_runs() -> None:
    rig = Rig()
    rig.submit("a", request_of())
    rig.step()
    rig.scheduler.cancel("a")
    rig.run()
    assert rig.runner.log[-1].kind == "release"
    assert rig.runner.held == {}


def test_cancelled_waiting_job_holds_nothing() -> None:
    rig = Rig()
    rig.submit("a", request_of())
    rig.scheduler.cancel("a")
    assert not rig.step()


def test_a_slow_reader_is_left_out_and_goes_on_later() -> None:
    rig = Rig()
    rig.submit("slow", request_of(num_steps=3))
    rig.step()
    rig.scheduler.set_paused("slow", True)
    rig.submit("waiting", request_of())
    rig.scheduler.set_paused("waiting", True)
    rig.submit("other", request_of(num_steps=3))
    rig.run()
    assert rig.has_ended("other")
    assert rig.plans("encode")[-1].starts[0].key.job_id == "other"
    assert rig.deltas("slow") == []
    for job_id in ("slow", "waiting", "nobody"):
        rig.scheduler.set_paused(job_id, False)
    rig.run()
    assert rig.has_ended("slow")
    assert rig.has_ended("waiting")


def test_progress_is_sent_once_a_step() -> None:
    rig = Rig()
    rig.submit("a", request_of(num_steps=8, interval=3, has_progress=True))  # 0, 3, 6, 7
    rig.submit("quiet", request_of(num_steps=8))
    rig.run()
    reported = [(delta.step, delta.num_computed) for delta in rig.deltas("a")]
    assert reported == [(0, 0), (0, 0), (1, 1), (4, 2), (7, 3), (8, 4), (8, 4)]
    assert len(rig.deltas("quiet")) == 1


def test_queue_position_is_sent_on_change() -> None:
    rig = Rig(max_images=1)
    for name in "abcd":
        rig.submit(name, request_of(num_steps=2, has_progress=name != "b"))
    rig.scheduler.cancel("c")
    rig.run()

    def positions(job_id: str) -> list[int]:
        reported = [delta.queue_position for delta in rig.deltas(job_id)]
        return [position for position in reported if position >= 0]

    assert positions("a") == [0]
    assert positions("b") == []
    assert positions("c") == [2]
    assert positions("d") == [3, 2, 1, 0]


@pytest.mark.parametrize("num_partials", [1, 2, 3])
@pytest.mark.parametrize(("num_steps", "interval"), [(50, 1), (50, 4), (9, 1)])
def test_previews_are_spread_over_the_work_and_the_first_is_early(
    num_partials: int, num_steps: int, interval: int
) -> None:
    rig = Rig()
    request = request_of(num_steps=num_steps, interval=interval, num_partials=num_partials)
    rig.submit("a", request)
    rig.run()
    *previews, last = rig.deltas("a")
    assert [delta.partial_index for delta in previews] == list(range(num_partials))
    assert all(delta.pixels is not None for delta in previews)
    work = [0, *(delta.num_computed for delta in previews), last.num_computed]
    assert previews[0].num_computed <= 0.34 * last.num_computed
    assert max(after - before for before, after in pairwise(work)) <= 0.75 * last.num_computed
    assert sum(row.has_preview for plan in rig.plans("denoise") for row in plan.rows) == len(
        previews
    )


@pytest.mark.parametrize(("num_steps", "num_previews"), [(1, 0), (2, 1), (4, 3)])
def test_a_short_way_has_fewer_previews(num_steps: int, num_previews: int) -> None:
    rig = Rig()
    rig.submit("a", request_of(num_steps=num_steps, num_partials=3))
    rig.run()
    assert len(rig.deltas("a")) == num_previews + 1


def test_only_so_many_images_run_and_their_state_fits() -> None:
    rig = Rig(max_state_bytes=3 * 64 * 64)
    for index in range(6):
        rig.submit(f"j{index}", request_of(num_steps=4))
    most = 0
    while rig.step():
        most = max(most, len(rig.runner.held))
    assert most == 3
    assert all(rig.has_ended(f"j{index}") for index in range(6))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("client", ["", "another"])
def test_large_images_are_not_starved_by_small_ones(depth: int, client: str) -> None:
    rig = Rig(depth=depth, max_images=4, max_state_bytes=4 * 64 * 64)
    rig.submit("s0", request_of(num_steps=3), client=client)
    rig.submit("large", request_of(128, num_steps=3))
    num_submitted = 1
    while not rig.has_ended("large"):
        if num_submitted < 60 and rig.num_steps % 2:
            rig.submit(f"s{num_submitted}", request_of(num_steps=3), client=client)
            num_submitted += 1
        rig.step()
    assert num_submitted < 40


def test_small_images_pass_a_large_one_that_has_no_room_yet() -> None:
    rig = Rig(max_state_bytes=5 * 64 * 64)
    for index in range(2):
        rig.submit(f"first{index}", request_of(num_steps=30))
    rig.submit("large", request_of(128, num_steps=2))
    rig.submit("small", request_of(num_steps=2))
    rig.run()
    encoded = [[start.key.job_id for start in plan.starts] for plan in rig.plans("encode")]
    assert encoded == [["first0", "first1", "small"], ["large"]]


def test_what_can_never_be_generated_is_refused() -> None:
    rig = Rig(max_state_bytes=64 * 64, max_jobs=1)
    with pytest.raises(InvalidRequest):
        rig.submit("large", request_of(128))
    with pytest.raises(InvalidRequest):
        rig.submit("odd", request_of(1 << 20))
    with pytest.raises(InvalidRequest):
        rig.submit("none", request_of(num_images=0))
    rig.submit("a", request_of())
    with pytest.raises(Overloaded):
        rig.submit("b", request_of())
    rig.run()
    assert rig.has_ended("a")


def test_the_earliest_deadline_goes_first() -> None:
    rig = Rig(max_rows=1)
    rig.submit("late", request_of(num_steps=5))
    rig.submit("soon", request_of(num_steps=5), deadline_s=rig.clock() + 9.0)
    rig.run()
    order = [plan.rows[0].key.job_id for plan in rig.plans("denoise")]
    assert order == ["soon"] * 5 + ["late"] * 5


def test_sizes_share_a_step_but_no_run() -> None:
    rig = Rig(runner=FakeImageRunner(cost_s=FLAT))
    rig.submit("small", request_of(64, num_steps=2))
    rig.submit("large", request_of(128, num_steps=2))
    rig.submit("other", request_of(64, num_steps=2))
    rig.run()
    assert len(rig.plans("denoise")) == 2
    assert rig.runner.rows_run == [2, 1, 2, 1]


def test_both_branches_of_guidance_count_as_rows() -> None:
    rig = Rig(max_rows=4, runner=FakeImageRunner(cost_s=FLAT))
    for index in range(3):
        rig.submit(f"j{index}", request_of(num_steps=2, guidance_scale=4.0))
    rig.run()
    assert rig.runner.rows_run == [4, 4, 2, 2]


def test_a_full_device_generates_one_after_the_other() -> None:
    """Where rows cost more together than apart, runs become single rows once that was seen."""
    costs = linear_costs(run_s=-0.002, row_s=0.01)
    rig = Rig(runner=FakeImageRunner(cost_s=costs))
    for index in range(4):
        rig.submit(f"j{index}", request_of(num_steps=30))
    rig.run()
    assert rig.runner.rows_run == [4, 4] + [1] * 112


def test_an_empty_device_is_filled_again_after_a_try() -> None:
    rig = Rig(runner=FakeImageRunner(cost_s=FLAT))
    for index in range(4):
        rig.submit(f"j{index}", request_of(num_steps=30))
    rig.run()
    assert rig.runner.rows_run[:5] == [4, 4, 1, 1, 4]
    assert len(rig.runner.rows_run) <= 33


def test_large_images_are_decoded_one_by_one_and_small_ones_together() -> None:
    rig = Rig()
    for index in range(2):
        rig.submit(f"large{index}", request_of(1024, num_steps=2))
    for index in range(4):
        rig.submit(f"small{index}", request_of(256, num_steps=2))
    rig.run()
    decoded = [[row.key.job_id for row in plan.rows] for plan in rig.plans("decode")]
    assert decoded == [["large0"], ["large1"], [f"small{index}" for index in range(4)]]


def test_where_others_have_work_steps_are_short_and_many() -> None:
    """10 ms a row, and 12 ms between the others' steps: one row, one text, one image."""
    rig = Rig()
    rig.scheduler.set_step_budget(0.012)
    for index in range(4):
        rig.submit(f"j{index}", request_of(size=64 + 64 * (index % 2), num_steps=5))
    rig.run()
    assert all(len(plan.rows) + len(plan.starts) == 1 for plan in rig.runner.log)
    rig.scheduler.set_step_budget(0.035)
    for index in range(4, 8):
        rig.submit(f"j{index}", request_of(num_steps=5))
    rig.run()
    assert max(rig.runner.rows_run) == 3
    rig.scheduler.set_step_budget(math.inf)
    for index in range(8, 12):
        rig.submit(f"j{index}", request_of(num_steps=5))
    rig.run()
    assert max(rig.runner.rows_run) == 4


def test_what_fails_alone_ends_its_job_and_no_other() -> None:
    runner = FakeImageRunner(broken={ImageKey("b", 1): 3, ImageKey("c", 0): -1})
    rig = Rig(depth=2, runner=runner)
    rig.submit("a", request_of())
    rig.submit("b", request_of(num_images=2))
    rig.submit("c", request_of(num_images=2))
    rig.run()
    assert rig.outputs.error_code("b") == rig.outputs.error_code("c") == "internal_error"
    assert rig.outputs.error_code("a") is None
    assert set(rig.images("a")) == {0}
    assert runner.held == {}


def test_a_step_that_raises_ends_its_jobs() -> None:
    rig = Rig(runner=FakeImageRunner(errors={2: InternalError("boom")}))
    rig.submit("a", request_of())
    rig.submit("b", request_of())
    rig.step()
    rig.submit("later", request_of())
    rig.scheduler.set_paused("later", True)
    rig.step()
    assert rig.outputs.error_code("a") == rig.outputs.error_code("b") == "internal_error"
    rig.scheduler.set_paused("later", False)
    rig.run()
    assert rig.images("later")
    assert rig.runner.held == {}


@pytest.mark.parametrize("failing", [1, 2])
def test_a_step_that_raises_ends_a_job_of_several_images_once(failing: int) -> None:
    rig = Rig(runner=FakeImageRunner(errors={failing: InternalError("boom")}))
    rig.submit("a", request_of(num_images=3))
    rig.run()
    assert rig.outputs.error_code("a") == "internal_error"
    assert rig.runner.held == {}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_fit", [1, 2, 3])
def test_steps_that_do_not_fit_are_made_smaller(depth: int, max_fit: int) -> None:
    rig = Rig(depth=depth, runner=FakeImageRunner(max_fit=max_fit))
    for index in range(7):
        rig.submit(f"j{index}", request_of(num_steps=6, num_partials=2))
    rig.run()
    for index in range(7):
        assert rig.images(f"j{index}"), "is drawn all the same"
        shown = [delta.partial_index for delta in rig.deltas(f"j{index}")]
        assert shown == [0, 1, -1], "no preview is sent twice"
    assert rig.scheduler.stats().counters["image_retries_total"] > 0
    assert rig.runner.held == {}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_begun_in_a_gap_goes_on_from_there_where_memory_ran_out(depth: int) -> None:
    """The first half skipped two steps and asked a branch; the second fails beside another's."""
    rig = Rig(depth=depth)
    for name in ("a", "b"):
        rig.submit(name, request_of(num_steps=8, interval=3, guidance_scale=4.0, has_progress=True))
    while not any(
        row.evaluates_ahead and row.num_steps for plan in rig.runner.log for row in plan.rows
    ):
        rig.scheduler.set_step_budget(0.001)
        rig.step()
    rig.scheduler.set_step_budget(math.inf)
    rig.runner.errors[len(rig.runner.log) + 1] = OutOfMemory("for once")
    rig.run()
    assert rig.scheduler.stats().counters["image_retries_total"] == 2
    for name in ("a", "b"):
        assert rig.images(name)
        assert rig.deltas(name)[-1].num_computed == 4
    assert rig.scheduler.stats().counters["denoise_rows_total"] >= 16
    assert rig.runner.held == {}


@pytest.mark.parametrize("act", ["cancel", "pause"])
def test_an_image_may_end_or_rest_between_the_halves_of_a_step(act: str) -> None:
    rig = Rig()
    rig.submit("a", request_of(guidance_scale=4.0))
    rig.scheduler.set_step_budget(0.001)
    while not any(row.evaluates_ahead for plan in rig.runner.log for row in plan.rows):
        rig.step()
    if act == "cancel":
        rig.scheduler.cancel("a")
    else:
        rig.scheduler.set_paused("a", True)
        rig.run()
        assert not rig.has_ended("a")
        rig.scheduler.set_paused("a", False)
    rig.run()
    assert bool(rig.images("a")) == (act == "pause")
    assert rig.runner.held == {}


def test_steps_become_large_again_when_enough_images_were_done() -> None:
    rig = Rig(runner=FakeImageRunner(cost_s=FLAT, errors={2: OutOfMemory("for once")}))
    for index in range(60):
        rig.submit(f"j{index}", request_of(num_steps=3))
    rig.run()
    rows = rig.runner.rows_run
    assert max(rows[:4]) == 4
    assert max(rows) == 8
    assert all(rig.images(f"j{index}") for index in range(60))


@pytest.mark.parametrize("number", [1, 2, 5])
def test_an_image_that_does_not_even_fit_alone_fails(number: int) -> None:
    rig = Rig(runner=FakeImageRunner(errors={number: OutOfMemory("too large")}))
    rig.submit("a", request_of(num_steps=3))
    rig.run()
    assert rig.outputs.error_code("a") == OutOfMemory.code
    assert rig.runner.held == {}


def test_same_calls_same_plans() -> None:
    def plans() -> list[object]:
        rig = Rig(depth=2, max_images=5, max_rows=3)
        for index in range(9):
            size = {"num_steps": 4 + index, "interval": 1 + index % 3, "num_partials": index % 3}
            rig.submit(f"j{index}", request_of(64 * (1 + index % 2), **size))
            rig.step()
            if index == 6:
                rig.scheduler.cancel("j2")
        rig.run()
        return list(rig.runner.log)

    assert plans() == plans()


def test_counts_for_metrics() -> None:
    rig = Rig(max_images=2)
    rig.submit("a", request_of(num_images=2, num_steps=3))
    rig.submit("b", request_of(num_images=2, num_steps=3))
    rig.step()
    stats = rig.scheduler.stats()
    assert (stats.num_waiting, stats.num_running) == (1, 1)
    assert {"backlog_seconds", "job_seconds"} < stats.gauges.keys()
    assert {name: n for name, n in stats.gauges.items() if "seconds" not in name} == {
        "jobs_paused": 0,
        "images_waiting": 2,
        "images_running": 2,
        "image_state_bytes": 2 * 64 * 64,
    }
    rig.run()
    assert rig.scheduler.stats().counters == {
        "images_total": 4,
        "image_retries_total": 0,
        "denoise_runs_total": len(rig.runner.rows_run),
        "denoise_rows_total": 12,
        "denoise_steps_computed_total": 12,
        "denoise_steps_skipped_total": 0,
    }
