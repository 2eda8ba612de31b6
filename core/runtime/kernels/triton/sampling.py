"""From logits to tokens: the dozen operations of `runtime.sampling` in four kernels.

Owns the kernels: maximum and finite check, probabilities, candidates, token. The first three have a
program for each part of a row's vocabulary (`sampling_parts.py`), the last one for each row; greedy
batches have the first and the last. Nothing is sorted. The definitions are those of
`core.runtime.sampling.filters`: a filter is a least probability, so that equal ones are kept or
dropped together (`filter_search.py`, `inverse_cdf.py`).

Masses that decide are float64. Whatever a row holds, its id is in range.

Shapes: B rows, S slots, V vocabulary, W words of 32 tokens each, C parts of the vocabulary, J steps
of probability, K candidates.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.inverse_cdf import (
    filters_of,
    first_limits,
    token_of_candidates,
    token_of_many,
    token_of_masses,
)
from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.sampling_parts import (
    NUM_STEPS,
    bound_of_row,
    gather_part,
    highest_of_part,
    masses_of_parts,
    steps_below,
    sum_of_part,
    total_of_row,
    weigh_part,
)
from triptych.core.runtime.kernels.triton.variant import Variant

_BLOCK_V = 2048
_MAX_CANDIDATES = 2048
_NUM_WARPS = {"_measure": 4, "_weigh": 4, "_gather": 4, "_choose": 8}
_NUM_STEPS = tl.constexpr(NUM_STEPS)


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
    if not num_rows:
        return token_ids_B, is_finite_B.view(torch.bool)
    num_parts = triton.cdiv(vocab_size, _BLOCK_V)
    constants = {"BLOCK_V": _BLOCK_V, "NUM_PARTS": triton.next_power_of_2(num_parts)}
    random = _random_buffers(logits_BV, num_parts, uniforms_B is not None)
    sources = (logits_BV, edited_BV, allowed_BW, shape_S4, slots_B)
    strides = [0 if each is None else each.stride(0) for each in sources[:3]]
    highest_B2C = logits_BV.new_empty(num_rows, 2, num_parts, dtype=torch.float32)
    marks_B2C = logits_BV.new_empty(num_rows, 2, num_parts, dtype=torch.int32)
    args = (*sources, highest_B2C, marks_B2C, *random)
    sizes = (*strides, vocab_size, num_parts)
    grid = (num_parts, num_rows)
    kernels = [(_measure, grid), (_choose, (num_rows,))]
    if uniforms_B is not None:
        kernels[1:1] = [(_weigh, grid), (_gather, grid)]
    for kernel, programs in kernels:
        if kernel is _choose:
            args = (*args, uniforms_B, token_ids_B, is_finite_B)
        kernel[programs](
            *args,
            *sizes,
            **constants,
            MAX_CANDIDATES=_MAX_CANDIDATES,
            num_warps=_NUM_WARPS[kernel.fn.__name__],
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


def _random_buffers(
    logits_BV: torch.Tensor, num_parts: int, is_random: bool
) -> tuple[torch.Tensor | None, ...]:
    """Probabilities, numbers and masses above steps, masses of parts, candidates and their ids."""
    if not is_random:
        return (None,) * 6
    num_rows, vocab_size = logits_BV.shape
    probs_BV = logits_BV.new_empty(num_rows, vocab_size, dtype=torch.float32)
    num_BCJ = logits_BV.new_empty(num_rows, num_parts, NUM_STEPS, dtype=torch.int32)
    above_BCJ = torch.empty_like(num_BCJ, dtype=torch.float32)
    mass_BC = logits_BV.new_empty(num_rows, num_parts, dtype=torch.float64)
    candidates_BK = probs_BV.new_empty(num_rows, _MAX_CANDIDATES)
    ids_BK = torch.empty_like(candidates_BK, dtype=torch.int32)
    return probs_BV, num_BCJ, above_BCJ, mass_BC, candidates_BK, ids_BK


_jit = triton.jit(
    do_not_specialize=["allowed_stride", "num_parts"],
    do_not_specialize_on_alignment=["slots_ptr", "uniforms_ptr"],
)


@_jit
def _measure(
    logits_ptr, edited_ptr, allowed_ptr, shape_ptr, slots_ptr, highest_ptr, marks_ptr,
    probs_ptr, num_ptr, above_ptr, mass_ptr, candidates_ptr, candidate_ids_ptr,
    logits_stride, edited_stride, allowed_stride, vocab_size, num_parts,
    BLOCK_V: tl.constexpr, NUM_PARTS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """A part's highest score, its token, whether a logit is not finite, and its exponentials."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits_ptr += row * logits_stride
    scores_ptr = logits_ptr if edited_ptr is None else edited_ptr + row * edited_stride
    if allowed_ptr is not None:
        allowed_ptr += row * allowed_stride
    highest, token, is_odd, scores = highest_of_part(
        logits_ptr, scores_ptr, allowed_ptr, part * BLOCK_V, vocab_size, BLOCK_V
    )
    place = row * 2 * num_parts + part
    tl.store(highest_ptr + place, highest)
    tl.store(marks_ptr + place, token)
    tl.store(marks_ptr + place + num_parts, is_odd)
    if probs_ptr is not None:
        temperature = tl.load(shape_ptr + tl.load(slots_ptr + row) * 4)
        total = sum_of_part(scores, highest, temperature)
        tl.store(highest_ptr + place + num_parts, total)


