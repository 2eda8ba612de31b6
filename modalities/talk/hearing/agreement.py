"""The settled words of a growing transcript: those on which two passes in a row agree.

Owns local agreement: Liu, Spanakis, Niehues, "Low-Latency Sequence-to-Sequence Speech Recognition
and Translation by Partial Hypothesis Selection" (2020), with two passes, as in Macháček, Dabre,
Bojar, "Turning Whisper into Real-Time Transcription System" (2023). Knows texts, no sound.
"""

from __future__ import annotations

import re
from itertools import takewhile

from triptych.modalities.asr.languages import UNSPACED

_WORD = re.compile(r"\s*\S+")
_CHARACTER = re.compile(r"\s*\S")


def words(text: str, language: str) -> list[str]:
    """The words with the space before each; characters in languages without spaces."""
    return (_CHARACTER if language in UNSPACED else _WORD).findall(text)


def agreed(before: str, after: str, language: str) -> str:
    """The words with which both texts begin, as they are in the second."""
    pairs = zip(words(before, language), words(after, language), strict=False)
    return "".join(word for _, word in takewhile(lambda pair: pair[0] == pair[1], pairs))


class SettledText:
    """A growing text, and the part of it that callers have, which may not be taken back.

    Passes read the sound after the `frozen` text.
    """

    def __init__(self) -> None:
        self.frozen = ""
        self.said = ""
        self._before = ""

    def take(self, text: str, language: str) -> str:
        """Take the text of a pass; returns what it newly settles."""
        known = agreed(self._before, text, language)
        self._before = text
        return self._say(self.frozen + known)

    def freeze(self, text: str) -> None:
        """Later passes begin after `text`, the beginning of the last pass's."""
        assert self._before.startswith(text)
        self.frozen += text
        self._before = self._before[len(text) :]

    def end(self, text: str) -> str:
        """Return what is left to say of the whole `text`: nothing where it says otherwise."""
        return self._say(text)

    def _say(self, text: str) -> str:
        if not text.startswith(self.said):
            return ""
        more = text[len(self.said) :]
        self.said = text
        return more
