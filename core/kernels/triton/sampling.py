"""From logits to a token, one row a program: what `core.sampling` does in a dozen operations.

Owns the kernel. Nothing is sorted. The definitions are those of `core.sampling.filters`: a filter
is a least probability, so that equal ones are kept or dropped together. It is searched for among
the bits of positive floats, whose order is that of their values: a value is kept while fewer than k
others, or a mass of less than top-p, lie above it. Once few tokens are left to decide about, they
are put side by side, and the rest happens among these.

Masses are float64. Whatever a row holds, its id is in range.

Shapes: B rows, S slots, V vocabulary, W words of 32 tokens each, K candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.kernels.triton.variant import Variant

_BLOCK_V = 4096
_MAX_CANDIDATES = 2048
_NUM_WARPS = 16


def launch(
    logits_BV: torch.Tensor,
    edited_BV: torch.Tensor | None,
    allowed_BW: torch.Tensor | None,
    shape_S4: torch.Tensor,
    slots_B: torch.Tensor,
    uniforms_B: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token id per row, and whether all its logits are finite.

    Drawn from `edited_BV` where given, of the tokens whose bits in `allowed_BW` (int32, lowest bit
    first) are set. Of each slot `shape_S4` has temperature, top-k (0: off, 1: greedy), top-p and
    min-p. Without `uniforms_B` (float64, in [0, 1)) all rows are greedy.
    """
    _check(logits_BV, edited_BV, allowed_BW, shape_S4, slots_B, uniforms_B)
    num_rows, vocab_size = logits_BV.shape
    token_ids_B = torch.empty_like(slots_B)
    is_finite_B = torch.empty_like(slots_B, dtype=torch.uint8)
    if num_rows:
        _kernel[(num_rows,)](
            logits_BV,
            edited_BV,
            allowed_BW,
            shape_S4,
            slots_B,
            uniforms_B,
            *_scratch(logits_BV, uniforms_B),
            token_ids_B,
            is_finite_B,
            logits_BV.stride(0),
            0 if edited_BV is None else edited_BV.stride(0),
            0 if allowed_BW is None else allowed_BW.stride(0),
            vocab_size,
            BLOCK_V=_BLOCK_V,
            NUM_BLOCKS=triton.next_power_of_2(triton.cdiv(vocab_size, _BLOCK_V)),
            MAX_CANDIDATES=_MAX_CANDIDATES,
            num_warps=_NUM_WARPS,
            num_stages=2,
        )
    return token_ids_B, is_finite_B.view(torch.bool)


sample_rows = torch.library.custom_op(
    "triptych::sample_rows", launch, mutates_args=(), device_types="cuda"
)


