"""Lookups of a start are reported to listeners: hits, misses and their reasons."""

from __future__ import annotations

import logging
import threading

import pytest

from triptych.core.process.lookups import Lookup, listen_to_lookups, record_miss, timed_lookup


def test_a_search_is_a_hit_unless_something_inside_missed() -> None:
    heard: list[Lookup] = []
    with listen_to_lookups(heard.append):
        with timed_lookup("weights", "one"):
            pass
        with timed_lookup("weights", "two"):
            record_miss("not in the cache")
            record_miss("a later reason")
    assert [(each.what, each.is_hit, each.reason) for each in heard] == [
        ("one", True, ""),
        ("two", False, "not in the cache"),
    ]
    assert all(each.seconds >= 0 for each in heard)


def test_a_miss_belongs_to_the_innermost_search() -> None:
    heard: list[Lookup] = []
    with listen_to_lookups(heard.append), timed_lookup("weights", "outer"):
        with timed_lookup("native kernels", "inner"):
            record_miss("not built before")
        record_miss("fetched")
    assert [(each.what, each.reason) for each in heard] == [
        ("inner", "not built before"),
        ("outer", "fetched"),
    ]


def test_a_search_inside_another_of_its_phase_is_a_part_of_that() -> None:
    heard: list[Lookup] = []
    joined, part = timed_lookup("weights", "joined"), timed_lookup("weights", "part")
    with listen_to_lookups(heard.append), joined, part:
        record_miss("not in the cache")
    assert [(each.what, each.is_hit) for each in heard] == [("joined", False)]


def test_a_broken_promise_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with timed_lookup("weights", "one") as search:
        search.is_promised = True
        record_miss("model.safetensors is damaged")
    with timed_lookup("weights", "unpromised"):
        record_miss("not in the cache")
    with timed_lookup("weights", "kept") as search:
        search.is_promised = True
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert record.fields["reason"] == "model.safetensors is damaged"
    assert record.fields["what"] == "one"


def test_a_lookup_that_raises_is_not_reported_and_leaves_no_search() -> None:
    heard: list[Lookup] = []
    with listen_to_lookups(heard.append):
        with pytest.raises(ValueError, match="no"), timed_lookup("weights", "one"):
            raise ValueError("no")
        record_miss("nobody is looking")
    assert heard == []


def test_other_threads_are_heard_until_the_end() -> None:
    heard: list[Lookup] = []

    def look() -> None:
        with timed_lookup("weights", "there"):
            pass

    with listen_to_lookups(heard.append):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    look()
    assert [each.what for each in heard] == ["there"]
