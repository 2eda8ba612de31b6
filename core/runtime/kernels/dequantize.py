"""Weights in blocks of small integers, and their values in torch.

Owns the meaning of each format's bytes, as the reference of every kernel that reads them. Knows
nothing of files.

Shapes: O outputs, I inputs, B bytes of a row, N blocks, S bytes of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from triptych.core.block_formats import BlockFormat

FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three bits of float4 (e2m1); the fourth is the sign."""

UNEVEN4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the codes of IQ4_NL and IQ4_XS."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A matrix of `num_inputs` columns, kept as the file's bytes `blocks_OB`."""

    blocks_OB: torch.Tensor
    format: BlockFormat

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        num_outputs, row_bytes = self.blocks_OB.shape
        return num_outputs, row_bytes // self.format.num_bytes * self.format.num_inputs

    @property
    def num_bytes(self) -> int:
        """The bytes in memory."""
        return self.blocks_OB.nbytes

    def rows(self, ids: torch.Tensor) -> PackedTensor:
        """Select some of its outputs."""
        return PackedTensor(self.blocks_OB.index_select(0, ids), self.format)

    def part(self, rows: slice, inputs: slice) -> PackedTensor:
        """A slice of rows and columns, both block-aligned."""
        assert all(map(self.format.holds, (inputs.start, inputs.stop)))
        first, end = map(self.format.row_bytes, (inputs.start, inputs.stop))
        return PackedTensor(self.blocks_OB[rows, first:end].contiguous(), self.format)

    def to(self, device: torch.device) -> PackedTensor:
        """Copy the matrix to a device."""
        return PackedTensor(self.blocks_OB.to(device), self.format)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Compute its values, `[O, I]`, in float32."""
        blocks_NS = self.blocks_OB.reshape(-1, self.format.num_bytes)
        return _READERS[self.format.name](blocks_NS).to(dtype).view(self.shape)


def _halves(blocks_NS: torch.Tensor, first: int, count: int = 1) -> torch.Tensor:
    """Read float16 numbers of each block, `[N, count]`."""
    return blocks_NS[:, first : first + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed_NB: torch.Tensor) -> torch.Tensor:
    """Half bytes, `[N, 2, B]`: lower halves of the bytes, then the upper ones."""
    return torch.stack((packed_NB & 15, packed_NB >> 4), dim=1)


def _bits(packed_NB: torch.Tensor, width: int) -> torch.Tensor:
    """Fields of `width` bits, `[N, 8 / width, B]`, lowest first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed_NB.device)
    return packed_NB[:, None] >> shifts[:, None] & (1 << width) - 1


def _q8_0(blocks_NS: torch.Tensor) -> torch.Tensor:
    return blocks_NS[:, 2:].view(torch.int8) * _halves(blocks_NS, 0)


def _q4_0(blocks_NS: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks_NS[:, 2:]).flatten(1) - 8.0) * _halves(blocks_NS, 0)


def _q4_1(blocks_NS: torch.Tensor) -> torch.Tensor:
    codes_NI = _nibbles(blocks_NS[:, 4:]).flatten(1)
    return codes_NI * _halves(blocks_NS, 0) + _halves(blocks_NS, 2)


def _fifth_bits(packed_NB: torch.Tensor) -> torch.Tensor:
    """The fifth bits of 32 codes, in four bytes."""
    return _bits(packed_NB, 1).transpose(1, 2).flatten(1) << 4


def _q5_0(blocks_NS: torch.Tensor) -> torch.Tensor:
    codes_NI = _nibbles(blocks_NS[:, 6:]).flatten(1) | _fifth_bits(blocks_NS[:, 2:6])
    return (codes_NI - 16.0) * _halves(blocks_NS, 0)


def _q5_1(blocks_NS: torch.Tensor) -> torch.Tensor:
    codes_NI = _nibbles(blocks_NS[:, 8:]).flatten(1) | _fifth_bits(blocks_NS[:, 4:8])
    return codes_NI * _halves(blocks_NS, 0) + _halves(blocks_NS, 2)


def _scales_and_minima(blocks_NS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of 6 bits of the eight parts of Q4_K and Q5_K blocks, `[N, 8, 1]` each."""
    low, middle, high = blocks_NS[:, 4:16].split(4, dim=1)
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), dim=1)
    minima = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), dim=1)
    own_scale, own_minimum = _halves(blocks_NS, 0, 2).split(1, dim=1)
    return (own_scale * scales)[..., None], (own_minimum * minima)[..., None]


def _q4_k(blocks_NS: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks_NS)
    codes = _nibbles(blocks_NS[:, 16:].reshape(-1, 32)).view(-1, 8, 32)
    return codes * scales - minima


def _q5_k(blocks_NS: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks_NS)
    low = _nibbles(blocks_NS[:, 48:].reshape(-1, 32)).view(-1, 8, 32)
    return (low | _bits(blocks_NS[:, 16:48], 1) << 4) * scales - minima


def _q6_k(blocks_NS: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks_NS[:, :128].reshape(-1, 64)).view(-1, 2, 128)
    high = _bits(blocks_NS[:, 128:192].reshape(-1, 32), 2).view(-1, 2, 128)
    scales = blocks_NS[:, 192:208].view(torch.int8) * _halves(blocks_NS, 208)
    codes = (low | high << 4).view(-1, 16, 16)
    return (codes - 32.0) * scales[..., None]


def _mxfp4(blocks_NS: torch.Tensor) -> torch.Tensor:
    """Powers of two, as exponents, times numbers of four bits."""
    scales = torch.exp2(blocks_NS[:, :1].to(torch.float32) - 127)
    magnitudes = torch.tensor(FLOAT4, device=blocks_NS.device)
    values = torch.cat((magnitudes, 0 - magnitudes))  # no negative zero, as in GGUF's library
    codes_NI = _nibbles(blocks_NS[:, 1:]).flatten(1)
    return values[codes_NI.int()] * scales


def _uneven(codes: torch.Tensor) -> torch.Tensor:
    values = torch.tensor(UNEVEN4, dtype=torch.float32, device=codes.device)
    return values[codes.int()]


def _iq4_nl(blocks_NS: torch.Tensor) -> torch.Tensor:
    return _uneven(_nibbles(blocks_NS[:, 2:]).flatten(1)) * _halves(blocks_NS, 0)


def _iq4_xs(blocks_NS: torch.Tensor) -> torch.Tensor:
    """Scales of six bits for 32 codes: the upper two of all, then the lower four."""
    high = _bits(blocks_NS[:, 2:4], 2).transpose(1, 2).flatten(1)
    low = _nibbles(blocks_NS[:, 4:8]).transpose(1, 2).flatten(1)
    scales = ((low | high << 4) - 32.0) * _halves(blocks_NS, 0)
    codes = _nibbles(blocks_NS[:, 8:].reshape(-1, 16)).view(-1, 8, 32)
    return _uneven(codes) * scales[..., None]


_READERS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "q8_0": _q8_0,
        "q4_0": _q4_0,
        "q4_1": _q4_1,
        "q5_0": _q5_0,
        "q5_1": _q5_1,
        "q4_k": _q4_k,
        "q5_k": _q5_k,
        "q6_k": _q6_k,
        "mxfp4": _mxfp4,
        "iq4_nl": _iq4_nl,
        "iq4_xs": _iq4_xs,
    }
)
