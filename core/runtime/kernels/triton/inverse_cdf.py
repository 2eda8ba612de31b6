"""Samples the token of a row from its stored probabilities or candidates.

Owns the sample, from a row's candidates where they are few. Knows no logits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.filter_search import kept_of, least_among, mass_of, narrow


@triton.jit
def filters_of(of_slot, vocab_size):
    """A slot's top-k, whether it limits anything, top-p, and whether there is a filter at all."""
    top_k = tl.load(of_slot + 1).to(tl.int32)
    top_p = tl.load(of_slot + 2).to(tl.float64)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    return top_k, has_top_k, top_p, has_top_k | (top_p < 1)


@triton.jit
def first_limits(top_k, has_top_k, top_p, mass, vocab_size):
    """The first filter's limits: every token that it drops is also dropped by both."""
    max_above = tl.where(has_top_k, top_k, vocab_size + 1)
    return max_above, tl.where(has_top_k, float("inf"), top_p * mass)


@triton.jit
def token_of_candidates(
    candidates_ptr,
    candidate_ids_ptr,
    num_candidates,
    of_slot,
    uniform,
    below,
    most,
    mass,
    vocab_size,
    MAX_CANDIDATES: tl.constexpr,
):
    """The token among all those whose bits are above `below`; the likeliest has `most`."""
    top_k, has_top_k, top_p, _ = filters_of(of_slot, vocab_size)
    highest, least = most.to(tl.int32, bitcast=True), below + 1
    places = tl.arange(0, MAX_CANDIDATES)
    is_one = places < num_candidates
    probs = tl.load(candidates_ptr + places, mask=is_one, other=0.0)
    if has_top_k:
        least = least_among(probs, least, highest, top_k, float("inf"))
    if top_p < 1:
        kept = tl.sum(kept_of(probs, least, 0.0), axis=0)
        max_mass = top_p * tl.where(has_top_k, kept, mass)
        least = least_among(probs, least, highest, vocab_size + 1, max_mass)
    floor = tl.load(of_slot + 3) * most
    place, _ = _first_above(kept_of(probs, least, floor), uniform, MAX_CANDIDATES)
    ids = tl.load(candidate_ids_ptr + places, mask=is_one, other=0)
    return tl.sum(tl.where(places == place, ids, 0), axis=0)


@triton.jit
def token_of_many(
    probs_ptr,
    of_slot,
    uniform,
    below,
    most,
    mass,
    vocab_size,
    BLOCK_V: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):
    """The token of a row of which too many are above `below`: by passes over the vocabulary."""
    top_k, has_top_k, top_p, _ = filters_of(of_slot, vocab_size)
    highest, least = most.to(tl.int32, bitcast=True), below + 1
    floor = tl.load(of_slot + 3) * most
    if has_top_k:
        least = 1 + narrow(probs_ptr, vocab_size, least - 1, highest, top_k, float("inf"), BLOCK_V)
    if top_p < 1:
        if has_top_k:
            mass = mass_of(probs_ptr, vocab_size, least, BLOCK_V)
        least = 1 + narrow(
            probs_ptr, vocab_size, least - 1, highest, vocab_size + 1, top_p * mass, BLOCK_V
        )
    part_C = tl.arange(0, NUM_PARTS)
    mass_C = tl.zeros([NUM_PARTS], tl.float64)
    for start in range(0, vocab_size, BLOCK_V):
        tokens = start + tl.arange(0, BLOCK_V)
        probs = tl.load(probs_ptr + tokens, mask=tokens < vocab_size, other=0.0)
        part = tl.sum(kept_of(probs, least, floor), axis=0)
        mass_C = tl.where(part_C == start // BLOCK_V, part, mass_C)
    return token_of_masses(probs_ptr, mass_C, uniform, least, floor, vocab_size, BLOCK_V, NUM_PARTS)


@triton.jit
def token_of_masses(
    probs_ptr,
    mass_C,
    uniform,
    least,
    floor,
    vocab_size,
    BLOCK_V: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):
    """Find the part whose share of the mass contains the number, then the token in the part."""
    part, share = _first_above(mass_C, uniform, NUM_PARTS)
    lanes = tl.arange(0, BLOCK_V)
    tokens = part * BLOCK_V + lanes
    probs = tl.load(probs_ptr + tokens, mask=tokens < vocab_size, other=0.0)
    lane, share = _first_above(kept_of(probs, least, floor), share, BLOCK_V)
    return part * BLOCK_V + lane


@triton.jit
def _first_above(masses, share, NUM: tl.constexpr):
    """The entry that contains a share of the mass, and the share of the mass before it.

    The sums of a scan may differ by their order, so entries without mass are excluded explicitly.
    """
    entries = tl.arange(0, NUM)
    has_mass = masses > 0
    ends = tl.cumsum(masses, axis=0)
    target = share * tl.max(ends, axis=0)
    last = tl.max(tl.where(has_mass, entries, 0), axis=0)
    found = tl.min(tl.where((ends > target) & has_mass, entries, last), axis=0)
    before = tl.max(tl.where(entries < found, ends, 0.0), axis=0)
    inside = (target - before) / tl.sum(tl.where(entries == found, masses, 0.0), axis=0)
    most = tl.full([], 0.9999999999999998, tl.float64)
    return found, tl.minimum(tl.maximum(inside, 0.0), most)
