"""The record of what kernels take, and what counts as taking more."""

from __future__ import annotations

from pathlib import Path

from triptych.core.runtime.kernels.triton.resources import (
    Resources,
    load_record,
    regressions,
    save_record,
)

BEFORE = {"a.x": Resources(100, 0, 32768), "b.y": Resources(255, 16, 0)}


def test_a_record_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "resources.json"
    assert load_record(path) == {}
    save_record(BEFORE, path)
    assert load_record(path) == BEFORE
    assert len(path.read_text().splitlines()) == len(BEFORE) + 2


def test_taking_as_much_or_less_is_no_regression() -> None:
    less = {"a.x": Resources(90, 0, 0), "b.y": Resources(255, 8, 0)}
    assert regressions(BEFORE, BEFORE) == regressions(BEFORE, less) == []


def test_a_little_more_is_no_regression_but_a_spill_is() -> None:
    little = {**BEFORE, "a.x": Resources(110, 0, 33000)}
    assert regressions(BEFORE, little) == []
    spilled = {**BEFORE, "a.x": Resources(100, 4, 32768)}
    assert regressions(BEFORE, spilled) == ["a.x: spills 4 bytes, was 0"]


def test_much_more_is_a_regression() -> None:
    more = {"a.x": Resources(120, 0, 65536), "b.y": Resources(255, 16, 1024)}
    assert regressions(BEFORE, more) == [
        "a.x: registers 120, was 100",
        "a.x: shared_bytes 65536, was 32768",
        "b.y: shared_bytes 1024, was 0",
    ]


def test_kernels_come_and_go_with_the_record_alone() -> None:
    now = {"a.x": BEFORE["a.x"], "c.z": Resources(1, 0, 0)}
    assert regressions(BEFORE, now) == ["c.z: not recorded", "b.y: recorded, but missing"]


def test_paged_attention_keeps_its_values_in_registers() -> None:
    """Over pages of numbers and float8, on every target; int8's scales take a few more."""
    paged = {name: each for name, each in load_record().items() if name.startswith("paged_")}
    assert {name.rpartition(" ")[2] for name in paged} >= {"cuda:80", "cuda:90", "hip:gfx942"}
    spilled = {name for name, each in paged.items() if each.spill_bytes}
    assert {name for name in spilled if "_int8 " not in name} == set()
