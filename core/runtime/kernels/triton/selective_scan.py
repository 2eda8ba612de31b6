"""Mamba 2's scan over the rows of a step, whose states go on from step to step.

Owns the kernels of `core.runtime.kernels.recurrent.selective_scan`. One takes the tokens of a row
one after the other: results depend neither on chunks nor on other rows, to the last bit. The other
takes them in blocks, whose products matrix units compute (the state space duality of Dao and Gu
2024, arXiv:2405.21060, section 6): many times faster on prompts, and equal up to rounding.

A block's decays are differences of sums, and its scores and states are multiplied in two parts of
bfloat16 each, which keeps sixteen bits of them; in other types products are those of float32.

Shapes: T tokens, H heads, P values of a head, G groups, N numbers of a state for each value, L
lines of states, B rows; K tokens of a block.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.step_sizes import softplus
from triptych.core.runtime.kernels.triton.tiling import dot, tile_size
from triptych.core.runtime.kernels.triton.variant import Variant

_BLOCK_P = 16
_MAX_STATE, _MAX_NARROW = 256, 128
_MIN_BLOCKED = 32
"""The longest row of a step from which rows are taken in blocks."""
_NUMBERS = ("decay_ptr", "dt_bias_ptr", "skip_ptr", "state_ptr", "y_ptr")
_VALUES = ("x_ptr", "b_ptr", "c_ptr", "dt_ptr")
_ROWS = ("starts_ptr", "lengths_ptr", "slots_ptr")
_STRIDES = ("x_stride", "b_stride", "c_stride", "dt_stride", "line_stride")
_LIMITS = ("least", "most")


def launch(
    x_THP: torch.Tensor,
    b_TGN: torch.Tensor,
    c_TGN: torch.Tensor,
    dt_TH: torch.Tensor,
    decay_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    skip_H: torch.Tensor,
    limits: list[float],
    state_LHPN: torch.Tensor,
    y_THP: torch.Tensor,
    starts_B: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    max_length: int,
    deterministic: bool = False,
) -> None:
    """Compute `y_THP` of rows of up to `max_length` tokens, and bring their states up to date.

    If `deterministic`, tokens are taken one after the other in any row.
    """
    _check(x_THP, b_TGN, c_TGN, dt_TH, state_LHPN, y_THP)
    (_, num_heads, head_dim), (_, num_groups, state_dim) = x_THP.shape, b_TGN.shape
    is_blocked = max_length >= _MIN_BLOCKED and not deterministic
    is_wide = x_THP.dtype is not torch.bfloat16 or state_dim > _MAX_NARROW
    kernel, sizes, num_warps = _blocks(is_wide=is_wide) if is_blocked else _TOKENS
    kernel[(len(slots_B), num_heads, triton.cdiv(head_dim, _BLOCK_P))](
        *(x_THP, b_TGN, c_TGN, dt_TH, decay_H, dt_bias_H, skip_H, state_LHPN, y_THP),
        *(starts_B, lengths_B, slots_B),
        *(x_THP.stride(0), b_TGN.stride(0), c_TGN.stride(0), dt_TH.stride(0)),
        *(state_LHPN.stride(0), *limits),
        NUM_HEADS=num_heads,
        REPEATS=num_heads // num_groups,
        HEAD_DIM=head_dim,
        STATE_DIM=state_dim,
        BLOCK_P=_BLOCK_P,
        BLOCK_N=tile_size(state_dim, _MAX_STATE),
        **sizes,
        num_warps=num_warps,
        num_stages=2,
    )


selective_scan = define_operator("selective_scan", launch, mutates=("state_LHPN", "y_THP"))


@fake_of(selective_scan)
def _(
    x_THP: torch.Tensor,
    b_TGN: torch.Tensor,
    c_TGN: torch.Tensor,
    dt_TH: torch.Tensor,
    decay_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    skip_H: torch.Tensor,
    limits: list[float],
    state_LHPN: torch.Tensor,
    y_THP: torch.Tensor,
    starts_B: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    max_length: int,
    deterministic: bool = False,
) -> None:
    _check(x_THP, b_TGN, c_TGN, dt_TH, state_LHPN, y_THP)


def _check(
    x_THP: torch.Tensor,
    b_TGN: torch.Tensor,
    c_TGN: torch.Tensor,
    dt_TH: torch.Tensor,
    state_LHPN: torch.Tensor,
    y_THP: torch.Tensor,
) -> None:
    head_dim, state_dim = x_THP.shape[2], b_TGN.shape[2]
    for heads, size in ((x_THP, head_dim), (b_TGN, state_dim), (c_TGN, state_dim)):
        assert heads.stride()[1:] == (size, 1)
    assert dt_TH.stride(1) == 1
    assert state_LHPN.stride()[1:] == (head_dim * state_dim, state_dim, 1)
    assert y_THP.is_contiguous()
    assert y_THP.dtype == state_LHPN.dtype == torch.float32


@triton.jit
def _kernel(
    x_ptr, b_ptr, c_ptr, dt_ptr, decay_ptr, dt_bias_ptr, skip_ptr, state_ptr, y_ptr,
    starts_ptr, lengths_ptr, slots_ptr,
    x_stride, b_stride, c_stride, dt_stride, line_stride, least, most,
    NUM_HEADS: tl.constexpr, REPEATS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Go on with some rows of one head's state over the tokens of one row."""
    row, head = tl.program_id(0), tl.program_id(1)
    p, n = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    is_p, is_n = p < HEAD_DIM, n < STATE_DIM
    first, length = tl.load(starts_ptr + row), tl.load(lengths_ptr + row)
    line = state_ptr + tl.load(slots_ptr + row) * line_stride + head * (HEAD_DIM * STATE_DIM)
    places = line + p[:, None] * STATE_DIM + n[None, :]
    is_place = is_p[:, None] & is_n[None, :]
    state = tl.load(places, mask=is_place, other=0.0)
    decay, dt_bias = tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head)
    skip, vector = tl.load(skip_ptr + head), head // REPEATS * STATE_DIM
    for token in range(first, first + length):
        x = tl.load(x_ptr + token * x_stride + head * HEAD_DIM + p, mask=is_p, other=0.0)
        b = tl.load(b_ptr + token * b_stride + vector + n, mask=is_n, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + token * c_stride + vector + n, mask=is_n, other=0.0).to(tl.float32)
        step = softplus(tl.load(dt_ptr + token * dt_stride + head).to(tl.float32) + dt_bias)
        step, x = tl.clamp(step, least, most), x.to(tl.float32)
        state = state * tl.exp(decay * step) + (x * step)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], axis=1) + skip * x
        tl.store(y_ptr + (token * NUM_HEADS + head) * HEAD_DIM + p, y, mask=is_p)
    tl.store(places, state, mask=is_place)


