"""The voices of requests: those of the model, and those of recordings that were encoded before.

Owns the encoded voices that are kept. Knows no streams and no steps.
"""

from __future__ import annotations

from collections import OrderedDict

from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.modalities.tts.plan import VoicePrompt
from triptych.modalities.tts.scheduling.state import SpeechModel
from triptych.modalities.tts.wire import SpeechRequest

_MAX_VOICES = 64
"""Encoded voices of clips that are kept."""


class RequestVoices:
    """The voices of `model`, and by digest those of clips, the latest used last."""

    def __init__(self, model: SpeechModel) -> None:
        self._model = model
        self._of_clips: OrderedDict[str, VoicePrompt] = OrderedDict()

    def find(self, request: SpeechRequest) -> VoicePrompt | None:
        """The voice of a request; `None` if its clip has to be encoded first.

        Raises `RequestError` for a voice that the model does not have.
        """
        if request.clip is not None:
            if not self._model.can_clone:
                raise UnsupportedOption("This model cannot imitate a recording.", param="voice")
            voice = self._of_clips.get(request.clip.digest)
            if voice is not None:
                self._of_clips.move_to_end(request.clip.digest)
            return voice
        if request.voice and self._model.voices and request.voice not in self._model.voices:
            raise InvalidRequest("This model has no such voice.", param="voice")
        return self._model.voices.get(request.voice, VoicePrompt())

    def keep(self, digest: str, voice: VoicePrompt) -> None:
        """Keep the voice of a clip."""
        self._of_clips[digest] = voice
        if len(self._of_clips) > _MAX_VOICES:
            self._of_clips.popitem(last=False)
