"""Writes the rows of latent attention: norm, rotation and conversion in one kernel.

Owns the kernel for `core.runtime.kernels.latent_attention.write_latents`. A program makes the row
of one token: compressed values, and one rotated key.

Shapes: T tokens, N pages, P page size, K = 1 head, V compressed values, R rotated dims, D = V + R.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.kv_pages import LatentPages
from triptych.core.runtime.kernels.triton.float8 import (
    as_stored,
    divided,
    int8_scale,
    size_bits,
    to_stored,
)
from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.variant import Variant


def launch(
    row_TD: torch.Tensor,
    norm_V: torch.Tensor | None,
    eps: float,
    cos_T1R: torch.Tensor | None,
    sin_T1R: torch.Tensor | None,
    is_interleaved: bool,
    pages_NPKD: torch.Tensor,
    scale_NPK: torch.Tensor | None,
    write_slots_T: torch.Tensor,
) -> None:
    """Write the rows. A token with a slot below 0 is not written.

    Without `cos_T1R` and `norm_V`, rows are stored as they are.
    """
    _check(row_TD, norm_V, cos_T1R, sin_T1R, pages_NPKD, scale_NPK, write_slots_T)
    num_tokens, row_dim = row_TD.shape
    half = 0 if cos_T1R is None else cos_T1R.shape[2] // 2
    value_dim = row_dim - 2 * half
    if num_tokens:
        _kernel[(num_tokens,)](
            *(row_TD, norm_V, cos_T1R, sin_T1R, as_stored(pages_NPKD), scale_NPK, write_slots_T),
            *(row_TD.stride(0), eps),
            **_constants(value_dim, half),
            IS_INTERLEAVED=is_interleaved,
            HAS_SCALES=scale_NPK is not None,
            num_warps=4,
            num_stages=2,
        )


def _constants(value_dim: int, half: int) -> dict[str, int]:
    return {
        "VALUE_DIM": value_dim,
        "HALF": half,
        "BLOCK_V": triton.next_power_of_2(value_dim),
        "BLOCK_HALF": triton.next_power_of_2(half) if half else 0,
    }


latent_write = define_operator("latent_write", launch, mutates=("pages_NPKD", "scale_NPK"))


@fake_of(latent_write)
def _(
    row_TD: torch.Tensor,
    norm_V: torch.Tensor | None,
    eps: float,
    cos_T1R: torch.Tensor | None,
    sin_T1R: torch.Tensor | None,
    is_interleaved: bool,
    pages_NPKD: torch.Tensor,
    scale_NPK: torch.Tensor | None,
    write_slots_T: torch.Tensor,
) -> None:
    _check(row_TD, norm_V, cos_T1R, sin_T1R, pages_NPKD, scale_NPK, write_slots_T)


def _check(
    row_TD: torch.Tensor,
    norm_V: torch.Tensor | None,
    cos_T1R: torch.Tensor | None,
    sin_T1R: torch.Tensor | None,
    pages_NPKD: torch.Tensor,
    scale_NPK: torch.Tensor | None,
    write_slots_T: torch.Tensor,
) -> None:
    LatentPages(pages_NPKD, pages_NPKD, scale_NPK, scale_NPK).check()
    assert row_TD.shape[1] == pages_NPKD.shape[3]
    assert row_TD.stride(1) == 1
    assert write_slots_T.shape == row_TD.shape[:1]
    assert write_slots_T.is_contiguous()
    num_rotated = 0
    if cos_T1R is not None:
        assert sin_T1R is not None
        assert cos_T1R.shape == sin_T1R.shape
        assert cos_T1R.is_contiguous()
        assert sin_T1R.is_contiguous()
        num_rotated = cos_T1R.shape[2]
    assert norm_V is None or norm_V.shape == (row_TD.shape[1] - num_rotated,)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _kernel(
    row_ptr, norm_ptr, cos_ptr, sin_ptr, pages_ptr, scale_ptr, slots_ptr, row_stride, eps,
    VALUE_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    is_written = slot >= 0
    row_ptr += token * row_stride
    dim_V = tl.arange(0, BLOCK_V)
    is_held_V = dim_V < VALUE_DIM
    value_V = tl.load(row_ptr + dim_V, mask=is_held_V, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        weight_V = tl.load(norm_ptr + dim_V, mask=is_held_V, other=0.0)
        normed_V = value_V * tl.rsqrt(tl.sum(value_V * value_V, 0) / VALUE_DIM + eps)
        value_V = normed_V.to(weight_V.dtype).to(tl.float32) * weight_V.to(tl.float32)
    peak_bits = tl.max(size_bits(value_V), 0)
    if HALF > 0:
        pair = tl.arange(0, BLOCK_HALF)
        is_pair = pair < HALF
        first_dim = VALUE_DIM + (2 * pair if IS_INTERLEAVED else pair)
        second_dim = first_dim + (1 if IS_INTERLEAVED else HALF)
        a = tl.load(row_ptr + first_dim, mask=is_pair, other=0.0).to(tl.float32)
        b = tl.load(row_ptr + second_dim, mask=is_pair, other=0.0).to(tl.float32)
        place = token * (2 * HALF) + pair
        first = a * _factor(cos_ptr + place, is_pair) + b * _factor(sin_ptr + place, is_pair)
        place += HALF
        second = b * _factor(cos_ptr + place, is_pair) + a * _factor(sin_ptr + place, is_pair)
        peak_bits = tl.maximum(peak_bits, tl.max(size_bits(first), 0))
        peak_bits = tl.maximum(peak_bits, tl.max(size_bits(second), 0))
    cell_scale = int8_scale(peak_bits)
    if HAS_SCALES:
        tl.store(scale_ptr + slot, cell_scale, mask=is_written)
    into = pages_ptr + slot * (VALUE_DIM + 2 * HALF)
    _store(into + dim_V, value_V, cell_scale, is_held_V & is_written, HAS_SCALES)
    if HALF > 0:
        _store(into + first_dim, first, cell_scale, is_pair & is_written, HAS_SCALES)
        _store(into + second_dim, second, cell_scale, is_pair & is_written, HAS_SCALES)


@triton.jit
def _factor(from_ptr, is_pair):
    return tl.load(from_ptr, mask=is_pair, other=0.0).to(tl.float32)


@triton.jit
def _store(into, values, cell_scale, is_stored, HAS_SCALES: tl.constexpr):
    """Store values in the format of the pages."""
    if HAS_SCALES:
        values = divided(values, cell_scale)
    tl.store(into, to_stored(values, into.dtype.element_ty), mask=is_stored)


def variants() -> tuple[Variant, ...]:
    """DeepSeek-V3 over bfloat16, float8 and int8, and rows that are stored as they are.

    Those of 128 values are the keys of an index.
    """
    return (
        *(_variant(f"index{name}", pages, 128, 0) for name, pages in _PAGES.items()),
        *(_variant(f"row{name}", pages, 512, 32) for name, pages in _PAGES.items()),
        _variant("plain", "*bf16", 576, 0),
    )


_PAGES = {"": "*bf16", "_float8": "*u8", "_int8": "*i8"}


def _variant(name: str, pages: str, value_dim: int, half: int) -> Variant:
    constants: dict[str, Any] = {
        **_constants(value_dim, half),
        "IS_INTERLEAVED": half > 0,
        "HAS_SCALES": pages == "*i8",
    }
    constants |= {} if half else dict.fromkeys(("norm_ptr", "cos_ptr", "sin_ptr"))
    constants |= {} if pages == "*i8" else {"scale_ptr": None}
    pointers = dict.fromkeys(("row_ptr", "norm_ptr", "cos_ptr", "sin_ptr"), "*bf16")
    pointers |= {"pages_ptr": pages, "scale_ptr": "*bf16", "slots_ptr": "*i64"}
    signature = {**pointers, "row_stride": "i32", "eps": "fp32"}
    signature |= dict.fromkeys(constants, "constexpr")
    return Variant(
        name=name,
        kernel=_kernel,
        signature={each: signature[each] for each in _kernel.arg_names},
        constants=constants,
        divisible=frozenset((*pointers, "row_stride")) - {"slots_ptr"} - constants.keys(),
    )
