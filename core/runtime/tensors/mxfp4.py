"""Checkpoints' numbers of four bits with shared exponents (MXFP4), as blocks.

Owns the order of numbers. The meaning of a block is in `core.runtime.kernels.dequantize`.

Shapes: O outputs, I inputs, G groups of 32 inputs.
"""

from __future__ import annotations

import torch

from triptych.core.block_formats import FORMATS
from triptych.core.runtime.kernels.dequantize import PackedTensor

_HALF = 16


def mxfp4_blocks(pairs: torch.Tensor, exponents_OG: torch.Tensor) -> PackedTensor:
    """The matrix of bytes `[O, I / 2]`, or `[O, G, 16]`, and of exponents, both uint8.

    Neighbouring inputs share a byte there, the first one in its lower half; in a block inputs at a
    distance of 16 do.
    """
    num_outputs, num_groups = exponents_OG.shape
    pairs = pairs.view(torch.uint8).reshape(num_outputs, num_groups, _HALF)
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).view(num_outputs, num_groups, 2, _HALF)
    low, high = codes.unbind(2)
    blocks = torch.cat((exponents_OG.view(torch.uint8)[..., None], low | high << 4), dim=2)
    return PackedTensor(blocks.view(num_outputs, -1), FORMATS["mxfp4"])
