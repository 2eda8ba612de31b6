"""The values of SSML's attributes: pauses, rates and levels.

Owns their spelling and their limits. Raises `InvalidRequest` that says which values there are; the
reader adds the place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from triptych.core.errors import InvalidRequest

MAX_PAUSE_S = 10.0
"""The longest break, as in Amazon Polly."""
MAX_PAUSES_S = 120.0
"""The longest silence of a document: sound that costs its sender nothing is bounded."""
STRENGTHS_S: Mapping[str, float] = MappingProxyType(
    {"none": 0.0, "x-weak": 0.25, "weak": 0.5, "medium": 0.75, "strong": 1.0, "x-strong": 1.25}
)
"""Seconds of the strengths of a break, as in Azure AI Speech; the standard leaves them open."""
RATES: Mapping[str, float] = MappingProxyType(
    {"x-slow": 0.5, "slow": 0.64, "medium": 1.0, "default": 1.0, "fast": 1.55, "x-fast": 2.0}
)
"""The named rates, as in Azure AI Speech; the standard leaves them open."""
LEVELS = ("strong", "moderate", "none", "reduced")
"""The levels of emphasis."""

_TIME = re.compile(r"\+?(\d{1,6}(?:\.\d{1,6})?|\.\d{1,6})(ms|s)\Z")
_RATE = re.compile(r"([+-]?)(\d{1,4}(?:\.\d{1,4})?|\.\d{1,4})(%?)\Z")


def pause_s(time: str | None, strength: str | None) -> float:
    """The seconds of a break; a `time` counts more than a `strength`."""
    if (seconds := STRENGTHS_S.get("medium" if strength is None else strength)) is None:
        raise InvalidRequest(f"strength is one of {', '.join(STRENGTHS_S)}, or send time.")
    if time is None:
        return seconds
    match = _TIME.match(time.strip())
    if match is None:
        raise InvalidRequest('time is written as in "500ms" or "1.5s".')
    seconds = float(match[1]) / (1000 if match[2] == "ms" else 1)
    if seconds > MAX_PAUSE_S:
        raise InvalidRequest(f"A break has at most {MAX_PAUSE_S:g} s: send several.")
    return seconds


def emphasis(level: str | None) -> bool:
    """Whether a level, "moderate" without one, wants words to stand out from the others."""
    if level is not None and level not in LEVELS:
        raise InvalidRequest(f"level is one of {', '.join(LEVELS)}.")
    return level != "none"


def rate(text: str) -> float:
    """The factor of a rate: a name, a factor ("1.5", "150%") or a change ("+50%", "-10%")."""
    if (named := RATES.get(text.strip())) is not None:
        return named
    match = _RATE.match(text.strip())
    is_change = match is not None and bool(match[1])
    if match is None or (is_change and not match[3]):
        raise InvalidRequest(
            f'rate is one of {", ".join(RATES)}, or as in "1.5", "150%" or "-10%".'
        )
    number = float(match[2]) / (100 if match[3] else 1)
    if not is_change:
        return number
    return 1 + number if match[1] == "+" else 1 - number
