"""The least probability that a row's filters keep: top-k and top-p without sorting.

Owns the search among the bits of positive floats, whose order is that of their values: a value is
kept while fewer than k others, or a mass of less than top-p, lie above it. Masses are float64.
Knows nothing of the sample.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def narrow(probs_ptr, vocab_size, below, kept, max_above, max_mass, BLOCK_V: tl.constexpr):
    """The bits below the least kept probability.

    A probability is kept while fewer tokens than a number, and less mass than a limit, lie above
    it. The search continues until one value is left between bound and kept; three values are tried
    at once.
    """
    num_below = vocab_size
    num_kept = 0
    while (kept - below > 1) & (num_below - num_kept > 1):
        low, middle, high = _quarters(below, kept)
        num_low = tl.zeros([BLOCK_V], tl.int32)
        num_middle = tl.zeros([BLOCK_V], tl.int32)
        num_high = tl.zeros([BLOCK_V], tl.int32)
        mass_low = tl.zeros([BLOCK_V], tl.float64)
        mass_middle = tl.zeros([BLOCK_V], tl.float64)
        mass_high = tl.zeros([BLOCK_V], tl.float64)
        for start in range(0, vocab_size, BLOCK_V):
            tokens = start + tl.arange(0, BLOCK_V)
            probs = tl.load(probs_ptr + tokens, mask=tokens < vocab_size, other=0.0)
            bits = probs.to(tl.int32, bitcast=True)
            num_low += (bits > low).to(tl.int32)
            num_middle += (bits > middle).to(tl.int32)
            num_high += (bits > high).to(tl.int32)
            mass_low += kept_of(probs, low + 1, 0.0)
            mass_middle += kept_of(probs, middle + 1, 0.0)
            mass_high += kept_of(probs, high + 1, 0.0)
        below, num_below, kept, num_kept = _narrowed(
            high, num_high, mass_high, below, num_below, kept, num_kept, max_above, max_mass
        )
        below, num_below, kept, num_kept = _narrowed(
            middle, num_middle, mass_middle, below, num_below, kept, num_kept, max_above, max_mass
        )
        below, num_below, kept, num_kept = _narrowed(
            low, num_low, mass_low, below, num_below, kept, num_kept, max_above, max_mass
        )
    return below


@triton.jit
def least_among(probs, least, kept, max_above, max_mass):
    """The bits of the least kept probability, among some that are in registers."""
    bits = probs.to(tl.int32, bitcast=True)
    below = least - 1
    num_below = tl.sum((bits > below).to(tl.int32), axis=0)
    num_kept = 0
    while (kept - below > 1) & (num_below - num_kept > 1):
        middle = below + (kept - below) // 2
        num_above = (bits > middle).to(tl.int32)
        mass_above = kept_of(probs, middle + 1, 0.0)
        below, num_below, kept, num_kept = _narrowed(
            middle, num_above, mass_above, below, num_below, kept, num_kept, max_above, max_mass
        )
    return below + 1


@triton.jit
def kept_of(probs, least, floor):
    """The probabilities that may be sampled, in float64; 0 for the others."""
    is_kept = (probs.to(tl.int32, bitcast=True) >= least) & (probs >= floor)
    return tl.where(is_kept, probs, 0.0).to(tl.float64)


@triton.jit
def mass_of(probs_ptr, vocab_size, least, BLOCK_V: tl.constexpr):
    """The mass of all kept tokens."""
    masses = tl.zeros([BLOCK_V], tl.float64)
    for start in range(0, vocab_size, BLOCK_V):
        tokens = start + tl.arange(0, BLOCK_V)
        probs = tl.load(probs_ptr + tokens, mask=tokens < vocab_size, other=0.0)
        masses += kept_of(probs, least, 0.0)
    return tl.sum(masses, axis=0)


@triton.jit
def _quarters(below, kept):
    quarter = (kept - below) // 4
    return below + quarter, below + (kept - below) // 2, kept - quarter


@triton.jit
def _narrowed(bits, above, mass, below, num_below, kept, num_kept, max_above, max_mass):
    """The bounds of the search after a value was tried, with the numbers of tokens above each."""
    num_above = tl.sum(above, axis=0)
    is_kept = (num_above < max_above) & (tl.sum(mass, axis=0) < max_mass)
    is_higher = (bits > below) & (bits < kept) & (is_kept == 0)
    is_lower = (bits < kept) & is_kept
    return (
        tl.where(is_higher, bits, below),
        tl.where(is_higher, num_above, num_below),
        tl.where(is_lower, bits, kept),
        tl.where(is_lower, num_above, num_kept),
    )
