"""Images of several clients: places and runs are shared between them. In virtual time."""

from __future__ import annotations

import pytest

from support.denoise_world import Rig, request_of
from triptych.core.engine_api.job import JobState


def finished(rig: Rig) -> list[str]:
    """Jobs in the order in which they are over."""
    order: list[str] = []
    while rig.step():
        order += [
            name
            for name, job in rig.jobs.items()
            if job.state is JobState.FINISHED and name not in order
        ]
    return order


@pytest.mark.parametrize("depth", [1, 2])
def test_a_client_that_comes_later_waits_for_one_place_only(depth: int) -> None:
    rig = Rig(depth=depth, max_images=2, max_rows=2)
    for index in range(8):
        rig.submit(f"loud{index}", request_of(), client="loud")
    rig.step()
    rig.submit("light", request_of(), client="light", deadline_s=rig.now_s + 900)
    assert finished(rig).index("light") <= 3  # one more begins with it


def test_deadlines_of_one_client_do_not_come_before_another() -> None:
    rig = Rig(max_images=1, max_rows=1)
    for index in range(4):
        deadline_s = rig.now_s + 10
        rig.submit(f"loud{index}", request_of(), client="loud", deadline_s=deadline_s)
    rig.step()
    rig.submit("light", request_of(), client="light")
    assert finished(rig)[1] == "light"


def test_runs_are_shared_between_clients() -> None:
    rig = Rig(max_images=8, max_rows=2)
    for index in range(7):
        rig.submit(f"loud{index}", request_of(num_steps=60), client="loud")
    rig.submit("light", request_of(num_steps=60), client="light")
    while rig.step() and rig.jobs["light"].state is not JobState.FINISHED:
        pass
    rows = [row.key.job_id for plan in rig.plans("denoise") for row in plan.rows]
    assert rows.count("light") == 60
    assert len(rows) <= 2 * 60 + 4, "half of the rows are those of the one image"


def test_one_client_generates_in_order() -> None:
    rig = Rig(max_images=1)
    for index in range(4):
        rig.submit(f"{index}", request_of(), client="a")
    assert finished(rig) == list("0123")
