"""What an utterance may cost, and when an engine has lost its way.

Owns the limits on text, the expected duration, the loop detector and the reason why speech ended.
Knows nothing of models: it sees counts, times and token ids.
"""

# ruff: noqa: RUF001  # typographic signs are the subject here
from __future__ import annotations

import math
import unicodedata
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from triptych.core.errors import InvalidRequest
from triptych.modalities.tts.text.spoken import SpokenText

SpeechFinishReason = Literal["stop", "length", "loop"]

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


class Loop(NamedTuple):
    """The last `num_tokens` tokens repeat themselves every `period` tokens."""

    period: int
    num_tokens: int


class LoopDetector:
    """Finds exact cycles at the end of a stream of tokens, in time linear in its length.

    Each time a quarter of a window has come in, the Z function (Gusfield, 1997) of the window read
    backwards tells for every period how far the stream's end repeats itself. The answer depends on
    the tokens alone, not on how they were pushed. A token may be anything hashable: a
    frame of several codebooks is a tuple.

    A repetition of less than `least_tokens` is no loop: a pause repeats the token of silence. A
    cycle is at most `longest_period` tokens, and has come at least `num_repeats` times.
    """

    def __init__(
        self, *, least_tokens: int, num_repeats: int = 4, longest_period: int = 64
    ) -> None:
        if least_tokens < 2 or num_repeats < 2 or longest_period < 1:
            raise ValueError("a loop is at least two tokens, twice the same, of a period of one")
        self.least_tokens = least_tokens
        self.num_repeats = num_repeats
        self.longest_period = longest_period
        size = max(least_tokens, num_repeats * longest_period)
        self._recent: deque[Hashable] = deque(maxlen=size)
        self._stride = max(1, size // 4)
        self._num_until_check = self._stride

    def push(self, token: Hashable) -> Loop | None:
        """Take one token; returns the loop that the stream is in, when it is looked for."""
        self._recent.append(token)
        self._num_until_check -= 1
        if self._num_until_check:
            return None
        self._num_until_check = self._stride
        return self.find()

    def find(self) -> Loop | None:
        """The loop of the shortest period at the end of what was pushed."""
        repeated = z_function(list(reversed(self._recent)))
        for period in range(1, min(self.longest_period + 1, len(repeated))):
            num_tokens = period + repeated[period]
            if num_tokens >= max(self.least_tokens, self.num_repeats * period):
                return Loop(period, num_tokens)
        return None


def z_function(items: Sequence[object]) -> list[int]:
    """For each position, how many items from there on equal the sequence's beginning."""
    lengths = [len(items)] + [0] * (len(items) - 1) if items else []
    left = right = 0
    for at in range(1, len(items)):
        length = min(right - at, lengths[at - left]) if at < right else 0
        while at + length < len(items) and items[length] == items[at + length]:
            length += 1
        lengths[at] = length
        if at + length > right:
            left, right = at, at + length
    return lengths


class RunawayGuard:
    """Ends one utterance whose engine does not: at the longest credible duration, or in a loop."""

    def __init__(
        self, expected: ExpectedDuration, *, tokens_per_s: float, least_loop_s: float = 3.0
    ) -> None:
        self.max_tokens = expected.max_tokens(tokens_per_s)
        self.num_tokens = 0
        """Tokens taken in, up to the one that ended the utterance."""
        self.loop: Loop | None = None
        self.finish_reason: SpeechFinishReason | None = None
        self._detector = LoopDetector(least_tokens=max(2, math.ceil(least_loop_s * tokens_per_s)))

    def push(self, tokens: Iterable[Hashable]) -> SpeechFinishReason | None:
        """Take what the engine sampled; returns why to end, from then on always the same."""
        for token in tokens:
            if self.finish_reason is not None:
                break
            self.num_tokens += 1
            self.loop = self._detector.push(token)
            if self.loop is not None:
                self.finish_reason = "loop"
            elif self.num_tokens >= self.max_tokens:
                self.finish_reason = "length"
        return self.finish_reason

    def stop(self) -> SpeechFinishReason:
        """The engine ended by itself: that is the reason, unless it was ended before."""
        self.finish_reason = self.finish_reason or "stop"
        return self.finish_reason

    @property
    def num_sound_tokens(self) -> int:
        """Tokens worth playing: all, or up to the end of a loop's first cycle."""
        if self.loop is None:
            return self.num_tokens
        return self.num_tokens - self.loop.num_tokens + self.loop.period
