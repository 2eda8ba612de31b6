"""Whose stage runs next, and what goes out in which order: without a network, in virtual time."""

from __future__ import annotations

import math

import pytest

from support.staged_world import STAGE_S, Request, Rig, order_of
from triptych.core.engine_api.job import JobState
from triptych.core.engine_api.staged_plan import StagedPlan
from triptych.core.errors import InternalError, Overloaded


def test_units_come_in_order_and_the_last_ends_the_job() -> None:
    rig = Rig()
    rig.submit("a", Request(units=(3, 1, 2)))
    rig.run()
    assert rig.payloads("a") == [("a", 0), ("a", 1), ("a", 2)]
    assert rig.has_ended("a")
    assert rig.jobs["a"].state is JobState.FINISHED
    assert rig.num_steps == 6
    assert rig.runner.under_way == {}


def test_one_stage_of_a_unit_at_a_time_however_many_plans_are_in_flight() -> None:
    rig = Rig(depth=2)
    rig.submit("a", Request(units=(3,)))
    assert rig.book()
    assert not rig.book()
    rig.submit("b", Request(units=(3,)))
    assert rig.book()
    rig.run()
    assert rig.has_ended("a")
    assert rig.has_ended("b")


def test_jobs_without_deadlines_take_turns() -> None:
    rig = Rig()
    for name in "abc":
        rig.submit(name, Request(units=(4,)))
    rig.clock.advance(1.0)
    rig.run()
    assert order_of(rig.runner.log)[:6] == ["a", "b", "c", "a", "b", "c"]


def test_the_unit_due_first_goes_first() -> None:
    rig = Rig()
    rig.submit("file", Request(units=(50,)))
    rig.submit("late", Request(units=(3,), target_s=5.0))
    rig.submit("soon", Request(units=(3,), target_s=1.0))
    for _ in range(4):
        rig.step()
    assert order_of(rig.runner.log)[:3] == ["soon"] * 3
    assert rig.payloads("soon") == [("soon", 0)]


def test_time_left_counts_what_such_units_took() -> None:
    """Of two due at once the longer goes first, once it is known how long units take."""
    rig = Rig()
    rig.submit("before", Request(units=(4,)))
    rig.run()
    rig.submit("short", Request(units=(2,), target_s=3.0))
    rig.submit("long", Request(units=(20,), target_s=3.0))
    assert rig.book()
    assert order_of(rig.runner.log)[-1] == "long"


def test_jobs_without_a_deadline_are_not_starved() -> None:
    rig = Rig()
    rig.submit("file", Request(units=(10,)))
    rig.submit("live", Request(units=(40, 40), sound_s=0.1, target_s=0.1))
    for _ in range(50):
        rig.step()
    assert 8 <= order_of(rig.runner.log).count("file") <= 12


def test_speech_goes_no_further_ahead_than_it_may() -> None:
    rig = Rig()
    rig.submit("a", Request(units=(1, 1), sound_s=2.0, target_s=1.0, max_lead_s=0.5))
    rig.step()
    proposal = rig.scheduler.propose(rig.clock())
    assert proposal is not None
    assert proposal.not_before_s == pytest.approx(rig.clock() + 1.5)
    assert rig.scheduler.book(proposal, 9, rig.clock()) is None
    assert not rig.step()
    rig.clock.advance(1.5)
    rig.run()
    assert rig.has_ended("a")


def test_a_cancelled_job_gives_its_place_back_within_one_stage() -> None:
    rig = Rig(depth=2, max_started=1)
    rig.submit("a", Request(units=(100,)))
    rig.submit("b", Request(units=(2,)))
    rig.book()
    rig.scheduler.cancel("a")
    rig.scheduler.cancel("a")
    assert rig.payloads("a") == ["cancelled"]
    assert rig.has_ended("a")
    rig.commit()
    rig.step()
    assert rig.runner.log[1].dropped == ("a",)
    assert set(rig.runner.under_way) == {("b", 0)}
    rig.run()
    assert rig.payloads("b") == [("b", 0)]


def test_what_was_dropped_is_let_go_of_even_if_nothing_else_runs() -> None:
    rig = Rig()
    rig.submit("a", Request(units=(5,)))
    rig.step()
    rig.scheduler.cancel("a")
    rig.run()
    assert rig.runner.log[-1].rows == ()
    assert rig.runner.under_way == {}
    assert rig.scheduler.propose(rig.clock()) is None


