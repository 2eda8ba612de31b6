"""Products of rows with one of many weights each: experts, adapters.

Owns the order in which rows of one group share tiles, computed on the device, and the product over
it. Knows nothing of routing or of the meaning of a group.

A *pair* is a row and one of its groups; row `p // pairs_per_row` is the input of pair `p`.

Shapes: P pairs, E groups, I inputs, O outputs, S slots (tiles of M pairs each), M pairs, N outputs
and K inputs of a tile's step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.gated import GateRule, gate_product, has_factor
from triptych.core.runtime.kernels.triton.linear import STEP_INPUTS, dense_sum
from triptych.core.runtime.kernels.triton.tiling import (
    NUM_STAGES,
    VARYING,
    Tiling,
    ceil_div,
    product_variant,
    tile_size,
)
from triptych.core.runtime.kernels.triton.variant import Variant

_SORT_BLOCK, _LARGE_SORT_BLOCK = 1024, 8192
_MIN_BINS = 128


@dataclass(frozen=True, slots=True)
class GroupedPairs:
    """The pairs sorted by group, in tiles of one group. All tensors are int32, on the device.

    `pairs_S` are numbers of pairs, or `num_pairs` where a tile has a gap. `groups_of_tiles` is -1
    for unused tiles; the number of used tiles is never read back.
    """

    pairs_S: torch.Tensor
    groups_of_tiles: torch.Tensor
    num_pairs: int
    tile_rows: int


def group_pairs(group_of_pair_P: torch.Tensor, num_groups: int, tile_rows: int) -> GroupedPairs:
    """Sort pairs by group, stably; pairs outside of groups `[0, num_groups)` are left out."""
    assert group_of_pair_P.dtype == torch.int32
    assert group_of_pair_P.is_contiguous()
    num_pairs = group_of_pair_P.numel()
    num_tiles = (num_pairs + min(num_groups, num_pairs) * (tile_rows - 1)) // tile_rows
    block = _SORT_BLOCK if num_pairs <= _LARGE_SORT_BLOCK else _LARGE_SORT_BLOCK
    pairs_S = group_of_pair_P.new_empty(num_tiles * tile_rows)
    groups_of_tiles = group_of_pair_P.new_empty(num_tiles)
    _group_kernel[num_groups + 1,](
        group_of_pair_P,
        pairs_S,
        groups_of_tiles,
        num_pairs,
        num_tiles,
        num_groups,
        M=tile_rows,
        B=block,
        BINS=max(_MIN_BINS, triton.next_power_of_2(num_groups + 1)),
        num_warps=block // 256,
        num_stages=NUM_STAGES,
    )
    return GroupedPairs(pairs_S, groups_of_tiles, num_pairs, tile_rows)


def grouped_linear(
    x_RI: torch.Tensor,
    weight_EOI: torch.Tensor,
    pairs: GroupedPairs,
    out: torch.Tensor,
    tiling: Tiling,
    *,
    pairs_per_row: int = 1,
    gate: GateRule | None = None,
    bias_EO: torch.Tensor | None = None,
    scale_P: torch.Tensor | None = None,
    is_added: bool = False,
) -> None:
    """Write the product of each pair to `out`, `[P, O]`, or in parts, `[num_splits, P, O]`.

    The product is multiplied by its pair's scale, then the bias of its group is added. With a
    `gate` the weights are `[E, 2 O, I]`, and the result is `gate(first) * second`; without its
    factor they are `[E, O, I]`. If `is_added`, results are added to `out`. The outputs of omitted
    pairs are unchanged.
    """
    num_inputs, num_outputs = weight_EOI.shape[2], out.shape[-1]
    assert x_RI.shape[1] == num_inputs
    assert x_RI.stride(1) == weight_EOI.stride(2) == out.stride(-1) == 1
    values = values_of(gate)
    assert weight_EOI.shape[1] == values * num_outputs
    assert tiling.num_splits == 1 or bias_EO is None
    num_tiles = len(pairs.groups_of_tiles)
    _grouped_kernel[num_tiles * ceil_div(num_outputs, tiling.outputs // values), tiling.num_splits](
        x_RI,
        weight_EOI,
        pairs.pairs_S,
        pairs.groups_of_tiles,
        bias_EO,
        scale_P,
        out,
        pairs.num_pairs,
        num_tiles,
        num_outputs,
        num_inputs,
        x_RI.stride(0),
        weight_EOI.stride(0),
        weight_EOI.stride(1),
        out.stride(-2),
        tiling.num_splits,
        PAIRS_PER_ROW=pairs_per_row,
        GATE=gate,
        IS_ADDED=is_added,
        M=pairs.tile_rows,
        N=tiling.outputs,
        K=tile_size(num_inputs, STEP_INPUTS),
        num_warps=tiling.num_warps,
        num_stages=NUM_STAGES,
    )


def values_of(gate: GateRule | None) -> int:
    """The values of a product for each result."""
    return 1 if gate is None or not gate.has_factor else 2


@triton.jit(do_not_specialize=VARYING)
def _group_kernel(
    group_ptr,
    pairs_ptr,
    groups_of_tiles_ptr,
    num_pairs,
    num_tiles,
    num_groups,
    M: tl.constexpr,
    B: tl.constexpr,
    BINS: tl.constexpr,
):
    """One program counts and places the pairs of one group; the last program marks the rest."""
    group = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, num_pairs, B):
        groups_B = _load_groups(group_ptr, first, num_pairs, num_groups, B)
        counts += tl.histogram(groups_B, BINS)
    counts = tl.where(bins < num_groups, counts, 0)
    tiles = tl.cdiv(counts, M)
    first_tile = tl.sum(tl.where(bins < group, tiles, 0), 0)
    num_own_tiles = tl.sum(tl.where(bins == group, tiles, 0), 0)
    own_group = group
    if group == num_groups:
        num_own_tiles = num_tiles - first_tile
        own_group = -1
    for tile in range(first_tile, first_tile + num_own_tiles, B):
        tiles_B = tile + tl.arange(0, B)
        is_own_B = tiles_B < first_tile + num_own_tiles
        tl.store(groups_of_tiles_ptr + tiles_B, tl.full((B,), own_group, tl.int32), mask=is_own_B)
    num_placed = 0
    for first in range(0, num_pairs, B):
        groups_B = _load_groups(group_ptr, first, num_pairs, num_groups, B)
        is_own_B = (groups_B == group) & (group < num_groups)
        places_B = first_tile * M + num_placed + tl.cumsum(is_own_B.to(tl.int32), 0) - 1
        tl.store(pairs_ptr + places_B, first + tl.arange(0, B), mask=is_own_B)
        num_placed += tl.sum(is_own_B.to(tl.int32), 0)
    gap_M = num_placed + tl.arange(0, M)
    gap_mask_M = (gap_M < num_own_tiles * M) & (group < num_groups)
    tl.store(pairs_ptr + first_tile * M + gap_M, tl.zeros((M,), tl.int32) + num_pairs, gap_mask_M)


@triton.jit
def _load_groups(group_ptr, first, num_pairs, num_groups, B: tl.constexpr):
    """Load the groups of consecutive pairs; `num_groups` for none."""
    pairs_B = first + tl.arange(0, B)
    groups_B = tl.load(group_ptr + pairs_B, mask=pairs_B < num_pairs, other=-1)
    return tl.where((groups_B >= 0) & (groups_B < num_groups), groups_B, num_groups)


@triton.jit(do_not_specialize=VARYING)
def _grouped_kernel(
    x_ptr,
    weight_ptr,
    pairs_ptr,
    groups_of_tiles_ptr,
    bias_ptr,
    scale_ptr,
    out_ptr,
    num_pairs,
    num_tiles,
    num_outputs,
    num_inputs,
    x_stride,
    group_stride,
    weight_stride,
    out_stride,
    num_splits,
    PAIRS_PER_ROW: tl.constexpr,
    GATE: tl.constexpr,
    IS_ADDED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    group, pairs_M, outputs_N, weight_rows_N = pairs_of_tile(
        pairs_ptr, groups_of_tiles_ptr, num_tiles, num_outputs, GATE, M, N
    )
    if group < 0:
        return
    total_MN = dense_sum(
        x_ptr + (pairs_M // PAIRS_PER_ROW).to(tl.int64) * x_stride,
        pairs_M < num_pairs,
        weight_ptr + group * group_stride + weight_rows_N.to(tl.int64) * weight_stride,
        outputs_N < num_outputs,
        num_inputs,
        0,
        num_splits,
        1,
        K,
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
        scale_ptr,
        GATE,
        IS_ADDED,
    )


@triton.jit
def pairs_of_tile(
    pairs_ptr,
    groups_of_tiles_ptr,
    num_tiles,
    num_outputs,
    GATE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """This program's group (-1: none) and its pairs; its outputs, and their rows of the weight."""
    tile, output_tile = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    group = tl.load(groups_of_tiles_ptr + tile).to(tl.int64)
    pairs_M = tl.load(pairs_ptr + tile * M + tl.arange(0, M))
    outputs_N, weight_rows_N = _outputs_of_tile(output_tile, num_outputs, GATE, N)
    return group, pairs_M, outputs_N, weight_rows_N


