"""The gated delta rule over the rows of a step, whose states go on from step to step.

Owns the kernel of `core.runtime.kernels.recurrent.gated_delta_rule`. A program takes the tokens of
a row one after the other, so that results depend neither on chunks nor on other rows.

Shapes: T tokens, G key heads, H value heads, D key dim, E value dim, A decays of a
head, L lines of states, B rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.step_sizes import softplus
from triptych.core.runtime.kernels.triton.variant import Variant

_BLOCK_E = 32
_NUM_WARPS = 4


def launch(
    q_TGD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_THE: torch.Tensor,
    a_THA: torch.Tensor,
    b_TH: torch.Tensor,
    decay_H: torch.Tensor,
    dt_bias_HA: torch.Tensor,
    state_LHDE: torch.Tensor,
    y_THE: torch.Tensor,
    starts_B: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    beta_scale: float,
) -> None:
    """Compute `y_THE` of all rows, in float32, and bring their states up to date."""
    _check(q_TGD, k_TGD, v_THE, a_THA, b_TH, state_LHDE, y_THE)
    (_, num_key_heads, key_dim), (_, num_heads, value_dim) = q_TGD.shape, v_THE.shape
    block_e = min(_BLOCK_E, triton.next_power_of_2(value_dim))
    _kernel[(len(slots_B), num_heads, triton.cdiv(value_dim, block_e))](
        *(q_TGD, k_TGD, v_THE, a_THA, b_TH, decay_H, dt_bias_HA, state_LHDE, y_THE),
        *(starts_B, lengths_B, slots_B),
        *(q_TGD.stride(0), k_TGD.stride(0), v_THE.stride(0), a_THA.stride(0), b_TH.stride(0)),
        *(state_LHDE.stride(0), key_dim**-0.5, beta_scale),
        NUM_HEADS=num_heads,
        REPEATS=num_heads // num_key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        HAS_KEY_DECAYS=a_THA.shape[2] > 1,
        BLOCK_D=triton.next_power_of_2(key_dim),
        BLOCK_E=block_e,
        num_warps=_NUM_WARPS,
        num_stages=2,
    )


delta_rule = define_operator("delta_rule", launch, mutates=("state_LHDE", "y_THE"))


@fake_of(delta_rule)
def _(
    q_TGD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_THE: torch.Tensor,
    a_THA: torch.Tensor,
    b_TH: torch.Tensor,
    decay_H: torch.Tensor,
    dt_bias_HA: torch.Tensor,
    state_LHDE: torch.Tensor,
    y_THE: torch.Tensor,
    starts_B: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    beta_scale: float,
) -> None:
    _check(q_TGD, k_TGD, v_THE, a_THA, b_TH, state_LHDE, y_THE)


def _check(
    q_TGD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_THE: torch.Tensor,
    a_THA: torch.Tensor,
    b_TH: torch.Tensor,
    state_LHDE: torch.Tensor,
    y_THE: torch.Tensor,
) -> None:
    key_dim, value_dim = q_TGD.shape[2], v_THE.shape[2]
    for heads, size in ((q_TGD, key_dim), (k_TGD, key_dim), (v_THE, value_dim)):
        assert heads.stride()[1:] == (size, 1)
    num_decays = a_THA.shape[2]
    assert num_decays in (1, key_dim)
    assert a_THA.stride()[1:] == (num_decays, 1)
    assert b_TH.stride(1) == 1
    assert state_LHDE.stride()[1:] == (key_dim * value_dim, value_dim, 1)
    assert y_THE.is_contiguous()
    assert y_THE.dtype == state_LHDE.dtype == torch.float32


@triton.jit
def _unit(x, scale):
    """A head in float32, with length `scale`."""
    x = x.to(tl.float32)
    return x * (scale * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6))


@triton.jit
def _kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, decay_ptr, dt_bias_ptr, state_ptr, y_ptr,
    starts_ptr, lengths_ptr, slots_ptr,
    q_stride, k_stride, v_stride, a_stride, b_stride, line_stride, q_scale, beta_scale,
    NUM_HEADS: tl.constexpr, REPEATS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HAS_KEY_DECAYS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Go on with some columns of one head's state over the tokens of one row."""
    row, head = tl.program_id(0), tl.program_id(1)
    d, e = tl.arange(0, BLOCK_D), tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    is_d, is_e = d < KEY_DIM, e < VALUE_DIM
    first, length = tl.load(starts_ptr + row), tl.load(lengths_ptr + row)
    line = state_ptr + tl.load(slots_ptr + row) * line_stride + head * (KEY_DIM * VALUE_DIM)
    places = line + d[:, None] * VALUE_DIM + e[None, :]
    is_place = is_d[:, None] & is_e[None, :]
    state = tl.load(places, mask=is_place, other=0.0)
    decay, own = tl.load(decay_ptr + head), head * KEY_DIM + d
    if HAS_KEY_DECAYS:
        dt_bias = tl.load(dt_bias_ptr + own, mask=is_d, other=0.0)
    else:
        dt_bias = tl.load(dt_bias_ptr + head)
    key_head = head // REPEATS * KEY_DIM
    for token in range(first, first + length):
        q = tl.load(q_ptr + token * q_stride + key_head + d, mask=is_d, other=0.0)
        k = tl.load(k_ptr + token * k_stride + key_head + d, mask=is_d, other=0.0)
        v = tl.load(v_ptr + token * v_stride + head * VALUE_DIM + e, mask=is_e, other=0.0)
        beta = beta_scale * tl.sigmoid(tl.load(b_ptr + token * b_stride + head).to(tl.float32))
        q, k = _unit(q, q_scale), _unit(k, 1.0)
        if HAS_KEY_DECAYS:
            step = tl.load(a_ptr + token * a_stride + own, mask=is_d, other=0.0).to(tl.float32)
            state = state * tl.exp(decay * softplus(step + dt_bias))[:, None]
        else:
            step = tl.load(a_ptr + token * a_stride + head).to(tl.float32)
            state = state * tl.exp(decay * softplus(step + dt_bias))
        kept = tl.sum(state * k[:, None], axis=0)
        state += k[:, None] * ((v.to(tl.float32) - kept) * beta)[None, :]
        y = tl.sum(state * q[:, None], axis=0)
        tl.store(y_ptr + (token * NUM_HEADS + head) * VALUE_DIM + e, y, mask=is_e)
    tl.store(places, state, mask=is_place)


