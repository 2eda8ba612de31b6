"""Transcripts as subtitles and plain text.

Owns SubRip (SRT) and WebVTT (W3C, https://www.w3.org/TR/webvtt1/). Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triptych.modalities.asr.api.transcript import Transcript

SUFFIXES: Mapping[str, str] = MappingProxyType(
    {"text": ".txt", "srt": ".srt", "vtt": ".vtt", "json": ".json", "verbose_json": ".json"}
)
"""File suffixes by format."""


def as_text(transcript: Transcript) -> str:
    """The text alone, with a newline at its end."""
    return transcript.text.strip() + "\n"


def as_srt(transcript: Transcript) -> str:
    """SubRip: numbered cues."""
    cues = (
        f"{segment.index + 1}\n{_time(segment.start_s, ',')} --> {_time(segment.end_s, ',')}\n"
        f"{_cue_text(segment.text)}\n\n"
        for segment in transcript.segments
    )
    return "".join(cues)


def as_vtt(transcript: Transcript) -> str:
    """WebVTT, with hours in every time."""
    cues = (
        f"{_time(segment.start_s, '.')} --> {_time(segment.end_s, '.')}\n"
        f"{_escaped(_cue_text(segment.text))}\n\n"
        for segment in transcript.segments
    )
    return "WEBVTT\n\n" + "".join(cues)


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
