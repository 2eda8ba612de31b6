"""Convolutions of each channel over a row's last tokens, whose states go on from step to step.

Owns the kernels of `core.runtime.kernels.recurrent.convolve`: one for the results of all tokens,
and one that leaves a row's last inputs in its state, after the first has read it.

Shapes: T tokens, X channels, K tokens of a convolution, J = K - 1, L lines of states, B rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.variant import Variant

_BLOCK_X = 256
_TOKENS = 16
"""Tokens of a program."""
_NUM_WARPS = 4


def launch(
    x_TX: torch.Tensor,
    weight_KX: torch.Tensor,
    bias_X: torch.Tensor | None,
    activates: bool,
    state_LJX: torch.Tensor,
    y_TX: torch.Tensor,
    starts_B: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    max_length: int,
) -> None:
    """Compute `y_TX` of rows of up to `max_length` tokens, and bring their states up to date."""
    _check(x_TX, weight_KX, bias_X, state_LJX, y_TX)
    width, num_channels = weight_KX.shape
    num_blocks = triton.cdiv(num_channels, _BLOCK_X)
    rows = (starts_B, lengths_B, slots_B, x_TX.stride(0))
    sizes = (state_LJX.stride(0), num_channels)
    options = {"WIDTH": width, "BLOCK_X": _BLOCK_X, "num_warps": _NUM_WARPS, "num_stages": 2}
    _kernel[(len(slots_B), triton.cdiv(max_length, _TOKENS), num_blocks)](
        *(x_TX, weight_KX, bias_X, state_LJX, y_TX, *rows, y_TX.stride(0), *sizes),
        ACTIVATES=activates,
        TOKENS=_TOKENS,
        **options,
    )
    _shift_kernel[(len(slots_B), num_blocks)](x_TX, state_LJX, *rows, *sizes, **options)


short_conv = define_operator("short_conv", launch, mutates=("state_LJX", "y_TX"))


@fake_of(short_conv)
def _(
    x_TX: torch.Tensor,
    weight_KX: torch.Tensor,
    bias_X: torch.Tensor | None,
    activates: bool,
    state_LJX: torch.Tensor,
    y_TX: torch.Tensor,
    starts_B: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    max_length: int,
) -> None:
    _check(x_TX, weight_KX, bias_X, state_LJX, y_TX)


def _check(
    x_TX: torch.Tensor,
    weight_KX: torch.Tensor,
    bias_X: torch.Tensor | None,
    state_LJX: torch.Tensor,
    y_TX: torch.Tensor,
) -> None:
    width, num_channels = weight_KX.shape
    assert x_TX.shape == y_TX.shape
    assert x_TX.stride(1) == y_TX.stride(1) == 1
    assert state_LJX.shape[1:] == (width - 1, num_channels)
    assert state_LJX.stride()[1:] == (num_channels, 1)
    assert weight_KX.is_contiguous()
    assert bias_X is None or bias_X.is_contiguous()


@triton.jit
def _input(
    x_ptr, state_ptr, first, token, x_stride, num_channels, columns, is_column, WIDTH: tl.constexpr
):
    """The input of a row's token, in float32; those before its first are in its state."""
    is_new = token >= 0
    new = tl.load(
        x_ptr + (first + token) * x_stride + columns, mask=is_column & is_new, other=0.0
    ).to(tl.float32)
    old = tl.load(
        state_ptr + (token + WIDTH - 1) * num_channels + columns,
        mask=is_column & (token < 0),
        other=0.0,
    )
    return tl.where(is_new, new, old)


@triton.jit
def _kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, y_ptr, starts_ptr, lengths_ptr, slots_ptr,
    x_stride, y_stride, line_stride, num_channels,
    ACTIVATES: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Compute some channels of some tokens of one row."""
    row = tl.program_id(0)
    columns = tl.program_id(2) * BLOCK_X + tl.arange(0, BLOCK_X)
    is_column = columns < num_channels
    first, length = tl.load(starts_ptr + row), tl.load(lengths_ptr + row)
    state = state_ptr + tl.load(slots_ptr + row) * line_stride
    begin = tl.program_id(1) * TOKENS
    for token in range(begin, tl.minimum(begin + TOKENS, length)):
        total = tl.zeros([BLOCK_X], tl.float32)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + columns, mask=is_column, other=0.0)
        for tap in tl.static_range(WIDTH):
            weight = tl.load(weight_ptr + tap * num_channels + columns, mask=is_column, other=0.0)
            place = token + tap - (WIDTH - 1)
            total += weight * _input(
                x_ptr, state, first, place, x_stride, num_channels, columns, is_column, WIDTH
            )
        if ACTIVATES:
            total = total * tl.sigmoid(total)
        into = y_ptr + (first + token) * y_stride + columns
        tl.store(into, total.to(y_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def _shift_kernel(
    x_ptr, state_ptr, starts_ptr, lengths_ptr, slots_ptr, x_stride, line_stride, num_channels,
    WIDTH: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Keep the last inputs of some channels of one row, the earliest first."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_X + tl.arange(0, BLOCK_X)
    is_column = columns < num_channels
    first, length = tl.load(starts_ptr + row), tl.load(lengths_ptr + row)
    state = state_ptr + tl.load(slots_ptr + row) * line_stride
    for tap in tl.static_range(WIDTH - 1):
        place = length + tap - (WIDTH - 1)
        kept = _input(x_ptr, state, first, place, x_stride, num_channels, columns, is_column, WIDTH)
        tl.store(state + tap * num_channels + columns, kept, mask=is_column)


def variants() -> tuple[Variant, ...]:
    """Three and four tokens, in bfloat16."""
    pointers = ("x_ptr", "weight_ptr", "state_ptr", "y_ptr")
    rows = dict.fromkeys(("starts_ptr", "lengths_ptr", "slots_ptr"), "*i64")
    types = {"x_ptr": "*bf16", "weight_ptr": "*fp32", "state_ptr": "*fp32", "y_ptr": "*bf16"}
    numbers = dict.fromkeys(("x_stride", "y_stride", "line_stride", "num_channels"), "i32")
    found = []
    for width, activates in ((4, True), (3, False)):
        constants = {"WIDTH": width, "BLOCK_X": _BLOCK_X}
        own = {"ACTIVATES": activates, "TOKENS": _TOKENS, **constants}
        signature = {
            **{name: types[name] for name in ("x_ptr", "weight_ptr")},
            "bias_ptr": "constexpr",
            **{name: types[name] for name in ("state_ptr", "y_ptr")},
            **rows,
            **numbers,
            **dict.fromkeys(own, "constexpr"),
        }
        found.append(
            Variant(
                name=f"conv_{width}",
                kernel=_kernel,
                signature=signature,
                constants={"bias_ptr": None, **own},
                divisible=frozenset((*pointers, *rows, *numbers)),
                num_warps=_NUM_WARPS,
            )
        )
        shifted = {name: types[name] for name in ("x_ptr", "state_ptr")} | rows
        shifted |= {name: "i32" for name in numbers if name != "y_stride"}
        found.append(
            Variant(
                name=f"shift_{width}",
                kernel=_shift_kernel,
                signature={**shifted, **dict.fromkeys(constants, "constexpr")},
                constants=constants,
                divisible=frozenset(shifted),
                num_warps=_NUM_WARPS,
            )
        )
    return tuple(found)
