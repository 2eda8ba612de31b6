"""A spoken conversation with a running server: chat with audio, in the events of this process.

Owns the fields of a request for a turn, and reading its chunks.
"""

from __future__ import annotations

import base64
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import numpy as np

from triptych.core.client.choice import RemoteModel
from triptych.core.errors import ConfigError, UnsupportedMedia
from triptych.core.media.audio.intake import sniff
from triptych.modalities.llm.api.audio_fields import SPOKEN_INSTRUCTIONS
from triptych.modalities.talk.speaking.events import SpokenSound, TalkEvent, WrittenWords

_ROUTE = "/v1/chat/completions"
_SAMPLE_RATE = 24_000  # of pcm16
_FORMATS = {"mov": "m4a", "matroska": "webm"}


class RemoteTalk(RemoteModel):
    """A chat model of a server, which the server's recognizer and voice let talk."""

    def begin(self, *, system: str | None, voice: str, **options: Any) -> None:
        """Open the conversation."""
        self._messages: list[dict[str, Any]] = []
        if system := SPOKEN_INSTRUCTIONS if system is None else system:
            self._messages.append({"role": "system", "content": system})
        audio = {"format": "pcm16"} | ({"voice": voice} if voice else {})
        self._fields = {**options, "modalities": ["text", "audio"], "audio": audio, "stream": True}

    def turn(self, said: str | bytes) -> Generator[TalkEvent, None, None]:
        """Answer a turn. What the server heard stays with it."""
        question = {"role": "user", "content": said if isinstance(said, str) else [_part(said)]}
        messages = [*self._messages, question]
        words: list[str] = []
        body = self.request({**self._fields, "messages": messages})
        try:
            for event in self.connection.events(_ROUTE, body):
                yield from _spoken(event, words)
        finally:
            if words:
                answer = {"role": "assistant", "content": "".join(words)}
                self._messages = [*messages, answer]


def _spoken(event: Mapping[str, Any], words: list[str]) -> Iterator[TalkEvent]:
    """Yield the events of a chunk; its text is added to `words`."""
    for choice in event["choices"]:
        audio = choice["delta"].get("audio") or {}
        if text := audio.get("transcript"):
            words.append(text)
            yield WrittenWords(text)
        if data := audio.get("data"):
            pcm_S = np.frombuffer(base64.b64decode(data), "<i2").astype(np.float32)
            yield SpokenSound(pcm_S / np.float32(32767), _SAMPLE_RATE)


def _part(data: bytes) -> dict[str, Any]:
    """The part of a message for a file of sound. Raises `ConfigError` if it is none."""
    try:
        found = sniff(data)
    except UnsupportedMedia as error:
        raise ConfigError(error.message) from error
    audio = {"data": base64.b64encode(data).decode(), "format": _FORMATS.get(found, found)}
    return {"type": "input_audio", "input_audio": audio}
