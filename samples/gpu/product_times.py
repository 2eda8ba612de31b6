"""Matrix products: plain, float8, four bits, GGUF blocks, experts and adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from kernel_case import Case, randn, value_type
from place import Place
from torch.nn.functional import linear

GROUP = 128
"""Inputs that share a scale in four bits."""
BLOCKS = {"q4_k": (256, 144), "q8_0": (32, 34)}
"""Formats of GGUF: the inputs of a block, and its bytes."""


def cases(place: Place) -> Iterator[Case]:
    """The products of Llama 3 8B's MLP, then experts of Qwen3-30B-A3B, then adapters."""
    num_inputs, num_outputs = (4096, 28_672) if place.is_gpu else (256, 64)
    for num_rows in (1, 16, 64, 256, 8192) if place.is_gpu else (2,):
        for has_squares in (False, True):
            yield _float8(place, num_rows, (num_inputs, num_outputs), has_squares=has_squares)
    for num_rows in (1, 8, 64) if place.is_gpu else (2,):
        yield _four_bits(place, num_rows, num_inputs, num_outputs)
        for kind, (num_values, num_bytes) in BLOCKS.items():
            row_bytes = num_inputs // num_values * num_bytes
            yield _blocks(place, num_rows, (num_inputs, num_outputs), kind, row_bytes)
    for num_rows in (1, 64, 512) if place.is_gpu else (2,):
        yield _deterministic(place, num_rows, num_inputs, num_outputs)
    for num_tokens in (1, 64, 512, 4096) if place.is_gpu else (3,):
        yield _experts(place, num_tokens)
        yield _packed_experts(place, num_tokens)
    for num_tokens in (1, 64) if place.is_gpu else (1,):
        for form in ("q4_k" if place.is_gpu else "q8_0", "gptq"):
            yield _coded_experts(place, num_tokens, form)
    yield _adapters(place, *((64, 4096) if place.is_gpu else (3, 64)))


