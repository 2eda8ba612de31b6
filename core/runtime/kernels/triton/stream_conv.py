"""Causal convolution over the kept past of streams and their new steps, without joining them.

Owns the kernels of `StreamingConv1d` of the codecs. The first reads each stream's past and the new
steps in place, rows and steps together as one matrix product, or channel by channel; float32 is
multiplied without rounding. The second stores the past of the next push.

Shapes: B streams of this push, S slots, C channels, O output channels, T new steps, L past steps
kept, W width of the weights, U output steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.variant import Variant

_BLOCK_M, _BLOCK_O, _BLOCK_C = 32, 64, 16
_BLOCK_U, _BLOCK_D = 64, 16
_MAX_KEPT = 4096
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NUM_WARPS = 4


def is_supported(weight_OCW: torch.Tensor, num_groups: int, num_kept: int) -> bool:
    """Whether the kernels support such a layer: all channels together or each separately."""
    num_outputs, num_inputs, _ = weight_OCW.shape
    is_plain = num_groups == 1 or (num_inputs == 1 and num_groups == num_outputs)
    return is_plain and 0 < num_kept <= _MAX_KEPT and weight_OCW.dtype in _DTYPES


def launch(
    x_BCT: torch.Tensor,
    past_SCL: torch.Tensor,
    slots_B: torch.Tensor,
    num_new_B: torch.Tensor | None,
    weight_OCW: torch.Tensor,
    bias_O: torch.Tensor | None,
    stride: int,
    dilation: int,
    num_outputs: int,
) -> torch.Tensor:
    """Compute `num_outputs` steps over past and new steps; steps beyond the input are 0.

    Afterwards the past ends with each row's last new step: that of `num_new_B`, or the last of all.
    """
    _check(x_BCT, past_SCL, slots_B, num_new_B, weight_OCW)
    num_rows, num_channels, num_new = x_BCT.shape
    y_BOU = x_BCT.new_empty(num_rows, len(weight_OCW), num_outputs)
    is_by_channel = weight_OCW.shape[1] != num_channels
    convolve = _convolve_channels if is_by_channel else _convolve_dense
    convolve(
        (x_BCT, past_SCL, slots_B, weight_OCW, bias_O, y_BOU),
        (*x_BCT.stride(), num_channels, num_new, past_SCL.shape[2], num_outputs),
        (stride, dilation),
    )
    _keep_last(x_BCT, past_SCL, slots_B, num_new_B)
    return y_BOU


def _convolve_channels(
    tensors: tuple[Any, ...], sizes: tuple[int, ...], steps: tuple[int, int]
) -> None:
    """Convolve each channel separately."""
    x_BCT, weight_OCW, num_outputs = tensors[0], tensors[3], sizes[-1]
    num_rows, num_channels, _ = x_BCT.shape
    grid = num_rows, triton.cdiv(num_channels, _BLOCK_D), triton.cdiv(num_outputs, _BLOCK_U)
    _channel_kernel[grid](
        *(*tensors, *sizes, *steps),
        WIDTH=weight_OCW.shape[2],
        BLOCK_D=_BLOCK_D,
        BLOCK_U=_BLOCK_U,
        num_warps=_NUM_WARPS,
        num_stages=2,
    )


def _convolve_dense(
    tensors: tuple[Any, ...], sizes: tuple[int, ...], steps: tuple[int, int]
) -> None:
    """Convolve all channels together, rows and output steps as one matrix product."""
    num_output_channels, _, width = tensors[3].shape
    num_places = len(tensors[0]) * sizes[-1]
    grid = triton.cdiv(num_places, _BLOCK_M), triton.cdiv(num_output_channels, _BLOCK_O)
    _dense_kernel[grid](
        *(*tensors, *sizes, num_output_channels, num_places, *steps),
        WIDTH=width,
        BLOCK_M=_BLOCK_M,
        BLOCK_O=_BLOCK_O,
        BLOCK_C=_BLOCK_C,
        num_warps=_NUM_WARPS,
        num_stages=2,
    )


def _keep_last(
    x_BCT: torch.Tensor,
    past_SCL: torch.Tensor,
    slots_B: torch.Tensor,
    num_new_B: torch.Tensor | None,
) -> None:
    """Append each row's last new steps to its past, which drops as many."""
    num_rows, num_channels, num_new = x_BCT.shape
    num_kept = past_SCL.shape[2]
    block_l = triton.next_power_of_2(num_kept)
    block_d = max(1, 2048 // block_l)
    _keep_kernel[(num_rows, triton.cdiv(num_channels, block_d))](
        x_BCT,
        past_SCL,
        slots_B,
        num_new_B,
        *x_BCT.stride(),
        num_channels,
        num_new,
        num_kept,
        BLOCK_D=block_d,
        BLOCK_L=block_l,
        num_warps=_NUM_WARPS,
        num_stages=2,
    )


stream_conv = define_operator("stream_conv", launch, mutates=("past_SCL",))


@fake_of(stream_conv)
def _(
    x_BCT: torch.Tensor,
    past_SCL: torch.Tensor,
    slots_B: torch.Tensor,
    num_new_B: torch.Tensor | None,
    weight_OCW: torch.Tensor,
    bias_O: torch.Tensor | None,
    stride: int,
    dilation: int,
    num_outputs: int,
) -> torch.Tensor:
    _check(x_BCT, past_SCL, slots_B, num_new_B, weight_OCW)
    return x_BCT.new_empty(len(x_BCT), len(weight_OCW), num_outputs)


def _check(
    x_BCT: torch.Tensor,
    past_SCL: torch.Tensor,
    slots_B: torch.Tensor,
    num_new_B: torch.Tensor | None,
    weight_OCW: torch.Tensor,
) -> None:
    num_rows, num_channels, num_new = x_BCT.shape
    assert num_rows > 0
    assert num_new > 0
    assert past_SCL.shape[1] == num_channels
    assert past_SCL.dtype == x_BCT.dtype == weight_OCW.dtype
    assert past_SCL.is_contiguous()
    assert weight_OCW.is_contiguous()
    assert weight_OCW.shape[1] == num_channels or weight_OCW.shape[:2] == (num_channels, 1)
    for counts_B in (slots_B, num_new_B):
        if counts_B is not None:
            assert counts_B.shape == (num_rows,)
            assert counts_B.dtype is torch.int64
            assert counts_B.is_contiguous()


# Values that differ between pushes and layers: compiling a kernel for each would take too long.
_KEPT = ("x_row_stride", "x_channel_stride", "num_new", "num_kept")
_VARIES = (*_KEPT, "num_outputs", "stride", "dilation")
_UPLOADED = ("slots_ptr", "num_new_ptr")  # uploaded one after the other, so alignments also differ


@triton.jit(do_not_specialize=(*_VARIES, "num_places"), do_not_specialize_on_alignment=_UPLOADED)
def _dense_kernel(
    x_ptr,
    past_ptr,
    slots_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    x_row_stride,
    x_channel_stride,
    x_step_stride,
    num_channels,
    num_new,
    num_kept,
    num_outputs,
    num_output_channels,
    num_places,
    stride,
    dilation,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute some places (output steps of all rows, one row after the other) of some channels."""
    places = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_place = places < num_places
    row = (places // num_outputs).to(tl.int64)
    output = places % num_outputs
    slot = tl.load(slots_ptr + row, mask=is_place, other=0)
    of_x = x_ptr + row[:, None] * x_row_stride
    of_past = past_ptr + slot[:, None] * num_channels * num_kept
    outs = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    is_out = outs < num_output_channels
    of_weight = weight_ptr + outs[None, :].to(tl.int64) * num_channels * WIDTH
    total = tl.zeros([BLOCK_M, BLOCK_O], tl.float32)
    for first in range(0, num_channels, BLOCK_C):
        channels = first + tl.arange(0, BLOCK_C)
        is_channel = channels < num_channels
        for tap in range(WIDTH):
            step = output * stride + tap * dilation - num_kept
            is_wanted = is_place[:, None] & is_channel[None, :]
            window = _window(
                of_past, of_x, channels[None, :], step[:, None], is_wanted,
                num_kept, num_new, x_channel_stride, x_step_stride,
            )  # fmt: skip
            weight = tl.load(
                of_weight + channels[:, None] * WIDTH + tap,
                mask=is_channel[:, None] & is_out[None, :],
                other=0.0,
            )
            total = tl.dot(window, weight, total, input_precision="ieee")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outs, mask=is_out, other=0.0).to(tl.float32)[None, :]
    into = y_ptr + (row[:, None] * num_output_channels + outs[None, :]) * num_outputs
    tl.store(
        into + output[:, None],
        total.to(y_ptr.dtype.element_ty),
        mask=is_place[:, None] & is_out[None, :],
    )


@triton.jit(do_not_specialize=_VARIES, do_not_specialize_on_alignment=_UPLOADED)
def _channel_kernel(
    x_ptr,
    past_ptr,
    slots_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    x_row_stride,
    x_channel_stride,
    x_step_stride,
    num_channels,
    num_new,
    num_kept,
    num_outputs,
    stride,
    dilation,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """Compute some output steps of some channels of one row."""
    row = tl.program_id(0).to(tl.int64)
    channels = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D))[:, None]
    outputs = (tl.program_id(2) * BLOCK_U + tl.arange(0, BLOCK_U))[None, :]
    is_channel = channels < num_channels
    is_wanted = is_channel & (outputs < num_outputs)
    of_past = past_ptr + tl.load(slots_ptr + row) * num_channels * num_kept
    total = tl.zeros([BLOCK_D, BLOCK_U], tl.float32)
    for tap in range(WIDTH):
        window = _window(
            of_past,
            x_ptr + row * x_row_stride,
            channels,
            outputs * stride + tap * dilation - num_kept,
            is_wanted,
            num_kept,
            num_new,
            x_channel_stride,
            x_step_stride,
        )
        weight = tl.load(weight_ptr + channels * WIDTH + tap, mask=is_channel, other=0.0)
        total += window.to(tl.float32) * weight.to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)
    into = y_ptr + (row * num_channels + channels) * num_outputs + outputs
    tl.store(into, total.to(y_ptr.dtype.element_ty), mask=is_wanted)


@triton.jit(do_not_specialize=_KEPT, do_not_specialize_on_alignment=_UPLOADED)
def _keep_kernel(
    x_ptr,
    past_ptr,
    slots_ptr,
    num_new_ptr,
    x_row_stride,
    x_channel_stride,
    x_step_stride,
    num_channels,
    num_new,
    num_kept,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Shift the past of some channels of one row: all is read before anything is written."""
    row = tl.program_id(0).to(tl.int64)
    channels = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D))[:, None]
    kept = tl.arange(0, BLOCK_L)[None, :]
    is_kept = (channels < num_channels) & (kept < num_kept)
    of_past = past_ptr + tl.load(slots_ptr + row) * num_channels * num_kept
    moved = num_new if num_new_ptr is None else tl.load(num_new_ptr + row)
    values = _window(
        of_past,
        x_ptr + row * x_row_stride,
        channels,
        kept + moved - num_kept,
        is_kept,
        num_kept,
        num_new,
        x_channel_stride,
        x_step_stride,
    )
    tl.debug_barrier()
    tl.store(of_past + channels * num_kept + kept, values, mask=is_kept)