def variants() -> tuple[Variant, ...]:
    """Qwen3.5's heads, and Kimi Linear's, in bfloat16."""
    values = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "a_ptr", "b_ptr"), "*bf16")
    numbers = dict.fromkeys(("decay_ptr", "dt_bias_ptr", "state_ptr", "y_ptr"), "*fp32")
    rows = dict.fromkeys(("starts_ptr", "lengths_ptr", "slots_ptr"), "*i64")
    strides = dict.fromkeys(
        ("q_stride", "k_stride", "v_stride", "a_stride", "b_stride", "line_stride"), "i32"
    )
    signature = {**values, **numbers, **rows, **strides, "q_scale": "fp32", "beta_scale": "fp32"}
    sizes, blocks = {"KEY_DIM": 128, "VALUE_DIM": 128}, {"BLOCK_D": 128, "BLOCK_E": _BLOCK_E}
    constants = {"NUM_HEADS": 32, "REPEATS": 2, **sizes, "HAS_KEY_DECAYS": False, **blocks}
    return tuple(
        Variant(
            name=name,
            kernel=_kernel,
            signature={**signature, **dict.fromkeys(constants, "constexpr")},
            constants={**constants, **own},
            divisible=frozenset((*values, *numbers, *rows, *strides)),
            num_warps=_NUM_WARPS,
        )
        for name, own in (
            ("heads_128", {}),
            ("key_decays_128", {"REPEATS": 1, "HAS_KEY_DECAYS": True}),
        )
    )
