"""Captured steps of a token runner.

Owns the estimate of their memory. Knows nothing of rows, pages or models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from triptych.core.runtime.graphs.buckets import Bucket, DecodeBuckets, PromptBuckets
from triptych.core.runtime.graphs.captured import CapturedSteps

_INTS_PER_ROW = 16  # positions, slots, lengths, and the extras of heads
GPU_POOL_BYTES = 256 * 2**20
"""Memory set aside, until the graphs of a GPU are captured and measured, for what they share:
workspaces of matrix libraries, the parts of attention, and what is left of the segments that a pool
grows by; and the same for those of steps with prompts, which the driver's memory adds to."""


@dataclass(frozen=True, slots=True)
class DecodeGraphs:
    """Captured decode steps and their sizes.

    `spare_bytes` are for other steps that are captured with the same `steps` as they come: those
    with prompt chunks, of the sizes in `prompts`, among them.
    """

    steps: CapturedSteps
    buckets: DecodeBuckets
    spare_bytes: int = 0
    prompts: PromptBuckets | None = None


def decode_graph_bytes(buckets: DecodeBuckets, step_bytes: Callable[[int], int]) -> int:
    """The most memory that steps of all `buckets` hold; `step_bytes` gives that of one size.

    Intermediate tensors are counted once, since the graphs share them; inputs and outputs, for
    every one.
    """
    inputs = sum(8 * _num_ints(bucket) for bucket in buckets.all())
    outputs = len(buckets.pages) * sum(map(step_bytes, buckets.rows))
    return step_bytes(max(buckets.rows)) + inputs + outputs


def prompt_graph_bytes(prompts: PromptBuckets, activation_bytes: Callable[[int, int], int]) -> int:
    """Memory for steps with prompt chunks: that of the largest, and as much for outputs.

    The least used steps are dropped where that is too little.
    """
    most = prompts.decode_rows[-1] + prompts.tokens[-1]
    return 2 * activation_bytes(most, 0) + GPU_POOL_BYTES


def _num_ints(bucket: Bucket) -> int:
    return bucket.rows * (bucket.pages + _INTS_PER_ROW)
