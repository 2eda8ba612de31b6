"""A small projection for each head, whose rows are independent of their batch.

Owns the kernel. Tiles have one size and inputs one order, so that a row's result does not depend on
the number of rows, which decides the algorithm of vendors' libraries.

Shapes: T rows, H heads, I inputs and O outputs of a head; M rows, N outputs and K inputs of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.linear import STEP_INPUTS, dense_sum
from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.tiling import (
    NUM_STAGES,
    VARYING,
    are_on_one_device,
    ceil_div,
    product_variant,
    tile_of_program,
)
from triptych.core.runtime.kernels.triton.variant import Variant

_TILE = {"M": 64, "N": 64, "K": STEP_INPUTS}


def launch(x_THI: torch.Tensor, weight_HOI: torch.Tensor) -> torch.Tensor:
    """Compute `y[:, h] = x[:, h] @ weight[h].T`, `[T, H, O]`, summed in float32."""
    _check(x_THI, weight_HOI)
    (num_rows, num_heads, num_inputs), num_outputs = x_THI.shape, weight_HOI.shape[1]
    y_THO = x_THI.new_empty(num_rows, num_heads, num_outputs)
    num_tiles = ceil_div(num_rows, _TILE["M"]) * ceil_div(num_outputs, _TILE["N"])
    _kernel[(num_tiles, 1, num_heads)](
        *(x_THI, weight_HOI, y_THO, num_rows, num_outputs, num_inputs),
        *(x_THI.stride(0), x_THI.stride(1), num_heads),
        **_TILE,
        num_warps=4,
        num_stages=NUM_STAGES,
    )
    return y_THO


head_linear = define_operator("head_linear", launch)


@fake_of(head_linear)
def _(x_THI: torch.Tensor, weight_HOI: torch.Tensor) -> torch.Tensor:
    _check(x_THI, weight_HOI)
    return x_THI.new_empty(*x_THI.shape[:2], weight_HOI.shape[1])


def _check(x_THI: torch.Tensor, weight_HOI: torch.Tensor) -> None:
    assert are_on_one_device(x_THI, weight_HOI)
    assert x_THI.shape[1:] == (weight_HOI.shape[0], weight_HOI.shape[2])
    assert x_THI.dtype == weight_HOI.dtype
    assert x_THI.stride(2) == 1
    assert weight_HOI.is_contiguous()


@triton.jit(do_not_specialize=VARYING)
def _kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    head_stride,
    num_heads,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    head = tl.program_id(2).to(tl.int64)
    _, rows_M, outputs_N, is_row_M, is_output_N = tile_of_program(num_rows, num_outputs, M, N)
    x_ptrs_M = x_ptr + head * head_stride + rows_M.to(tl.int64) * x_stride
    weight_ptrs_N = weight_ptr + (head * num_outputs + outputs_N) * num_inputs
    total_MN = dense_sum(
        x_ptrs_M, is_row_M, weight_ptrs_N, is_output_N, num_inputs, 0, 1, SPLITS=1, K=K
    )
    places_MN = (rows_M.to(tl.int64)[:, None] * num_heads + head) * num_outputs + outputs_N
    is_held_MN = is_row_M[:, None] & is_output_N[None, :]
    tl.store(out_ptr + places_MN, total_MN.to(out_ptr.dtype.element_ty), mask=is_held_MN)


def variants() -> tuple[Variant, ...]:
    """The one tile, of heads of bfloat16."""
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16")
    return (product_variant("heads", _kernel, pointers, _TILE, 4),)
