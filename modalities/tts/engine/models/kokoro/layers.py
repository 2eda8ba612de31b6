"""Common parts of Kokoro: adaptive norms, residual blocks, padding, and sliced computations.

Owns adaptive instance normalization and the residual block of the prosody predictor and the
decoder, after StyleTTS 2 (arXiv:2306.07691), with the released checkpoint's names. Owns how rows of
different lengths share a padded batch: padding may hold anything, and operations that mix positions
(convolutions, norms over time) clear or skip it first. Owns where the work can be cut.

Legend: B rows, C channels, T positions, Y style size.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from triptych.core.runtime.devices.transfer import to_device

Result = TypeVar("Result")
Sliced = Generator[float, None, Result]
"""A computation in pieces. Before each piece it yields the piece's size in billions of
multiplications; at the end it returns its result. Its driver may pause between two pieces: the
result is the same, because the operations and their order are.
"""
AWAIT = 0.0
"""Yielded before a piece whose size depends on values computed by earlier pieces. On a GPU, the
driver continues in another step, when the values have reached the host.
"""
EPSILON = 1e-5


def gmacs(module: nn.Module, x_BCT: Tensor) -> float:
    """Billions of multiplications when `module` is applied to the positions of [B, C, T].

    Every weight is used once a position; those of styles, used once a row, are negligible.
    """
    num_weights = sum(weight.numel() for weight in module.parameters() if weight.ndim > 1)
    return num_weights * len(x_BCT) * x_BCT.shape[-1] / 1e9


def finish(computation: Sliced[Result]) -> Result:
    """Run a computation to its end without stopping."""
    while True:
        try:
            next(computation)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class LengthMask:
    """The valid part of each padded row. `mask_BT` is `None` when every row is full."""

    lengths: tuple[int, ...]
    mask_BT: Tensor | None

    @property
    def is_padded(self) -> bool:
        """Whether some row is shorter than the longest."""
        return self.mask_BT is not None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> LengthMask:
        """The mask of rows padded to the longest of them."""
        if min(lengths) == max(lengths):
            return cls(tuple(lengths), None)
        lengths_B = to_device(torch.tensor(lengths), device)
        return cls(tuple(lengths), torch.arange(max(lengths), device=device) < lengths_B[:, None])

    def upsample(self, factor: int, extra: int = 0) -> LengthMask:
        """The mask after upsampling by `factor`, plus `extra` positions."""
        lengths = tuple(length * factor + extra for length in self.lengths)
        if self.mask_BT is None:
            return LengthMask(lengths, None)
        return LengthMask.of(lengths, self.mask_BT.device)

    def clear(self, x_BCT: Tensor) -> Tensor:
        """Set the padding to zeros, like that of a single row."""
        return x_BCT if self.mask_BT is None else x_BCT * self.mask_BT[:, None]

    def moments(self, x_BCT: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance over each row's real positions, both [B, C, 1]."""
        lengths = to_device(torch.tensor(self.lengths), x_BCT.device)
        count_B11 = lengths[:, None, None]
        mean_BC1 = self.clear(x_BCT).sum(-1, keepdim=True) / count_B11
        # A squared norm is many times faster on a CPU than `torch.var`, and as exact.
        deviation_BC1 = torch.linalg.vector_norm(self.clear(x_BCT - mean_BC1), dim=-1, keepdim=True)
        return mean_BC1, deviation_BC1.square() / count_B11


class AdaptiveNorm(nn.Module):
    """Instance normalization over time; scale and shift come from the style."""

    def __init__(self, style_size: int, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(style_size, 2 * channels)

    def forward(self, x_BCT: Tensor, style_BY: Tensor, mask: LengthMask) -> Tensor:
        """Normalize each row and channel over the row's real positions."""
        gamma_BC1, beta_BC1 = (part[..., None] for part in self.style(style_BY))
        mean_BC1, var_BC1 = mask.moments(x_BCT)
        scale_BC1 = (1 + gamma_BC1) * torch.rsqrt(var_BC1 + EPSILON)
        return torch.addcmul(beta_BC1 - mean_BC1 * scale_BC1, x_BCT, scale_BC1)

    def style(self, style_BY: Tensor) -> tuple[Tensor, Tensor]:
        """The offset from a scale of 1, and the shift, both [B, C]."""
        gamma_BC, beta_BC = self.fc(style_BY).chunk(2, dim=1)
        return gamma_BC, beta_BC


class StyledBlock(nn.Module):
    """Two styled convolutions and a shortcut; `is_upsampling` doubles the rate."""

    def __init__(
        self, in_channels: int, out_channels: int, style_size: int, *, is_upsampling: bool = False
    ) -> None:
        super().__init__()
        self.rate = 2 if is_upsampling else 1
        self.norm1 = AdaptiveNorm(style_size, in_channels)
        self.conv1 = nn.Conv1d(in_channels, out_channels, 3, padding=1)
        self.norm2 = AdaptiveNorm(style_size, out_channels)
        self.conv2 = nn.Conv1d(out_channels, out_channels, 3, padding=1)
        if in_channels != out_channels:
            self.conv1x1 = nn.Conv1d(in_channels, out_channels, 1, bias=False)
        if is_upsampling:
            self.pool = nn.ConvTranspose1d(
                in_channels, in_channels, 3, 2, padding=1, output_padding=1, groups=in_channels
            )

    def forward(self, x_BCT: Tensor, style_BY: Tensor, mask: LengthMask) -> Tensor:
        """Map [B, C, T] to [B, C', rate * T]."""
        upsampled = mask.upsample(self.rate)
        y_BCT = mask.clear(F.leaky_relu(self.norm1(x_BCT, style_BY, mask), 0.2))
        if self.rate > 1:
            y_BCT = upsampled.clear(self.pool(y_BCT))
            x_BCT = x_BCT.repeat_interleave(self.rate, dim=-1)
        y_BCT = convolve(self.conv1, y_BCT, x_BCT.dtype)
        y_BCT = upsampled.clear(F.leaky_relu(self.norm2(y_BCT, style_BY, upsampled), 0.2))
        if hasattr(self, "conv1x1"):
            x_BCT = convolve(self.conv1x1, x_BCT, x_BCT.dtype)
        y_BCT = convolve(self.conv2, y_BCT, x_BCT.dtype)
        return torch.add(x_BCT, y_BCT) * math.sqrt(0.5)

    def cast_convolutions(self, dtype: torch.dtype) -> None:
        """Compute the convolutions over all channels in `dtype`."""
        for name, conv in self.named_children():
            if name.startswith("conv"):
                conv.to(dtype)


def convolve(conv: nn.Module, x_BCT: Tensor, dtype: torch.dtype) -> Tensor:
    """Convolve in the weights' type, which may be narrower than the result's `dtype`."""
    weight = conv.weight
    assert isinstance(weight, Tensor)
    return conv(x_BCT.to(weight.dtype)).to(dtype)  # type: ignore[no-any-return]
