"""Voices: tables of style vectors, one per sentence length, and mixtures of them.

Owns the notation `af_heart*0.7+af_bella*0.3` and the choice of a row. Knows neither files nor the
network.

Legend: N sentence lengths, Y the two style vectors together (timbre, then prosody).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from triptych.core.errors import InvalidRequest

MAX_PARTS = 8
MAX_WEIGHT = 1000.0
_PART = re.compile(r"(?P<name>[A-Za-z0-9_-]+)\s*(?:\*\s*(?P<weight>[0-9]*\.?[0-9]+))?")
_EXAMPLE = "Write NAME, or a mixture such as af_heart*0.7+af_bella*0.3."


def parse_mixture(text: str) -> tuple[tuple[str, float], ...]:
    """Names and shares (summing to 1) of `name*weight+name*weight`; a lone name weighs 1.

    Raises `InvalidRequest` that says what to write.
    """
    parts = text.split("+")
    if len(parts) > MAX_PARTS:
        raise InvalidRequest(f"A voice mixes at most {MAX_PARTS} others.", param="voice")
    pairs = [_parse_part(part.strip()) for part in parts]
    total = math.fsum(weight for _, weight in pairs)
    return tuple((name, weight / total) for name, weight in pairs)


def _parse_part(part: str) -> tuple[str, float]:
    match = _PART.fullmatch(part)
    if match is None:
        raise InvalidRequest(f"{part[:40]!r} is no part of a voice. {_EXAMPLE}", param="voice")
    weight = float(match["weight"] or 1)
    if not 0 < weight <= MAX_WEIGHT:
        raise InvalidRequest(
            f"The weight of {match['name'][:40]!r} must lie above 0 and at most at"
            f" {MAX_WEIGHT:g}. {_EXAMPLE}",
            param="voice",
        )
    return match["name"], weight


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
