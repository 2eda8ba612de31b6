"""One uniform number per sampled token, keyed only by (seed, sample index, position).

Owns the random numbers of sampling. Keeps no state, so a row's sample depends neither on other rows
of its batch nor on earlier samples. Runs on the host: a few integers a step.

The generator is SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014): a row owns the stream whose state is a hash of its seed and sample
index, and the token at position `n` takes the stream's `n`-th output, computed directly.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def stream_key(seed: int, sample_index: int) -> int:
    """The 64-bit state of the stream that belongs to one sample of one request."""
    state = _mix(np.array([(seed + _GAMMA) & _MASK], np.uint64))
    return int(_mix(state + np.uint64((sample_index + 1) * _GAMMA & _MASK))[0])


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1 - 2**-52], one per row; `positions` count from 0."""
    counters = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
    bits = _mix(keys + counters) >> np.uint64(12)
    return bits.astype(np.float64) * 2.0**-52


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