@sample_rows.register_fake
def _(
    logits_BV: torch.Tensor,
    edited_BV: torch.Tensor | None,
    allowed_BW: torch.Tensor | None,
    shape_S4: torch.Tensor,
    slots_B: torch.Tensor,
    uniforms_B: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(logits_BV, edited_BV, allowed_BW, shape_S4, slots_B, uniforms_B)
    return torch.empty_like(slots_B), torch.empty_like(slots_B, dtype=torch.bool)


def _scratch(
    logits_BV: torch.Tensor, uniforms_B: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | tuple[None, None, None]:
    """Where drawn rows keep probabilities `[B, V]`, those of candidates `[B, K]`, and their ids."""
    if uniforms_B is None:
        return None, None, None
    num_rows, vocab_size = logits_BV.shape
    probs_BV = logits_BV.new_empty(num_rows, vocab_size, dtype=torch.float32)
    candidates_BK = probs_BV.new_empty(num_rows, _MAX_CANDIDATES)
    return probs_BV, candidates_BK, torch.empty_like(candidates_BK, dtype=torch.int32)


def _check(
    logits_BV: torch.Tensor,
    edited_BV: torch.Tensor | None,
    allowed_BW: torch.Tensor | None,
    shape_S4: torch.Tensor,
    slots_B: torch.Tensor,
    uniforms_B: torch.Tensor | None,
) -> None:
    assert logits_BV.stride(1) == 1
    assert slots_B.shape == logits_BV.shape[:1]
    assert slots_B.is_contiguous()
    assert slots_B.dtype is torch.int64
    assert shape_S4.shape[1:] == (4,)
    assert shape_S4.is_contiguous()
    if edited_BV is not None:
        assert edited_BV.shape == logits_BV.shape
        assert edited_BV.stride(1) == 1
    if allowed_BW is not None:
        assert allowed_BW.dtype is torch.int32
        assert allowed_BW.shape == (len(logits_BV), -(-logits_BV.shape[1] // 32))
        assert allowed_BW.stride(1) == 1
    if uniforms_B is not None:
        assert uniforms_B.dtype is torch.float64
        assert uniforms_B.shape == slots_B.shape
        assert uniforms_B.is_contiguous()


@triton.jit(
    do_not_specialize=["allowed_stride"],
    do_not_specialize_on_alignment=["slots_ptr", "uniforms_ptr"],
)
def _kernel(
    logits_ptr,
    edited_ptr,
    allowed_ptr,
    shape_ptr,
    slots_ptr,
    uniforms_ptr,
    probs_ptr,
    candidates_ptr,
    candidate_ids_ptr,
    ids_ptr,
    finite_ptr,
    logits_stride,
    edited_stride,
    allowed_stride,
    vocab_size,
    BLOCK_V: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    if allowed_ptr is not None:
        allowed_ptr += row * allowed_stride
    scores_ptr = logits_ptr if edited_ptr is None else edited_ptr + row * edited_stride

    lanes = tl.arange(0, BLOCK_V)
    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    best_ids = lanes
    is_odd = tl.zeros([BLOCK_V], tl.int32)
    for start in range(0, vocab_size, BLOCK_V):
        tokens = start + lanes
        raw = tl.load(logits_ptr + tokens, mask=tokens < vocab_size, other=0.0).to(tl.float32)
        is_odd |= (tl.abs(raw) < float("inf")).to(tl.int32) ^ 1
        scores = _scores(scores_ptr, allowed_ptr, tokens, vocab_size)
        is_better = scores > best
        best = tl.where(is_better, scores, best)
        best_ids = tl.where(is_better, tokens, best_ids)
    tl.store(finite_ptr + row, (tl.max(is_odd, axis=0) == 0).to(tl.uint8))
    highest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == highest, best_ids, vocab_size - 1), axis=0)

    if uniforms_ptr is not None:
        of_slot = shape_ptr + tl.load(slots_ptr + row) * 4
        temperature = tl.load(of_slot)
        if tl.load(of_slot + 1) != 1:
            probs_ptr += row * vocab_size
            highest = highest / temperature
            sums = tl.zeros([BLOCK_V], tl.float32)
            for start in range(0, vocab_size, BLOCK_V):
                scores = _scores(scores_ptr, allowed_ptr, start + lanes, vocab_size)
                sums += tl.exp(scores / temperature - highest)
            total = tl.sum(sums, axis=0)
            masses = tl.zeros([BLOCK_V], tl.float64)
            for start in range(0, vocab_size, BLOCK_V):
                tokens = start + lanes
                scores = _scores(scores_ptr, allowed_ptr, tokens, vocab_size)
                probs = tl.exp(scores / temperature - highest) / total
                tl.store(probs_ptr + tokens, probs, mask=tokens < vocab_size)
                masses += probs.to(tl.float64)
            tl.debug_barrier()
            token = _drawn(
                probs_ptr,
                candidates_ptr + row * MAX_CANDIDATES,
                candidate_ids_ptr + row * MAX_CANDIDATES,
                of_slot,
                tl.load(uniforms_ptr + row),
                1.0 / total,
                tl.sum(masses, axis=0),
                vocab_size,
                BLOCK_V,
                NUM_BLOCKS,
                MAX_CANDIDATES,
            )
    tl.store(ids_ptr + row, token.to(tl.int64))


@triton.jit
def _scores(scores_ptr, allowed_ptr, tokens, vocab_size):
    """Logits of some tokens in float32; minus infinity for those that are forbidden or beyond."""
    is_token = tokens < vocab_size
    scores = tl.load(scores_ptr + tokens, mask=is_token, other=float("-inf")).to(tl.float32)
    if allowed_ptr is not None:
        words = tl.load(allowed_ptr + tokens // 32, mask=is_token, other=0)
        scores = tl.where(((words >> (tokens % 32)) & 1) != 0, scores, float("-inf"))
    return scores


@triton.jit
def _drawn(
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
    """The token of a row whose likeliest has the probability `most`, and all of them `mass`."""
    top_k = tl.load(of_slot + 1).to(tl.int32)
    top_p = tl.load(of_slot + 2).to(tl.float64)
    floor = tl.load(of_slot + 3) * most
    highest = most.to(tl.int32, bitcast=True)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    max_above = tl.where(has_top_k, top_k, vocab_size + 1)
    below = 0
    num_below = vocab_size
    if has_top_k | (top_p < 1):
        # The first filter of the two alone: what it drops the other would, too.
        max_mass = tl.where(has_top_k, float("inf"), top_p * mass)
        below, num_below = _narrow(
            probs_ptr, vocab_size, below, highest, max_above, max_mass, MAX_CANDIDATES, BLOCK_V
        )
    least = below + 1
    if num_below <= MAX_CANDIDATES:
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
        places = tl.arange(0, MAX_CANDIDATES)
        is_one = places < num_candidates
        probs = tl.load(candidates_ptr + places, mask=is_one, other=0.0)
        if has_top_k:
            least = _least_among(probs, least, highest, top_k, float("inf"))
        if top_p < 1:
            kept = tl.sum(_kept(probs, least, 0.0), axis=0)
            max_mass = top_p * tl.where(has_top_k, kept, mass)
            least = _least_among(probs, least, highest, vocab_size + 1, max_mass)
        place, _ = _first_above(_kept(probs, least, floor), uniform, MAX_CANDIDATES)
        ids = tl.load(candidate_ids_ptr + places, mask=is_one, other=0)
        token = tl.sum(tl.where(places == place, ids, 0), axis=0)
    else:
        if has_top_k:
            below, num_below = _narrow(
                probs_ptr, vocab_size, below, highest, top_k, float("inf"), 0, BLOCK_V
            )
            least = below + 1
        if top_p < 1:
            if has_top_k:
                mass = _mass(probs_ptr, vocab_size, least, BLOCK_V)
            below, num_below = _narrow(
                probs_ptr,
                vocab_size,
                least - 1,
                highest,
                vocab_size + 1,
                top_p * mass,
                0,
                BLOCK_V,
            )
            least = below + 1
        token = _token_of_all(probs_ptr, vocab_size, least, floor, uniform, BLOCK_V, NUM_BLOCKS)
    return tl.minimum(token, vocab_size - 1)


@triton.jit
def _kept(probs, least, floor):
    """The probabilities that may be drawn, in float64; 0 for the others."""
    is_kept = (probs.to(tl.int32, bitcast=True) >= least) & (probs >= floor)
    return tl.where(is_kept, probs, 0.0).to(tl.float64)


@triton.jit
def _mass(probs_ptr, vocab_size, least, BLOCK_V: tl.constexpr):
    """The mass of all tokens that are kept."""
    masses = tl.zeros([BLOCK_V], tl.float64)
    for start in range(0, vocab_size, BLOCK_V):
        tokens = start + tl.arange(0, BLOCK_V)
        probs = tl.load(probs_ptr + tokens, mask=tokens < vocab_size, other=0.0)
        masses += _kept(probs, least, 0.0)
    return tl.sum(masses, axis=0)


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
    """First the block in whose share of the mass the number falls, then the token in the block."""
    lanes = tl.arange(0, BLOCK_V)
    blocks = tl.arange(0, NUM_BLOCKS)
    of_blocks = tl.zeros([NUM_BLOCKS], tl.float64)
    for start in range(0, vocab_size, BLOCK_V):
        tokens = start + lanes
        probs = tl.load(probs_ptr + tokens, mask=tokens < vocab_size, other=0.0)
        mass = tl.sum(_kept(probs, least, floor), axis=0)
        of_blocks = tl.where(blocks == start // BLOCK_V, mass, of_blocks)
    block, share = _first_above(of_blocks, uniform, NUM_BLOCKS)
    tokens = block * BLOCK_V + lanes
    probs = tl.load(probs_ptr + tokens, mask=tokens < vocab_size, other=0.0)
    lane, share = _first_above(_kept(probs, least, floor), share, BLOCK_V)
    return block * BLOCK_V + lane


@triton.jit
def _first_above(masses, share, NUM: tl.constexpr):
    """The entry in which a share of the whole mass falls, and the share of the entry before that.

    Sums of a scan may differ by their order, so an entry without mass is ruled out by name.
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


@triton.jit
def _narrow(probs_ptr, vocab_size, below, kept, max_above, max_mass, enough, BLOCK_V: tl.constexpr):
    """The bits below the least probability that is kept, or a bound of them; how many lie above.

    Kept is what has less above it than a number of tokens and a mass. The search goes on until no
    more than `enough` tokens lie above the bound, or one is left between bound and kept; three
    values are tried at once, first some that leave the likeliest tokens only.
    """
    num_below = vocab_size
    num_kept = 0
    num_passes = 0
    while (kept - below > 1) & (num_below - num_kept > 1) & (num_below > enough):
        low, middle, high = _quarters(below, kept)
        is_first = (num_passes == 0) & (enough > 0)
        low = tl.where(is_first, tl.maximum(kept - (14 << 23), below), low)
        middle = tl.where(is_first, tl.maximum(kept - (7 << 23), below), middle)
        high = tl.where(is_first, tl.maximum(kept - (3 << 23), below), high)
        num_passes += 1
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
            mass_low += _kept(probs, low + 1, 0.0)
            mass_middle += _kept(probs, middle + 1, 0.0)
            mass_high += _kept(probs, high + 1, 0.0)
        below, num_below, kept, num_kept = _narrowed(
            high, num_high, mass_high, below, num_below, kept, num_kept, max_above, max_mass
        )
        below, num_below, kept, num_kept = _narrowed(
            middle, num_middle, mass_middle, below, num_below, kept, num_kept, max_above, max_mass
        )
        below, num_below, kept, num_kept = _narrowed(
            low, num_low, mass_low, below, num_below, kept, num_kept, max_above, max_mass
        )
    return below, num_below


@triton.jit
def _least_among(probs, least, kept, max_above, max_mass):
    """The bits of the least probability that is kept, of some that are at hand."""
    bits = probs.to(tl.int32, bitcast=True)
    below = least - 1
    num_below = tl.sum((bits > below).to(tl.int32), axis=0)
    num_kept = 0
    while (kept - below > 1) & (num_below - num_kept > 1):
        middle = below + (kept - below) // 2
        num_above = (bits > middle).to(tl.int32)
        mass_above = _kept(probs, middle + 1, 0.0)
        below, num_below, kept, num_kept = _narrowed(
            middle, num_above, mass_above, below, num_below, kept, num_kept, max_above, max_mass
        )
    return below + 1


@triton.jit
def _quarters(below, kept):
    quarter = (kept - below) // 4
    return below + quarter, below + (kept - below) // 2, kept - quarter


@triton.jit
def _narrowed(bits, above, mass, below, num_below, kept, num_kept, max_above, max_mass):
    """The search's bounds after a value was tried, with the numbers of tokens above each."""
    num_above = tl.sum(above, axis=0)
    is_kept = (num_above < max_above) & (tl.sum(mass, axis=0) < max_mass)
    is_higher = (bits > below) & (is_kept == 0)
    is_lower = (bits < kept) & is_kept
    return (
        tl.where(is_higher, bits, below),
        tl.where(is_higher, num_above, num_below),
        tl.where(is_lower, bits, kept),
        tl.where(is_lower, num_above, num_kept),
    )


def variants() -> tuple[Variant, ...]:
    """Greedy rows in bfloat16; drawn rows, plain, and with edits and a vocabulary mask."""
    return tuple(
        _variant(name, logits, has_edits, is_drawn)
        for name, logits, has_edits, is_drawn in (
            ("greedy_bf16", "*bf16", False, False),
            ("drawn", "*fp32", False, True),
            ("masked", "*fp32", True, True),
        )
    )


def _variant(name: str, logits: str, has_edits: bool, is_drawn: bool) -> Variant:
    constants: dict[str, object] = {
        "BLOCK_V": _BLOCK_V,
        "NUM_BLOCKS": 32,
        "MAX_CANDIDATES": _MAX_CANDIDATES,
    }
    constants |= {} if has_edits else {"edited_ptr": None, "allowed_ptr": None}
    of_draw = ("uniforms_ptr", "probs_ptr", "candidates_ptr", "candidate_ids_ptr")
    constants |= {} if is_drawn else dict.fromkeys(of_draw)
    pointers = {
        "logits_ptr": logits,
        "edited_ptr": "*fp32",
        "allowed_ptr": "*i32",
        "shape_ptr": "*fp32",
        "slots_ptr": "*i64",
        "uniforms_ptr": "*fp64",
        "probs_ptr": "*fp32",
        "candidates_ptr": "*fp32",
        "candidate_ids_ptr": "*i32",
        "ids_ptr": "*i64",
        "finite_ptr": "*u8",
    }
    counts = ("logits_stride", "edited_stride", "allowed_stride", "vocab_size")
    signature = {
        **pointers,
        **dict.fromkeys(counts, "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    return Variant(
        name=name,
        kernel=_kernel,
        signature=signature,
        constants=constants,
        divisible=frozenset((*pointers, *counts))
        - {"allowed_stride", "slots_ptr", "uniforms_ptr"}
        - constants.keys(),
        num_warps=_NUM_WARPS,
    )