@triton.jit
def _block_kernel(
    x_ptr, b_ptr, c_ptr, dt_ptr, decay_ptr, dt_bias_ptr, skip_ptr, state_ptr, y_ptr,
    starts_ptr, lengths_ptr, slots_ptr,
    x_stride, b_stride, c_stride, dt_stride, line_stride, least, most,
    NUM_HEADS: tl.constexpr, REPEATS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The same, `K` tokens at a time."""
    row, head = tl.program_id(0), tl.program_id(1)
    p, n = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    is_p, is_n, k = p < HEAD_DIM, n < STATE_DIM, tl.arange(0, K)
    first, length = tl.load(starts_ptr + row), tl.load(lengths_ptr + row)
    line = state_ptr + tl.load(slots_ptr + row) * line_stride + head * (HEAD_DIM * STATE_DIM)
    places = line + p[:, None] * STATE_DIM + n[None, :]
    is_place = is_p[:, None] & is_n[None, :]
    state_PN = tl.load(places, mask=is_place, other=0.0)
    decay, dt_bias = tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head)
    skip, vector = tl.load(skip_ptr + head), head // REPEATS * STATE_DIM
    is_earlier_KK = k[None, :] <= k[:, None]
    for begin in range(0, length, K):
        token, is_token_K = first + begin, begin + k < length
        b_KN = _load_tokens(b_ptr + token * b_stride + vector, b_stride, k, n, is_token_K, is_n)
        c_KN = _load_tokens(c_ptr + token * c_stride + vector, c_stride, k, n, is_token_K, is_n)
        x_ptrs = x_ptr + token * x_stride + head * HEAD_DIM
        x_KP = _load_tokens(x_ptrs, x_stride, k, p, is_token_K, is_p)
        dt_ptrs = dt_ptr + token * dt_stride + head
        step_K = tl.load(dt_ptrs + k * dt_stride, is_token_K, 0.0).to(tl.float32)
        step_K = tl.where(is_token_K, tl.clamp(softplus(step_K + dt_bias), least, most), 0.0)
        decay_K = tl.cumsum(decay * step_K, axis=0)  # the logarithm, from before the block
        last = tl.sum(tl.where(k == K - 1, decay_K, 0.0), axis=0)
        between_KK = tl.where(is_earlier_KK, decay_K[:, None] - decay_K[None, :], float("-inf"))
        scores_KK = _dot(c_KN, b_KN.T) * tl.exp(between_KK) * step_K[None, :]
        y_KP = _split_dot(scores_KK, x_KP) + skip * x_KP.to(tl.float32)
        y_KP += _split_dot(state_PN, c_KN.T).T * tl.exp(decay_K)[:, None]
        added_KP = x_KP.to(tl.float32) * (step_K * tl.exp(last - decay_K))[:, None]
        state_PN = state_PN * tl.exp(last) + _split_dot(added_KP.T, b_KN)
        y_ptrs = y_ptr + (token * NUM_HEADS + head) * HEAD_DIM
        y_ptrs_KP = y_ptrs + k[:, None] * (NUM_HEADS * HEAD_DIM) + p[None, :]
        tl.store(y_ptrs_KP, y_KP, mask=is_token_K[:, None] & is_p[None, :])
    tl.store(places, state_PN, mask=is_place)


@triton.jit
def _load_tokens(first_ptr, stride, k, values, is_token_K, is_value):
    """Load values of consecutive tokens, by offsets of 32 bits, which save registers."""
    ptrs = first_ptr + k[:, None] * stride + values[None, :]
    return tl.load(ptrs, mask=is_token_K[:, None] & is_value[None, :], other=0.0)


@triton.jit
def _dot(a, b):
    return dot(a, b, tl.zeros((a.shape[0], b.shape[1]), tl.float32))


@triton.jit
def _split_dot(a, b):
    """The product of float32 with values of another type, as exact as sixteen bits."""
    if b.dtype == tl.bfloat16:
        high = a.to(tl.bfloat16)
        low = (a - high.to(tl.float32)).to(tl.bfloat16)
        return dot(low, b, _dot(high, b))
    else:
        return _dot(a, b.to(tl.float32))


_Choice = tuple[Any, dict[str, int], int]
"""A kernel, its own sizes, and its warps."""
_TOKENS: _Choice = _kernel, {}, 4


def _blocks(*, is_wide: bool) -> _Choice:
    """Blocks that registers hold: of fewer tokens where states are large, or not in bfloat16."""
    return _block_kernel, {"K": 16 if is_wide else 32}, 8 if is_wide else 4


def variants() -> tuple[Variant, ...]:
    """Granite 4's heads in bfloat16, token by token and in blocks."""
    return _variant("tokens_128", _TOKENS), _variant("blocks_128", _blocks(is_wide=False))


def odd_variants() -> tuple[Variant, ...]:
    """Blocks of larger states, and those of float32."""
    wide = _blocks(is_wide=True)
    return _variant("blocks_256", wide, 256), _variant("float32", wide, values="*fp32")


def _variant(name: str, choice: _Choice, state_dim: int = 128, values: str = "*bf16") -> Variant:
    kernel, sizes, num_warps = choice
    constants = {
        "NUM_HEADS": 128,
        "REPEATS": 128,
        "HEAD_DIM": 64,
        "STATE_DIM": state_dim,
        "BLOCK_N": state_dim,
        "BLOCK_P": _BLOCK_P,
        **sizes,
    }
    types = {
        **dict.fromkeys(_VALUES, values),
        **dict.fromkeys(_NUMBERS, "*fp32"),
        **dict.fromkeys(_ROWS, "*i64"),
        **dict.fromkeys(_STRIDES, "i32"),
        **dict.fromkeys(_LIMITS, "fp32"),
    }
    return Variant(
        name=name,
        kernel=kernel,
        signature={each: types.get(each, "constexpr") for each in kernel.arg_names},
        constants=constants,
        divisible=frozenset(types) - set(_LIMITS),
        num_warps=num_warps,
    )
