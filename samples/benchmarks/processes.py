"""Resources that a server and its child processes use: CPU time, memory, descriptors, threads.

Owns the reading of `/proc` by `psutil`, and detection of other processes that used the machine
at the same time. Knows nothing of the measurements.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil


def tree(pid: int) -> list[psutil.Process]:
    """A process and its live descendants, the oldest first; empty if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


@dataclass(frozen=True, slots=True)
class Usage:
    """A snapshot of one process. `pss_bytes` counts shared pages proportionally."""

    rss_bytes: int
    pss_bytes: int
    num_descriptors: int
    num_threads: int


def usage(process: psutil.Process) -> Usage | None:
    """A snapshot of `process`; None if it has just ended."""
    try:
        with process.oneshot():
            memory = process.memory_full_info()
            return Usage(
                rss_bytes=memory.rss,
                pss_bytes=memory.pss,
                num_descriptors=process.num_fds(),
                num_threads=process.num_threads(),
            )
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def role_of(process: psutil.Process, roles: Mapping[str, str]) -> str:
    """The first of `roles` whose key is a word of the process's command line, else its name."""
    try:
        words = process.cmdline()
        return next((role for key, role in roles.items() if key in words), process.name())
    except psutil.NoSuchProcess:
        return ""


def busy_s(pid: int) -> float:
    """CPU seconds of a process tree, including children that have ended."""
    total_s = 0.0
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total_s += times.user + times.system + times.children_user + times.children_system
    return total_s


@dataclass(slots=True)
class Neighbours:
    """How many cores other processes used on average, steal time included.

    `own_s` are our own CPU seconds.
    """

    num_cores: float = 0.0
    own_s: float = 0.0


@contextlib.contextmanager
def watch_neighbours(*pids: int) -> Iterator[Neighbours]:
    """Measure the machine's CPU use in the block outside the process trees of `pids`."""
    found = Neighbours()
    started_s, ours_s, all_s = time.perf_counter(), sum(map(busy_s, pids)), _machine_busy_s()
    yield found
    found.own_s = sum(map(busy_s, pids)) - ours_s
    others_s = _machine_busy_s() - all_s - found.own_s
    found.num_cores = max(others_s, 0.0) / (time.perf_counter() - started_s)


def _machine_busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)
