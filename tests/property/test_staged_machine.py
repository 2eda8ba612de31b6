"""Random lives of jobs in stages: nothing is lost, reordered, leaked or starved."""

from __future__ import annotations

import math

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

from support.staged_world import Request, Rig

UNITS = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
TARGETS = st.sampled_from([0.05, 0.5, 3.0, math.inf])


class StagedMachine(RuleBasedStateMachine):
    """Jobs come, pause, go on, are cancelled and fail while steps begin and end."""

    jobs = Bundle("jobs")

    @initialize(
        max_rows=st.integers(1, 3),
        max_started=st.integers(1, 4),
        units_per_job=st.integers(1, 3),
        max_fit=st.sampled_from([1, 10_000]),
    )
    def start(self, max_rows: int, max_started: int, units_per_job: int, max_fit: int) -> None:
        self.rig = Rig(
            max_fit=max_fit, max_rows=max_rows, max_started=max_started, units_per_job=units_per_job
        )
        self.requests: dict[str, Request] = {}
        self.cancelled: set[str] = set()

    @rule(target=jobs, units=UNITS, target_s=TARGETS, fails=st.booleans())
    def submit(self, units: tuple[int, ...], target_s: float, fails: bool) -> str:
        job_id = f"j{len(self.requests)}"
        fails_at = (len(units) - 1, units[-1]) if fails and len(units) > 2 else None
        self.requests[job_id] = Request(units=units, target_s=target_s, fails_at=fails_at)
        self.rig.submit(job_id, self.requests[job_id])
        return job_id

    @rule(job_id=jobs)
    def cancel(self, job_id: str) -> None:
        if not self.rig.has_ended(job_id):
            self.cancelled.add(job_id)
        self.rig.scheduler.cancel(job_id)
        assert self.rig.has_ended(job_id)

    @rule(job_id=jobs, is_paused=st.booleans())
    def pause(self, job_id: str, is_paused: bool) -> None:
        self.rig.scheduler.set_paused(job_id, is_paused)

    @precondition(lambda self: len(self.rig.in_flight) < 2)
    @rule()
    def launch(self) -> None:
        self.rig.book()

    @precondition(lambda self: self.rig.in_flight)
    @rule()
    def settle(self) -> None:
        self.rig.commit()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "rig"):
            self.rig.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for job_id in self.requests:
            self.rig.scheduler.set_paused(job_id, False)
        self.rig.run()
        assert self.rig.runner.under_way == {}, "nothing is left on the device"
        assert self.rig.scheduler.propose(self.rig.clock()) is None
        for job_id, request in self.requests.items():
            self._check_outputs(job_id, request)

    def _check_outputs(self, job_id: str, request: Request) -> None:
        assert self.rig.has_ended(job_id)
        assert sum(output.is_final for output in self.rig.outputs.outputs[job_id]) == 1
        whole: list[object] = [(job_id, unit) for unit in range(len(request.units))]
        got = self.rig.payloads(job_id)
        if job_id in self.cancelled:
            assert got.pop() == "cancelled"
            assert got == whole[: len(got)]
        elif request.fails_at is None:
            assert got == whole
        else:
            assert self.rig.outputs.error_code(job_id) == "internal_error"
            assert got == whole[: len(got)]


TestStagedMachine = StagedMachine.TestCase
TestStagedMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=40, deadline=None)
@given(
    others=st.lists(st.tuples(st.integers(1, 20), TARGETS), min_size=1, max_size=6),
    depth=st.integers(1, 2),
)
def test_no_job_waits_for_ever(others: list[tuple[int, float]], depth: int) -> None:
    """A file among listeners who are always late: it has its turn within a bound."""
    rig = Rig(depth=depth, max_started=10)
    rig.submit("file", Request(units=(3,)))
    for index, (num_stages, target_s) in enumerate(others):
        rig.submit(f"j{index}", Request(units=(num_stages,) * 50, sound_s=0.01, target_s=target_s))
    waited = longest = 0
    while not rig.has_ended("file"):
        before = len(rig.runner.log)
        rig.step()
        for plan in rig.runner.log[before:]:
            is_served = any(row.job_id == "file" for row in plan.rows)
            waited = 0 if is_served else waited + 1
            longest = max(longest, waited)
    assert longest <= 5 * (len(others) + depth)
