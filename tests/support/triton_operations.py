"""Launches of the small operations at shapes that servers have."""

from __future__ import annotations

from collections.abc import Callable

import torch

from support.triton_launches import key_of_variant, keys_of_launches
from triptych.core.runtime.kernels.kv_pages import KvPages
from triptych.core.runtime.kernels.triton.compile import CompileTarget

BF16 = torch.bfloat16
Launches = dict[str, Callable[[], object]]


def operation_keys(target: CompileTarget) -> dict[str, tuple[str, str]]:
    """By module and variant: the keys of a launch, and of what is compiled ahead."""
    from triptych.core.runtime.kernels.triton import (
        adaln,
        add_rms_norm,
        altup,
        cache_metrics,
        delta_rule,
        gated,
        gated_norm,
        gelu_rows,
        norm_rotary,
        penalties,
        rope_write,
        row_moments,
        sampling,
        selective_scan,
        short_conv,
        stream_conv,
    )

    keys = {}
    for module, launches in (
        (adaln, _adaln()),
        (add_rms_norm, _norms()),
        (altup, _altup()),
        (cache_metrics, _cache_metrics()),
        (delta_rule, _delta_rule()),
        (gated, _gated()),
        (gelu_rows, _gelu_rows()),
        (norm_rotary, _norm_rotary()),
        (penalties, _penalties()),
        (rope_write, _rope_write()),
        (row_moments, _row_moments()),
        (sampling, _sampling()),
        (selective_scan, _selective_scan()),
        (short_conv, _short_conv()),
        (gated_norm, _gated_norm()),
        (stream_conv, _stream_conv()),
    ):
        ahead = {each.name: each for each in module.variants()}
        for name, launch in launches.items():
            launched = keys_of_launches(launch, target)[0]
            keys[f"{module.__name__}.{name}"] = launched, key_of_variant(ahead[name], target)
    return keys


def _adaln() -> Launches:
    from triptych.core.runtime.kernels.triton.adaln import (
        launch_gated_modulated_norm,
        launch_modulated_norm,
    )

    x, rows = torch.empty(2, 40, 3072, dtype=BF16), torch.empty(2, 6 * 3072, dtype=BF16)
    shift, scale, gate = rows.chunk(6, dim=1)[:3]
    return {
        "layer_norm_4096": lambda: launch_modulated_norm(x, scale, shift, 1e-6, False),
        "gated_layer_norm_4096": lambda: launch_gated_modulated_norm(
            x, x, gate, scale, shift, 1e-6, False
        ),
    }


def _norms() -> Launches:
    from triptych.core.runtime.kernels.triton.add_rms_norm import (
        launch_add_rms_norm,
        launch_rms_norm,
    )

    x, weight = torch.empty(1, 4096, dtype=BF16), torch.empty(4096, dtype=BF16)
    return {
        "add_4096": lambda: launch_add_rms_norm(x, x, weight, 1e-5),
        "centred_4096": lambda: launch_rms_norm(x, weight.float(), 1e-5),
    }


def _cache_metrics() -> Launches:
    from triptych.core.runtime.kernels.triton.cache_metrics import launch_distances, launch_weighted

    cells, numbers = torch.empty(2, 64 * 64, dtype=BF16), torch.zeros(1, dtype=torch.int64)
    weights = torch.ones(1, 1)
    return {
        "distances_bf16": lambda: launch_distances(cells[:1], cells, numbers),
        "weighted": lambda: launch_weighted(cells.float(), numbers[None], weights),
    }