def test_a_paused_job_waits_and_goes_on() -> None:
    rig = Rig()
    rig.submit("a", Request(units=(2, 2)))
    rig.scheduler.set_paused("a", True)
    assert not rig.step()
    rig.scheduler.set_paused("a", False)
    rig.run()
    assert rig.has_ended("a")


def test_a_paused_job_does_not_keep_its_place_from_others() -> None:
    rig = Rig(max_started=1)
    rig.submit("slow", Request(units=(3, 3)))
    rig.step()
    rig.scheduler.set_paused("slow", True)
    rig.submit("other", Request(units=(1,)))
    rig.run()
    assert rig.has_ended("other")
    assert rig.payloads("slow") == [("slow", 0)]


def test_units_that_run_ahead_are_sent_in_order() -> None:
    rig = Rig(max_rows=2, units_per_job=2)
    rig.submit("a", Request(units=(4, 1, 1)))
    rig.step()
    assert {row.unit for row in rig.runner.log[0].rows} == {0, 1}
    assert rig.payloads("a") == []
    rig.run()
    assert rig.payloads("a") == [("a", 0), ("a", 1), ("a", 2)]


def test_what_a_stage_yields_goes_out_at_once_and_once() -> None:
    rig = Rig(max_rows=2, units_per_job=2)
    rig.submit("a", Request(units=(3, 2), reports_all=True))
    rig.step()
    assert rig.payloads("a") == [("a", 0, 1)]
    rig.run()
    assert rig.payloads("a") == [("a", 0, 1), ("a", 0, 2), ("a", 0), ("a", 1, 1), ("a", 1)]


def test_a_unit_ahead_of_its_turn_waits_for_units_that_are_due() -> None:
    rig = Rig(depth=2, units_per_job=2)
    rig.submit("a", Request(units=(3, 3), target_s=1.0))
    rig.submit("b", Request(units=(3,), target_s=5.0))
    rig.book()
    rig.book()
    assert order_of(rig.runner.log) == ["a", "b"]


def test_stale_proposal_is_rebuilt_on_booking() -> None:
    rig = Rig()
    rig.submit("a", Request(units=(2,)))
    proposal = rig.scheduler.propose(rig.clock())
    assert proposal is not None
    rig.scheduler.cancel("a")
    assert rig.scheduler.book(proposal, 0, rig.clock()) is None
    rig.submit("b", Request(units=(2,)))
    plan = rig.scheduler.book(proposal, 0, rig.clock())
    assert isinstance(plan, StagedPlan)
    assert [row.job_id for row in plan.rows] == ["b"]


def test_like_stages_share_a_step() -> None:
    rig = Rig(max_rows=3)
    for name in "abcd":
        rig.submit(name, Request(units=(2,)))
    rig.run()
    assert [len(plan.rows) for plan in rig.runner.log] == [3, 3, 1, 1]
    for plan in rig.runner.log:
        assert len({row.job_id for row in plan.rows}) == len(plan.rows)


def test_a_row_that_fails_takes_no_other_with_it() -> None:
    rig = Rig(max_rows=2)
    rig.submit("bad", Request(units=(2,), fails_at=(0, 2)))
    rig.submit("good", Request(units=(2,)))
    rig.run()
    assert rig.outputs.error_code("bad") == "internal_error"
    assert rig.jobs["bad"].state is JobState.FAILED
    assert rig.payloads("good") == [("good", 0)]


def test_rows_that_do_not_fit_together_are_tried_alone() -> None:
    rig = Rig(max_rows=3, max_fit=1)
    for name in "abc":
        rig.submit(name, Request(units=(2,)))
    rig.run()
    assert [len(plan.rows) for plan in rig.runner.log] == [3, 1, 1, 1, 1, 1, 1]
    assert all(rig.payloads(name) == [(name, 0)] for name in "abc")


def test_a_step_that_raises_ends_its_jobs() -> None:
    rig = Rig(max_rows=2)
    rig.submit("a", Request(units=(3,)))
    rig.submit("b", Request(units=(3,)))
    rig.book()
    plan, _ = rig.in_flight[0]
    rig.in_flight[0] = (plan, InternalError("broken"))
    rig.commit()
    assert rig.outputs.error_code("a") == rig.outputs.error_code("b") == "internal_error"
    rig.run()
    assert rig.scheduler.stats().num_running == 0
    assert not rig.runner.under_way, "it was launched before it failed"


