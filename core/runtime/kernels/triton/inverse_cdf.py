"""Samples the token of a row from its stored probabilities.

Owns the sample: once few candidate tokens are left, they are gathered, and the rest works on these
only. Knows no logits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.filter_search import kept_of, least_among, mass_of, narrow


@triton.jit
def sampled_token(
    probs_ptr,
    candidates_ptr,
    candidate_ids_ptr,
    of_slot,
    uniform,
    most,
    mass,
    vocab_size,
    BLOCK_V: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
):
    """The token of a row with total mass `mass`, whose likeliest has the probability `most`."""
    top_k = tl.load(of_slot + 1).to(tl.int32)
    top_p = tl.load(of_slot + 2).to(tl.float64)
    floor = tl.load(of_slot + 3) * most
    highest = most.to(tl.int32, bitcast=True)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    max_above = tl.where(has_top_k, top_k, vocab_size + 1)
    below = 0
    num_below = vocab_size
    if has_top_k | (top_p < 1):
        # The first filter alone: every token that it drops is also dropped by both.
        max_mass = tl.where(has_top_k, float("inf"), top_p * mass)
        below, num_below = narrow(
            probs_ptr, vocab_size, below, highest, max_above, max_mass, MAX_CANDIDATES, BLOCK_V
        )
    least = below + 1
    if num_below <= MAX_CANDIDATES:
        num_candidates = _put_side_by_side(
            probs_ptr, candidates_ptr, candidate_ids_ptr, vocab_size, least, BLOCK_V, MAX_CANDIDATES
        )
        places = tl.arange(0, MAX_CANDIDATES)
        is_one = places < num_candidates
        probs = tl.load(candidates_ptr + places, mask=is_one, other=0.0)
        if has_top_k:
            least = least_among(probs, least, highest, top_k, float("inf"))
        if top_p < 1:
            kept = tl.sum(kept_of(probs, least, 0.0), axis=0)
            max_mass = top_p * tl.where(has_top_k, kept, mass)
            least = least_among(probs, least, highest, vocab_size + 1, max_mass)
        place, _ = _first_above(kept_of(probs, least, floor), uniform, MAX_CANDIDATES)
        ids = tl.load(candidate_ids_ptr + places, mask=is_one, other=0)
        token = tl.sum(tl.where(places == place, ids, 0), axis=0)
    else:
        least = _least_of_all(
            probs_ptr, vocab_size, least, highest, top_k, has_top_k, top_p, mass, BLOCK_V
        )
        token = _token_of_all(probs_ptr, vocab_size, least, floor, uniform, BLOCK_V, NUM_BLOCKS)
    return tl.minimum(token, vocab_size - 1)


@triton.jit
def _put_side_by_side(
    probs_ptr,
    candidates_ptr,
    candidate_ids_ptr,
    vocab_size,
    least,
    BLOCK_V: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
):
    """Gather the tokens whose bits are `least` or more; returns their number."""
    num_candidates = 0
    for start in range(0, vocab_size, BLOCK_V):
        tokens = start + tl.arange(0, BLOCK_V)
        probs = tl.load(probs_ptr + tokens, mask=tokens < vocab_size, other=0.0)
        is_one = probs.to(tl.int32, bitcast=True) >= least
        num_here = tl.sum(is_one.to(tl.int32), axis=0)
        if num_here > 0:
            places = num_candidates + tl.cumsum(is_one.to(tl.int32), axis=0) - 1
            is_one = is_one & (places < MAX_CANDIDATES)
            tl.store(candidates_ptr + places, probs, mask=is_one)
            tl.store(candidate_ids_ptr + places, tokens, mask=is_one)
        num_candidates += num_here
    tl.debug_barrier()
    return num_candidates


@triton.jit
def _least_of_all(
    probs_ptr, vocab_size, least, highest, top_k, has_top_k, top_p, mass, BLOCK_V: tl.constexpr
):
    """The bits of the least probability, from `least` on, that both filters keep of all tokens."""
    if has_top_k:
        below, _ = narrow(
            probs_ptr, vocab_size, least - 1, highest, top_k, float("inf"), 0, BLOCK_V
        )
        least = below + 1
    if top_p < 1:
        if has_top_k:
            mass = mass_of(probs_ptr, vocab_size, least, BLOCK_V)
        below, _ = narrow(
            probs_ptr, vocab_size, least - 1, highest, vocab_size + 1, top_p * mass, 0, BLOCK_V
        )
        least = below + 1
    return least


@triton.jit
def _token_of_all(
    probs_ptr,
    vocab_size,
    least,
    floor,
    uniform,
    BLOCK_V: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Find the block whose share of the mass contains the number, then the token in the block."""
    lanes = tl.arange(0, BLOCK_V)
    blocks = tl.arange(0, NUM_BLOCKS)
    of_blocks = tl.zeros([NUM_BLOCKS], tl.float64)
    for start in range(0, vocab_size, BLOCK_V):
        tokens = start + lanes
        probs = tl.load(probs_ptr + tokens, mask=tokens < vocab_size, other=0.0)
        mass = tl.sum(kept_of(probs, least, floor), axis=0)
        of_blocks = tl.where(blocks == start // BLOCK_V, mass, of_blocks)
    block, share = _first_above(of_blocks, uniform, NUM_BLOCKS)
    tokens = block * BLOCK_V + lanes
    probs = tl.load(probs_ptr + tokens, mask=tokens < vocab_size, other=0.0)
    lane, share = _first_above(kept_of(probs, least, floor), share, BLOCK_V)
    return block * BLOCK_V + lane


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
