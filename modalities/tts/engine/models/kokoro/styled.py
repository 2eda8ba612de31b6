"""Residual convolution blocks whose normalisation is steered by a voice's style vector.

Owns adaptive instance normalisation and the block that the prosody predictor and the decoder share.
Names follow the released checkpoint. Architecture: StyleTTS 2 (arXiv:2306.07691).

Legend: B rows, C channels, T positions, S style size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from triptych.modalities.tts.engine.models.kokoro.length_mask import LengthMask

EPSILON = 1e-5


class AdaptiveNorm(nn.Module):
    """Instance normalisation over time; scale and shift come from the style."""

    def __init__(self, style_size: int, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(style_size, 2 * channels)

    def forward(self, x_BCT: Tensor, style_BS: Tensor, extent: LengthMask) -> Tensor:
        """Normalise each row and channel over the row's real positions."""
        gamma_BC1, beta_BC1 = (part[..., None] for part in self.style(style_BS))
        mean_BC1, var_BC1 = extent.moments(x_BCT)
        scale_BC1 = (1 + gamma_BC1) * torch.rsqrt(var_BC1 + EPSILON)
        return torch.addcmul(beta_BC1 - mean_BC1 * scale_BC1, x_BCT, scale_BC1)

    def style(self, style_BS: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to a scale of 1, and the shift, both [B, C]."""
        gamma_BC, beta_BC = self.fc(style_BS).chunk(2, dim=1)
        return gamma_BC, beta_BC


class StyledBlock(nn.Module):
    """Two styled convolutions beside a shortcut; `is_upsampling` doubles the rate."""

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

    def forward(self, x_BCT: Tensor, style_BS: Tensor, extent: LengthMask) -> Tensor:
        """[B, C, T] to [B, C', rate * T]."""
        stretched = extent.stretched(self.rate)
        y_BCT = extent.clear(F.leaky_relu(self.norm1(x_BCT, style_BS, extent), 0.2))
        if self.rate > 1:
            y_BCT = stretched.clear(self.pool(y_BCT))
            x_BCT = x_BCT.repeat_interleave(self.rate, dim=-1)
        y_BCT = convolve(self.conv1, y_BCT, x_BCT.dtype)
        y_BCT = stretched.clear(F.leaky_relu(self.norm2(y_BCT, style_BS, stretched), 0.2))
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
    """Convolve in the type of the weights, which may be shorter than `dtype`, the result's."""
    weight = conv.weight
    assert isinstance(weight, Tensor)
    return conv(x_BCT.to(weight.dtype)).to(dtype)  # type: ignore[no-any-return]
