"""Limits the cost of an utterance.

Owns the limits on text and the expected duration. Knows nothing of models;
`modalities.tts.scheduling.state` handles models that do not stop.
"""

# ruff: noqa: RUF001  # typographic signs are the subject here
from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass

from triptych.core.errors import InvalidRequest
from triptych.modalities.tts.api.text.spoken import SpokenText

_PAUSES_S = {**dict.fromkeys(".!?。！？…", 0.5), **dict.fromkeys(",;:—、，；：", 0.25)}
LETTERS_PER_S = 14.0
_PHONEMES_PER_S = 13.0
"""How fast people read aloud: letters of English, phonemes of any language."""
_HASTE = 0.4
_SLACK, _SLACK_S = 2.0, 2.0
"""Factors from the likely duration to the shortest and the longest credible one."""
_DIGIT_WEIGHT = 4.0  # a digit that is spoken as it is written is a word
_WIDE_LETTER_WEIGHT = 3.0  # a Chinese or Japanese character takes about as long as three letters


class Unspeakable(InvalidRequest):
    """A text has nothing that a model can speak."""


def check_text(text: str, max_characters: float) -> None:
    """Refuse text that is too long or only white space, before any other work.

    Raises `InvalidRequest` that names the limit, or says that there is nothing to speak.
    """
    if len(text) > max_characters:
        raise InvalidRequest(
            f"The text has {len(text)} characters; at most {max_characters} can be spoken in one "
            "request. Split it into several requests.",
            param="input",
        )
    if not text.strip():
        raise InvalidRequest("The text is empty: there is nothing to speak.", param="input")


def check_spoken(spoken: SpokenText) -> None:
    """Raise `Unspeakable` for text without words: only emoji or punctuation."""
    if spoken.is_silent:
        raise Unspeakable(
            "The text has no words to speak: only emoji, signs or punctuation.", param="input"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedDuration:
    """Seconds of audio of an utterance: less has lost words, more has run away."""

    least_s: float
    likely_s: float
    most_s: float

    def max_tokens(self, tokens_per_s: float) -> int:
        """Speech tokens (or codec frames) after which generation is stopped."""
        return max(1, math.ceil(self.most_s * tokens_per_s))


def expected_duration(
    text: str, *, num_phonemes: int | None = None, speed: float = 1.0
) -> ExpectedDuration:
    """The duration of the spoken `text` at `speed`; more precise with `num_phonemes`.

    Raises `ValueError` if `speed` is not positive.
    """
    if not speed > 0:
        raise ValueError("speed must be positive")
    pauses_s = sum(_PAUSES_S.get(char, 0.0) for char in text)
    if num_phonemes is None:
        voiced_s = sum(map(_weight, filter(str.isalnum, text))) / LETTERS_PER_S
    else:
        voiced_s = num_phonemes / _PHONEMES_PER_S
    return ExpectedDuration(
        least_s=_HASTE * voiced_s / speed,
        likely_s=(voiced_s + pauses_s) / speed,
        most_s=(_SLACK * (voiced_s + pauses_s) + _SLACK_S) / speed,
    )


def estimate_seconds(text: str) -> float:
    """Likely seconds of speech; additive, so it can measure the pieces of a long text."""
    return expected_duration(text).likely_s


def _weight(char: str) -> float:
    if char.isdecimal():
        return _DIGIT_WEIGHT
    return _WIDE_LETTER_WEIGHT if unicodedata.east_asian_width(char) in "WF" else 1.0
