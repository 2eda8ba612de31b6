"""The blocks of GGUF files in a kernel: the conversion of their bytes to weights.

Owns the formats of `core.block_formats`; their torch reference is
`core.runtime.kernels.dequantize`. Knows nothing of products.

A block is read in groups of bytes with one scale for their low and one for their high half bytes;
the high ones belong to inputs at a fixed distance. A byte of Q8_0 is one input. No byte of weights
is therefore read twice, and no weight moves between threads before a product.

Shapes: N outputs of a tile, G groups, L bytes of a group.
"""

# ruff: noqa: PLR1714 - Triton has no `in`

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class BlockGroups:
    """The number of groups of a block, and of bytes of a group.

    `distance` is from the input of a low half byte to that of the high one; 0 where a byte is one
    input.
    """

    num_groups: int
    num_bytes: int
    distance: int


_SMALL, _LARGE = BlockGroups(1, 16, 16), BlockGroups(4, 32, 32)
GROUPS = {
    "q8_0": BlockGroups(1, 32, 0),
    "q4_0": _SMALL,
    "q4_1": _SMALL,
    "q5_0": _SMALL,
    "q5_1": _SMALL,
    "q4_k": _LARGE,
    "q5_k": _LARGE,
    "q6_k": BlockGroups(8, 16, 64),
    "mxfp4": _SMALL,
    "iq4_nl": _SMALL,
    "iq4_xs": BlockGroups(8, 16, 16),
}


