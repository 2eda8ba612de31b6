"""The number of processor cores that this process may use.

Owns the count: affinity and cpusets, cores rather than hardware threads, and the CPU quotas of the
enclosing control groups, version 1 or 2. Knows nothing of what the threads do. The count is fixed
at start: with the native kernels' pool, fewer threads gained nothing on a machine with other load
(docs/benchmarks/contention.md).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_PROCESS = Path("/proc/self")
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_LEAST_SHARE = 0.2
"""The fraction of a core above which a quota gets one more thread. Two threads on a quota of 1.5
cores made 1.3 times as many tokens as one, although they are throttled; on a quota of 1.0, 0.9
times."""


@dataclass(frozen=True, slots=True)
class UsableCores:
    """The cores available for computing. More threads than `count` only take turns."""

    num_cores: int
    """Cores in this process's affinity mask."""
    quota: float
    """CPU quota in cores; infinite without a quota."""

    @property
    def count(self) -> int:
        """The number of threads to compute with."""
        if math.isinf(self.quota):
            return self.num_cores
        return max(1, min(self.num_cores, math.ceil(self.quota - _LEAST_SHARE)))

    def __str__(self) -> str:
        """The reason for `count`, for the log."""
        quota = "" if math.isinf(self.quota) else f", a CPU quota of {self.quota:g}"
        return f"cores to run on: {self.num_cores}{quota}"


def usable_cores(process: Path = _PROCESS) -> UsableCores:
    """Read affinity, topology and control groups; `process` is a folder like /proc/self."""
    quotas = (_quota(folder) for folder in _cpu_groups(process))
    if hasattr(os, "sched_getaffinity"):
        num_cores = len({_siblings(cpu) for cpu in os.sched_getaffinity(0)})
    else:
        num_cores = psutil.cpu_count(logical=False) or 1
    return UsableCores(num_cores, min(quotas, default=math.inf))


def num_usable_cores() -> int:
    """The number of threads to compute with."""
    return usable_cores().count


def _siblings(cpu: int) -> str:
    """The hardware threads of a CPU's core, as one string; an unknown CPU counts as a core."""
    try:
        return Path(_SIBLINGS.format(cpu)).read_text().strip()
    except OSError:
        return str(cpu)


def _cpu_groups(process: Path) -> Iterator[Path]:
    """The folders of this process's control groups and of all their ancestors."""
    try:
        groups = (process / "cgroup").read_text().splitlines()
        mounts = (process / "mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return
    fields = (line.split(":", 2) for line in groups)
    paths = {kind: path for _, kinds, path in fields for kind in kinds.split(",")}
    for mount in mounts:
        place, _, kind = mount.partition(" - ")
        root, point = place.split()[3:5]
        version, _, options = kind.split(maxsplit=2)
        name = {"cgroup2": "", "cgroup": "cpu"}.get(version)
        if name not in paths or (name and name not in options.split(",")):
            continue
        # Within a container, the path may be that of the host and the mount begin further down.
        path = Path(paths[name])
        inner = path.relative_to(root) if path.is_relative_to(root) else Path()
        yield from (Path(point, *inner.parts[:depth]) for depth in range(len(inner.parts) + 1))


def _quota(group: Path) -> float:
    """The CPU quota of a control group, in cores."""
    try:
        if (group / "cpu.max").exists():
            allowed_us, period_us = (group / "cpu.max").read_text().split()
        else:
            allowed_us = (group / "cpu.cfs_quota_us").read_text()
            period_us = (group / "cpu.cfs_period_us").read_text()
        quota = int(allowed_us) / int(period_us)
    except (OSError, ValueError):  # the outermost group has no such file; "max" is no number
        return math.inf
    return quota if quota > 0 else math.inf  # -1: no quota
