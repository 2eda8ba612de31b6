"""What a runner of tokens needs to replay its decode steps.

Owns the sum of what they take. Knows nothing of rows, pages or models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from triptych.core.runtime.graphs.buckets import Bucket, DecodeBuckets
from triptych.core.runtime.graphs.captured import CapturedSteps

_INTS_PER_ROW = 16  # positions, slots, lengths, and what heads add
GPU_POOL_BYTES = 256 * 2**20
"""What is set aside, until the graphs of a GPU are captured and measured, for what they share: room
that libraries of products compute in, the parts of attention, and what is left of the segments that
a pool grows by."""


@dataclass(frozen=True, slots=True)
class DecodeGraphs:
    """Captured decode steps, and the sizes they come in.

    `spare_bytes` are for what else is captured with the same `steps` as it is first run.
    """

    steps: CapturedSteps
    buckets: DecodeBuckets
    spare_bytes: int = 0


def decode_graph_bytes(buckets: DecodeBuckets, step_bytes: Callable[[int], int]) -> int:
    """The most that steps of all `buckets` hold; `step_bytes` says what one of so many rows does.

    What a step computes with is counted once, since their graphs share it; what each reads and
    returns, for every one.
    """
    inputs = sum(8 * _num_ints(bucket) for bucket in buckets.all())
    outputs = len(buckets.pages) * sum(map(step_bytes, buckets.rows))
    return step_bytes(max(buckets.rows)) + inputs + outputs


def _num_ints(bucket: Bucket) -> int:
    return bucket.rows * (bucket.pages + _INTS_PER_ROW)
