"""What a start looks for is told to those who listen: hits, misses and their reasons."""

from __future__ import annotations

import logging
import threading

import pytest

from triptych.core.process.lookups import Lookup, listening, looking_for, missed


def test_a_search_is_a_hit_unless_something_inside_missed() -> None:
    heard: list[Lookup] = []
    with listening(heard.append):
        with looking_for("weights", "one"):
            pass
        with looking_for("weights", "two"):
            missed("not in the cache")
            missed("a later reason")
    assert [(each.what, each.is_hit, each.reason) for each in heard] == [
        ("one", True, ""),
        ("two", False, "not in the cache"),
    ]
    assert all(each.seconds >= 0 for each in heard)


def test_a_miss_belongs_to_the_innermost_search() -> None:
    heard: list[Lookup] = []
    with listening(heard.append), looking_for("weights", "outer"):
        with looking_for("native kernels", "inner"):
            missed("not built before")
        missed("fetched")
    assert [(each.what, each.reason) for each in heard] == [
        ("inner", "not built before"),
        ("outer", "fetched"),
    ]


def test_a_search_inside_another_of_its_phase_is_a_part_of_that() -> None:
    heard: list[Lookup] = []
    joined, part = looking_for("weights", "joined"), looking_for("weights", "part")
    with listening(heard.append), joined, part:
        missed("not in the cache")
    assert [(each.what, each.is_hit) for each in heard] == [("joined", False)]


def test_a_broken_promise_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with looking_for("weights", "one") as search:
        search.is_promised = True
        missed("model.safetensors is damaged")
    with looking_for("weights", "unpromised"):
        missed("not in the cache")
    with looking_for("weights", "kept") as search:
        search.is_promised = True
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert record.fields["reason"] == "model.safetensors is damaged"
    assert record.fields["what"] == "one"


def test_what_raises_is_not_told_and_leaves_no_search_behind() -> None:
    heard: list[Lookup] = []
    with listening(heard.append):
        with pytest.raises(ValueError, match="no"), looking_for("weights", "one"):
            raise ValueError("no")
        missed("nobody is looking")
    assert heard == []


def test_other_threads_are_heard_until_the_end() -> None:
    heard: list[Lookup] = []

    def look() -> None:
        with looking_for("weights", "there"):
            pass

    with listening(heard.append):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    look()
    assert [each.what for each in heard] == ["there"]
