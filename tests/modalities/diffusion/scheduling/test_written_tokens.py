"""Tokens that a language model writes of an image are steps of their own. In virtual time."""

from __future__ import annotations

import pytest

from support.denoise_world import FakeImageRunner, Rig, request_of


@pytest.mark.parametrize("max_fit", [1, 9])
def test_tokens_are_written_before_an_image_is_denoised(max_fit: int) -> None:
    """Images that lack some are left out of the others' steps, also after one ran out of memory."""
    rig = Rig(depth=2, runner=FakeImageRunner(max_fit=max_fit))
    rig.submit("plain", request_of(num_steps=2))
    rig.submit("a", request_of(num_steps=2, num_layers=70))
    rig.submit("b", request_of(num_steps=2, num_layers=40))
    rig.run()
    assert {*rig.images("plain"), *rig.images("a"), *rig.images("b")} == {0}
    assert rig.scheduler.stats().counters["images_total"] == 3
    if max_fit == 9:
        written = [[row.num_tokens for row in plan.rows] for plan in rig.plans("write")]
        assert written == [[32, 32], [32, 8], [6]]


def test_a_few_tokens_are_written_while_others_have_work() -> None:
    rig = Rig()
    rig.submit("a", request_of(num_steps=2, num_layers=10))
    rig.scheduler.set_step_budget(0.001)  # a written step takes longer, whatever it writes
    rig.run()
    assert [plan.rows[0].num_tokens for plan in rig.plans("write")] == [1] * 10
