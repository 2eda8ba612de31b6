"""The cycle collector rests during a start, and then looks at what is new alone."""

from __future__ import annotations

import gc

from triptych.core.process.collector import pause_collector, resume_collector


def test_the_collector_rests_and_leaves_what_was_made_meanwhile() -> None:
    try:
        pause_collector()
        assert not gc.isenabled()
        made: list[object] = []
        made.append(made)
        num_frozen = gc.get_freeze_count()
        resume_collector()
        assert gc.isenabled()
        assert gc.get_freeze_count() > num_frozen
        assert not any(each is made for each in gc.get_objects())
    finally:
        gc.enable()  # what is frozen stays so, as after each file of tests
