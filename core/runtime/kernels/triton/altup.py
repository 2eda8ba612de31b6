"""Maps between several residual streams, one token for each program.

Owns the kernels of `core.runtime.kernels.altup`. Routes, coefficients and sums are float32.

Shapes: T tokens, C hidden, N streams, S pairs of streams.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.variant import Variant

_BLOCK_VALUES = 8192
"""Products of pairs of streams that a program holds at a time."""
_NUM_WARPS = 4


def _sizes(num_streams: int) -> dict[str, int]:
    padded = triton.next_power_of_2(num_streams)
    return {"N": num_streams, "P": padded, "B": min(_BLOCK_VALUES // padded**2, 512)}


def _launch_options(num_streams: int) -> dict[str, int]:
    return _sizes(num_streams) | {"num_warps": _NUM_WARPS, "num_stages": 2}


def launch_predict(
    x_TNC: torch.Tensor, router_NC: torch.Tensor, eps: float, weight_SN: torch.Tensor
) -> torch.Tensor:
    """Predict all streams."""
    out_TNC = _new_predicted(x_TNC, router_NC, eps, weight_SN)
    num_tokens, num_streams, hidden = x_TNC.shape
    if num_tokens:
        _predict[(num_tokens,)](
            *(x_TNC, router_NC, weight_SN, out_TNC, hidden, eps),
            **_launch_options(num_streams),
        )
    return out_TNC


predict_streams = define_operator("predict_streams", launch_predict)


@fake_of(predict_streams)
def _new_predicted(
    x_TNC: torch.Tensor, router_NC: torch.Tensor, eps: float, weight_SN: torch.Tensor
) -> torch.Tensor:
    num_streams = x_TNC.shape[1]
    assert router_NC.shape == x_TNC.shape[1:]
    assert weight_SN.shape == (num_streams**2, num_streams)
    assert all(each.is_contiguous() for each in (x_TNC, router_NC, weight_SN))
    return torch.empty_like(x_TNC)


def launch_correct(
    predicted_TNC: torch.Tensor,
    computed_TC: torch.Tensor,
    router_NC: torch.Tensor,
    eps: float,
    weight_NN: torch.Tensor,
) -> torch.Tensor:
    """Correct all streams."""
    out_TNC = _new_corrected(predicted_TNC, computed_TC, router_NC, eps, weight_NN)
    num_tokens, num_streams, hidden = predicted_TNC.shape
    if num_tokens:
        _correct[(num_tokens,)](
            *(predicted_TNC, computed_TC, router_NC, weight_NN, out_TNC, hidden, eps),
            **_launch_options(num_streams),
        )
    return out_TNC


correct_streams = define_operator("correct_streams", launch_correct)


@fake_of(correct_streams)
def _new_corrected(
    predicted_TNC: torch.Tensor,
    computed_TC: torch.Tensor,
    router_NC: torch.Tensor,
    eps: float,
    weight_NN: torch.Tensor,
) -> torch.Tensor:
    given = (predicted_TNC, computed_TC, router_NC, weight_NN)
    assert router_NC.shape == predicted_TNC.shape[1:]
    assert weight_NN.shape == (len(router_NC),) * 2
    assert all(each.is_contiguous() for each in given)
    return torch.empty_like(predicted_TNC)


@triton.jit
def _routes(
    x_ptr, router_ptr, num_channels, eps, N: tl.constexpr, P: tl.constexpr, B: tl.constexpr
):
    """The routes of a token, of P streams of which N are."""
    stream = tl.arange(0, P)[:, None]
    squares = tl.zeros((B,), tl.float32)
    scores = tl.zeros((P, B), tl.float32)
    for first in range(0, num_channels, B):
        at = first + tl.arange(0, B)
        is_channel = at < num_channels
        x = tl.load(x_ptr + at, mask=is_channel, other=0.0).to(tl.float32)
        mask = (stream < N) & is_channel[None, :]
        weight = tl.load(router_ptr + stream * num_channels + at[None, :], mask=mask, other=0.0)
        squares += x * x
        scores += x[None, :] * weight
    factor = tl.rsqrt(tl.sum(squares, 0) / num_channels + eps)
    return 2.0 * tl.sigmoid(2.0 * factor * tl.sum(scores, 1)) - 1.0


@triton.jit
def _predict(
    x_ptr,
    router_ptr,
    weight_ptr,
    out_ptr,
    num_channels,
    eps,
    N: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
):
    """Predict one token's streams."""
    x_ptr += tl.program_id(0).to(tl.int64) * N * num_channels
    out_ptr += tl.program_id(0).to(tl.int64) * N * num_channels
    routes = _routes(x_ptr, router_ptr, num_channels, eps, N, P, B)
    stream = tl.arange(0, P)
    pair = stream[:, None, None] * N + stream[None, :, None]
    is_pair = (stream[:, None, None] < N) & (stream[None, :, None] < N)
    mask = is_pair & (stream[None, None, :] < N)
    weight = tl.load(weight_ptr + pair * N + stream[None, None, :], mask=mask, other=0.0)
    by = tl.sum(weight.to(tl.float32) * routes[None, None, :], 2)
    by += tl.where(stream[:, None] == stream[None, :], 1.0, 0.0)
    for first in range(0, num_channels, B):
        at = first + tl.arange(0, B)
        places = stream[:, None] * num_channels + at[None, :]
        is_value = (stream[:, None] < N) & (at < num_channels)[None, :]
        x = tl.load(x_ptr + places, mask=is_value, other=0.0).to(tl.float32)
        mixed = tl.sum(by[:, :, None] * x[None, :, :], 1)
        tl.store(out_ptr + places, mixed.to(out_ptr.dtype.element_ty), mask=is_value)


