"""The blocks of GGUF files: how their bytes become weights, in a kernel and in torch.

Owns the layouts Q4_0, Q4_1, Q8_0, Q4_K and Q6_K. Knows nothing of products.

A block is taken in groups of bytes with one scale for their low and one for their high half bytes;
the high ones belong to inputs that lie a fixed distance behind. A byte of Q8_0 is one input. So no
byte is read twice, and no weight moves between threads before a product.

Shapes: O outputs, I inputs, B bytes of a row, N outputs of a tile, G groups, L bytes of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The inputs and bytes of a block, and its groups.

    `distance` is from the input of a low half byte to that of the high one; 0 where a byte is one.
    """

    block_inputs: int
    block_bytes: int
    num_groups: int
    group_bytes: int
    distance: int


FORMATS = {
    "q4_0": BlockFormat(32, 18, 1, 16, 16),
    "q4_1": BlockFormat(32, 20, 1, 16, 16),
    "q8_0": BlockFormat(32, 34, 1, 32, 0),
    "q4_k": BlockFormat(256, 144, 4, 32, 32),
    "q6_k": BlockFormat(256, 210, 8, 16, 64),
}


def num_inputs(blocks_OB: torch.Tensor, kind: str) -> int:
    """How many weights a row of blocks holds."""
    layout = FORMATS[kind]
    assert blocks_OB.shape[1] % layout.block_bytes == 0
    return blocks_OB.shape[1] // layout.block_bytes * layout.block_inputs


def dequantize(blocks_OB: torch.Tensor, kind: str) -> torch.Tensor:
    """The weights `[O, I]` in float32."""
    blocks = blocks_OB.reshape(-1, FORMATS[kind].block_bytes)
    return _DEQUANTIZE[kind](blocks).reshape(blocks_OB.shape[0], -1)


def _floats(blocks: torch.Tensor, begin: int, num: int = 1) -> torch.Tensor:
    return blocks[:, begin : begin + 2 * num].contiguous().view(torch.float16).float()


def _half_bytes(packed: torch.Tensor) -> torch.Tensor:
    """Low, then high half bytes of each line of the last axis, in float32."""
    return torch.cat((packed & 15, packed >> 4), dim=-1).float()


def _dequantize_q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _floats(blocks, 0) * (_half_bytes(blocks[:, 2:]) - 8)


def _dequantize_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _floats(blocks, 0) * _half_bytes(blocks[:, 4:]) + _floats(blocks, 2)


