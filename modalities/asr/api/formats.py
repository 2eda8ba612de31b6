"""Transcripts as subtitles and plain text.

Owns which text stands in a cue; `core.media.captions` writes the formats. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from triptych.core.media import captions
from triptych.core.media.captions import Cue

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
    """SubRip: a numbered cue for each segment."""
    return captions.as_srt(_cues(transcript))


def as_vtt(transcript: Transcript) -> str:
    """WebVTT: a cue for each segment."""
    return captions.as_vtt(_cues(transcript))


def _cues(transcript: Transcript) -> Iterator[Cue]:
    return (Cue(each.start_s, each.end_s, each.text) for each in transcript.segments)
