"""Autoscaling of replicas by queued seconds of work and cache pages in use.

Owns the rule, which Ray Serve's autoscaler calls in its own process. Imports nothing of Ray.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

QUEUE_S = "queue_seconds"
PAGE_USE = "page_use"
MAX_PAGE_USE = 0.85
"""Above this share, rows begin to be preempted."""


def replicas_needed(
    queue_s: Mapping[Any, float], page_use: Mapping[Any, float], *, target_queue_s: float
) -> int:
    """Return the number of replicas at which each would have `target_queue_s` of queued work."""
    by_queue = sum(queue_s.values()) / target_queue_s
    by_pages = sum(page_use.values()) / MAX_PAGE_USE
    return max(1, math.ceil(max(by_queue, by_pages)))


class QueueScaling:
    """Ray Serve's autoscaling policy. Serve keeps what it returns within `min..max`."""

    def __init__(self, target_queue_s: float) -> None:
        self._target_queue_s = target_queue_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas for the reported load, and an empty policy state."""
        found: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        if QUEUE_S not in found:
            return context.target_num_replicas, {}
        needed = replicas_needed(
            found[QUEUE_S], found.get(PAGE_USE, {}), target_queue_s=self._target_queue_s
        )
        return needed, {}