@triton.jit
def _outputs_of_tile(output_tile, num_outputs, GATE: tl.constexpr, N: tl.constexpr):
    """The outputs of a tile, and their rows of the weight.

    A gate's rows lie next to those that it multiplies, and belong to one output.
    """
    if has_factor(GATE):
        outputs_N = output_tile * (N // 2) + tl.arange(0, N) // 2
        weight_rows_N = outputs_N + tl.arange(0, N) % 2 * num_outputs
    else:
        outputs_N = output_tile * N + tl.arange(0, N)
        weight_rows_N = outputs_N
    return outputs_N, weight_rows_N


@triton.jit
def store_pairs(
    out_ptr,
    total_MN,
    group,
    pairs_M,
    num_pairs,
    num_tiles,
    num_outputs,
    out_stride,
    bias_ptr,
    scale_ptr,
    GATE: tl.constexpr,
    IS_ADDED: tl.constexpr,
):
    """Store the results of this program's pairs: scaled, with a bias and through a gate if any."""
    output_tile = tl.program_id(0) // num_tiles
    M: tl.constexpr = total_MN.shape[0]
    N: tl.constexpr = total_MN.shape[1]
    is_pair_M = pairs_M < num_pairs
    if scale_ptr is not None:
        total_MN *= tl.load(scale_ptr + pairs_M, mask=is_pair_M, other=0)[:, None]
    outputs_N, weight_rows_N = _outputs_of_tile(output_tile, num_outputs, GATE, N)
    if bias_ptr is not None:
        bias_ptr += group * (2 * num_outputs if has_factor(GATE) else num_outputs)
        bias_N = tl.load(bias_ptr + weight_rows_N, mask=outputs_N < num_outputs, other=0)
        total_MN += bias_N.to(tl.float32)[None, :]
    if has_factor(GATE):
        gate_MN, up_MN = tl.split(tl.reshape(total_MN, (M, N // 2, 2)))
        total_MN = gate_product(gate_MN, up_MN, GATE)
        outputs_N = output_tile * (N // 2) + tl.arange(0, N // 2)
    elif GATE is not None:
        total_MN = gate_product(total_MN, 1.0, GATE)
    out_rows_M = tl.program_id(1).to(tl.int64) * num_pairs + pairs_M
    out_ptrs_MN = out_ptr + out_rows_M[:, None] * out_stride + outputs_N[None, :]
    mask_MN = is_pair_M[:, None] & (outputs_N < num_outputs)[None, :]
    if IS_ADDED:
        total_MN += tl.load(out_ptrs_MN, mask=mask_MN, other=0).to(tl.float32)
    tl.store(out_ptrs_MN, total_MN.to(out_ptr.dtype.element_ty), mask=mask_MN)


def variants() -> tuple[Variant, ...]:
    """The sorting of pairs."""
    return (
        product_variant(
            "group_pairs",
            _group_kernel,
            dict.fromkeys(("group_ptr", "pairs_ptr", "groups_of_tiles_ptr"), "*i32"),
            {"M": 16, "B": _SORT_BLOCK, "BINS": 256},
        ),
    )


def grouped_variant(
    name: str,
    tiling: Tiling,
    *,
    pairs_per_row: int = 1,
    gate: GateRule | None = None,
    is_added: bool = False,
    has_bias: bool = False,
    out: str = "*bf16",
) -> Variant:
    """A bfloat16 product in the form that an operation uses."""
    types = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": out}
    types |= dict.fromkeys(("pairs_ptr", "groups_of_tiles_ptr"), "*i32")
    constants = {
        "PAIRS_PER_ROW": pairs_per_row,
        "GATE": gate,
        "IS_ADDED": is_added,
        "M": tiling.rows,
        "N": tiling.outputs,
        "K": STEP_INPUTS,
    }
    types |= {"scale_ptr": "*fp32"} if is_added else {}
    types |= {"bias_ptr": "*bf16"} if has_bias else {}
    constants |= {name: None for name in ("bias_ptr", "scale_ptr") if name not in types}
    return product_variant(name, _grouped_kernel, types, constants, tiling.num_warps)