@_jit
def _weigh(
    logits_ptr, edited_ptr, allowed_ptr, shape_ptr, slots_ptr, highest_ptr, marks_ptr,
    probs_ptr, num_ptr, above_ptr, mass_ptr, candidates_ptr, candidate_ids_ptr,
    logits_stride, edited_stride, allowed_stride, vocab_size, num_parts,
    BLOCK_V: tl.constexpr, NUM_PARTS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """A part's probabilities, and what of them is above the steps."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    of_slot = shape_ptr + tl.load(slots_ptr + row) * 4
    if tl.load(of_slot + 1) == 1:
        return
    scores_ptr = logits_ptr + row * logits_stride
    if edited_ptr is not None:
        scores_ptr = edited_ptr + row * edited_stride
    if allowed_ptr is not None:
        allowed_ptr += row * allowed_stride
    temperature = tl.load(of_slot)
    top, total = total_of_row(highest_ptr + row * 2 * num_parts, num_parts, temperature, NUM_PARTS)
    _, _, _, has_filter = filters_of(of_slot, vocab_size)
    floor = tl.where(has_filter, 0.0, tl.load(of_slot + 3) * (1.0 / total))
    place = row * num_parts + part
    steps = place * _NUM_STEPS
    weigh_part(
        probs_ptr + row * vocab_size, scores_ptr, allowed_ptr,
        (num_ptr + steps, above_ptr + steps, mass_ptr + place),
        part * BLOCK_V, vocab_size, temperature, top, total, floor, BLOCK_V,
    )  # fmt: skip


@_jit
def _gather(
    logits_ptr, edited_ptr, allowed_ptr, shape_ptr, slots_ptr, highest_ptr, marks_ptr,
    probs_ptr, num_ptr, above_ptr, mass_ptr, candidates_ptr, candidate_ids_ptr,
    logits_stride, edited_stride, allowed_stride, vocab_size, num_parts,
    BLOCK_V: tl.constexpr, NUM_PARTS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """A part's candidates, behind those of the parts before it."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    of_slot = shape_ptr + tl.load(slots_ptr + row) * 4
    top_k, _, _, has_filter = filters_of(of_slot, vocab_size)
    if (top_k == 1) | (has_filter == 0):
        return
    _, _, below, num_C = _bound(
        of_slot, highest_ptr, num_ptr, above_ptr, mass_ptr, row, vocab_size, num_parts, NUM_PARTS
    )
    part_C = tl.arange(0, NUM_PARTS)
    num_here = tl.sum(tl.where(part_C == part, num_C, 0), axis=0)
    if (num_here == 0) | (tl.sum(num_C, axis=0) > MAX_CANDIDATES):
        return
    place = row * MAX_CANDIDATES + tl.sum(tl.where(part_C < part, num_C, 0), axis=0)
    gather_part(
        probs_ptr + row * vocab_size, candidates_ptr, candidate_ids_ptr, place,
        part * BLOCK_V, below, vocab_size, BLOCK_V,
    )  # fmt: skip


@_jit
def _choose(
    logits_ptr, edited_ptr, allowed_ptr, shape_ptr, slots_ptr, highest_ptr, marks_ptr,
    probs_ptr, num_ptr, above_ptr, mass_ptr, candidates_ptr, candidate_ids_ptr,
    uniforms_ptr, ids_ptr, finite_ptr,
    logits_stride, edited_stride, allowed_stride, vocab_size, num_parts,
    BLOCK_V: tl.constexpr, NUM_PARTS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The token of a row."""
    row, part_C = tl.program_id(0).to(tl.int64), tl.arange(0, NUM_PARTS)
    place_C, is_part_C = row * 2 * num_parts + part_C, part_C < num_parts
    highest_C = tl.load(highest_ptr + place_C, mask=is_part_C, other=float("-inf"))
    likeliest_C = tl.load(marks_ptr + place_C, mask=is_part_C, other=0)
    is_odd_C = tl.load(marks_ptr + place_C + num_parts, mask=is_part_C, other=0)
    tl.store(finite_ptr + row, (tl.max(is_odd_C, axis=0) == 0).to(tl.uint8))
    is_best_C = is_part_C & (highest_C == tl.max(highest_C, axis=0))
    token = tl.min(tl.where(is_best_C, likeliest_C, vocab_size - 1), axis=0)
    if uniforms_ptr is not None:
        of_slot = shape_ptr + tl.load(slots_ptr + row) * 4
        if tl.load(of_slot + 1) != 1:
            token = _sampled(
                of_slot, tl.load(uniforms_ptr + row), highest_ptr, probs_ptr, num_ptr, above_ptr,
                mass_ptr, candidates_ptr, candidate_ids_ptr, row, vocab_size, num_parts,
                BLOCK_V, NUM_PARTS, MAX_CANDIDATES,
            )  # fmt: skip
    tl.store(ids_ptr + row, tl.minimum(token, vocab_size - 1).to(tl.int64))


@triton.jit
def _sampled(
    of_slot, uniform, highest_ptr, probs_ptr, num_ptr, above_ptr,
    mass_ptr, candidates_ptr, candidate_ids_ptr, row, vocab_size, num_parts,
    BLOCK_V: tl.constexpr, NUM_PARTS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    probs_ptr += row * vocab_size
    most, mass, below, num_C = _bound(
        of_slot, highest_ptr, num_ptr, above_ptr, mass_ptr, row, vocab_size, num_parts, NUM_PARTS
    )
    _, _, _, has_filter = filters_of(of_slot, vocab_size)
    num_candidates = tl.sum(num_C, axis=0)
    if has_filter == 0:
        mass_C = masses_of_parts(mass_ptr + row * num_parts, num_parts, NUM_PARTS)
        floor = tl.load(of_slot + 3) * most
        token = token_of_masses(
            probs_ptr, mass_C, uniform, 1, floor, vocab_size, BLOCK_V, NUM_PARTS
        )
    elif num_candidates <= MAX_CANDIDATES:
        first = row * MAX_CANDIDATES
        token = token_of_candidates(
            candidates_ptr + first, candidate_ids_ptr + first, num_candidates,
            of_slot, uniform, below, most, mass, vocab_size, MAX_CANDIDATES,
        )  # fmt: skip
    else:
        token = token_of_many(
            probs_ptr, of_slot, uniform, below, most, mass, vocab_size, BLOCK_V, NUM_PARTS
        )
    return token


@triton.jit
def _bound(
    of_slot, highest_ptr, num_ptr, above_ptr, mass_ptr, row, vocab_size, num_parts,
    NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """The highest probability, the mass, the bits below all candidates, and candidates by part."""
    _, total = total_of_row(
        highest_ptr + row * 2 * num_parts, num_parts, tl.load(of_slot), NUM_PARTS
    )
    most = 1.0 / total
    mass = tl.sum(masses_of_parts(mass_ptr + row * num_parts, num_parts, NUM_PARTS), axis=0)
    top_k, has_top_k, top_p, _ = filters_of(of_slot, vocab_size)
    max_above, max_mass = first_limits(top_k, has_top_k, top_p, mass, vocab_size)
    steps = row * num_parts * _NUM_STEPS
    bound, num_C = bound_of_row(
        num_ptr + steps, above_ptr + steps, num_parts, max_above, max_mass, NUM_PARTS
    )
    step_J = steps_below(most.to(tl.int32, bitcast=True))
    below = tl.sum(tl.where(tl.arange(0, _NUM_STEPS) == bound, step_J, 0), axis=0)
    return most, mass, below, num_C


def variants() -> tuple[Variant, ...]:
    """Greedy rows in bfloat16; random rows, plain, and with edits and a vocabulary mask."""
    return tuple(
        _variant(f"{name}{kernel.fn.__name__}", kernel, logits, has_edits, is_sampled)
        for name, logits, has_edits, is_sampled in (
            ("greedy_bf16", "*bf16", False, False),
            ("sampled", "*fp32", False, True),
            ("masked", "*fp32", True, True),
        )
        for kernel in ((_measure, _weigh, _gather, _choose) if is_sampled else (_measure, _choose))
    )


_TYPES = {
    "edited_ptr": "*fp32",
    "allowed_ptr": "*i32",
    "shape_ptr": "*fp32",
    "slots_ptr": "*i64",
    "highest_ptr": "*fp32",
    "marks_ptr": "*i32",
    "probs_ptr": "*fp32",
    "num_ptr": "*i32",
    "above_ptr": "*fp32",
    "mass_ptr": "*fp64",
    "candidates_ptr": "*fp32",
    "candidate_ids_ptr": "*i32",
    "uniforms_ptr": "*fp64",
    "ids_ptr": "*i64",
    "finite_ptr": "*u8",
}
_OF_SAMPLES = (
    *("probs_ptr", "num_ptr", "above_ptr", "mass_ptr"),
    *("candidates_ptr", "candidate_ids_ptr", "uniforms_ptr"),
)


def _variant(name: str, kernel: Any, logits: str, has_edits: bool, is_sampled: bool) -> Variant:
    constants: dict[str, object] = {"BLOCK_V": _BLOCK_V, "NUM_PARTS": 64}
    constants |= {"MAX_CANDIDATES": _MAX_CANDIDATES}
    constants |= {} if has_edits else {"edited_ptr": None, "allowed_ptr": None}
    constants |= {} if is_sampled else dict.fromkeys(_OF_SAMPLES)
    constants = {each: value for each, value in constants.items() if each in kernel.arg_names}
    types = {"logits_ptr": logits, **_TYPES, **dict.fromkeys(constants, "constexpr")}
    return Variant(
        name=name,
        kernel=kernel,
        signature={each: types.get(each, "i32") for each in kernel.arg_names},
        constants=constants,
        divisible=frozenset(kernel.arg_names)
        - {"allowed_stride", "num_parts", "slots_ptr", "uniforms_ptr"}
        - constants.keys(),
        num_warps=_NUM_WARPS[kernel.fn.__name__],
    )