def _float8(place: Place, num_rows: int, shape: tuple[int, int], *, has_squares: bool) -> Case:
    """A scale for each output, or for each square of 128, as text models have it."""
    from triptych.core.runtime.kernels.library_products import scaled_linear
    from triptych.core.runtime.kernels.triton import fp8_linear

    (num_inputs, num_outputs), x_TI = shape, randn(place, num_rows, shape[0])
    out_dtype = value_type(place)
    weight_OI = randn(place, num_outputs, num_inputs, dtype=torch.float8_e4m3fn)
    squares = -(-num_outputs // GROUP), -(-num_inputs // GROUP)
    scale = torch.full(squares if has_squares else squares[:1], 0.02, device=place.device)
    if not has_squares:
        scale = scale[:1].repeat(num_outputs)
    plain_OI = (weight_OI.float() * 0.02).to(out_dtype)
    peers: dict[str, Callable[[], Any]] = {"plain": partial(linear, x_TI, plain_OI)}
    if place.is_gpu:
        peers["library"] = partial(scaled_linear, x_TI, weight_OI, scale, out_dtype)
    if place.is_gpu and not has_squares:
        x8_TI, one_T1 = x_TI.to(torch.float8_e4m3fn), torch.ones(num_rows, 1, device=place.device)
        given = x8_TI, weight_OI.t(), one_T1, scale[None]
        peers["product_alone"] = partial(torch._scaled_mm, *given, out_dtype=out_dtype)
        peers["fast_product_alone"] = partial(peers["product_alone"], use_fast_accum=True)
    kind = "squares" if has_squares else "outputs"
    return Case(
        f"float8 product, {num_rows} x {num_inputs} x {num_outputs}, scales of {kind}",
        partial(fp8_linear.launch_fp8_linear, x_TI, weight_OI, scale, out_dtype),
        peers,
        weight_OI.nbytes,
        2 * num_rows * num_inputs * num_outputs,
        is_float8=True,
    )


def _four_bits(place: Place, num_rows: int, num_inputs: int, num_outputs: int) -> Case:
    from triptych.core.runtime.kernels.triton import gptq_linear

    x_TI, num_groups = randn(place, num_rows, num_inputs), num_inputs // GROUP
    words, zeros = (
        torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=place.device)
        for shape in ((num_inputs // 8, num_outputs), (num_groups, num_outputs // 8))
    )
    scales_RO = torch.full((num_groups, num_outputs), 0.01, dtype=torch.float16).to(place.device)
    weight = words, scales_RO, zeros, None, "gptq"
    plain_OI = randn(place, num_outputs, num_inputs)
    peers = {"plain": _not_compared(partial(linear, x_TI, plain_OI))}
    if not place.is_gpu:
        peers = {"reference": partial(gptq_linear.reference, x_TI, *weight, x_TI.dtype)}
    return Case(
        f"four bits (GPTQ), {num_rows} x {num_inputs} x {num_outputs}",
        partial(gptq_linear.launch_gptq_linear, x_TI, *weight, x_TI.dtype),
        peers,
        words.nbytes + scales_RO.nbytes + zeros.nbytes,
        2 * num_rows * num_inputs * num_outputs,
    )


def _blocks(place: Place, num_rows: int, shape: tuple[int, int], kind: str, row_bytes: int) -> Case:
    from triptych.core.runtime.kernels.triton import gguf_linear

    num_inputs, num_outputs = shape
    x_TI, plain_OI = randn(place, num_rows, num_inputs), randn(place, num_outputs, num_inputs)
    blocks_OB = torch.randint(60, (num_outputs, row_bytes), dtype=torch.uint8, device=place.device)
    return Case(
        f"blocks ({kind}), {num_rows} x {num_inputs} x {num_outputs}",
        partial(gguf_linear.launch_gguf_linear, x_TI, blocks_OB, kind, x_TI.dtype),
        {"plain": _not_compared(partial(linear, x_TI, plain_OI))},
        blocks_OB.nbytes,
        2 * num_rows * num_inputs * num_outputs,
    )


def _deterministic(place: Place, num_rows: int, num_inputs: int, num_outputs: int) -> Case:
    from triptych.core.runtime.kernels.triton.linear import launch_linear

    x_TI, weight_OI = randn(place, num_rows, num_inputs), randn(place, num_outputs, num_inputs)
    return Case(
        f"deterministic product, {num_rows} x {num_inputs} x {num_outputs}",
        partial(launch_linear, x_TI, weight_OI, x_TI.dtype, True),
        {"torch": partial(linear, x_TI, weight_OI)},
        weight_OI.nbytes,
        2 * num_rows * num_inputs * num_outputs,
    )


def _experts(place: Place, num_tokens: int) -> Case:
    """Qwen3-30B-A3B: 8 of 128 experts for each token."""
    from triptych.core.runtime.kernels.expert_products import ExpertRule, library_moe
    from triptych.core.runtime.kernels.triton import moe

    num_experts, num_chosen, width, hidden = _expert_sizes(place)
    x_TI = randn(place, num_tokens, width)
    gate_up_EFI = randn(place, num_experts, 2 * hidden, width) * width**-0.5
    down_EIF = randn(place, num_experts, width, hidden) * hidden**-0.5
    *routing, num_used = _routing(place, num_tokens)
    given = x_TI, gate_up_EFI, down_EIF, *routing
    peers: dict[str, Callable[[], Any]] = {}
    if place.is_gpu:
        peers["grouped_mm"] = partial(library_moe, *given, ExpertRule())
    else:
        peers["reference"] = partial(moe.reference, *given, ExpertRule())
    expert_bytes = (gate_up_EFI.nbytes + down_EIF.nbytes) / num_experts
    return Case(
        f"{num_chosen} of {num_experts} experts, {num_tokens} tokens",
        partial(moe.launch_moe_mlp, *given, "silu"),
        peers,
        num_used * expert_bytes,
        6 * num_tokens * num_chosen * width * hidden,
    )


def _packed_experts(place: Place, num_tokens: int) -> Case:
    """The same in float8, with the scales of squares that such checkpoints have."""
    from triptych.core.runtime.kernels.stacked_weights import FLOAT8
    from triptych.core.runtime.kernels.triton import moe

    num_experts, num_chosen, width, hidden = _expert_sizes(place)
    x_TI, (*routing, num_used) = randn(place, num_tokens, width), _routing(place, num_tokens)

    def stored(num_outputs: int, num_inputs: int) -> list[torch.Tensor]:
        weight_EOI = randn(place, num_experts, num_outputs, num_inputs, dtype=torch.float8_e4m3fn)
        shape = num_experts, -(-num_outputs // GROUP), -(-num_inputs // GROUP)
        return [weight_EOI, torch.full(shape, num_inputs**-0.5, device=place.device)]

    gate_up, down = stored(2 * hidden, width), stored(width, hidden)
    plain = [_plain(*each, value_type(place)) for each in (gate_up, down)]
    num_bytes = sum(each.nbytes for each in (*gate_up, *down)) / num_experts
    return Case(
        f"{num_chosen} of {num_experts} experts in float8, {num_tokens} tokens",
        partial(
            *(moe.launch_packed_moe_mlp, x_TI, gate_up, FLOAT8, down, FLOAT8),
            *(*routing, "silu"),
        ),
        {"plain": partial(moe.launch_moe_mlp, x_TI, *plain, *routing, "silu")},
        num_used * num_bytes,
        6 * num_tokens * num_chosen * width * hidden,
        is_float8=True,
    )


def _coded_experts(place: Place, num_tokens: int, form: str) -> Case:
    """The same experts in four bits: blocks of GGUF, or words of GPTQ."""
    from triptych.core.runtime.kernels.triton import moe

    num_experts, num_chosen, width, hidden = _expert_sizes(place)
    width, hidden = (width, hidden) if place.is_gpu else (GROUP, GROUP)
    x_TI, (*routing, num_used) = randn(place, num_tokens, width), _routing(place, num_tokens)

    def stored(num_outputs: int, num_inputs: int) -> list[torch.Tensor]:
        if form in BLOCKS:
            num_values, num_bytes = BLOCKS[form]
            shape = num_experts, num_outputs, num_inputs // num_values * num_bytes
            return [torch.randint(40, shape, dtype=torch.uint8, device=place.device)]
        shape = num_experts, num_inputs // 8, num_outputs
        words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=place.device)
        return [words, randn(place, num_experts, num_inputs // GROUP, num_outputs).half() * 0.01]

    gate_up, down = stored(2 * hidden, width), stored(width, hidden)
    num_bytes = sum(each.nbytes for each in (*gate_up, *down)) / num_experts
    return Case(
        f"{num_chosen} of {num_experts} experts in {form}, {num_tokens} tokens",
        partial(moe.launch_packed_moe_mlp, x_TI, gate_up, form, down, form, *routing, "silu"),
        {},
        num_used * num_bytes,
        6 * num_tokens * num_chosen * width * hidden,
    )


def _plain(weight_EOI: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of experts in float8, one at a time: there is not memory enough for float32."""
    values_EOI = weight_EOI.new_empty(weight_EOI.shape, dtype=dtype)
    for values_OI, weight_OI, squares in zip(values_EOI, weight_EOI, scale, strict=True):
        factors = squares.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
        num_outputs, num_inputs = weight_OI.shape
        values_OI.copy_(weight_OI.float() * factors[:num_outputs, :num_inputs])
    return values_EOI


def _expert_sizes(place: Place) -> tuple[int, int, int, int]:
    """The numbers of experts, of a token's, of features and of features inside an expert."""
    return (128, 8, 2048, 768) if place.is_gpu else (4, 2, 32, 16)


def _routing(place: Place, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Random experts of each token, with their weights, and how many there are in all."""
    num_experts, num_chosen, *_ = _expert_sizes(place)
    chosen = [torch.randperm(num_experts)[:num_chosen] for _ in range(num_tokens)]
    experts_TC = torch.stack(chosen).int()
    num_used = len(experts_TC.unique())
    weights_TC = torch.full(experts_TC.shape, 1 / num_chosen, device=place.device)
    return weights_TC, experts_TC.to(place.device), num_used


def _adapters(place: Place, num_rows: int, width: int) -> Case:
    """Rows with one of four adapters each."""
    from triptych.core.runtime.kernels.triton.lora import launch_lora_add

    rank, num_adapters = 16, 4
    y_TO, x_TI = (randn(place, num_rows, width) for _ in range(2))
    a_LRI = randn(place, num_adapters, rank, width)
    b_LOR = randn(place, num_adapters, width, rank)
    adapters_T = torch.arange(num_rows, dtype=torch.int32, device=place.device) % num_adapters
    scales_T = torch.ones(num_rows, device=place.device)
    return Case(
        f"adapters of rank {rank}, {num_rows} x {width}",
        partial(launch_lora_add, y_TO, x_TI, a_LRI, b_LOR, scales_T, adapters_T),
        {},
        a_LRI.nbytes + b_LOR.nbytes + 2 * y_TO.nbytes + x_TI.nbytes,
    )


def _not_compared(work: Callable[[], object]) -> Callable[[], None]:
    """A product of the same size with other weights."""

    def call() -> None:
        work()

    return call
