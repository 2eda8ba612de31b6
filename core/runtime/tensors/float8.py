"""Checkpoints' numbers of eight bits in floating point with their scales, as blocks.

Owns the spreading of scales over a matrix. fp8 becomes Q8_0, whose error is a few times smaller.

Shapes: O outputs, I inputs.
"""

from __future__ import annotations

import torch

from triptych.core.block_formats import FORMATS
from triptych.core.runtime.kernels.dequantize import PackedTensor
from triptych.core.runtime.tensors.quantize import quantize_blocks

SQUARE = 128
"""The side of the squares that share a scale in blockwise fp8."""


def float8_scales(shape: torch.Size, scales: torch.Tensor) -> torch.Tensor:
    """Scales in float32: one for all `[1]`, `[O]`, or of squares. Raises `ValueError`."""
    squares = tuple(-(-size // SQUARE) for size in shape)
    if tuple(scales.shape) == squares and scales.numel() > 1:
        return scales.float()
    if scales.numel() not in (1, shape[0]):
        raise ValueError("its scales are not one for all, for each output, or for squares of 128")
    return scales.float().reshape(-1)


def float8_blocks(weight_OI: torch.Tensor, scales: torch.Tensor) -> PackedTensor:
    """The matrix in blocks; `scales` are those of `float8_scales`, or of all numbers `[O, I]`."""
    if scales.dim() == 1:
        scales = scales.reshape(-1, 1)
    elif scales.shape != weight_OI.shape:
        scales = spread_scales(weight_OI.shape, scales)
    return quantize_blocks(weight_OI.float() * scales, FORMATS["q8_0"])


def spread_scales(shape: torch.Size, scales: torch.Tensor) -> torch.Tensor:
    """Scales of squares, or of equal parts of a matrix, for each number. Raises `ValueError`."""
    for dim, (size, num_scales) in enumerate(zip(shape, scales.shape, strict=True)):
        step = SQUARE if num_scales == -(-size // SQUARE) else size // max(1, num_scales)
        if step * num_scales < size:
            raise ValueError("its scales are of no equal parts")
        scales = scales.float().repeat_interleave(step, dim=dim).narrow(dim, 0, size)
    return scales
