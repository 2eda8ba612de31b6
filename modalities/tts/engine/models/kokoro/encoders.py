"""Encoders of phonemes: PL-BERT, the text encoder, and the prosody predictor.

Owns ALBERT (arXiv:1909.11942) over phoneme ids, the convolutional text encoder, and the predictor
of durations, pitch and energy, all with the released checkpoint's names. Durations are in decoder
frames; both curves have two values a frame.

Legend: B rows, T tokens, C hidden channels, E embedding size, H heads, D head size, F frames, P
pitch values, Y style size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from triptych.modalities.tts.configs.kokoro import AlbertConfig, KokoroConfig
from triptych.modalities.tts.engine.models.kokoro.layers import (
    EPSILON,
    LengthMask,
    Sliced,
    StyledBlock,
    gmacs,
)

ALBERT_EPSILON = 1e-12


class AlbertEmbeddings(nn.Module):
    """Phoneme, position and (always the first) type embeddings, normalized."""

    def __init__(self, config: AlbertConfig, num_tokens: int) -> None:
        super().__init__()
        size = config.embedding_size
        self.word_embeddings = nn.Embedding(num_tokens, size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size)
        self.LayerNorm = nn.LayerNorm(size, eps=ALBERT_EPSILON)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """[B, T] ids to [B, T, E]."""
        position_TE = self.position_embeddings.weight[: ids_BT.shape[1]]
        x_BTE = self.word_embeddings(ids_BT) + position_TE + self.token_type_embeddings.weight[0]
        return self.LayerNorm(x_BTE)  # type: ignore[no-any-return]


class AlbertAttention(nn.Module):
    """Self-attention with its residual and norm."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.query, self.key = nn.Linear(size, size), nn.Linear(size, size)
        self.value, self.dense = nn.Linear(size, size), nn.Linear(size, size)
        self.LayerNorm = nn.LayerNorm(size, eps=ALBERT_EPSILON)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Map [B, T, C] to [B, T, C]."""
        q_BHTD, k_BHTD, v_BHTD = (
            project(x_BTC).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD)
        return self.LayerNorm(x_BTC + self.dense(y_BHTD.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


class AlbertLayer(nn.Module):
    """The single layer that ALBERT applies repeatedly."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.attention = AlbertAttention(config)
        self.ffn = nn.Linear(config.hidden_size, config.intermediate_size)
        self.ffn_output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.full_layer_layer_norm = nn.LayerNorm(config.hidden_size, eps=ALBERT_EPSILON)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Map [B, T, C] to [B, T, C]."""
        x_BTC = self.attention(x_BTC)
        y_BTC = self.ffn_output(F.gelu(self.ffn(x_BTC), approximate="tanh"))
        return self.full_layer_layer_norm(y_BTC + x_BTC)  # type: ignore[no-any-return]


class Albert(nn.Module):
    """The phoneme-level language model."""

    def __init__(self, config: AlbertConfig, num_tokens: int) -> None:
        super().__init__()
        self.num_layers = config.num_hidden_layers
        self.embeddings = AlbertEmbeddings(config, num_tokens)
        self.mapping = nn.Linear(config.embedding_size, config.hidden_size)
        self.layer = AlbertLayer(config)

    def forward(self, ids_BT: Tensor) -> Sliced[Tensor]:
        """[B, T] ids to [B, T, C]."""
        x_BTC = self.mapping(self.embeddings(ids_BT))
        for _ in range(self.num_layers):
            yield gmacs(self.layer, ids_BT[:, None])
            x_BTC = self.layer(x_BTC)
        return x_BTC  # type: ignore[no-any-return]


class PhonemeEncoder(nn.Module):
    """The text encoder: convolutions and an LSTM over phonemes."""

    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        size, kernel = config.hidden_size, config.kernel_size
        self.embedding = nn.Embedding(config.num_tokens, size)
        self.cnn = nn.ModuleList(
            nn.ModuleList((nn.Conv1d(size, size, kernel, padding=kernel // 2), nn.LayerNorm(size)))
            for _ in range(config.num_layers)
        )
        self.lstm = nn.LSTM(size, size // 2, batch_first=True, bidirectional=True)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """[B, T] ids to [B, T, C]."""
        x_BTC = self.embedding(ids_BT)
        for block in self.cnn:
            convolve, norm = block.children()
            y_BCT = convolve(x_BTC.transpose(1, 2))
            x_BTC = F.leaky_relu(norm(y_BCT.transpose(1, 2)), 0.2)
        return self.lstm(x_BTC)[0]  # type: ignore[no-any-return]


class StyledLayerNorm(nn.Module):
    """Layer normalization over channels; scale and shift come from the style."""

    def __init__(self, style_size: int, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(style_size, 2 * channels)

    def forward(self, x_BTC: Tensor, style_BY: Tensor) -> Tensor:
        """Normalize [B, T, C]."""
        gamma_B1C, beta_B1C = self.fc(style_BY)[:, None].chunk(2, dim=-1)
        x_BTC = F.layer_norm(x_BTC, x_BTC.shape[-1:], eps=EPSILON)
        return torch.addcmul(x_BTC + beta_B1C, x_BTC, gamma_B1C)


class DurationEncoder(nn.Module):
    """LSTMs over the tokens, with the style appended before each."""

    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        self.lstms = nn.ModuleList()
        for _ in range(config.num_layers):
            self.lstms.append(_lstm_with_style(config))
            self.lstms.append(StyledLayerNorm(config.style_size, config.hidden_size))

    def forward(self, x_BTC: Tensor, style_BY: Tensor) -> Tensor:
        """[B, T, C] to [B, T, C + Y]."""
        x_BTC = _with_style(x_BTC, style_BY)
        for block in self.lstms:
            if isinstance(block, nn.LSTM):
                x_BTC = block(x_BTC)[0]
            else:
                x_BTC = _with_style(block(x_BTC, style_BY), style_BY)
        return x_BTC


class ProsodyPredictor(nn.Module):
    """Predicts durations from tokens, then pitch and energy from tokens repeated accordingly."""

    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        size, style = config.hidden_size, config.style_size
        self.text_encoder = DurationEncoder(config)
        self.lstm, self.shared = _lstm_with_style(config), _lstm_with_style(config)
        self.duration_proj = nn.Linear(size, config.max_duration)
        self.F0, self.N = _curve_blocks(size, style), _curve_blocks(size, style)
        self.F0_proj, self.N_proj = nn.Conv1d(size // 2, 1, 1), nn.Conv1d(size // 2, 1, 1)

    def durations(self, hidden_BTC: Tensor, style_BY: Tensor) -> tuple[Tensor, Tensor]:
        """Features [B, T, C + Y] for `curves`, and frames per token [B, T] at normal speed."""
        features_BTC = self.text_encoder(hidden_BTC, style_BY)
        logits_BTN = self.duration_proj(self.lstm(features_BTC)[0])
        return features_BTC, logits_BTN.sigmoid().sum(-1)

    def curves(self, features_BFC: Tensor, style_BY: Tensor) -> Sliced[tuple[Tensor, Tensor]]:
        """Pitch in hertz and log energy, both [B, P], of features repeated by duration."""
        yield gmacs(self.shared, features_BFC.transpose(1, 2))
        x_BCF = self.shared(features_BFC)[0].transpose(1, 2)
        yield gmacs(self.F0, x_BCF) + gmacs(self.N, x_BCF)
        return (
            self.F0_proj(_apply_blocks(self.F0, x_BCF, style_BY))[:, 0],
            self.N_proj(_apply_blocks(self.N, x_BCF, style_BY))[:, 0],
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


def _apply_blocks(blocks: nn.ModuleList, x_BCF: Tensor, style_BY: Tensor) -> Tensor:
    for block in blocks:
        full = LengthMask.of([x_BCF.shape[-1]] * len(x_BCF), x_BCF.device)
        x_BCF = block(x_BCF, style_BY, full)
    return x_BCF


def _with_style(x_BTC: Tensor, style_BY: Tensor) -> Tensor:
    return torch.cat((x_BTC, style_BY[:, None].expand(-1, x_BTC.shape[1], -1)), dim=-1)
