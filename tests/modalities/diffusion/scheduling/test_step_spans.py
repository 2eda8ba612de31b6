"""A way cut into strides, and where along it an image is shown."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from triptych.modalities.diffusion.plan import PlannedSteps
from triptych.modalities.diffusion.scheduling.step_spans import preview_spans, step_spans

COURSES = st.builds(
    lambda rows, first: PlannedSteps(num_rows=tuple(rows), first_step=min(first, len(rows))),
    rows=st.lists(st.integers(0, 2), max_size=30),
    first=st.integers(0, 8),
)


@given(COURSES)
def test_spans_cover_the_steps_and_compute_at_their_ends_alone(planned: PlannedSteps) -> None:
    step = planned.first_step
    for span in step_spans(planned):
        rows = planned.num_rows[step : span.stop]
        assert len(rows) == span.num_steps > 0
        assert not any(rows[:-1])
        assert rows[-1] == span.num_rows
        assert span.num_rows or span.stop == planned.num_steps
        step = span.stop
    assert step == planned.num_steps


@given(COURSES, st.integers(0, 3))
def test_previews_come_in_order_early_and_never_at_the_end(planned: PlannedSteps, num: int) -> None:
    way = step_spans(planned)
    shown = preview_spans(way, num)
    assert all(before < after for before, after in pairwise(shown))
    assert len(shown) <= num
    assert all(0 <= at < len(way) - 1 for at in shown)
    work = sum(span.num_rows for span in way)
    if shown:
        done = sum(span.num_rows for span in way[: shown[0] + 1])
        assert shown[0] == 0 or done <= work / (num + 2)


def test_a_long_even_way_is_shown_at_even_distances() -> None:
    way = step_spans(PlannedSteps(num_rows=(1,) * 50))
    assert preview_spans(way, 1) == (15,)
    assert preview_spans(way, 3) == (9, 19, 29)
    skipping = step_spans(PlannedSteps(num_rows=(1, 0, 0, 1, 0) * 10 + (1,)))
    assert [skipping[at].stop for at in preview_spans(skipping, 1)] == [16]
