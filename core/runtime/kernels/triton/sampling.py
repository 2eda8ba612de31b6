"""From logits to a token, one row per program: the dozen operations of `runtime.sampling`.

Owns the kernel: the finite check, the likeliest token, the probabilities of rows that are sampled.
Nothing is sorted. The definitions are those of `core.runtime.sampling.filters`: a filter is a least
probability, so that equal ones are kept or dropped together (`filter_search.py`, `inverse_cdf.py`).

Masses are float64. Whatever a row holds, its id is in range.

Shapes: B rows, S slots, V vocabulary, W words of 32 tokens each, K candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.inverse_cdf import sampled_token
from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.variant import Variant

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
    """Sample a token id per row; also returns whether all its logits are finite.

    Samples from `edited_BV` where given, among the tokens whose bits in `allowed_BW` (int32, lowest
    bit first) are set. `shape_S4` has each slot's temperature, top-k (0: off, 1: greedy), top-p and
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


sample_rows = define_operator("sample_rows", launch)


@fake_of(sample_rows)
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
    """Buffers of random rows: probabilities `[B, V]`, those of candidates `[B, K]`, their ids."""
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
    """Sample one row."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    if allowed_ptr is not None:
        allowed_ptr += row * allowed_stride
    scores_ptr = logits_ptr if edited_ptr is None else edited_ptr + row * edited_stride
    highest, token, is_finite = _likeliest(logits_ptr, scores_ptr, allowed_ptr, vocab_size, BLOCK_V)
    tl.store(finite_ptr + row, is_finite.to(tl.uint8))
    if uniforms_ptr is not None:
        of_slot = shape_ptr + tl.load(slots_ptr + row) * 4
        if tl.load(of_slot + 1) != 1:
            probs_ptr += row * vocab_size
            most, mass = _write_probabilities(
                probs_ptr, scores_ptr, allowed_ptr, tl.load(of_slot), highest, vocab_size, BLOCK_V
            )
            token = sampled_token(
                probs_ptr,
                candidates_ptr + row * MAX_CANDIDATES,
                candidate_ids_ptr + row * MAX_CANDIDATES,
                of_slot,
                tl.load(uniforms_ptr + row),
                most,
                mass,
                vocab_size,
                BLOCK_V,
                NUM_BLOCKS,
                MAX_CANDIDATES,
            )
    tl.store(ids_ptr + row, token.to(tl.int64))


@triton.jit
def _likeliest(logits_ptr, scores_ptr, allowed_ptr, vocab_size, BLOCK_V: tl.constexpr):
    """The highest score, the first token that has it, and whether all logits are finite."""
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
    highest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == highest, best_ids, vocab_size - 1), axis=0)
    return highest, token, tl.max(is_odd, axis=0) == 0


@triton.jit
def _write_probabilities(
    probs_ptr, scores_ptr, allowed_ptr, temperature, highest, vocab_size, BLOCK_V: tl.constexpr
):
    """Write the probabilities of all tokens; returns the greatest, and their sum as written."""
    lanes = tl.arange(0, BLOCK_V)
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
    return 1.0 / total, tl.sum(masses, axis=0)


@triton.jit
def _scores(scores_ptr, allowed_ptr, tokens, vocab_size):
    """Logits of some tokens in float32; minus infinity for forbidden ones or beyond the end."""
    is_token = tokens < vocab_size
    scores = tl.load(scores_ptr + tokens, mask=is_token, other=float("-inf")).to(tl.float32)
    if allowed_ptr is not None:
        words = tl.load(allowed_ptr + tokens // 32, mask=is_token, other=0)
        scores = tl.where(((words >> (tokens % 32)) & 1) != 0, scores, float("-inf"))
    return scores


def variants() -> tuple[Variant, ...]:
    """Greedy rows in bfloat16; random rows, plain, and with edits and a vocabulary mask."""
    return tuple(
        _variant(name, logits, has_edits, is_sampled)
        for name, logits, has_edits, is_sampled in (
            ("greedy_bf16", "*bf16", False, False),
            ("sampled", "*fp32", False, True),
            ("masked", "*fp32", True, True),
        )
    )


def _variant(name: str, logits: str, has_edits: bool, is_sampled: bool) -> Variant:
    constants: dict[str, object] = {
        "BLOCK_V": _BLOCK_V,
        "NUM_BLOCKS": 32,
        "MAX_CANDIDATES": _MAX_CANDIDATES,
    }
    constants |= {} if has_edits else {"edited_ptr": None, "allowed_ptr": None}
    of_sample = ("uniforms_ptr", "probs_ptr", "candidates_ptr", "candidate_ids_ptr")
    constants |= {} if is_sampled else dict.fromkeys(of_sample)
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
