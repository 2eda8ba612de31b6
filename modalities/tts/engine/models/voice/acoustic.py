"""The speech-token decoder's two ends: what a position reads, and what its scores say.

Owns the walk through the phonemes. A sequence is the sentence's symbols (with the pads around),
one start mark, then a position per step of 50 ms. Each step reads the symbols around the one that
is due, for how many steps it has been due, and the codes of the step before; it says the codes of
its step and by how many symbols the walk advances (0, 1 or 2: no symbol is shorter than half a
step). So no symbol can be skipped or repeated, and the sentence ends when all are spoken.

Shapes: T positions, W symbols of a window, Q codebooks, L levels, A advances, C channels.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from triptych.modalities.tts.configs.voice import AcousticConfig, CodecConfig


class Kind(IntEnum):
    """What stands at a position."""

    SYMBOL = 0
    START = 1
    STEP = 2


class AcousticPositions(NamedTuple):
    """What positions read; leading dims may be any.

    `windows` [..., W] are symbols around the one due, `held` for how many steps it has been due,
    `values` [..., Q] the codes of the step before, as values in [-1, 1]; `kinds` tell which count.
    """

    windows: Tensor
    held: Tensor
    values: Tensor
    kinds: Tensor


class Scores(NamedTuple):
    """Logits of the codes [..., Q, L] and of the advance [..., A]."""

    codes: Tensor
    advance: Tensor


class AcousticInput(nn.Module):
    """Embeds positions."""

    def __init__(self, config: AcousticConfig, codec: CodecConfig) -> None:
        super().__init__()
        width = config.num_symbols_before + 1 + config.num_symbols_after
        hidden = config.hidden_size
        self.symbols = nn.Embedding(config.num_symbols + 1, config.symbol_dim)
        self.context = nn.Linear(width * config.symbol_dim, hidden, bias=False)
        self.held = nn.Embedding(config.max_held + 2, hidden)
        self.codes = nn.Linear(codec.num_codebooks, hidden, bias=False)
        self.kinds = nn.Embedding(len(Kind), hidden)

    def forward(self, positions: AcousticPositions) -> Tensor:
        """Their embeddings [..., C]."""
        symbols = self.symbols(positions.windows).flatten(-2)
        is_step = (positions.kinds == Kind.STEP)[..., None]
        values = (positions.values * is_step).to(self.codes.weight.dtype)
        held = self.held(torch.where(positions.kinds == Kind.SYMBOL, 0, positions.held + 1))
        x: Tensor = self.context(symbols) + held + self.codes(values) + self.kinds(positions.kinds)
        return x


class AcousticOutput(nn.Module):
    """Scores what a position says."""

    def __init__(self, config: AcousticConfig, codec: CodecConfig) -> None:
        super().__init__()
        self.shape = (codec.num_codebooks, codec.num_levels)
        self.num_advances = config.max_advance + 1
        num_scores = codec.num_codebooks * codec.num_levels + self.num_advances
        self.scores = nn.Linear(config.hidden_size, num_scores)

    def forward(self, hidden: Tensor) -> Scores:
        """Split into codes and advance."""
        scores = self.scores(hidden)
        codes = scores[..., : -self.num_advances].unflatten(-1, self.shape)
        return Scores(codes, scores[..., -self.num_advances :])


def windows(padded: Tensor, due: Tensor, config: AcousticConfig) -> Tensor:
    """Symbols around `due`: [..., W].

    `padded` [..., P] has `num_symbols_before` outside symbols before the first, and at least
    `num_symbols_after` beyond the last; its leading dims are those of `due` less the last.
    """
    width = config.num_symbols_before + 1 + config.num_symbols_after
    index = due[..., None] + torch.arange(width, device=due.device)
    return padded.gather(-1, index.flatten(-2)).view(index.shape)
