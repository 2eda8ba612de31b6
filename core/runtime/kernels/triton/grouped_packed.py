"""Products of rows with one of many weights each that are kept as they are stored.

Owns the kernels for float8, words of four bits and the blocks of GGUF files; `grouped` owns the
order of the pairs, and the modules of linear products own what a weight is. Nothing is unpacked in
memory.

Shapes: P pairs, E groups, I inputs, O outputs, R groups of a row's inputs, B bytes of a row of
blocks, M pairs, N outputs and K inputs of a tile's step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from triptych.core.block_formats import FORMATS
from triptych.core.runtime.kernels.stacked_weights import FLOAT8, StackedWeight
from triptych.core.runtime.kernels.triton.float8 import as_stored
from triptych.core.runtime.kernels.triton.fp8_linear import (
    BLOCK,
    float8_step_inputs,
    fp8_sum,
    has_float8_units,
    launch_quantize_rows,
)
from triptych.core.runtime.kernels.triton.gated import GPT_OSS_GATE, GateRule, has_factor
from triptych.core.runtime.kernels.triton.gguf_linear import gguf_constants, gguf_sum
from triptych.core.runtime.kernels.triton.gptq_linear import (
    MAX_STEP_INPUTS,
    gptq_sum,
    int4_step_inputs,
)
from triptych.core.runtime.kernels.triton.grouped import (
    GroupedPairs,
    pairs_of_tile,
    store_pairs,
    values_of,
)
from triptych.core.runtime.kernels.triton.tiling import (
    NUM_STAGES,
    VARYING,
    Tiling,
    ceil_div,
    product_variant,
)
from triptych.core.runtime.kernels.triton.variant import Variant

_BLOCK = tl.constexpr(BLOCK)
_FLOAT8_ROWS = 64
_SILU = GateRule("silu")


def fitting_tiling(tiling: Tiling, *forms: str) -> Tiling:
    """The tiling whose rows fit the registers: float8 sums a step at a time, in a second tile."""
    rows = min(tiling.rows, _FLOAT8_ROWS) if FLOAT8 in forms else tiling.rows
    return replace(tiling, rows=rows)


def packed_grouped_linear(
    x_RI: torch.Tensor,
    weight: StackedWeight,
    pairs: GroupedPairs,
    out_PO: torch.Tensor,
    tiling: Tiling,
    *,
    pairs_per_row: int = 1,
    gate: GateRule | None = None,
    bias_EO: torch.Tensor | None = None,
    scale_P: torch.Tensor | None = None,
) -> None:
    """Write the product of each pair to `out_PO`, as `grouped_linear` does of plain weights.

    In float8 rows are quantized as in a linear product, where the device has units for that.
    """
    num_outputs, num_inputs = weight.shape[1:]
    assert x_RI.shape[1] == num_inputs
    assert x_RI.stride(1) == out_PO.stride(1) == 1
    values = values_of(gate)
    assert num_outputs == out_PO.shape[1] * values
    assert tiling.num_splits == 1
    assert all(each.is_contiguous() for each in weight.tensors)
    arguments = _float8_arguments if weight.form == FLOAT8 else _int4_arguments
    if weight.form in FORMATS:
        arguments = _block_arguments
    kernel, rows, sizes, constants = arguments(x_RI, weight, tiling)
    num_tiles = len(pairs.groups_of_tiles)
    tile_outputs = tiling.outputs // values
    kernel[(num_tiles * ceil_div(out_PO.shape[1], tile_outputs),)](
        *rows,
        pairs.pairs_S,
        pairs.groups_of_tiles,
        bias_EO,
        scale_P,
        out_PO,
        pairs.num_pairs,
        num_tiles,
        out_PO.shape[1],
        out_PO.stride(0),
        *sizes,
        PAIRS_PER_ROW=pairs_per_row,
        GATE=gate,
        M=pairs.tile_rows,
        N=tiling.outputs,
        **constants,
        num_warps=tiling.num_warps,
        num_stages=NUM_STAGES,
    )


_Arguments = tuple[Any, tuple[torch.Tensor | None, ...], tuple[int, ...], dict[str, Any]]
"""A kernel, its tensors, its own sizes and its own constants."""


def _float8_arguments(x_RI: torch.Tensor, weight: StackedWeight, tiling: Tiling) -> _Arguments:
    weight_EOI, scale = weight.tensors
    num_inputs, has_blocks = weight_EOI.shape[2], scale.dim() == 3
    has_units, x_scale = has_float8_units(x_RI.device), scale
    if has_units:
        x_RI, x_scale = launch_quantize_rows(x_RI, BLOCK if has_blocks else num_inputs)
    constants = {
        "HAS_UNITS": has_units,
        "HAS_BLOCKS": has_blocks,
        "K": float8_step_inputs(has_units),
    }
    rows = as_stored(x_RI), x_scale, as_stored(weight_EOI), scale
    sizes = len(x_RI), num_inputs, x_RI.stride(0), scale[0].numel()
    return _grouped_fp8_kernel, rows, sizes, constants


def _int4_arguments(x_RI: torch.Tensor, weight: StackedWeight, tiling: Tiling) -> _Arguments:
    words, scales_ERO, *zeros = weight.tensors
    num_inputs, num_groups = weight.shape[2], scales_ERO.shape[1]
    group_size = ceil_div(num_inputs, num_groups)
    constants = {"LAYOUT": weight.form, "K": int4_step_inputs(group_size, num_groups)}
    rows = x_RI, words, scales_ERO, zeros[0] if zeros else None
    sizes = num_inputs, group_size, num_groups, x_RI.stride(0)
    return _grouped_gptq_kernel, rows, sizes, constants


def _block_arguments(x_RI: torch.Tensor, weight: StackedWeight, tiling: Tiling) -> _Arguments:
    (blocks_EOB,) = weight.tensors
    num_blocks = blocks_EOB.shape[2] // FORMATS[weight.form].num_bytes
    constants = gguf_constants(weight.form, tiling)
    return _grouped_gguf_kernel, (x_RI, blocks_EOB), (num_blocks, x_RI.stride(0)), constants


@triton.jit(do_not_specialize=VARYING)
def _grouped_fp8_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, pairs_ptr, groups_of_tiles_ptr, bias_ptr,
    pair_scale_ptr, out_ptr, num_pairs, num_tiles, num_outputs, out_stride, num_rows, num_inputs,
    x_stride, group_scales, PAIRS_PER_ROW: tl.constexpr, GATE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, HAS_UNITS: tl.constexpr, HAS_BLOCKS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    group, pairs_M, outputs_N, weight_rows_N = pairs_of_tile(
        pairs_ptr, groups_of_tiles_ptr, num_tiles, num_outputs, GATE, M, N
    )
    if group < 0:
        return
    rows_M = (pairs_M // PAIRS_PER_ROW).to(tl.int64)
    num_weight_rows = 2 * num_outputs if has_factor(GATE) else num_outputs
    scale_ptr += group * group_scales
    if HAS_BLOCKS:
        scale_ptrs_N = scale_ptr + (weight_rows_N // _BLOCK) * tl.cdiv(num_inputs, _BLOCK)
    else:
        scale_ptrs_N = scale_ptr + weight_rows_N
    total_MN = fp8_sum(
        x_ptr + rows_M * x_stride,
        pairs_M < num_pairs,
        x_scale_ptr + rows_M,
        num_rows,
        weight_ptr + (group * num_weight_rows + weight_rows_N) * num_inputs,
        outputs_N < num_outputs,
        scale_ptrs_N,
        num_inputs,
        0,
        1,
        HAS_UNITS,
        HAS_BLOCKS,
        1,
        K,
    )
    store_pairs(
        out_ptr, total_MN, group, pairs_M, num_pairs, num_tiles, num_outputs, out_stride, bias_ptr,
        pair_scale_ptr, GATE, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _grouped_gptq_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, pairs_ptr, groups_of_tiles_ptr, bias_ptr,
    pair_scale_ptr, out_ptr, num_pairs, num_tiles, num_outputs, out_stride, num_inputs, group_size,
    num_groups, x_stride, PAIRS_PER_ROW: tl.constexpr, GATE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, LAYOUT: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    group, pairs_M, outputs_N, weight_rows_N = pairs_of_tile(
        pairs_ptr, groups_of_tiles_ptr, num_tiles, num_outputs, GATE, M, N
    )
    if group < 0:
        return
    num_weight_rows = 2 * num_outputs if has_factor(GATE) else num_outputs
    if zero_ptr is not None:
        zero_ptr += group * num_groups * (num_weight_rows // 8)
    total_MN = gptq_sum(
        x_ptr + (pairs_M // PAIRS_PER_ROW).to(tl.int64) * x_stride,
        pairs_M < num_pairs,
        weight_ptr + group * (num_inputs // 8) * num_weight_rows,
        scale_ptr + group * num_groups * num_weight_rows,
        zero_ptr,
        None,
        weight_rows_N,
        outputs_N < num_outputs,
        0,
        num_weight_rows,
        num_inputs,
        group_size,
        num_weight_rows,
        1,
        num_weight_rows,
        1,
        num_weight_rows // 8,
        1,
        0,
        1,
        LAYOUT,
        1,
        K,
    )
    store_pairs(
        out_ptr, total_MN, group, pairs_M, num_pairs, num_tiles, num_outputs, out_stride, bias_ptr,
        pair_scale_ptr, GATE, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _grouped_gguf_kernel(
    x_ptr,
    blocks_ptr,
    pairs_ptr,
    groups_of_tiles_ptr,
    bias_ptr,
    pair_scale_ptr,
    out_ptr,
    num_pairs,
    num_tiles,
    num_outputs,
    out_stride,
    num_blocks,
    x_stride,
    PAIRS_PER_ROW: tl.constexpr,
    GATE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    DISTANCE: tl.constexpr,
    G: tl.constexpr,
    L: tl.constexpr,
):
    group, pairs_M, outputs_N, weight_rows_N = pairs_of_tile(
        pairs_ptr, groups_of_tiles_ptr, num_tiles, num_outputs, GATE, M, N
    )
    if group < 0:
        return
    num_weight_rows = 2 * num_outputs if has_factor(GATE) else num_outputs
    total_MN = gguf_sum(
        x_ptr + (pairs_M // PAIRS_PER_ROW).to(tl.int64) * x_stride,
        pairs_M < num_pairs,
        blocks_ptr,
        (group * num_weight_rows + weight_rows_N) * num_blocks,
        outputs_N < num_outputs,
        num_blocks * BLOCK_GROUPS,
        0,
        1,
        KIND,
        DISTANCE,
        1,
        G,
        L,
    )
    store_pairs(
        out_ptr,
        total_MN,
        group,
        pairs_M,
        num_pairs,
        num_tiles,
        num_outputs,
        out_stride,
        bias_ptr,
        pair_scale_ptr,
        GATE,
        False,
    )


def variants() -> tuple[Variant, ...]:
    """Gate and up of 8 experts of a token, in a batch and in a prompt, and down, for each kind."""
    batch, prompt = Tiling(16, 64), Tiling(128, 128)
    fp8_prompt = fitting_tiling(prompt, FLOAT8)
    return (
        _fp8_variant("fp8_gate_up_16", batch, has_units=True),
        _fp8_variant("fp8_gate_up_64", fp8_prompt, has_units=True),
        _fp8_variant("weights_gate_up_64", fp8_prompt, has_units=False),
        _gptq_variant("gptq_gate_up_16", batch),
        _gptq_variant("gptq_gate_up_128", prompt),
        _gguf_variant("q4_k_gate_up_16", "q4_k", batch),
        _gguf_variant("q4_k_gate_up_128", "q4_k", prompt),
        _gguf_variant("q6_k_down_16", "q6_k", batch, gate=None),
        _gguf_variant("mxfp4_gate_up_16", "mxfp4", batch, GPT_OSS_GATE, has_bias=True),
        _gguf_variant("mxfp4_gate_up_128", "mxfp4", prompt, GPT_OSS_GATE, has_bias=True),
        _gguf_variant("mxfp4_down_16", "mxfp4", batch, gate=None, has_bias=True),
    )


def _fp8_variant(name: str, tiling: Tiling, *, has_units: bool) -> Variant:
    types = {"x_ptr": "*u8" if has_units else "*bf16", "weight_ptr": "*u8"}
    types |= {"x_scale_ptr": "*fp32", "scale_ptr": "*fp32"}
    constants = {
        "HAS_UNITS": has_units,
        "HAS_BLOCKS": True,
        "K": float8_step_inputs(has_units),
    }
    variant = _variant(name, _grouped_fp8_kernel, types, constants, tiling)
    return replace(variant, multiplies_float8=has_units)


def _gptq_variant(name: str, tiling: Tiling) -> Variant:
    types = {"x_ptr": "*bf16", "weight_ptr": "*i32", "scale_ptr": "*fp16", "zero_ptr": "*i32"}
    constants = {"LAYOUT": "gptq", "K": MAX_STEP_INPUTS}
    return _variant(name, _grouped_gptq_kernel, types, constants, tiling)


def _gguf_variant(
    name: str,
    kind: str,
    tiling: Tiling,
    gate: GateRule | None = _SILU,
    *,
    has_bias: bool = False,
) -> Variant:
    types = {"x_ptr": "*bf16", "blocks_ptr": "*u8"} | ({"bias_ptr": "*bf16"} if has_bias else {})
    constants = gguf_constants(kind, tiling)
    return _variant(name, _grouped_gguf_kernel, types, constants, tiling, gate)


def _variant(
    name: str,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    tiling: Tiling,
    gate: GateRule | None = _SILU,
) -> Variant:
    types |= dict.fromkeys(("pairs_ptr", "groups_of_tiles_ptr"), "*i32") | {"out_ptr": "*bf16"}
    constants |= {
        "PAIRS_PER_ROW": 1 if gate is None else 4 if gate == GPT_OSS_GATE else 8,
        "GATE": gate,
        "M": tiling.rows,
        "N": tiling.outputs,
        **{name: None for name in ("bias_ptr", "pair_scale_ptr") if name not in types},
    }
    return product_variant(name, kernel, types, constants, tiling.num_warps)
