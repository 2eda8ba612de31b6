"""Norms, gates, rotation with the write into the cache, routing, streams, codecs' convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from attention_times import PAGE_SIZE
from kernel_case import Case, randn, value_type
from place import Place
from torch.nn.functional import conv1d, rms_norm, silu

CONVOLUTIONS = ((64, 512, 512, 9, 7), (64, 128, 64, 960, 7))
"""Rows, channels in and out, new steps and width."""


def cases(place: Place) -> Iterator[Case]:
    """Each at decode and prompt sizes of Llama 3 8B."""
    for num_tokens in (1, 64, 8192) if place.is_gpu else (3,):
        yield _norm(place, num_tokens, 4096 if place.is_gpu else 64)
        yield _gate(place, num_tokens, 14_336 if place.is_gpu else 32)
        yield _rotation(place, num_tokens)
        yield _routing(place, num_tokens)
        yield from _streams(place, num_tokens)
    yield _gelu_rows(place, *((4608, 12_288) if place.is_gpu else (3, 32)))
    for sizes in CONVOLUTIONS if place.is_gpu else ((2, 4, 4, 9, 3),):
        yield _convolution(place, sizes)
        yield _convolution(place, sizes, is_by_channel=True)


def _norm(place: Place, num_tokens: int, width: int) -> Case:
    from triptych.core.runtime.kernels.triton.add_rms_norm import launch_add_rms_norm

    x_TC, residual_TC = (randn(place, num_tokens, width) for _ in range(2))
    weight_C = randn(place, width)
    return Case(
        f"add and norm, {num_tokens} x {width}",
        lambda: launch_add_rms_norm(x_TC, residual_TC, weight_C, 1e-5)[0],
        {"torch": lambda: rms_norm(x_TC + residual_TC, (width,), weight_C, 1e-5)},
        4 * x_TC.nbytes,
    )


def _gate(place: Place, num_tokens: int, width: int) -> Case:
    from triptych.core.runtime.kernels.triton.gated import launch

    both_T2F = randn(place, num_tokens, 2 * width)

    def theirs() -> torch.Tensor:
        gate_TF, up_TF = both_T2F.chunk(2, dim=1)
        return silu(gate_TF) * up_TF

    name = f"gate, {num_tokens} x {width}"
    return Case(name, partial(launch, both_T2F, "silu"), {"torch": theirs}, 1.5 * both_T2F.nbytes)


def _rotation(place: Place, num_tokens: int) -> Case:
    from triptych.core.runtime.kernels.kv_pages import KvPages
    from triptych.core.runtime.kernels.triton.rope_write import launch

    num_heads, num_kv_heads, head_dim = (32, 8, 128) if place.is_gpu else (4, 2, 16)
    qkv = randn(place, num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    qk_TXD, v_TKD = qkv.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    cos_T1R, sin_T1R = (randn(place, num_tokens, 1, head_dim) for _ in range(2))
    shape = (num_tokens // PAGE_SIZE + 2, PAGE_SIZE, num_kv_heads, head_dim)
    pages = KvPages.empty(shape, value_type(place), place.device)
    slots_T = torch.randperm(PAGE_SIZE * (shape[0] - 1))[:num_tokens].to(place.device)
    return Case(
        f"rotation and write, {num_tokens} tokens",
        partial(launch, qk_TXD, v_TKD, None, 0.0, cos_T1R, sin_T1R, False, *pages, slots_T),
        {},
        2 * qkv.nbytes,
    )


def _routing(place: Place, num_tokens: int) -> Case:
    from triptych.core.runtime.kernels.triton.routing import launch_route

    num_experts, num_chosen = (128, 8) if place.is_gpu else (8, 2)
    logits_TE = randn(place, num_tokens, num_experts).float()

    def theirs() -> torch.Tensor:
        weights_TC = logits_TE.softmax(-1).topk(num_chosen, -1).values
        return weights_TC / weights_TC.sum(-1, keepdim=True)

    return Case(
        f"routing to {num_chosen} of {num_experts}, {num_tokens} tokens",
        lambda: launch_route(logits_TE, None, num_chosen, "softmax", True, 1.0, [])[0],
        {"torch": theirs},
        logits_TE.nbytes,
    )


def _streams(place: Place, num_tokens: int) -> Iterator[Case]:
    """The maps between the residual streams of Gemma 3n, and its rows by their own means."""
    from triptych.core.runtime.kernels.altup import Router
    from triptych.core.runtime.kernels.triton import altup, row_moments

    num_streams, width = (4, 2048) if place.is_gpu else (4, 32)
    x_TNC, computed_TC = (
        randn(place, num_tokens, num_streams, width),
        randn(place, num_tokens, width),
    )
    router = Router(randn(place, num_streams, width).float() * width**-0.5, 1e-6)
    pairs = randn(place, num_streams**2, num_streams)
    name = f"{num_tokens} x {num_streams} x {width}"
    predict = partial(altup.launch_predict, x_TNC, *router, pairs)
    yield Case(f"predicted streams, {name}", predict, {}, 2 * x_TNC.nbytes)
    correct = partial(altup.launch_correct, x_TNC, computed_TC, *router, pairs[:num_streams])
    yield Case(f"corrected streams, {name}", correct, {}, 2 * x_TNC.nbytes + computed_TC.nbytes)
    other_TC = randn(place, num_tokens, width)
    scale = partial(row_moments.launch_as_large_as, computed_TC, other_TC)
    yield Case(f"rows as large as others, {num_tokens} x {width}", scale, {}, 3 * other_TC.nbytes)
    keep = partial(row_moments.launch_relu_above, other_TC, 1.6)
    yield Case(f"values above a limit, {num_tokens} x {width}", keep, {}, 2 * other_TC.nbytes)


def _gelu_rows(place: Place, num_tokens: int, width: int) -> Case:
    """Before a float8 product of FLUX."""
    from triptych.core.runtime.kernels.triton import gelu_rows

    x_TF = randn(place, num_tokens, width)
    name = f"GELU in float8 rows, {num_tokens} x {width}"
    return Case(name, partial(gelu_rows.launch, x_TF), {}, 1.5 * x_TF.nbytes)


def _convolution(
    place: Place, sizes: tuple[int, int, int, int, int], *, is_by_channel: bool = False
) -> Case:
    """In float32, as codecs are; of each channel separately or of all."""
    from triptych.core.runtime.kernels.triton.stream_conv import launch

    num_rows, num_inputs, num_outputs, num_new, width = sizes
    num_outputs = num_inputs if is_by_channel else num_outputs
    num_groups = num_inputs if is_by_channel else 1
    x_BCT, past_SCL, weight_OCW = (
        torch.randn(shape, device=place.device)
        for shape in (
            (num_rows, num_inputs, num_new),
            (num_rows, num_inputs, width - 1),
            (num_outputs, num_inputs // num_groups, width),
        )
    )
    bias_O = torch.randn(num_outputs, device=place.device)
    slots_B = torch.arange(num_rows, device=place.device)
    whole_BCT = torch.cat((past_SCL, x_BCT), dim=2)
    reference = partial(conv1d, whole_BCT, weight_OCW, bias_O, groups=num_groups)
    kind = " by channel" * is_by_channel
    return Case(
        f"streamed convolution{kind}, {num_rows} x {num_inputs} x {num_new} to {num_outputs}",
        partial(launch, x_BCT, past_SCL.clone(), slots_B, None, weight_OCW, bias_O, 1, 1, num_new),
        {"torch": reference},
        x_BCT.nbytes + num_rows * num_outputs * num_new * 4,
        2 * num_rows * num_outputs * (num_inputs // num_groups) * num_new * width,
    )