@triton.jit
def _window(
    of_past,
    of_x,
    channels,
    steps,
    is_wanted,
    num_kept,
    num_new,
    x_channel_stride,
    x_step_stride,
):
    """Values at steps counted from the first new one; the past has negative steps."""
    past = tl.load(
        of_past + channels * num_kept + steps + num_kept, mask=is_wanted & (steps < 0), other=0.0
    )
    new = tl.load(
        of_x + channels * x_channel_stride + steps * x_step_stride,
        mask=is_wanted & (steps >= 0) & (steps < num_new),
        other=0.0,
    )
    return tl.where(steps < 0, past, new)


def variants() -> tuple[Variant, ...]:
    """A wide convolution in both types, one by channel, and the step of the past."""
    tiles = {"WIDTH": 7, "BLOCK_M": _BLOCK_M, "BLOCK_O": _BLOCK_O, "BLOCK_C": _BLOCK_C}
    by_channel = {"WIDTH": 7, "BLOCK_D": _BLOCK_D, "BLOCK_U": _BLOCK_U}
    return (
        _variant("fp32", _dense_kernel, "*fp32", tiles),
        _variant("bf16", _dense_kernel, "*bf16", tiles),
        _variant("by_channel_fp32", _channel_kernel, "*fp32", by_channel),
        _variant("keep_fp32", _keep_kernel, "*fp32", {"BLOCK_D": 256, "BLOCK_L": 8}),
    )


def _variant(name: str, kernel: Any, kind: str, constants: Mapping[str, int]) -> Variant:
    """A variant for adjacent steps, and rows that have all new steps."""
    names: list[str] = kernel.arg_names
    pointers = {each: kind for each in names if each.endswith("_ptr")} | {"slots_ptr": "*i64"}
    fixed: dict[str, int | None] = {"x_step_stride": 1, **constants}
    fixed |= {"num_new_ptr": None} if "num_new_ptr" in names else {}
    aligned = {*pointers, "num_channels", "num_output_channels"}
    return Variant(
        name=name,
        kernel=kernel,
        signature={
            each: "constexpr" if each in fixed else pointers.get(each, "i32") for each in names
        },
        constants=fixed,
        divisible=frozenset(aligned & set(names)) - fixed.keys() - set(_UPLOADED),
        num_warps=_NUM_WARPS,
    )
