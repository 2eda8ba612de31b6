"""Low-rank adapters of many requests in one batch (arXiv:2106.09685, arXiv:2310.18547).

Owns the two products of a row with its adapter, and their reference. Knows nothing of the source of
adapters.

Shapes: T rows, I inputs, O outputs, L adapters, R the largest rank, P parts of the inputs.
"""

from __future__ import annotations

import torch

from triptych.core.runtime.kernels.triton.grouped import (
    group_pairs,
    grouped_linear,
    grouped_variant,
)
from triptych.core.runtime.kernels.triton.linear import STEP_INPUTS
from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.tiling import (
    Tiling,
    add_parts,
    are_on_one_device,
    ceil_div,
    choose_tiling,
    tile_size,
)
from triptych.core.runtime.kernels.triton.variant import Variant

MAX_RANK = 128


def launch_lora_add(
    y_TO: torch.Tensor,
    x_TI: torch.Tensor,
    a_LRI: torch.Tensor,
    b_LOR: torch.Tensor,
    scales_T: torch.Tensor,
    adapters_T: torch.Tensor,
    deterministic: bool = False,
) -> None:
    """Add `scale * b @ (a @ x)` of each row and its adapter to `y_TO`, in place.

    Smaller ranks are padded with zeros. A row whose adapter (int32) is -1 is unchanged. `y_TO` may
    be a few columns of a wider result. Scales are float32, one for each row.
    """
    _check(y_TO, x_TI, a_LRI, b_LOR, scales_T, adapters_T)
    num_adapters, rank, num_inputs = a_LRI.shape
    num_rows = ceil_div(len(x_TI), num_adapters)
    num_steps = ceil_div(num_inputs, STEP_INPUTS)
    tiling = choose_tiling(num_rows, rank, num_steps, is_deterministic=deterministic)
    shrink = Tiling(tiling.rows, tile_size(rank, tiling.outputs), tiling.num_splits)
    pairs = group_pairs(adapters_T, num_adapters, tiling.rows)
    is_split = shrink.num_splits > 1
    # Rows without an adapter are never written: zeros, so that their sums are numbers.
    new, dtype = (x_TI.new_zeros, torch.float32) if is_split else (x_TI.new_empty, x_TI.dtype)
    parts_PTR = new(shrink.num_splits, len(x_TI), rank, dtype=dtype)
    grouped_linear(x_TI, a_LRI, pairs, parts_PTR, shrink)
    low_TR = add_parts(parts_PTR, x_TI.dtype) if is_split else parts_PTR[0]
    expand = Tiling(tiling.rows, tiling.outputs)
    grouped_linear(low_TR, b_LOR, pairs, y_TO, expand, scale_P=scales_T, is_added=True)


lora_add = define_operator("lora_add", launch_lora_add, mutates=("y_TO",))


@fake_of(lora_add)
def _(
    y_TO: torch.Tensor,
    x_TI: torch.Tensor,
    a_LRI: torch.Tensor,
    b_LOR: torch.Tensor,
    scales_T: torch.Tensor,
    adapters_T: torch.Tensor,
    deterministic: bool = False,
) -> None:
    _check(y_TO, x_TI, a_LRI, b_LOR, scales_T, adapters_T)


def _check(
    y_TO: torch.Tensor,
    x_TI: torch.Tensor,
    a_LRI: torch.Tensor,
    b_LOR: torch.Tensor,
    scales_T: torch.Tensor,
    adapters_T: torch.Tensor,
) -> None:
    num_adapters, rank, num_inputs = a_LRI.shape
    assert are_on_one_device(y_TO, x_TI, a_LRI, b_LOR, scales_T, adapters_T)
    assert rank <= MAX_RANK
    assert y_TO.shape[0] == x_TI.shape[0] == adapters_T.numel() == scales_T.numel()
    assert x_TI.shape[1] == num_inputs
    assert b_LOR.shape == (num_adapters, y_TO.shape[1], rank)
    assert x_TI.dtype == a_LRI.dtype == b_LOR.dtype
    assert scales_T.dtype == torch.float32


def reference(
    y_TO: torch.Tensor,
    x_TI: torch.Tensor,
    a_LRI: torch.Tensor,
    b_LOR: torch.Tensor,
    scales_T: torch.Tensor,
    adapters_T: torch.Tensor,
) -> torch.Tensor:
    """The new `y_TO`, row by row in float32."""
    out_TO = y_TO.float()
    for row, adapter in enumerate(adapters_T.tolist()):
        if adapter >= 0:
            low_R = (a_LRI[adapter].float() @ x_TI[row].float()).to(x_TI.dtype).float()
            out_TO[row] += scales_T[row] * (b_LOR[adapter].float() @ low_R)
    return out_TO.to(y_TO.dtype)


def variants() -> tuple[Variant, ...]:
    """Both products of rank 64 in a small batch."""
    return (
        grouped_variant("shrink", Tiling(16, 64), out="*fp32"),
        grouped_variant("expand", Tiling(16, 64), is_added=True),
    )
