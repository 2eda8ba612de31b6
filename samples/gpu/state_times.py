"""Recurrent layers: the convolution, the gated delta rule, Mamba 2's scan, and gated norms.

Sizes are those of Qwen3-Next, with a decay for each head and for each value of its key, and of a
Nemotron-H of 8B. The references go token by token, so only decode steps are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from kernel_case import Case, randn, value_type
from place import Place
from torch.nn.functional import rms_norm, silu

from triptych.core.runtime.kernels import recurrent
from triptych.core.runtime.kernels.recurrent import (
    Convolution,
    DeltaInputs,
    ScanInputs,
    StateWave,
)


def cases(place: Place) -> Iterator[Case]:
    """Decode steps, and a prompt."""
    for num_rows, length in ((1, 1), (64, 1), (1, 2048)) if place.is_gpu else ((2, 1),):
        wave = _wave(place, num_rows, length)
        yield _convolution(place, wave)
        for has_key_decays in (False, True):
            yield _delta_rule(place, wave, has_key_decays=has_key_decays)
        for is_deterministic in (False, True) if length > 1 else (False,):
            yield _scan(place, wave, is_deterministic=is_deterministic)
        yield _gated_norm(place, num_rows * length)


def _wave(place: Place, num_rows: int, length: int) -> StateWave:
    """As many rows, each with as many tokens."""
    starts_B = torch.arange(num_rows, device=place.device) * length
    lengths_B = torch.full((num_rows,), length, device=place.device)
    return StateWave(starts_B, lengths_B, torch.arange(num_rows, device=place.device), length)


def _named(what: str, wave: StateWave) -> str:
    return f"{what}, {len(wave.starts_B)} rows of {wave.max_length}"


def _peers(wave: StateWave, reference: Callable[[], torch.Tensor]) -> dict[str, Any]:
    return {"torch": reference} if wave.max_length == 1 else {}


def _convolution(place: Place, wave: StateWave) -> Case:
    from triptych.core.runtime.kernels.triton import short_conv

    width, num_channels = (4, 8192) if place.is_gpu else (4, 48)
    num_rows = len(wave.starts_B)
    x_TX = randn(place, num_rows * wave.max_length, num_channels)
    by = Convolution(randn(place, width, num_channels).float())
    states = [torch.zeros(num_rows, width - 1, num_channels, device=place.device) for _ in range(2)]
    rows = wave.starts_B, wave.lengths_B, wave.slots_B, wave.max_length

    def ours() -> torch.Tensor:
        y_TX = torch.empty_like(x_TX)
        short_conv.launch(x_TX, by.weight_KX, None, True, states[0], y_TX, *rows)
        return y_TX

    def theirs() -> torch.Tensor:
        y_TX = torch.empty_like(x_TX)
        recurrent._convolve(x_TX, by, states[1], wave, y_TX)
        return y_TX

    num_bytes = 2 * x_TX.nbytes + 2 * states[0].nbytes
    return Case(_named("convolution", wave), ours, _peers(wave, theirs), num_bytes)


def _delta_rule(place: Place, wave: StateWave, *, has_key_decays: bool) -> Case:
    from triptych.core.runtime.kernels.triton import delta_rule

    num_key_heads, num_heads, size = (16, 32, 128) if place.is_gpu else (2, 4, 16)
    num_rows, num_tokens = len(wave.starts_B), len(wave.starts_B) * wave.max_length
    q, k = (randn(place, num_tokens, num_key_heads, size) for _ in range(2))
    num_decays = size if has_key_decays else 1
    v, b = randn(place, num_tokens, num_heads, size), randn(place, num_tokens, num_heads)
    a = randn(place, num_tokens, num_heads, num_decays)
    bias = randn(place, num_heads, num_decays).float()
    decay_H = -randn(place, num_heads).float().exp()
    inputs = DeltaInputs(q, k, v, a, b, decay_H, bias)
    shape = num_rows, num_heads, size, size
    states = [torch.zeros(shape, device=place.device) for _ in range(2)]
    rows = wave.starts_B, wave.lengths_B, wave.slots_B

    def ours() -> torch.Tensor:
        y_THE = torch.empty_like(v, dtype=torch.float32)
        delta_rule.launch(q, k, v, a, b, decay_H, bias, states[0], y_THE, *rows, 1.0)
        return y_THE

    def theirs() -> torch.Tensor:
        y_THE = torch.empty_like(v, dtype=torch.float32)
        recurrent._apply_delta_rule(inputs, states[1], wave, y_THE)
        return y_THE

    num_bytes = 2 * states[0].nbytes + a.nbytes + q.nbytes + k.nbytes + 3 * v.nbytes
    name = _named("gated delta rule" + ", decays of keys" * has_key_decays, wave)
    return Case(name, ours, _peers(wave, theirs), num_bytes)


def _scan(place: Place, wave: StateWave, *, is_deterministic: bool) -> Case:
    from triptych.core.runtime.kernels.triton import selective_scan

    num_groups, num_heads, head_dim, size = (8, 128, 64, 128) if place.is_gpu else (2, 4, 16, 16)
    num_rows, num_tokens = len(wave.starts_B), len(wave.starts_B) * wave.max_length
    x = randn(place, num_tokens, num_heads, head_dim)
    b, c = (randn(place, num_tokens, num_groups, size) for _ in range(2))
    dt = randn(place, num_tokens, num_heads)
    decay_H, bias_H, skip_H = (randn(place, num_heads).float() for _ in range(3))
    inputs = ScanInputs(x, b, c, dt, -decay_H.exp(), bias_H, skip_H, (0.001, 0.1))
    shape = num_rows, num_heads, head_dim, size
    states = [torch.zeros(shape, device=place.device) for _ in range(2)]
    of_all = inputs.decay_H, bias_H, skip_H, list(inputs.limits)
    rows = wave.starts_B, wave.lengths_B, wave.slots_B, wave.max_length, is_deterministic

    def ours() -> torch.Tensor:
        y_THP = torch.empty_like(x, dtype=torch.float32)
        selective_scan.launch(x, b, c, dt, *of_all, states[0], y_THP, *rows)
        return y_THP

    def theirs() -> torch.Tensor:
        y_THP = torch.empty_like(x, dtype=torch.float32)
        recurrent._scan(inputs, states[1], wave, y_THP)
        return y_THP

    name = _named("Mamba 2's scan" + ", deterministic" * is_deterministic, wave)
    num_bytes = 2 * states[0].nbytes + 3 * x.nbytes + b.nbytes + c.nbytes
    return Case(name, ours, _peers(wave, theirs), num_bytes)


def _gated_norm(place: Place, num_tokens: int) -> Case:
    from triptych.core.runtime.kernels.triton import gated_norm

    size, num_values = (128, 4096) if place.is_gpu else (16, 64)
    y_TO, z_TO = randn(place, num_tokens, num_values).float(), randn(place, num_tokens, num_values)
    weight = randn(place, size).float()

    def theirs() -> torch.Tensor:
        normed_TGX = rms_norm(y_TO.unflatten(1, (-1, size)), (size,), weight, 1e-6)
        return (normed_TGX.flatten(1) * silu(z_TO.float())).to(value_type(place))

    return Case(
        f"gated norm, {num_tokens} x {num_values}",
        partial(gated_norm.launch, y_TO, z_TO, weight, size, 1e-6, "first"),
        {"torch": theirs},
        y_TO.nbytes + 2 * z_TO.nbytes,
    )
