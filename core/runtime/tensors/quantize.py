"""Quantizes plain weights to blocks of small integers, or to float8, when a model is loaded.

Owns the choice of scales for Q4_K, Q6_K and float8; the simpler formats use the `gguf` library. The
meaning of the bytes is defined in `core.runtime.kernels.dequantize`.

Shapes: O outputs, I inputs, N groups of inputs with one scale each, G inputs of a group, S groups
of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from triptych.core.block_formats import BlockFormat
from triptych.core.runtime.kernels.dequantize import PackedTensor
from triptych.core.runtime.kernels.packed_linear import Float8Weight

_CHUNK_VALUES = 1 << 22
_SHRINKING = tuple(1.0 - 0.03 * step for step in range(9))
"""Scales to try, as fractions of the one that represents the largest value."""


def quantize_blocks(weight_OI: torch.Tensor, form: BlockFormat) -> PackedTensor:
    """The weight in blocks of `form`; rows must be whole blocks."""
    assert form.holds(weight_OI.shape[1])
    rows = max(1, _CHUNK_VALUES // weight_OI.shape[1])
    packed = [_pack(chunk.float(), form) for chunk in weight_OI.split(rows)]
    return PackedTensor(torch.cat(packed), form)


def quantize_float8(weight_OI: torch.Tensor) -> Float8Weight:
    """The weight in float8 (e4m3), with the scale of each output by its largest value.

    Scales are powers of two. They round as well as others, and keep exactly what has been float8
    without scales in its file.
    """
    weight_OI = weight_OI.float()
    largest_O = weight_OI.abs().amax(dim=1) / torch.finfo(torch.float8_e4m3fn).max
    fraction_O, exponent_O = torch.frexp(largest_O)
    scale_O = torch.exp2((exponent_O - (fraction_O == 0.5).int()).float())
    return Float8Weight((weight_OI / scale_O[:, None]).to(torch.float8_e4m3fn), scale_O)


def _pack(weight_OI: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """The packed bytes of some rows."""
    if form.name in _MAKERS:
        blocks = _MAKERS[form.name](weight_OI.reshape(-1, form.num_inputs))
        return blocks.view(len(weight_OI), -1)
    kind = GGMLQuantizationType[form.name.upper()]
    return torch.from_numpy(quantize(weight_OI.numpy(), kind))


def _codes(values: torch.Tensor, scale: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """The nearest codes; a scale of 0 makes them 0."""
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    return (values * inverse).round().clamp(least, most)


def _best_scale(
    values_NG: torch.Tensor, scale_N1: torch.Tensor, least: int, most: int
) -> torch.Tensor:
    """For each group, the scale with the smallest squared error, of some up to `scale_N1`."""
    best, least_error = scale_N1, torch.full_like(scale_N1, torch.inf)
    for share in _SHRINKING:
        tried = scale_N1 * share
        made = _codes(values_NG, tried, least, most) * tried
        error = (made - values_NG).square().sum(-1, keepdim=True)
        best = torch.where(error < least_error, tried, best)
        least_error = torch.minimum(error, least_error)
    return best


def _shared(scales_NS: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of a block as integers up to `most` times one in float16; returns both."""
    largest = scales_NS.abs().amax(-1, keepdim=True)
    own_N1 = (largest / most).half()
    return own_N1, _codes(scales_NS, own_N1.float(), -most, most)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """View numbers of any type as bytes."""
    return values.contiguous().view(torch.uint8)


def _q4_k(values: torch.Tensor) -> torch.Tensor:
    groups = values.view(-1, 8, 32)
    lowest = groups.amin(-1, keepdim=True).clamp(max=0)
    scale = _best_scale(groups - lowest, (groups.amax(-1, keepdim=True) - lowest) / 15, 0, 15)
    own_scale, scales = _shared(scale[..., 0], 63)
    own_minimum, minima = _shared(-lowest[..., 0], 63)
    shifted = groups + (own_minimum.float() * minima)[..., None]
    codes = _codes(shifted, (own_scale.float() * scales)[..., None], 0, 15).to(torch.uint8)
    small = _six_bits(scales.to(torch.uint8), minima.to(torch.uint8))
    halves = codes.view(-1, 4, 2, 32)
    nibbles = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    return torch.cat((_bytes(own_scale), _bytes(own_minimum), small, nibbles), dim=1)


def _six_bits(scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    """Eight scales and minima of 6 bits in twelve bytes; see `core.runtime.kernels.dequantize`."""
    low = scales[:, :4] | scales[:, 4:] >> 4 << 6
    middle = minima[:, :4] | minima[:, 4:] >> 4 << 6
    return torch.cat((low, middle, scales[:, 4:] & 15 | minima[:, 4:] << 4), dim=1)


def _q6_k(values: torch.Tensor) -> torch.Tensor:
    groups = values.view(-1, 16, 16)
    at = groups.abs().argmax(-1, keepdim=True)
    scale = _best_scale(groups, groups.gather(-1, at) / -32, -32, 31)
    own_scale, scales = _shared(scale[..., 0], 127)
    codes = _codes(groups, (own_scale.float() * scales)[..., None], -32, 31) + 32
    parts = codes.to(torch.uint8).view(-1, 2, 4, 32)
    low = (parts[:, :, :2] & 15 | (parts[:, :, 2:] & 15) << 4).flatten(1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (parts >> 4 << shifts).sum(2, dtype=torch.uint8).flatten(1)
    small = _bytes(scales.to(torch.int8))
    return torch.cat((low, high, small, _bytes(own_scale)), dim=1)


_MAKERS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {"q4_k": _q4_k, "q6_k": _q6_k}
)
"""Converters from blocks of values to blocks of bytes."""