@triton.jit
def inputs_of_groups(groups_G, KIND: tl.constexpr, L: tl.constexpr):
    """The inputs `[G, L]` of low half bytes, or of whole bytes."""
    if KIND == "q6_k":
        firsts_G = (groups_G // 4) * 128 + (groups_G % 4) * L
    elif KIND == "q4_k" or KIND == "q5_k":
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
    if KIND == "q4_k" or KIND == "q5_k":
        blocks_NG = first_blocks_N[:, None] + (groups_G // 4)[None, :]
        low, high = _k_blocks(blocks_ptr, blocks_NG, groups_G[None, :] % 4, mask_NG, KIND, L)
    elif KIND == "q6_k":
        blocks_NG = first_blocks_N[:, None] + (groups_G // 8)[None, :]
        low, high = _q6_k(blocks_ptr, blocks_NG, groups_G[None, :] % 8, mask_NG, L)
    elif KIND == "q8_0":
        low, high = _q8_0(blocks_ptr, first_blocks_N[:, None] + groups_G[None, :], mask_NG, L)
    elif KIND == "mxfp4":
        low, high = _mxfp4(blocks_ptr, first_blocks_N[:, None] + groups_G[None, :], mask_NG, L)
    elif KIND == "iq4_nl":
        low, high = _iq4_nl(blocks_ptr, first_blocks_N[:, None] + groups_G[None, :], mask_NG, L)
    elif KIND == "iq4_xs":
        blocks_NG = first_blocks_N[:, None] + (groups_G // 8)[None, :]
        low, high = _iq4_xs(blocks_ptr, blocks_NG, groups_G[None, :] % 8, mask_NG, L)
    else:
        blocks_NG = first_blocks_N[:, None] + groups_G[None, :]
        low, high = _small_blocks(blocks_ptr, blocks_NG, mask_NG, KIND, L)
    return low, high


@triton.jit
def _small_blocks(blocks_ptr, blocks_NG, mask_NG, KIND: tl.constexpr, L: tl.constexpr):
    """Half bytes and a scale; an offset in Q4_1 and Q5_1; the fifth bits in Q5_0 and Q5_1."""
    HAS_OFFSET: tl.constexpr = KIND == "q4_1" or KIND == "q5_1"
    HAS_FIFTH: tl.constexpr = KIND == "q5_0" or KIND == "q5_1"
    bytes_NG = blocks_NG * (18 + 2 * HAS_OFFSET + 4 * HAS_FIFTH)
    scale = _load_half(blocks_ptr, bytes_NG, mask_NG)[:, :, None]
    packed = _load_bytes(
        blocks_ptr, bytes_NG + (2 + 2 * HAS_OFFSET + 4 * HAS_FIFTH), mask_NG, L
    ).to(tl.int32)
    low, high = packed & 15, packed >> 4
    if HAS_FIFTH:
        # Blocks lie at even addresses, not always at multiples of four.
        words = (blocks_ptr + bytes_NG + (2 + 2 * HAS_OFFSET)).to(
            tl.pointer_type(tl.uint16), bitcast=True
        )
        low |= _fifth_bits(tl.load(words, mask=mask_NG, other=0), L)
        high |= _fifth_bits(tl.load(words + 1, mask=mask_NG, other=0), L)
    if HAS_OFFSET:
        offset = _load_half(blocks_ptr, bytes_NG + 2, mask_NG)[:, :, None]
        return scale * low.to(tl.float32) + offset, scale * high.to(tl.float32) + offset
    else:
        middle = 16.0 if HAS_FIFTH else 8.0
        return scale * (low.to(tl.float32) - middle), scale * (high.to(tl.float32) - middle)


@triton.jit
def _fifth_bits(words_NG, L: tl.constexpr):
    """Expand each bit of two-byte words to the fifth bit of a weight."""
    return ((words_NG.to(tl.int32)[:, :, None] >> tl.arange(0, L)[None, None, :]) & 1) << 4


@triton.jit
def _q8_0(blocks_ptr, blocks_NG, mask_NG, L: tl.constexpr):
    bytes_NG = blocks_NG * 34
    scale = _load_half(blocks_ptr, bytes_NG, mask_NG)[:, :, None]
    weights = scale * _load_bytes(blocks_ptr, bytes_NG + 2, mask_NG, L).to(tl.int8, bitcast=True)
    return weights, weights


@triton.jit
def _mxfp4(blocks_ptr, blocks_NG, mask_NG, L: tl.constexpr):
    """Powers of two, as exponents, times numbers of four bits."""
    bytes_NG = blocks_NG * 17
    exponents = tl.load(blocks_ptr + bytes_NG, mask=mask_NG, other=0).to(tl.int32)
    # Half of the scale, since numbers are doubled; below 2 it is not a normal number.
    bits = tl.where(exponents < 2, 0x00200000 << (exponents & 1), (exponents - 1) << 23)
    scale = bits.to(tl.float32, bitcast=True)[:, :, None]
    packed = _load_bytes(blocks_ptr, bytes_NG + 1, mask_NG, L).to(tl.int32)
    return scale * _doubled_float4(packed & 15), scale * _doubled_float4(packed >> 4)


@triton.jit
def _doubled_float4(codes):
    """0, 1, 2, 3, 4, 6, 8 or 12 by the lower three bits; the fourth is the sign."""
    is_wide = (codes >> 2) & 1
    size = ((codes & 3) | (is_wide << 1)) << (is_wide + (is_wide & (codes >> 1)))
    return tl.where(codes > 7, -size, size).to(tl.float32)


@triton.jit
def _iq4_nl(blocks_ptr, blocks_NG, mask_NG, L: tl.constexpr):
    bytes_NG = blocks_NG * 18
    scale = _load_half(blocks_ptr, bytes_NG, mask_NG)[:, :, None]
    packed = _load_bytes(blocks_ptr, bytes_NG + 2, mask_NG, L).to(tl.int32)
    return scale * _uneven(packed & 15), scale * _uneven(packed >> 4)


@triton.jit
def _iq4_xs(blocks_ptr, blocks_NG, group_1G, mask_NG, L: tl.constexpr):
    """Scales of six bits, in two pieces, for the 32 inputs of a group."""
    bytes_NG = blocks_NG * 136
    high_ptrs = (blocks_ptr + bytes_NG + 2).to(tl.pointer_type(tl.uint16), bitcast=True)
    high = tl.load(high_ptrs, mask=mask_NG, other=0).to(tl.int32) >> (2 * group_1G)
    low_ptrs = blocks_ptr + bytes_NG + 4 + group_1G // 2
    low = tl.load(low_ptrs, mask=mask_NG, other=0).to(tl.int32) >> (4 * (group_1G % 2))
    small = ((low & 15) | ((high & 3) << 4)) - 32
    scale = (_load_half(blocks_ptr, bytes_NG, mask_NG) * small.to(tl.float32))[:, :, None]
    packed = _load_bytes(blocks_ptr, bytes_NG + 8 + 16 * group_1G, mask_NG, L).to(tl.int32)
    return scale * _uneven(packed & 15), scale * _uneven(packed >> 4)


@triton.jit
def _uneven(codes):
    """The codes' numbers, -127 to 113, which are the bytes of four words."""
    low = tl.where(codes < 4, -0x4052677F, -0x9152231)
    high = tl.where(codes < 12, 0x26190D01, 0x71594535)
    words = tl.where(codes < 8, low, high)
    return (words >> (8 * (codes & 3))).to(tl.int8).to(tl.float32)


@triton.jit
def _k_blocks(blocks_ptr, blocks_NG, group_1G, mask_NG, KIND: tl.constexpr, L: tl.constexpr):
    """Q4_K and Q5_K: scales and offsets of six bits, in Q5_K the fifth bits, and half bytes.

    Groups hold the inputs from `64 * group` and those 32 further.
    """
    HAS_FIFTH: tl.constexpr = KIND == "q5_k"
    bytes_NG = blocks_NG * (144 + 32 * HAS_FIFTH)
    scale_step = _load_half(blocks_ptr, bytes_NG, mask_NG)
    offset_step = _load_half(blocks_ptr, bytes_NG + 2, mask_NG)
    words_ptrs = (blocks_ptr + bytes_NG + 4).to(tl.pointer_type(tl.int32), bitcast=True)
    shift = (group_1G % 2) * 16
    scales = tl.load(words_ptrs, mask=mask_NG, other=0) >> shift
    offsets = tl.load(words_ptrs + 1, mask=mask_NG, other=0) >> shift
    rest = tl.load(words_ptrs + 2, mask=mask_NG, other=0) >> shift
    low_scale, low_offset = _six_bits(scales, offsets, rest, group_1G >= 2)
    high_scale, high_offset = _six_bits(scales >> 8, offsets >> 8, rest >> 8, group_1G >= 2)
    places = bytes_NG + (16 + 32 * HAS_FIFTH) + 32 * group_1G
    packed = _load_bytes(blocks_ptr, places, mask_NG, L)
    low, high = packed & 15, packed >> 4
    if HAS_FIFTH:
        fifth = _load_bytes(blocks_ptr, bytes_NG + 16, mask_NG, L)
        fifth = fifth >> (2 * group_1G).to(tl.uint8)[:, :, None]
        low |= (fifth & 1) << 4
        high |= (fifth & 2) << 3
    low = (scale_step * low_scale)[:, :, None] * low.to(tl.float32)
    high = (scale_step * high_scale)[:, :, None] * high.to(tl.float32)
    low_offset, high_offset = offset_step * low_offset, offset_step * high_offset
    return low - low_offset[:, :, None], high - high_offset[:, :, None]


@triton.jit
def _six_bits(scales, offsets, rest, is_late):
    """Scale and offset in the lowest byte; those of the last groups are in two pieces."""
    late_scale = (rest & 15) | ((scales & 192) >> 2)
    late_offset = ((rest & 240) >> 4) | ((offsets & 192) >> 2)
    scale = tl.where(is_late, late_scale, scales & 63)
    offset = tl.where(is_late, late_offset, offsets & 63)
    return scale.to(tl.float32), offset.to(tl.float32)


@triton.jit
def _q6_k(blocks_ptr, blocks_NG, group_1G, mask_NG, L: tl.constexpr):
    """Four low bits, and two high ones from other bytes, of 16 inputs and of those 64 further."""
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
    """Load floats of two bytes, which lie at even addresses."""
    ptrs = (bytes_ptr + offsets).to(tl.pointer_type(tl.float16), bitcast=True)
    return tl.load(ptrs, mask=mask, other=0).to(tl.float32)


@triton.jit
def _load_bytes(bytes_ptr, offsets_NG, mask_NG, L: tl.constexpr):
    offsets_NGL = offsets_NG[:, :, None] + tl.arange(0, L)[None, None, :]
    return tl.load(bytes_ptr + offsets_NGL, mask=mask_NG[:, :, None], other=0)
