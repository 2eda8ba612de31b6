"""Speech of a running server, in the pieces that a pipeline of this process returns.

Owns the fields of a request for a call's options, and reading samples from a WAV stream.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any, Unpack

import numpy as np

from triptych.core.client.choice import RemoteModel
from triptych.core.errors import EngineDown
from triptych.core.media.audio.framing import read_wav_header
from triptych.modalities.tts.api.results import SpeakOptions, SpeechPiece, SpeechUsage, SpokenWord

_ROUTE = "/v1/audio/speech"


class RemoteSpeech(RemoteModel):
    """A speech model of a server."""

    sample_rate = 0
    """Samples per second of the sound, known from the first piece on."""

    def pieces(
        self, text: str, *, is_live: bool = True, **options: Unpack[SpeakOptions]
    ) -> Iterator[SpeechPiece]:
        """Speak a text as `SpeechPipeline.pieces` does. The server always speaks at once."""
        given = {name: value for name, value in options.items() if value not in ("", None)}
        form: dict[str, Any] = {"response_format": "wav", "stream_format": "sse"}
        if given.pop("has_word_times", False):
            form["timestamp_granularities"] = ["word"]
        head = b""
        body = self.request({**given, **form, "input": text})
        for event in self.connection.events(_ROUTE, body):
            if event["type"] == "speech.audio.done":
                yield _last(event)
                return
            data = base64.b64decode(event["audio"])
            if not self.sample_rate:
                head += data
                if (found := read_wav_header(head)) is None:
                    continue
                self.sample_rate, start = found
                data = head[start:]
            yield _piece(data)
        raise EngineDown(f"The connection to {self.connection.url} broke off.")


def _piece(data: bytes) -> SpeechPiece:
    pcm_S = np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32767)
    return SpeechPiece(pcm_S=pcm_S, usage=SpeechUsage(), coverage=1.0)


def _word(entry: Mapping[str, Any]) -> SpokenWord:
    """A word; its place in the text does not cross."""
    times = {"start_s": entry["start"], "end_s": entry["end"]}
    return SpokenWord(text=entry["word"], source=(0, 0), **times)


def _last(event: Mapping[str, Any]) -> SpeechPiece:
    usage = event["usage"]
    return SpeechPiece(
        pcm_S=np.zeros(0, np.float32),
        usage=SpeechUsage(
            num_prompt_tokens=usage["input_tokens"], num_output_tokens=usage["output_tokens"]
        ),
        coverage=event["coverage"],
        finish_reason=event["finish_reason"],
        words=tuple(map(_word, event.get("words", ()))),
    )
