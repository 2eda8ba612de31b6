"""Voices: tables of style vectors, one per sentence length, and mixtures of them.

Owns mixing and the choice of a row. Knows neither files nor the network.

Legend: N sentence lengths, Y the two style vectors together (timbre, then prosody).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from triptych.core.errors import InvalidRequest
from triptych.modalities.tts.configs.mixture import parse_mixture


class Voices:
    """Named style tables [N, 1, Y] in memory, and mixtures of them by notation."""

    def __init__(self, tables: Mapping[str, Tensor]) -> None:
        self._tables = dict(tables)
        self._mixed = lru_cache(maxsize=64)(self._mix)

    @property
    def names(self) -> tuple[str, ...]:
        """What can be named, in order."""
        return tuple(sorted(self._tables))

    def table(self, voice: str) -> Tensor:
        """The style table [N, 1, Y] of a voice or mixture. Raises `InvalidRequest`."""
        return self._mixed(parse_mixture(voice))

    def _mix(self, mixture: tuple[tuple[str, float], ...]) -> Tensor:
        return torch.stack([self._named(name) * share for name, share in mixture]).sum(0)

    def _named(self, name: str) -> Tensor:
        if name in self._tables:
            return self._tables[name]
        close = difflib.get_close_matches(name, self.names, n=3) or self.names[:5]
        raise InvalidRequest(
            f"There is no voice {name[:40]!r}; did you mean {', '.join(close)}?", param="voice"
        )


def style_of(table_N1Y: Tensor, num_phonemes: int) -> Tensor:
    """The style vectors [Y] for a sentence of so many phonemes."""
    return table_N1Y[min(num_phonemes, len(table_N1Y)) - 1, 0]