def _delta_rule() -> Launches:
    from triptych.core.runtime.kernels.triton.delta_rule import launch

    def run(num_keys: int, num_decays: int) -> None:
        sizes = num_keys, num_keys, 4096, 32, num_decays
        q, k, v, b, a = torch.empty(3, sum(sizes), dtype=BF16).split(sizes, dim=1)
        heads = (each.unflatten(1, (-1, 128)) for each in (q, k, v))
        numbers = torch.empty(32), torch.empty(32, num_decays // 32), torch.empty(4, 32, 128, 128)
        y = torch.empty(3, 32, 128)
        launch(*heads, a.unflatten(1, (32, -1)), b, *numbers, y, *_rows(), 1.0)

    return {"heads_128": lambda: run(2048, 32), "key_decays_128": lambda: run(4096, 4096)}


def _rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    numbers = torch.zeros(2, dtype=torch.int64)
    return numbers, numbers, numbers


def _selective_scan() -> Launches:
    from triptych.core.runtime.kernels.triton.selective_scan import launch

    inner, size = 128 * 64, 128
    projected = torch.empty(3, 2 * inner + 2 * size + 128, dtype=BF16)
    _, x, b, c, dt = projected.split((inner, inner, size, size, 128), dim=1)
    x, b, c = x.unflatten(1, (128, 64)), b.unflatten(1, (1, -1)), c.unflatten(1, (1, -1))
    state, y, heads = torch.empty(4, 128, 64, size), torch.empty(3, 128, 64), torch.empty(128)
    given = x, b, c, dt, heads, heads, heads, [0.0, float("inf")], state, y
    return {
        "tokens_128": lambda: launch(*given, *_rows(), 2),
        "blocks_128": lambda: launch(*given, *_rows(), 64),
    }


def _gated_norm() -> Launches:
    from triptych.core.runtime.kernels.triton.gated_norm import launch

    def run(num_groups: int, size: int, place: str, gate: str = "silu") -> None:
        width, num_weights = num_groups * size, size if place == "first" else num_groups * size
        y, z = torch.empty(2, width), torch.empty(2, width, dtype=BF16)
        launch(y, z, torch.empty(num_weights), size, 1e-6, place, gate)

    return {
        "mamba_8192": lambda: run(1, 8192, "last"),
        "heads_128": lambda: run(32, 128, "first"),
        "sigmoid_128": lambda: run(32, 128, "first", "sigmoid"),
    }


def _short_conv() -> Launches:
    from triptych.core.runtime.kernels.triton.short_conv import launch

    def run(width: int) -> None:
        x, weight = torch.empty(3, 8192, dtype=BF16), torch.empty(width, 8192)
        state = torch.empty(4, width - 1, 8192)
        launch(x, weight, None, width == 4, state, torch.empty_like(x), *_rows(), 2)

    return {"conv_3": lambda: run(3), "conv_4": lambda: run(4)}


def _gated() -> Launches:
    from triptych.core.runtime.kernels.triton.gated import launch

    x = torch.empty(1, 2 * 14336, dtype=BF16)
    return {
        "silu": lambda: launch(x, "silu"),
        "gelu": lambda: launch(x, "gelu_tanh"),
        "relu2": lambda: launch(x, "relu2"),
        "clamped": lambda: launch(x, "clamped_silu", 1.702, 7.0),
    }


def _altup() -> Launches:
    from triptych.core.runtime.kernels.triton.altup import launch_correct, launch_predict

    streams, router = torch.empty(3, 4, 2048, dtype=BF16), torch.empty(4, 2048)
    pairs, own = torch.empty(16, 4, dtype=BF16), torch.empty(4, 4, dtype=BF16)
    return {
        "predict": lambda: launch_predict(streams, router, 1e-6, pairs),
        "correct": lambda: launch_correct(streams, streams[:, 0].clone(), router, 1e-6, own),
    }


def _row_moments() -> Launches:
    from triptych.core.runtime.kernels.triton.row_moments import (
        launch_as_large_as,
        launch_relu_above,
    )

    x = torch.empty(3, 2048, dtype=BF16)
    return {
        "scale": lambda: launch_as_large_as(x, x),
        "keep_above": lambda: launch_relu_above(x, 1.5),
    }


def _gelu_rows() -> Launches:
    from triptych.core.runtime.kernels.triton.gelu_rows import launch

    x, left = torch.empty(40, 12288, dtype=BF16), torch.empty(40, 3072, dtype=BF16)
    return {"gelu": lambda: launch(x), "left_gelu": lambda: launch(x, left)}


def _norm_rotary() -> Launches:
    from triptych.core.runtime.kernels.triton.norm_rotary import launch

    qkv, weight = torch.empty(1, 40, 72, 128, dtype=BF16), torch.empty(128, dtype=BF16)
    angles, joint = torch.empty(40, 128), torch.empty(1, 60, 24, 128, dtype=BF16)
    out = joint[:, 16:56]
    return {"heads_32x128": lambda: launch(qkv[:, :, :24], weight, angles, angles, out, 1e-6)}


def _penalties() -> Launches:
    from triptych.core.runtime.kernels.triton.penalties import launch

    logits, counts = torch.empty(1, 128256), torch.zeros(1, 128256, dtype=torch.int32)
    slots = torch.zeros(1, dtype=torch.int64)
    return {"fp32": lambda: launch(logits, counts, torch.ones(1, 3), slots, 2**30 - 1)}


def _rope_write() -> Launches:
    from triptych.core.runtime.kernels.triton.rope_write import launch

    qkv, norm = torch.empty(1, 48, 128, dtype=BF16), torch.empty(40, 128, dtype=BF16)
    rows, slots = torch.empty(1, 1, 128, dtype=BF16), torch.zeros(1, dtype=torch.int64)
    plain, float8, int8 = (
        KvPages.empty((1, 16, 8, 128), dtype, torch.device("cpu"))
        for dtype in (BF16, torch.float8_e4m3fn, torch.int8)
    )
    qk, v = qkv[:, :40], qkv[:, 40:]
    return {
        "rope": lambda: launch(qk, v, None, 0.0, rows, rows, False, *plain, slots),
        "norm_rope_float8": lambda: launch(qk, v, norm, 1e-6, rows, rows, False, *float8, slots),
        "norm_rope_int8": lambda: launch(qk, v, norm, 1e-6, rows, rows, False, *int8, slots),
    }


def _sampling() -> Launches:
    from triptych.core.runtime.kernels.triton.sampling import launch

    logits, shape = torch.empty(1, 128256), torch.ones(1, 4)
    slots, uniform = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    return {
        "greedy_bf16_measure": lambda: launch(logits.to(BF16), None, None, shape, slots, None),
        "sampled_measure": lambda: launch(logits, None, None, shape, slots, uniform),
    }


def _stream_conv() -> Launches:
    from triptych.core.runtime.kernels.triton.stream_conv import launch

    x, past, weight = torch.empty(2, 512, 9), torch.empty(2, 512, 6), torch.empty(256, 512, 7)
    slots, bias = torch.arange(2), torch.empty(256)
    return {"fp32": lambda: launch(x, past, slots, None, weight, bias, 1, 1, 9)}
