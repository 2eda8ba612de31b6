"""Memory, time and files of the processes of a server."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import psutil
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


SPENT = "process_cpu_seconds_total"
Times = namedtuple("Times", "user system")
Memory = namedtuple("Memory", "rss")


class FakeProcess:
    """A process with as many seconds as a test gives it; `on_read` runs while it is read."""

    def __init__(self, pid: int, cpu_s: float = 0.0) -> None:
        self.pid, self.cpu_s = pid, cpu_s
        self.family: list[FakeProcess] = []
        self.num_commands_read = 0
        self.on_read: Callable[[], None] = lambda: None

    def children(self, recursive: bool) -> list[FakeProcess]:
        return list(self.family)

    def cmdline(self) -> list[str]:
        self.num_commands_read += 1
        return ["python", "-m", "triptych.engine_process"]

    def create_time(self) -> float:
        return 1.0

    def oneshot(self) -> Any:
        return nullcontext()

    def cpu_times(self) -> Times:
        self.on_read()
        return Times(self.cpu_s, 0.0)

    def memory_info(self) -> Memory:
        return Memory(1)

    def num_fds(self) -> int:
        return 1

    num_threads = num_fds


@pytest.fixture
def engine() -> FakeProcess:
    return FakeProcess(-2, cpu_s=5.0)


@pytest.fixture
def collector(engine: FakeProcess) -> ProcessCollector:
    """A collector over a supervisor with one engine."""
    collector = ProcessCollector()
    root = FakeProcess(-1)
    root.family = [engine]
    collector._root = root  # type: ignore[assignment]
    return collector


def test_readers_take_turns_and_count_a_process_once(
    collector: ProcessCollector, engine: FakeProcess
) -> None:
    assert values(collector)[SPENT]["engine"] == 5.0
    second = threading.Thread(target=collector.read)

    def end_while_a_second_reader_comes() -> None:
        collector._root.family = []  # type: ignore[attr-defined]
        second.start()
        second.join(0.1)  # over at once if it need not wait

    engine.on_read = end_while_a_second_reader_comes
    collector.read()
    second.join()
    for _ in range(2):
        assert values(collector)[SPENT]["engine"] == 5.0


def test_a_live_process_that_cannot_be_read_is_counted_once(
    collector: ProcessCollector, engine: FakeProcess
) -> None:
    def deny() -> None:
        raise psutil.AccessDenied(engine.pid)

    assert values(collector)[SPENT]["engine"] == 5.0
    engine.on_read = deny
    assert values(collector)[SPENT]["engine"] == 5.0
    engine.on_read, engine.cpu_s = lambda: None, 6.0
    assert values(collector)[SPENT]["engine"] == 6.0


def test_the_command_line_of_a_process_is_read_once(
    collector: ProcessCollector, engine: FakeProcess
) -> None:
    for _ in range(3):
        collector.read()
    assert engine.num_commands_read == 1
