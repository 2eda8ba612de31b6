"""The notation of voices and their mixtures: `af_heart*0.7+af_bella*0.3`.

Owns parsing it. Knows no voice by name and loads no torch.
"""

from __future__ import annotations

import math
import re

from triptych.core.errors import InvalidRequest

MAX_PARTS = 8
MAX_WEIGHT = 1000.0
_PART = re.compile(r"(?P<name>[A-Za-z0-9_-]+)\s*(?:\*\s*(?P<weight>[0-9]*\.?[0-9]+))?")
_EXAMPLE = "Write NAME, or a mixture such as af_heart*0.7+af_bella*0.3."


def parse_mixture(text: str) -> tuple[tuple[str, float], ...]:
    """Names and shares (summing to 1) of `name*weight+name*weight`; a lone name weighs 1.

    Raises `InvalidRequest` with an example.
    """
    parts = text.split("+")
    if len(parts) > MAX_PARTS:
        raise InvalidRequest(f"A mixture has at most {MAX_PARTS} voices.", param="voice")
    pairs = [_parse_part(part.strip()) for part in parts]
    total = math.fsum(weight for _, weight in pairs)
    return tuple((name, weight / total) for name, weight in pairs)


def _parse_part(part: str) -> tuple[str, float]:
    match = _PART.fullmatch(part)
    if match is None:
        raise InvalidRequest(f"{part[:40]!r} is not a voice name. {_EXAMPLE}", param="voice")
    weight = float(match["weight"] or 1)
    if not 0 < weight <= MAX_WEIGHT:
        raise InvalidRequest(
            f"The weight of {match['name'][:40]!r} must be above 0 and at most"
            f" {MAX_WEIGHT:g}. {_EXAMPLE}",
            param="voice",
        )
    return match["name"], weight
