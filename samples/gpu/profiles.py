"""What the device does during some work: its longest kernels, and the gaps between kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from place import Place, Record, record
from torch.profiler import ProfilerActivity, profile

NUM_KERNELS = 30
GAP_US = 2.0
"""Shorter pauses are the device's own between two kernels."""
Span = tuple[float, float, str]
"""Begin and end in microseconds, and the name of a kernel or copy."""


def profiler(place: Place) -> Any:
    """A context that records kernels, or on a CPU operators; used once."""
    if place.is_gpu:
        return profile(activities=[ProfilerActivity.CUDA])
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread)


def shown(name: str, profiled: Any, num_steps: int) -> Iterator[Record]:
    """A record of the whole, and one of the kernels that took longest, for each of the steps.

    `num_steps` is the number of steps that ran inside.
    """
    spans = _spans(profiled)
    if not spans:
        yield record(name, "the profile has no kernels")
        return
    yield record(name, num_steps=num_steps, **totals(spans, num_steps))
    lengths, counts = Counter[str](), Counter[str]()
    for begin, end, kernel in spans:
        lengths[kernel] += end - begin
        counts[kernel] += 1
    yield record(
        f"{name}, kernels",
        **{
            kernel[:80]: f"{length / num_steps:.1f} us, {counts[kernel] / num_steps:.4g} times"
            for kernel, length in lengths.most_common(NUM_KERNELS)
        },
    )


def totals(spans: Sequence[Span], num_steps: int) -> dict[str, float]:
    """Microseconds a step in which the device worked and waited, and the longest waits."""
    busy, gaps, until = 0.0, [], spans[0][0]
    for begin, end, _ in spans:
        if begin - until > GAP_US:
            gaps.append(begin - until)
        busy += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return {
        "span_us": (until - spans[0][0]) / num_steps,
        "busy_us": busy / num_steps,
        "num_kernels": len(spans) / num_steps,
        "num_gaps": len(gaps) / num_steps,
        "gaps_us": sum(gaps) / num_steps,
        "longest_gap_us": max(gaps, default=0.0),
    }


def _spans(profiled: Any) -> list[Span]:
    """Kernels and copies in the order in which they began."""
    found = [
        (event.start_ns() / 1e3, (event.start_ns() + event.duration_ns()) / 1e3, event.name())
        for event in profiled.profiler.kineto_results.events()
        if event.device_type() == torch.profiler.DeviceType.CUDA or not torch.cuda.is_available()
    ]
    return sorted(found)
