"""Captions of sound: cues with times, as SubRip (SRT) and WebVTT.

Owns both formats (https://www.w3.org/TR/webvtt1/). Knows no models and no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

CaptionFormat: TypeAlias = Literal["srt", "vtt"]


class Cue(NamedTuple):
    """A line of text with its times, in seconds."""

    start_s: float
    end_s: float
    text: str


def as_srt(cues: Iterable[Cue]) -> str:
    """SubRip: numbered cues."""
    return "".join(
        f"{number}\n{_time(cue.start_s, ',')} --> {_time(cue.end_s, ',')}\n"
        f"{_cue_text(cue.text)}\n\n"
        for number, cue in enumerate(cues, 1)
    )


def as_vtt(cues: Iterable[Cue]) -> str:
    """WebVTT, with hours in every time."""
    lines = (
        f"{_time(cue.start_s, '.')} --> {_time(cue.end_s, '.')}\n"
        f"{_escaped(_cue_text(cue.text))}\n\n"
        for cue in cues
    )
    return "WEBVTT\n\n" + "".join(lines)


CAPTION_FORMATS: Mapping[CaptionFormat, Callable[[Iterable[Cue]], str]] = MappingProxyType(
    {"srt": as_srt, "vtt": as_vtt}
)
"""The writer of each format."""


def _time(seconds: float, point: str) -> str:
    """HH:MM:SS and milliseconds."""
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}{point}{milliseconds:03}"


def _cue_text(text: str) -> str:
    """One cue's text without arrows, which begin a cue, and empty lines, which end it."""
    return " ".join(text.split()).replace("-->", "->")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