@triton.jit
def _correct(
    predicted_ptr,
    computed_ptr,
    router_ptr,
    weight_ptr,
    out_ptr,
    num_channels,
    eps,
    N: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
):
    """Correct one token's streams."""
    token = tl.program_id(0).to(tl.int64)
    predicted_ptr += token * N * num_channels
    out_ptr += token * N * num_channels
    computed_ptr += token * num_channels
    routes = _routes(computed_ptr, router_ptr, num_channels, eps, N, P, B)
    stream = tl.arange(0, P)
    is_pair = (stream[:, None] < N) & (stream[None, :] < N)
    weight = tl.load(
        weight_ptr + stream[:, None] * N + stream[None, :], mask=is_pair, other=0.0
    ).to(tl.float32)
    by = 1.0 + tl.sum(weight * routes[None, :], 1)
    for first in range(0, num_channels, B):
        at = first + tl.arange(0, B)
        places = stream[:, None] * num_channels + at[None, :]
        is_value = (stream[:, None] < N) & (at < num_channels)[None, :]
        predicted = tl.load(predicted_ptr + places, mask=is_value, other=0.0).to(tl.float32)
        first_one = tl.load(predicted_ptr + at, mask=at < num_channels, other=0.0).to(tl.float32)
        computed = tl.load(computed_ptr + at, mask=at < num_channels, other=0.0).to(tl.float32)
        out = predicted + by[:, None] * (computed - first_one)[None, :]
        tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=is_value)


def variants() -> tuple[Variant, ...]:
    """Gemma 3n's four streams in bfloat16."""
    return (
        _variant("predict", _predict, ("x_ptr",)),
        _variant("correct", _correct, ("predicted_ptr", "computed_ptr")),
    )


def _variant(name: str, kernel: object, inputs: tuple[str, ...]) -> Variant:
    sizes = _sizes(4)
    pointers = {
        **dict.fromkeys(inputs, "*bf16"),
        "router_ptr": "*fp32",
        "weight_ptr": "*bf16",
        "out_ptr": "*bf16",
    }
    return Variant(
        name=name,
        kernel=kernel,
        signature={
            **pointers,
            "num_channels": "i32",
            "eps": "fp32",
            **dict.fromkeys(sizes, "constexpr"),
        },
        constants=sizes,
        divisible=frozenset(pointers) | {"num_channels"},
        num_warps=_NUM_WARPS,
        num_stages=2,
    )
