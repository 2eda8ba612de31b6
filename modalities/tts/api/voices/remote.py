"""The voices of a running server, as the command lists those of this machine.

Owns the requests for them.
"""

from __future__ import annotations

import argparse
from urllib.parse import quote

from triptych.core.client.choice import RemoteModel
from triptych.modalities.tts.api.voices.protocol import VoiceCard

_ROUTE = "/v1/audio/voices"


class RemoteVoices:
    """The built-in voices of a server's models, and those of the caller's key."""

    def __init__(self, remote: RemoteModel) -> None:
        self._remote = remote

    def list_all(self) -> list[VoiceCard]:
        """Return the voices of all speech models of the server."""
        found = self._remote.connection.get(_ROUTE)["data"]
        return [VoiceCard.model_validate(card) for card in found]

    def add(self, name: str, data: bytes, args: argparse.Namespace) -> VoiceCard:
        """Create a voice from a recording, for the chosen model if one was named."""
        fields = {
            "name": name,
            "consent": args.consent,
            "transcript": args.transcript,
            "language": args.language,
            "model": self._remote.name if getattr(args, "model", None) else "",
        }
        given = {field: value for field, value in fields.items() if value}
        file = ("audio_sample", (args.audio, data))
        card = self._remote.connection.upload(_ROUTE, given, [file])
        return VoiceCard.model_validate_json(card)

    def delete(self, voice_id: str) -> None:
        """Delete a voice of the caller. Raises `NotFound`."""
        self._remote.connection.delete(f"{_ROUTE}/{quote(voice_id, safe='')}")

    def close(self) -> None:
        """Close the connection."""
        self._remote.close()
