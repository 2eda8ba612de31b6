"""How many processor cores this process may really use.

Owns the count: affinity, cores rather than hardware threads, and a container's CPU quota. Knows
nothing of what the threads do.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def num_usable_cores(quota: Path = _CGROUP_QUOTA) -> int:
    """Cores to compute on; more threads than these only take turns."""
    num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    num_cores = psutil.cpu_count(logical=False) or 1
    return max(1, min(num_threads or num_cores, num_cores, _quota_cores(quota)))


def _quota_cores(quota: Path) -> int:
    """What the enclosing cgroup (version 2) allows; without a quota, a huge number."""
    try:
        allowed_us, period_us = quota.read_text().split()
        return math.ceil(int(allowed_us) / int(period_us))
    except (OSError, ValueError):  # no such file, or "max"
        return 2**31
