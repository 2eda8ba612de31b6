"""The events of a spoken turn, as a conversation of this process or of a server yields them.

Owns their types. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from triptych.core.media.audio.resampling import Pcm


@dataclass(frozen=True, slots=True)
class HeardWords:
    """The words of the sound that began a turn."""

    text: str


@dataclass(frozen=True, slots=True)
class WrittenWords:
    """The next words of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class SpokenSound:
    """The next sound of the answer: samples [S] at `sample_rate` (Hz).

    `text` is the stretch of the answer that begins with it, if one does.
    """

    pcm_S: Pcm
    sample_rate: int
    text: str = ""


TalkEvent: TypeAlias = HeardWords | WrittenWords | SpokenSound
