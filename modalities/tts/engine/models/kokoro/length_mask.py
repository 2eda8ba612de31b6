"""Rows of different lengths in one padded batch, such that none hears another or its own padding.

Owns the masks. The rule everywhere in this package: padding may hold anything, and whatever mixes
positions (convolutions, norms over time) clears or skips it first.

Legend: B rows, C channels, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LengthMask:
    """How much of each padded row is real. `mask_BT` is `None` when every row is full."""

    lengths: tuple[int, ...]
    mask_BT: Tensor | None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> LengthMask:
        """The extent of rows padded to the longest of them."""
        if min(lengths) == max(lengths):
            return cls(tuple(lengths), None)
        lengths_B = torch.tensor(lengths, device=device)
        return cls(tuple(lengths), torch.arange(max(lengths), device=device) < lengths_B[:, None])

    def stretched(self, factor: int, extra: int = 0) -> LengthMask:
        """The extent after upsampling by `factor` and `extra` positions more."""
        lengths = tuple(length * factor + extra for length in self.lengths)
        if self.mask_BT is None:
            return LengthMask(lengths, None)
        return LengthMask.of(lengths, self.mask_BT.device)

    def clear(self, x_BCT: Tensor) -> Tensor:
        """The same with zeros as padding, as a lone row would be padded."""
        return x_BCT if self.mask_BT is None else x_BCT * self.mask_BT[:, None]

    def moments(self, x_BCT: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance over each row's real positions, both [B, C, 1]."""
        lengths = torch.tensor(self.lengths, device=x_BCT.device)
        count_B11 = lengths[:, None, None]
        mean_BC1 = self.clear(x_BCT).sum(-1, keepdim=True) / count_B11
        # A norm, squared, is many times faster on a CPU than `torch.var`, and as exact.
        deviation_BC1 = torch.linalg.vector_norm(self.clear(x_BCT - mean_BC1), dim=-1, keepdim=True)
        return mean_BC1, deviation_BC1.square() / count_B11
