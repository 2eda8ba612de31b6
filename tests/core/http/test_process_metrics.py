"""Memory, time and files of the processes of a server."""

from __future__ import annotations

import subprocess
import sys

import pytest

from triptych.core.http.process_metrics import ProcessCollector, kind_of


def values(collector: ProcessCollector) -> dict[str, dict[str, float]]:
    collector.read()
    return {
        sample.name: {s.labels["process"]: s.value for s in family.samples}
        for family in collector.collect()
        for sample in family.samples
    }


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("python -P -m triptych.engine_process", "engine"),
        ("python -P -m triptych.api_process", "api"),
        ("python -P -m triptych.rank_process", "rank"),
        ("python -P -m triptych.core.media.worker numpy", "helper"),
        ("", "helper"),
    ],
)
def test_processes_are_known_by_their_module(command: str, kind: str) -> None:
    assert kind_of(command.split()) == kind


def test_children_are_counted_and_their_time_is_kept() -> None:
    collector = ProcessCollector()
    busy = "sum(range(3_000_000)); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = values(collector)
        child.communicate(b"\n")
    after = values(collector)
    assert set(during["process_resident_memory_bytes"]) >= {"api", "helper"}
    assert during["process_resident_memory_bytes"]["api"] > 2**20
    assert during["process_open_fds"]["helper"] >= 3
    assert during["process_threads"]["api"] >= 1
    assert during["process_start_time_seconds"]["api"] > 1.6e9
    spent = "process_cpu_seconds_total"
    assert during[spent]["helper"] > 0
    assert after[spent]["helper"] >= during[spent]["helper"], "a counter never falls"


def test_a_family_has_a_help_text() -> None:
    collector = ProcessCollector()
    collector.read()
    assert all(family.documentation for family in collector.collect())
