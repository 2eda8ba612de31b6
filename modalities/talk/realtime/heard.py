"""The events that tell a client about its sound: speech in it, and the words of a turn.

Owns their fields. Knows no state.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from triptych.modalities.talk.realtime.inputs import (
    TranscriptEnded,
    TranscriptFailed,
    TranscriptPiece,
)
from triptych.modalities.talk.realtime.responding import Event

BufferEvent: TypeAlias = Literal[
    "speech_started",
    "speech_stopped",
    "speech_suspected",
    "speech_dismissed",
    "committed",
    "cleared",
    "timeout_triggered",
]


def buffer_event(kind: BufferEvent, **fields: Any) -> Event:
    """An event of the client's sound. Suspicions are ours, and sent where asked for."""
    return {"type": f"input_audio_buffer.{kind}", **fields}


def transcript_event(news: TranscriptPiece | TranscriptEnded | TranscriptFailed) -> Event:
    """The words of a turn, or why there are none."""
    kind = "conversation.item.input_audio_transcription"
    head: Event = {"item_id": news.item_id, "content_index": 0}
    match news:
        case TranscriptPiece(text=text):
            return {"type": f"{kind}.delta", **head, "delta": text}
        case TranscriptEnded(text=text, seconds=seconds):
            usage = {"type": "duration", "seconds": seconds}
            return {"type": f"{kind}.completed", **head, "transcript": text, "usage": usage}
        case TranscriptFailed(error=error):
            return {"type": f"{kind}.failed", **head, "error": dict(error)}
