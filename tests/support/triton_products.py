"""Launches of products at the shapes of models that people serve, on tensors without storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from support.triton_launches import key_of_variant, keys_of_launches
from triptych.core.runtime.kernels.triton.compile import CompileTarget

_FEATURES, _HIDDEN, _EXPERTS, _CHOSEN = 4096, 768, 128, 8
_MODULES = (
    *("tiling", "linear", "gguf_linear", "gptq_linear", "fp8_linear"),
    *("routing", "grouped", "grouped_packed", "moe", "lora"),
)


def missing_variants(*targets: CompileTarget) -> list[str]:
    """Variants that no launch on one of the targets would ask for."""
    return [missing for target in targets for missing in _missing_variants(target)]


def _missing_variants(target: CompileTarget) -> list[str]:
    from importlib import import_module

    launched = {key for launch in _launches() for key in keys_of_launches(launch, target)}
    return [
        f"{name}.{variant.name} on {target}"
        for name in _MODULES
        for variant in import_module(f"triptych.core.runtime.kernels.triton.{name}").variants()
        if key_of_variant(variant, target) not in launched
    ]


_GPT_OSS = ("clamped_silu", False, 1.702, 7.0)


def _biases(num_hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _tensor(_EXPERTS, 2 * num_hidden), _tensor(_EXPERTS, _FEATURES)


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _x(num_rows: int, num_inputs: int = _FEATURES) -> torch.Tensor:
    return _tensor(num_rows, num_inputs)


def _launches() -> list[Callable[[], Any]]:
    return [
        *_linear_launches(),
        *_fp8_launches(),
        *_expert_launches(),
        *_packed_launches(),
        _adapters,
    ]


def _linear_launches() -> list[Callable[[], Any]]:
    from triptych.core.runtime.kernels.triton.gguf_linear import launch_gguf_linear
    from triptych.core.runtime.kernels.triton.gptq_linear import launch_gptq_linear
    from triptych.core.runtime.kernels.triton.linear import launch_linear

    out, width = torch.bfloat16, 16384

    def gguf(num_rows: int, kind: str, row_bytes: int, num_outputs: int = width) -> object:
        blocks_OB = _tensor(num_outputs, row_bytes, dtype=torch.uint8)
        return launch_gguf_linear(_x(num_rows), blocks_OB, kind, out)

    def gptq(num_rows: int, layout: str, *shape: int) -> object:
        words = _tensor(*shape, dtype=torch.int32)
        zeros = _tensor(32, width // 8, dtype=torch.int32)
        scales_RO = _tensor(32, width, dtype=torch.float16)
        return launch_gptq_linear(_x(num_rows), words, scales_RO, zeros, None, layout, out)

    return [
        lambda: launch_linear(_x(1), _tensor(width, _FEATURES), out, deterministic=True),
        lambda: launch_linear(_x(500), _tensor(width, _FEATURES), out),
        lambda: gguf(1, "q4_k", _FEATURES // 256 * 144),
        lambda: gguf(9, "q4_k", _FEATURES // 256 * 144),
        lambda: gguf(500, "q6_k", _FEATURES // 256 * 210),
        lambda: gguf(9, "q4_0", _FEATURES // 32 * 18),
        lambda: gptq(9, "gptq", _FEATURES // 8, width),
        lambda: gptq(500, "gptq", _FEATURES // 8, width),
        lambda: gptq(9, "awq", _FEATURES, width // 8),
    ]


def _fp8_launches() -> list[Callable[[], Any]]:
    from triptych.core.runtime.kernels.triton.fp8_linear import multiply_fp8

    weight = _tensor(16384, _FEATURES, dtype=torch.float8_e4m3fn)
    outputs = _tensor(16384, dtype=torch.float32)
    blocks = _tensor(128, 32, dtype=torch.float32)

    def fp8(num_rows: int, scale: torch.Tensor, has_units: bool) -> object:
        out = torch.bfloat16
        return multiply_fp8(_x(num_rows), weight, scale, out, False, has_units=has_units)

    return [
        lambda: fp8(9, outputs, True),
        lambda: fp8(500, blocks, True),
        lambda: fp8(500, blocks, False),
    ]


def _expert_launches() -> list[Callable[[], Any]]:
    from triptych.core.runtime.kernels.triton.moe import launch_moe_mlp
    from triptych.core.runtime.kernels.triton.routing import launch_route

    gate_up, down = _tensor(_EXPERTS, 2 * _HIDDEN, _FEATURES), _tensor(_EXPERTS, _FEATURES, _HIDDEN)

    def moe(num_tokens: int) -> object:
        weights_TC = _tensor(num_tokens, _CHOSEN, dtype=torch.float32)
        experts_TC = _tensor(num_tokens, _CHOSEN, dtype=torch.int32)
        return launch_moe_mlp(_x(num_tokens), gate_up, down, weights_TC, experts_TC, "silu")

    def clamped(num_tokens: int) -> object:
        weights_TC = _tensor(num_tokens, 4, dtype=torch.float32)
        experts_TC = _tensor(num_tokens, 4, dtype=torch.int32)
        given = _x(num_tokens), gate_up, down, weights_TC, experts_TC, *_GPT_OSS
        return launch_moe_mlp(*given, *_biases(_HIDDEN), False)

    def route(num_experts: int, scoring: str, *groups: int) -> object:
        logits_TE = _tensor(9, num_experts, dtype=torch.float32)
        correction_E = _tensor(num_experts, dtype=torch.float32) if groups else None
        return launch_route(logits_TE, correction_E, _CHOSEN, scoring, True, 1.0, list(groups))

    return [
        lambda: moe(9),
        lambda: moe(2000),
        lambda: launch_moe_mlp(
            *(_x(9), gate_up[:, :_HIDDEN], down, _tensor(9, _CHOSEN, dtype=torch.float32)),
            *(_tensor(9, _CHOSEN, dtype=torch.int32), "relu2"),
            has_factor=False,
        ),
        lambda: clamped(9),
        lambda: clamped(4000),
        lambda: route(128, "softmax"),
        lambda: route(256, "sigmoid", 8, 4, 2),
    ]


def _packed_launches() -> list[Callable[[], Any]]:
    from triptych.core.runtime.kernels.triton import grouped_packed
    from triptych.core.runtime.kernels.triton.moe import launch_combine, launch_packed_moe_mlp

    features, hidden = _FEATURES, 1024

    def float8(num_outputs: int, num_inputs: int) -> list[torch.Tensor]:
        squares = _tensor(_EXPERTS, num_outputs // 128, num_inputs // 128, dtype=torch.float32)
        return [_tensor(_EXPERTS, num_outputs, num_inputs, dtype=torch.float8_e4m3fn), squares]

    def gptq(num_outputs: int, num_inputs: int) -> list[torch.Tensor]:
        groups = num_inputs // 128
        return [
            _tensor(_EXPERTS, num_inputs // 8, num_outputs, dtype=torch.int32),
            _tensor(_EXPERTS, groups, num_outputs, dtype=torch.float16),
            _tensor(_EXPERTS, groups, num_outputs // 8, dtype=torch.int32),
        ]

    def blocks(num_outputs: int, row_bytes: int) -> list[torch.Tensor]:
        return [_tensor(_EXPERTS, num_outputs, row_bytes, dtype=torch.uint8)]

    def moe(num_tokens: int, *weights: Any) -> object:
        weights_TC = _tensor(num_tokens, _CHOSEN, dtype=torch.float32)
        experts_TC = _tensor(num_tokens, _CHOSEN, dtype=torch.int32)
        return launch_packed_moe_mlp(_x(num_tokens), *weights, weights_TC, experts_TC, "silu")

    def mxfp4_moe(num_tokens: int) -> object:
        weights = [
            *(blocks(2 * hidden, features // 32 * 17), "mxfp4"),
            *(blocks(features, hidden // 32 * 17), "mxfp4"),
        ]
        weights_TC = _tensor(num_tokens, 4, dtype=torch.float32)
        experts_TC = _tensor(num_tokens, 4, dtype=torch.int32)
        given = _x(num_tokens), *weights, weights_TC, experts_TC, *_GPT_OSS
        return launch_packed_moe_mlp(*given, *_biases(hidden), False)

    def float8_moe(num_tokens: int, *, has_units: bool = True) -> object:
        known, grouped_packed.has_float8_units = (
            grouped_packed.has_float8_units,
            lambda device: has_units,
        )
        try:
            down = float8(features, hidden), "float8"
            return moe(num_tokens, float8(2 * hidden, features), "float8", *down)
        finally:
            grouped_packed.has_float8_units = known

    four_bits = gptq(2 * hidden, features), "gptq", gptq(features, hidden), "gptq"
    k_blocks = (
        *(blocks(2 * hidden, features // 256 * 144), "q4_k"),
        *(blocks(features, hidden // 256 * 210), "q6_k"),
    )
    return [
        lambda: float8_moe(9),
        lambda: float8_moe(2000),
        lambda: float8_moe(2000, has_units=False),
        lambda: moe(9, *four_bits),
        lambda: moe(2000, *four_bits),
        lambda: moe(9, *k_blocks),
        lambda: moe(2000, *k_blocks),
        lambda: launch_combine(
            *(_x(72), _tensor(9, _CHOSEN, dtype=torch.float32), _CHOSEN),
            _tensor(72, dtype=torch.int64),
        ),
        lambda: mxfp4_moe(9),
        lambda: mxfp4_moe(4000),
    ]


def _adapters() -> None:
    from triptych.core.runtime.kernels.triton.lora import launch_lora_add

    a_LRI, b_LOR = _tensor(8, 64, _FEATURES), _tensor(8, _FEATURES, 64)
    scales_T, adapters_T = _tensor(9, dtype=torch.float32), _tensor(9, dtype=torch.int32)
    launch_lora_add(_x(9), _x(9), a_LRI, b_LOR, scales_T, adapters_T)
