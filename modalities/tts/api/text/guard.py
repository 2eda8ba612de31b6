"""What an utterance may cost.

Owns the limits on text and the expected duration. Knows nothing of models; what is done about one
that runs on is `modalities.tts.scheduling.runaway`'s.
"""

# ruff: noqa: RUF001  # typographic signs are the subject here
from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass

from triptych.core.errors import InvalidRequest
from triptych.modalities.tts.api.text.spoken import SpokenText

MAX_CHARACTERS = 20_000
"""Longest text of one request unless the server says otherwise."""

_PAUSES_S = {**dict.fromkeys(".!?。！？…", 0.5), **dict.fromkeys(",;:—、，；：", 0.25)}
_WIDE_LETTER_WEIGHT = 3.0  # a Chinese or Japanese character takes about as long as three letters


def check_text(text: str, *, max_characters: int = MAX_CHARACTERS, param: str = "input") -> None:
    """Refuse text that is too long, or of white space alone, before any work is done on it.

    `InvalidRequest` names the limit, or says that there is nothing to speak.
    """
    if len(text) > max_characters:
        raise InvalidRequest(
            f"The text has {len(text)} characters; at most {max_characters} can be spoken in one "
            "request. Split it into several requests.",
            param=param,
        )
    if not text.strip():
        raise InvalidRequest("The text is empty: there is nothing to speak.", param=param)


def check_spoken(spoken: SpokenText, *, param: str = "input") -> None:
    """`InvalidRequest` for text of which nothing would be heard: emoji or punctuation alone."""
    if spoken.is_silent:
        raise InvalidRequest(
            "The text has no words to speak: only emoji, signs or punctuation.", param=param
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeakingRate:
    """How fast people read aloud. The defaults hold for English; phonemes for any language.

    `slack` and `slack_s` widen the likely duration to the longest that is still credible, and
    `haste` narrows it to the shortest.
    """

    letters_per_s: float = 14.0
    phonemes_per_s: float = 13.0
    slack: float = 2.0
    slack_s: float = 2.0
    haste: float = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedDuration:
    """Seconds of audio an utterance may take: less has lost words, more has run away."""

    least_s: float
    likely_s: float
    most_s: float

    def max_tokens(self, tokens_per_s: float) -> int:
        """Speech tokens (or codec frames) after which generation must end."""
        return max(1, math.ceil(self.most_s * tokens_per_s))


def expected_duration(
    text: str,
    *,
    num_phonemes: int | None = None,
    speed: float = 1.0,
    rate: SpeakingRate = SpeakingRate(),  # frozen
) -> ExpectedDuration:
    """How long the spoken `text` may take at `speed`; phonemes are the better measure if known.

    `ValueError` if `speed` is not positive.
    """
    if not speed > 0:
        raise ValueError("speed must be positive")
    pauses_s = sum(_PAUSES_S.get(char, 0.0) for char in text)
    if num_phonemes is None:
        voiced_s = _letter_weight(text) / rate.letters_per_s
    else:
        voiced_s = num_phonemes / rate.phonemes_per_s
    return ExpectedDuration(
        least_s=rate.haste * voiced_s / speed,
        likely_s=(voiced_s + pauses_s) / speed,
        most_s=(rate.slack * (voiced_s + pauses_s) + rate.slack_s) / speed,
    )


def estimate_seconds(text: str) -> float:
    """Likely seconds of speech; additive, so it can measure the pieces of a long text."""
    return expected_duration(text).likely_s


def _letter_weight(text: str) -> float:
    return sum(
        _WIDE_LETTER_WEIGHT if unicodedata.east_asian_width(char) in "WF" else 1.0
        for char in text
        if char.isalnum()
    )
