"""How a voice says it: how long each phoneme lasts, and the curves of pitch and energy.

Owns the prosody predictor. Durations are in decoder frames; both curves have two values a frame.

Legend: B rows, T tokens, F frames, P pitch values (two a frame), C hidden channels, S style size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from triptych.modalities.tts.configs.kokoro import KokoroConfig
from triptych.modalities.tts.engine.models.kokoro.joints import Joints, gmacs
from triptych.modalities.tts.engine.models.kokoro.length_mask import LengthMask
from triptych.modalities.tts.engine.models.kokoro.styled import EPSILON, StyledBlock


class StyledLayerNorm(nn.Module):
    """Layer normalisation over channels; scale and shift come from the style."""

    def __init__(self, style_size: int, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(style_size, 2 * channels)

    def forward(self, x_BTC: Tensor, style_BS: Tensor) -> Tensor:
        """[B, T, C] to the same."""
        gamma_B1C, beta_B1C = self.fc(style_BS)[:, None].chunk(2, dim=-1)
        x_BTC = F.layer_norm(x_BTC, x_BTC.shape[-1:], eps=EPSILON)
        return torch.addcmul(x_BTC + beta_B1C, x_BTC, gamma_B1C)


class DurationEncoder(nn.Module):
    """LSTMs over the tokens, told the style before each."""

    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        self.lstms = nn.ModuleList()
        for _ in range(config.num_layers):
            self.lstms.append(_lstm_with_style(config))
            self.lstms.append(StyledLayerNorm(config.style_size, config.hidden_size))

    def forward(self, x_BTC: Tensor, style_BS: Tensor) -> Tensor:
        """[B, T, C] to [B, T, C + S]."""
        x_BTC = _with_style(x_BTC, style_BS)
        for block in self.lstms:
            if isinstance(block, nn.LSTM):
                x_BTC = block(x_BTC)[0]
            else:
                x_BTC = _with_style(block(x_BTC, style_BS), style_BS)
        return x_BTC


class ProsodyPredictor(nn.Module):
    """Durations from tokens, then pitch and energy from tokens held for their durations."""

    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        size, style = config.hidden_size, config.style_size
        self.text_encoder = DurationEncoder(config)
        self.lstm, self.shared = _lstm_with_style(config), _lstm_with_style(config)
        self.duration_proj = nn.Linear(size, config.max_duration)
        self.F0, self.N = _curve_blocks(size, style), _curve_blocks(size, style)
        self.F0_proj, self.N_proj = nn.Conv1d(size // 2, 1, 1), nn.Conv1d(size // 2, 1, 1)

    def durations(self, hidden_BTC: Tensor, style_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Features [B, T, C + S] for `curves`, and frames per token [B, T] at normal speed."""
        features_BTC = self.text_encoder(hidden_BTC, style_BS)
        logits_BTN = self.duration_proj(self.lstm(features_BTC)[0])
        return features_BTC, logits_BTN.sigmoid().sum(-1)

    def curves(self, features_BFC: Tensor, style_BS: Tensor) -> Joints[tuple[Tensor, Tensor]]:
        """Pitch in hertz and log energy, both [B, P], of features held for their durations."""
        yield gmacs(self.shared, features_BFC.transpose(1, 2))
        x_BCF = self.shared(features_BFC)[0].transpose(1, 2)
        yield gmacs(self.F0, x_BCF) + gmacs(self.N, x_BCF)
        return (
            self.F0_proj(_through(self.F0, x_BCF, style_BS))[:, 0],
            self.N_proj(_through(self.N, x_BCF, style_BS))[:, 0],
        )


def _lstm_with_style(config: KokoroConfig) -> nn.LSTM:
    return nn.LSTM(
        config.hidden_size + config.style_size,
        config.hidden_size // 2,
        batch_first=True,
        bidirectional=True,
    )


def _curve_blocks(size: int, style_size: int) -> nn.ModuleList:
    return nn.ModuleList(
        (
            StyledBlock(size, size, style_size),
            StyledBlock(size, size // 2, style_size, is_upsampling=True),
            StyledBlock(size // 2, size // 2, style_size),
        )
    )


def _through(blocks: nn.ModuleList, x_BCF: Tensor, style_BS: Tensor) -> Tensor:
    for block in blocks:
        full = LengthMask.of([x_BCF.shape[-1]] * len(x_BCF), x_BCF.device)
        x_BCF = block(x_BCF, style_BS, full)
    return x_BCF


def _with_style(x_BTC: Tensor, style_BS: Tensor) -> Tensor:
    return torch.cat((x_BTC, style_BS[:, None].expand(-1, x_BTC.shape[1], -1)), dim=-1)
