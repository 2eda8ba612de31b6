"""Transcripts of a running server, in the formats of `triptych transcribe`.

Owns the fields of the form for a call's options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from triptych.core.client.choice import RemoteModel

if TYPE_CHECKING:
    from triptych.modalities.asr.api.pipeline import TranscribeOptions


class RemoteRecognizer(RemoteModel):
    """A recognizer of a server."""

    def transcript(
        self, audio: bytes, name: str, audio_format: str, **options: Unpack[TranscribeOptions]
    ) -> str:
        """Return the transcript of the file `name` as text in a format of the route."""
        is_translation = options.get("task") == "translate"
        fields: dict[str, Any] = {
            "response_format": audio_format,
            "language": options.get("language"),
            "prompt": options.get("prompt"),
            "temperature": options.get("temperature"),
            "seed": options.get("seed"),
            "timestamp_granularities[]": ["word", "segment"]
            if options.get("has_word_times")
            else None,
        }
        filled = {field: value for field, value in fields.items() if value not in ("", None)}
        given = self.request(filled)
        route = "/v1/audio/translations" if is_translation else "/v1/audio/transcriptions"
        reply = self.connection.upload(route, given, [("file", (name, audio))]).decode()
        return reply + "\n" if audio_format in ("json", "verbose_json") else reply
