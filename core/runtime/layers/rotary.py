"""Rotary position frequencies: plain, and with the published scalings.

Owns the formulas. Knows nothing of layers or sequences.

Every scaling gives one set of frequencies for the life of a loaded model, because cached keys are
already rotated and shared between rows. Two published variants, `dynamic` and `longrope`, let the
frequencies depend on the length of the current sequence. A paged server cannot do that, so it
decides once, by the context length it was started with (`max_length`): up to the trained length the
original frequencies (`longrope`: the short factors), which equals transformers for every sequence
that fits; beyond it the frequencies transformers would use for a sequence of exactly `max_length`
tokens.

The formulas follow the papers named at each and agree with `transformers.modeling_rope_utils`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Frequencies of `num_rotated_dims` dims of each head, in the terms of model configurations.

    `trained_length` is the context of pre-training (for `dynamic`, the model's own length);
    `max_length` is the context served. Of the kind `proportional` a `share` of the frequencies is
    above 0. Fields a `kind` does not use are ignored. With `sections`
    positions have three axes (time, height, width), each with that many frequencies: in blocks, or
    alternating.
    """

    kind: str = "default"
    theta: float = 10_000.0
    num_rotated_dims: int
    max_length: int
    trained_length: int
    factor: float = 1.0
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    is_truncated: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    share: float = 1.0
    sections: tuple[int, ...] = ()
    has_interleaved_sections: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScaling:
    """Scales of queries that grow with their positions (Llama 4; Ministral 3).

    `1 + beta * log(1 + floor((position + offset) / length))`.
    """

    beta: float
    length: int
    offset: int = 0

    def rows(self, positions_T: torch.Tensor) -> torch.Tensor:
        """The scale of each position, in float32."""
        steps = (positions_T.to(torch.float32) + self.offset).div_(self.length).floor_()
        return steps.log1p_().mul_(self.beta).add_(1.0)


class Rotary:
    """Computes cosine and sine rows of a step's positions."""

    __slots__ = ("_axis_R", "_inverse_frequencies", "_scales")

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        frequencies, attention_factor = rope_frequencies(config)
        half = torch.full_like(frequencies, attention_factor)
        self._inverse_frequencies = torch.cat((frequencies, frequencies)).to(device)
        self._scales = torch.cat((-half, half)).to(device)
        self._axis_R = _axes(config, len(frequencies)).repeat(2).to(device)

    def rows(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`cos_T1R, sin_T1R` for `runtime.kernels.rotary`: once a step, for all layers.

        `positions` are [T], or [3, T] for a model with sections. Both are contiguous.
        """
        if positions.dim() == 1:
            positions_T1R = positions.view(-1, 1, 1)
        else:
            positions_T1R = positions.t().index_select(1, self._axis_R).unsqueeze(1)
        angles_T1R = positions_T1R.to(torch.float32) * self._inverse_frequencies
        sin_T1R = (angles_T1R.sin() * self._scales).to(dtype)
        return angles_T1R.cos_().mul_(self._scales.abs()).to(dtype), sin_T1R


def rope_frequencies(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Inverse frequencies (radians per position, float32) and the factor on cosine and sine."""
    return _VARIANTS[config.kind](config)


def _axes(config: RopeConfig, num_frequencies: int) -> torch.Tensor:
    """The axis of each frequency (Qwen2-VL, arXiv:2409.12191; alternating: Qwen3-VL)."""
    axes = torch.zeros(num_frequencies, dtype=torch.int64)
    first = 0
    for axis, size in enumerate(config.sections):
        if not config.has_interleaved_sections:
            axes[first : first + size] = axis
        elif axis:
            axes[axis : 3 * size : 3] = axis
        first += size
    return axes


def _plain(config: RopeConfig, theta: float | None = None) -> torch.Tensor:
    num_dims = config.num_rotated_dims
    exponents = torch.arange(0, num_dims, 2, dtype=torch.float32) / num_dims
    frequencies: torch.Tensor = 1.0 / ((theta or config.theta) ** exponents)
    return frequencies


def _default(config: RopeConfig) -> tuple[torch.Tensor, float]:
    return _plain(config), 1.0


def _linear(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595)."""
    return _plain(config) / config.factor, 1.0


def _proportional(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """The highest frequencies alone; the rest of a head keeps its place in pairs (Gemma 4)."""
    frequencies = _plain(config) / config.factor
    frequencies[int(config.share * config.num_rotated_dims / 2) :] = 0
    return frequencies, 1.0


def _dynamic(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """NTK-aware base (bloc97 and emozilla, 2023), fixed by the served length: see the module."""
    num_dims, factor = config.num_rotated_dims, config.factor
    stretch = max(config.max_length, config.trained_length) / config.trained_length
    base = factor * stretch - (factor - 1)
    return _plain(config, config.theta * base ** (num_dims / (num_dims - 2))), 1.0


def _llama3(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long waves are interpolated, short ones kept, those between blended."""
    frequencies = _plain(config)
    waves = config.trained_length * frequencies / (2 * math.pi)  # turns within trained_length
    low, high = config.low_freq_factor, config.high_freq_factor
    blend = ((waves - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / config.factor + blend * frequencies, 1.0


def _yarn(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv:2309.00071)."""
    num_dims = config.num_rotated_dims

    def dim_of(num_turns: float) -> float:
        turns = config.trained_length / (num_turns * 2 * math.pi)
        return num_dims * math.log(turns) / (2 * math.log(config.theta))

    low, high = dim_of(config.beta_fast), dim_of(config.beta_slow)
    if config.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, num_dims - 1)
    span = (high - low) or 0.001
    ramp = ((torch.arange(num_dims // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    frequencies = _plain(config)
    return frequencies / config.factor * ramp + frequencies * (1 - ramp), _yarn_attention(config)


def _yarn_attention(config: RopeConfig) -> float:
    def scale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)


def _longrope(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753), one set by the served length: see the module.

    `factor` is the ratio of the model's own length to the trained one, as in transformers.
    """
    is_long = config.max_length > config.trained_length
    divisors = torch.tensor(config.long_factor if is_long else config.short_factor)
    attention_factor = config.attention_factor
    if attention_factor is None:
        growth = math.log(config.factor) / math.log(config.trained_length)
        attention_factor = 1.0 if config.factor <= 1 else math.sqrt(1 + growth)
    return _plain(config) / divisors, attention_factor


_VARIANTS: MappingProxyType[str, Callable[[RopeConfig], tuple[torch.Tensor, float]]] = (
    MappingProxyType(
        {
            "default": _default,
            "linear": _linear,
            "dynamic": _dynamic,
            "yarn": _yarn,
            "llama3": _llama3,
            "longrope": _longrope,
            "proportional": _proportional,
        }
    )
)
ROPE_KINDS = frozenset(_VARIANTS)