def test_a_job_ends_once_where_a_step_with_several_of_its_units_raises() -> None:
    rig = Rig(max_rows=3, units_per_job=3)
    rig.submit("a", Request(units=(2, 2, 2)))
    rig.book()
    plan, _ = rig.in_flight[0]
    assert len(plan.rows) == 3
    rig.in_flight[0] = (plan, InternalError("broken"))
    rig.commit()
    assert rig.outputs.error_code("a") == "internal_error"
    rig.run()
    assert rig.scheduler.stats().num_running == 0


def test_a_full_queue_is_refused() -> None:
    rig = Rig(max_jobs=1)
    rig.submit("a", Request(units=(1,)))
    with pytest.raises(Overloaded):
        rig.submit("b", Request(units=(1,)))


def test_stats_count_what_is_under_way() -> None:
    rig = Rig()
    rig.submit("a", Request(units=(2,)))
    rig.submit("b", Request(units=(2,)))
    rig.step()
    stats = rig.scheduler.stats()
    assert (stats.num_waiting, stats.num_running) == (1, 1)
    rig.run()
    assert rig.scheduler.stats().counters == {"stages_total": 4, "units_total": 2}


def test_due_time_leaves_room_for_remaining_stages() -> None:
    rig = Rig()
    rig.submit("a", Request(units=(4, 4)))
    rig.run()
    rig.submit("b", Request(units=(4,), target_s=2.0))
    proposal = rig.scheduler.propose(rig.clock())
    assert proposal is not None
    # Three more stages follow this one, so it must be over that much before the unit is due.
    assert proposal.due_s == pytest.approx(rig.clock() + 2.0 - 3 * STAGE_S, abs=STAGE_S)
    assert math.isfinite(proposal.due_s)


def _num_rows(rig: Rig) -> list[int]:
    return [len(plan.rows) for plan in rig.runner.log]


def test_a_step_is_no_larger_than_allowed_but_for_one_unit() -> None:
    rig = Rig(max_rows=9, max_started=9, units_per_job=9, max_size=4)
    rig.submit("a", Request(units=(1, 1, 1, 1, 9, 1)))
    rig.step()
    assert _num_rows(rig) == [4], "the next would be too much"
    rig.run()
    assert rig.has_ended("a")


def test_units_share_a_step_only_as_far_as_others_can_wait() -> None:
    rig = Rig(max_rows=9, max_started=9, units_per_job=9)
    rig.submit("a", Request(units=(1,)))
    rig.run()  # it is known now what a unit takes
    rig.scheduler.set_step_budget(2.5 * STAGE_S)
    rig.submit("b", Request(units=(1,) * 5))
    rig.step()
    rig.scheduler.set_step_budget(0.0)
    rig.step()
    assert _num_rows(rig)[1:] == [2, 1], "one is always done"
    rig.scheduler.set_step_budget(math.inf)
    rig.run()
    assert _num_rows(rig)[3:] == [2]
    assert rig.has_ended("b")


def test_a_client_that_is_late_on_many_promises_does_not_delay_another_for_all_of_them() -> None:
    rig = Rig()
    for index in range(30):
        request = Request(units=(4, 4), target_s=0.1)
        rig.submit(f"loud{index}", request, client="loud")
    rig.clock.advance(1.0)
    rig.step()
    rig.submit("light", Request(units=(4, 4), target_s=0.1), client="light")
    started_s = rig.clock()
    while not rig.payloads("light"):
        rig.step()
    assert rig.clock() - started_s <= 0.1 + 3 * 4 * STAGE_S


def test_what_a_client_is_owed_is_behind_what_is_in_time() -> None:
    """Service decides among what is late, or never due; what can be in time goes by its moment."""
    rig = Rig()
    rig.submit("poor", Request(units=(50,)), client="poor")
    rig.submit("rich", Request(units=(3,)), client="rich")
    while not rig.has_ended("rich"):
        rig.step()
    rig.submit("soon", Request(units=(3,), target_s=9.0), client="rich")
    num_before = len(order_of(rig.runner.log))
    for _ in range(4):
        rig.step()
    assert order_of(rig.runner.log)[num_before:].count("soon") == 3
