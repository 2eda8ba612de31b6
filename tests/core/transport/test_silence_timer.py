"""Silence is counted in ticks of the watcher, never longer than by the clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from triptych.core.transport.silence_timer import SilenceTimer

INTERVAL_S = 0.25


@given(st.lists(st.one_of(st.none(), st.floats(INTERVAL_S, 100.0))))
def test_it_is_never_longer_than_by_the_clock_and_ends_when_it_is_broken(
    turns: list[float | None],
) -> None:
    """A turn comes at least an interval after the one before; `None` is a word of the other."""
    silence, elapsed_s = SilenceTimer(INTERVAL_S), 0.0
    for gap_s in turns:
        if gap_s is None:
            silence.reset()
            elapsed_s = 0.0
        else:
            silence.tick()
            elapsed_s += gap_s
        assert 0 <= silence.elapsed_s <= elapsed_s


def test_one_long_gap_of_the_watcher_is_one_turn() -> None:
    silence = SilenceTimer(INTERVAL_S)
    for _ in range(5):
        silence.tick()
    assert silence.elapsed_s == 4 * INTERVAL_S
    silence.reset()
    assert silence.elapsed_s == 0
