"""Rows of different lengths in one padded batch, such that none hears another or its own padding.

Owns the masks. The rule everywhere in this package: padding may hold anything, and whatever mixes
positions (convolutions, norms over time, recurrences, attention) clears or skips it first.

Legend: B rows, C channels, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of each padded row is real. `mask_BT` is `None` when every row is full."""

    lengths: tuple[int, ...]
    mask_BT: Tensor | None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Extent:
        """The extent of rows padded to the longest of them."""
        if min(lengths) == max(lengths):
            return cls(tuple(lengths), None)
        lengths_B = torch.tensor(lengths, device=device)
        return cls(tuple(lengths), torch.arange(max(lengths), device=device) < lengths_B[:, None])

    def stretched(self, factor: int, extra: int = 0) -> Extent:
        """The extent after upsampling by `factor` and `extra` positions more."""
        lengths = tuple(length * factor + extra for length in self.lengths)
        if self.mask_BT is None:
            return Extent(lengths, None)
        return Extent.of(lengths, self.mask_BT.device)

    def clear(self, x_BCT: Tensor) -> Tensor:
        """The same with zeros as padding, as a lone row would be padded."""
        return x_BCT if self.mask_BT is None else x_BCT * self.mask_BT[:, None]

    def moments(self, x_BCT: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance over each row's real positions, both [B, C, 1]."""
        if self.mask_BT is None:
            var_BC1, mean_BC1 = torch.var_mean(x_BCT, dim=-1, correction=0, keepdim=True)
            return mean_BC1, var_BC1
        count_B11 = self.mask_BT.sum(-1)[:, None, None]
        mean_BC1 = self.clear(x_BCT).sum(-1, keepdim=True) / count_B11
        centred_BCT = self.clear(x_BCT - mean_BC1)
        return mean_BC1, centred_BCT.square().sum(-1, keepdim=True) / count_B11


def run_lstm(lstm: nn.LSTM, x_BTC: Tensor, extent: Extent) -> Tensor:
    """A bidirectional LSTM whose backward half starts at each row's own end."""
    if extent.mask_BT is None:
        return lstm(x_BTC)[0]  # type: ignore[no-any-return]
    packed = pack_padded_sequence(
        x_BTC, torch.tensor(extent.lengths), batch_first=True, enforce_sorted=False
    )
    return pad_packed_sequence(lstm(packed)[0], batch_first=True)[0]
