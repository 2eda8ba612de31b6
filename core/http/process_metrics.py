"""`process_*` of `/metrics`: memory, time and files of all processes of the server.

Owns the kinds of processes and the sums. The processes are found from the one that serves HTTP: its
supervisor's tree, or its own where there is none. Knows nothing of their work.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import NamedTuple

import psutil
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from triptych.core.process.metric_table import FAMILIES

_MODULE = re.compile(r"triptych\.(api|engine|rank)_process$")
_ROOT = "supervisor"


class _Use(NamedTuple):
    """The use of one process, or of all processes of a kind."""

    resident_bytes: int = 0
    num_fds: int = 0
    num_threads: int = 0
    started_s: float = float("inf")

    def plus(self, other: _Use) -> _Use:
        return _Use(
            self.resident_bytes + other.resident_bytes,
            self.num_fds + other.num_fds,
            self.num_threads + other.num_threads,
            min(self.started_s, other.started_s),
        )


class ProcessCollector(Collector):
    """Yields what the last `read` found."""

    def __init__(self) -> None:
        own = psutil.Process()
        parent = own.parent() if kind_of(own.cmdline()) == "api" else None
        self._root = parent or own
        self._own_pid = own.pid
        self._kinds: dict[tuple[int, float], str] = {}
        self._cpu_s: dict[tuple[int, float], float] = {}
        self._total_cpu_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._values = self._by_name({})

    def read(self) -> None:
        """Read the use of all processes; takes milliseconds. Threads take turns."""
        with self._lock:
            self._values = self._by_name(self._read())

    def _read(self) -> dict[str, _Use]:
        uses: dict[str, _Use] = {}
        alive: set[tuple[int, float]] = set()
        for process in (self._root, *self._root.children(recursive=True)):
            try:
                key = process.pid, process.create_time()
                alive.add(key)  # also if the rest cannot be read this time
                if key not in self._kinds:
                    self._kinds[key] = self._kind(process)
                use, cpu_s = _use_of(process)
            except psutil.Error:  # it has ended meanwhile, for instance
                continue
            kind = self._kinds[key]
            uses[kind] = uses.get(kind, _Use()).plus(use)
            added_s = cpu_s - self._cpu_s.get(key, 0.0)
            self._total_cpu_s[kind] = self._total_cpu_s.get(kind, 0.0) + added_s
            self._cpu_s[key] = cpu_s
        for key in self._kinds.keys() - alive:
            del self._kinds[key]
            self._cpu_s.pop(key, None)
        return uses

    def _by_name(self, uses: dict[str, _Use]) -> dict[str, dict[str, float]]:
        return {
            "process_resident_memory_bytes": {k: u.resident_bytes for k, u in uses.items()},
            "process_open_fds": {k: u.num_fds for k, u in uses.items()},
            "process_threads": {k: u.num_threads for k, u in uses.items()},
            "process_start_time_seconds": {k: u.started_s for k, u in uses.items()},
            "process_cpu_seconds_total": dict(self._total_cpu_s),
        }

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        for name, by_kind in self._values.items():
            known = FAMILIES[name]
            family = Metric(name.removesuffix("_total"), known.help, known.kind)
            for kind, value in by_kind.items():
                family.add_sample(name, {"process": kind}, value)
            yield family

    def describe(self) -> list[Metric]:
        """Return no families, so that registering reads no process."""
        return []

    def _kind(self, process: psutil.Process) -> str:
        if process.pid == self._own_pid:
            return "api"
        return _ROOT if process.pid == self._root.pid else kind_of(process.cmdline())


def kind_of(command: list[str]) -> str:
    """Return the kind of a process by its command line."""
    for word in command:
        match = _MODULE.search(word)
        if match is not None:
            return match[1]
    return "helper"


def _use_of(process: psutil.Process) -> tuple[_Use, float]:
    """Return the use of a process now, and the seconds of the processor since its start."""
    with process.oneshot():
        times = process.cpu_times()
        use = _Use(
            resident_bytes=process.memory_info().rss,
            num_fds=process.num_fds(),
            num_threads=process.num_threads(),
            started_s=process.create_time(),
        )
    return use, times.user + times.system
