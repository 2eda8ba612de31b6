"""The passes over a row's vocabulary, each by several programs: maximum, probabilities, candidates.

Owns the parts of the vocabulary, what a program writes of its part, and what a later kernel derives
from all parts of a row. Every row has the same parts in any batch, so its token depends on no other
row. Knows no grids and no samples.

A filter is a least probability (`core.runtime.sampling.filters`). The second pass counts the tokens
above a ladder of probabilities, one for each power of two below the likeliest. The highest step
that the first filter surely drops bounds the candidates: masses of steps are float32, so a step
counts as dropped only by a margin, and the exact least probability is found among the candidates.

Shapes: C parts of a vocabulary, J steps of the ladder, S tokens of a part read at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.filter_search import kept_of

_NUM_STEPS = tl.constexpr(16)
_TOKENS_AT_ONCE = tl.constexpr(256)
_MARGIN = tl.constexpr(1.00001)

NUM_STEPS = 16
"""Steps of the ladder; the first is zero."""


@triton.jit
def highest_of_part(logits_ptr, scores_ptr, allowed_ptr, first, vocab_size, BLOCK_V: tl.constexpr):
    """A part's highest score and its first token, whether all logits are finite, and the scores."""
    tokens = first + tl.arange(0, BLOCK_V)
    raw = tl.load(logits_ptr + tokens, mask=tokens < vocab_size, other=0.0).to(tl.float32)
    is_odd = tl.max(((tl.abs(raw) < float("inf")) == 0).to(tl.int32), axis=0)
    scores = scores_of(scores_ptr, allowed_ptr, tokens, vocab_size)
    scores = tl.where(scores == scores, scores, float("-inf"))  # noqa: PLR0124 - NaN is no maximum
    highest = tl.max(scores, axis=0)
    token = tl.min(tl.where(scores == highest, tokens, vocab_size - 1), axis=0)
    return highest, token, is_odd, scores


@triton.jit
def sum_of_part(scores, highest, temperature):
    """The sum of a part's exponentials, relative to its highest score."""
    top = tl.where(highest == float("-inf"), 0.0, highest / temperature)
    return tl.sum(tl.exp(scores / temperature - top), axis=0)


@triton.jit
def total_of_row(highest_ptr, num_parts, temperature, NUM_PARTS: tl.constexpr):
    """The exponent that makes the highest score 1, and the sum of all exponentials."""
    part_C = tl.arange(0, NUM_PARTS)
    is_part_C = part_C < num_parts
    highest_C = tl.load(highest_ptr + part_C, mask=is_part_C, other=float("-inf"))
    sums_C = tl.load(highest_ptr + num_parts + part_C, mask=is_part_C, other=0.0)
    top = tl.max(highest_C, axis=0) / temperature
    shares_C = tl.where(sums_C > 0, tl.exp(highest_C / temperature - top) * sums_C, sums_C)
    return top, tl.sum(shares_C, axis=0)


@triton.jit
def weigh_part(
    probs_ptr,
    scores_ptr,
    allowed_ptr,
    part_ptrs,
    first,
    vocab_size,
    temperature,
    top,
    total,
    floor,
    BLOCK_V: tl.constexpr,
):
    """Write the probabilities of a part, what of them is above each step, and the mass of all.

    `part_ptrs` are the places of numbers `[J]`, masses `[J]`, and the mass from `floor` on.
    """
    num_ptr, above_ptr, mass_ptr = part_ptrs
    step_J = steps_below((1.0 / total).to(tl.int32, bitcast=True))
    num_SJ = tl.zeros([_TOKENS_AT_ONCE, _NUM_STEPS], tl.int32)
    above_SJ = tl.zeros([_TOKENS_AT_ONCE, _NUM_STEPS], tl.float32)
    mass_S = tl.zeros([_TOKENS_AT_ONCE], tl.float64)
    for start in range(first, first + BLOCK_V, _TOKENS_AT_ONCE):
        tokens = start + tl.arange(0, _TOKENS_AT_ONCE)
        scores = scores_of(scores_ptr, allowed_ptr, tokens, vocab_size)
        probs = tl.exp(scores / temperature - top) / total
        tl.store(probs_ptr + tokens, probs, mask=tokens < vocab_size)
        is_above_SJ = probs.to(tl.int32, bitcast=True)[:, None] > step_J[None, :]
        num_SJ += is_above_SJ.to(tl.int32)
        above_SJ += tl.where(is_above_SJ, probs[:, None], 0.0)
        mass_S += kept_of(probs, 1, floor)
    index_J = tl.arange(0, _NUM_STEPS)
    tl.store(num_ptr + index_J, tl.sum(num_SJ, axis=0))
    tl.store(above_ptr + index_J, tl.sum(above_SJ, axis=0))
    tl.store(mass_ptr, tl.sum(mass_S, axis=0))