def _dequantize_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _floats(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _dequantize_q4_k(blocks: torch.Tensor) -> torch.Tensor:
    low, middle, high = blocks[:, 4:16].split(4, dim=1)
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=1).float()
    offsets = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), dim=1).float()
    scale_and_step = _floats(blocks, 0, 2)
    weights = _half_bytes(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    scales = (scale_and_step[:, :1] * scales).unsqueeze(2)
    return scales * weights - (scale_and_step[:, 1:] * offsets).unsqueeze(2)


def _dequantize_q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _half_bytes(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    scales = _floats(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    weights = low + 16 * high.float() - 32
    return scales.unsqueeze(2) * weights.reshape(-1, 16, 16)


_DEQUANTIZE = {
    "q4_0": _dequantize_q4_0,
    "q4_1": _dequantize_q4_1,
    "q8_0": _dequantize_q8_0,
    "q4_k": _dequantize_q4_k,
    "q6_k": _dequantize_q6_k,
}


@triton.jit
def inputs_of_groups(groups_G, KIND: tl.constexpr, L: tl.constexpr):
    """The inputs `[G, L]` of low half bytes, or of whole ones."""
    if KIND == "q6_k":
        firsts_G = (groups_G // 4) * 128 + (groups_G % 4) * L
    elif KIND == "q4_k":
        firsts_G = groups_G * 64
    else:
        firsts_G = groups_G * 32
    return firsts_G[:, None] + tl.arange(0, L)[None, :]


@triton.jit
def weights_of_groups(
    blocks_ptr,
    first_blocks_N,
    is_output_N,
    groups_G,
    is_group_G,
    KIND: tl.constexpr,
    L: tl.constexpr,
):
    """The weights `[N, G, L]` of low and of high half bytes, in float32.

    `first_blocks_N` is the number of the first block of each output's row, in 64 bits.
    """
    mask_NG = is_output_N[:, None] & is_group_G[None, :]
    if KIND == "q4_k":
        blocks_NG = first_blocks_N[:, None] + (groups_G // 4)[None, :]
        low, high = _q4_k(blocks_ptr, blocks_NG, groups_G[None, :] % 4, mask_NG, L)
    elif KIND == "q6_k":
        blocks_NG = first_blocks_N[:, None] + (groups_G // 8)[None, :]
        low, high = _q6_k(blocks_ptr, blocks_NG, groups_G[None, :] % 8, mask_NG, L)
    elif KIND == "q8_0":
        low, high = _q8_0(blocks_ptr, first_blocks_N[:, None] + groups_G[None, :], mask_NG, L)
    elif KIND == "q4_1":
        low, high = _q4_1(blocks_ptr, first_blocks_N[:, None] + groups_G[None, :], mask_NG, L)
    else:
        low, high = _q4_0(blocks_ptr, first_blocks_N[:, None] + groups_G[None, :], mask_NG, L)
    return low, high


@triton.jit
def _q4_0(blocks_ptr, blocks_NG, mask_NG, L: tl.constexpr):
    bytes_NG = blocks_NG * 18
    scale = _load_half(blocks_ptr, bytes_NG, mask_NG)[:, :, None]
    packed = _load_bytes(blocks_ptr, bytes_NG + 2, mask_NG, L)
    return scale * ((packed & 15).to(tl.float32) - 8), scale * ((packed >> 4).to(tl.float32) - 8)


@triton.jit
def _q4_1(blocks_ptr, blocks_NG, mask_NG, L: tl.constexpr):
    bytes_NG = blocks_NG * 20
    scale = _load_half(blocks_ptr, bytes_NG, mask_NG)[:, :, None]
    offset = _load_half(blocks_ptr, bytes_NG + 2, mask_NG)[:, :, None]
    packed = _load_bytes(blocks_ptr, bytes_NG + 4, mask_NG, L)
    low, high = (packed & 15).to(tl.float32), (packed >> 4).to(tl.float32)
    return scale * low + offset, scale * high + offset


@triton.jit
def _q8_0(blocks_ptr, blocks_NG, mask_NG, L: tl.constexpr):
    bytes_NG = blocks_NG * 34
    scale = _load_half(blocks_ptr, bytes_NG, mask_NG)[:, :, None]
    weights = scale * _load_bytes(blocks_ptr, bytes_NG + 2, mask_NG, L).to(tl.int8, bitcast=True)
    return weights, weights


@triton.jit
def _q4_k(blocks_ptr, blocks_NG, group_1G, mask_NG, L: tl.constexpr):
    """Six bits each of scale and offset, of inputs `64 * group` and those 32 behind."""
    bytes_NG = blocks_NG * 144
    scale_step = _load_half(blocks_ptr, bytes_NG, mask_NG)
    offset_step = _load_half(blocks_ptr, bytes_NG + 2, mask_NG)
    words_ptrs = (blocks_ptr + bytes_NG + 4).to(tl.pointer_type(tl.int32), bitcast=True)
    shift = (group_1G % 2) * 16
    scales = tl.load(words_ptrs, mask=mask_NG, other=0) >> shift
    offsets = tl.load(words_ptrs + 1, mask=mask_NG, other=0) >> shift
    rest = tl.load(words_ptrs + 2, mask=mask_NG, other=0) >> shift
    is_late = group_1G >= 2
    low_scale, low_offset = _q4_k_scale(scales, offsets, rest, is_late)
    high_scale, high_offset = _q4_k_scale(scales >> 8, offsets >> 8, rest >> 8, is_late)
    packed = _load_bytes(blocks_ptr, bytes_NG + 16 + 32 * group_1G, mask_NG, L)
    low = (scale_step * low_scale)[:, :, None] * (packed & 15).to(tl.float32)
    high = (scale_step * high_scale)[:, :, None] * (packed >> 4).to(tl.float32)
    return low - (offset_step * low_offset)[:, :, None], high - (offset_step * high_offset)[
        :, :, None
    ]


@triton.jit
def _q4_k_scale(scales, offsets, rest, is_late):
    """Scale and offset of the lowest byte; those of late groups are in pieces."""
    late_scale = (rest & 15) | ((scales & 192) >> 2)
    late_offset = ((rest & 240) >> 4) | ((offsets & 192) >> 2)
    scale = tl.where(is_late, late_scale, scales & 63)
    offset = tl.where(is_late, late_offset, offsets & 63)
    return scale.to(tl.float32), offset.to(tl.float32)


@triton.jit
def _q6_k(blocks_ptr, blocks_NG, group_1G, mask_NG, L: tl.constexpr):
    """Four low bits, and two high ones from elsewhere, of 16 inputs and those 64 behind."""
    bytes_NG = blocks_NG * 210
    half, quarter = group_1G // 4, group_1G % 4
    step = _load_half(blocks_ptr, bytes_NG + 208, mask_NG)
    scale_ptrs = (blocks_ptr + bytes_NG + 192 + 8 * half + quarter).to(
        tl.pointer_type(tl.int8), bitcast=True
    )
    low_scale = step * tl.load(scale_ptrs, mask=mask_NG, other=0).to(tl.float32)
    high_scale = step * tl.load(scale_ptrs + 4, mask=mask_NG, other=0).to(tl.float32)
    packed = _load_bytes(blocks_ptr, bytes_NG + 16 * group_1G, mask_NG, L)
    tops = _load_bytes(blocks_ptr, bytes_NG + 128 + 32 * half + 16 * (quarter % 2), mask_NG, L)
    tops = tops >> (2 * (quarter // 2)).to(tl.uint8)[:, :, None]
    low = (packed & 15) | ((tops & 3) << 4)
    high = (packed >> 4) | (tops & 48)
    low, high = low.to(tl.float32) - 32, high.to(tl.float32) - 32
    return low_scale[:, :, None] * low, high_scale[:, :, None] * high


@triton.jit
def _load_half(bytes_ptr, offsets, mask):
    """Floats of two bytes, which lie at even places."""
    ptrs = (bytes_ptr + offsets).to(tl.pointer_type(tl.float16), bitcast=True)
    return tl.load(ptrs, mask=mask, other=0).to(tl.float32)


@triton.jit
def _load_bytes(bytes_ptr, offsets_NG, mask_NG, L: tl.constexpr):
    offsets_NGL = offsets_NG[:, :, None] + tl.arange(0, L)[None, None, :]
    return tl.load(bytes_ptr + offsets_NGL, mask=mask_NG[:, :, None], other=0)