@triton.jit
def steps_below(highest):
    """The bits of the ladder's steps, rising: zero, then each twice the one before it."""
    step_J = tl.arange(0, _NUM_STEPS)
    return tl.where(step_J == 0, 0, tl.maximum(highest - ((_NUM_STEPS - step_J) << 23), 0))


@triton.jit
def masses_of_parts(mass_ptr, num_parts, NUM_PARTS: tl.constexpr):
    """The masses of a row's parts, in float64."""
    part_C = tl.arange(0, NUM_PARTS)
    return tl.load(mass_ptr + part_C, mask=part_C < num_parts, other=0.0)


@triton.jit
def bound_of_row(num_ptr, above_ptr, num_parts, max_above, max_mass, NUM_PARTS: tl.constexpr):
    """The highest step that a filter surely drops, and how many tokens of each part are above it.

    A filter drops a probability if `max_above` tokens, or a mass of `max_mass`, are above it.
    """
    part_C, step_J = tl.arange(0, NUM_PARTS), tl.arange(0, _NUM_STEPS)
    place_CJ = part_C[:, None] * _NUM_STEPS + step_J[None, :]
    is_part_CJ = (part_C < num_parts)[:, None] & (step_J >= 0)[None, :]
    num_CJ = tl.load(num_ptr + place_CJ, mask=is_part_CJ, other=0)
    above_CJ = tl.load(above_ptr + place_CJ, mask=is_part_CJ, other=0.0)
    has_many_J = tl.sum(num_CJ, axis=0) >= max_above
    is_dropped_J = has_many_J | (tl.sum(above_CJ, axis=0).to(tl.float64) >= max_mass * _MARGIN)
    bound = tl.max(tl.where(is_dropped_J, step_J, 0), axis=0)
    return bound, tl.sum(tl.where(step_J[None, :] == bound, num_CJ, 0), axis=1)


@triton.jit
def gather_part(
    probs_ptr,
    candidates_ptr,
    ids_ptr,
    place,
    first,
    below,
    vocab_size,
    BLOCK_V: tl.constexpr,
):
    """Write a part's tokens whose bits are above `below` from `place` on, in order."""
    tokens = first + tl.arange(0, BLOCK_V)
    probs = tl.load(probs_ptr + tokens, mask=tokens < vocab_size, other=0.0)
    is_one = probs.to(tl.int32, bitcast=True) > below
    places = place + tl.cumsum(is_one.to(tl.int32), axis=0) - 1
    tl.store(candidates_ptr + places, probs, mask=is_one)
    tl.store(ids_ptr + places, tokens, mask=is_one)


@triton.jit
def scores_of(scores_ptr, allowed_ptr, tokens, vocab_size):
    """Logits of some tokens in float32; minus infinity for forbidden ones or beyond the end."""
    is_token = tokens < vocab_size
    scores = tl.load(scores_ptr + tokens, mask=is_token, other=float("-inf")).to(tl.float32)
    if allowed_ptr is not None:
        words = tl.load(allowed_ptr + tokens // 32, mask=is_token, other=0)
        scores = tl.where(((words >> (tokens % 32)) & 1) != 0, scores, float("-inf"))
    return scores
