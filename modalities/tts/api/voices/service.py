"""The voices of a server: those built into its models, and those its callers created.

Owns creating a voice, from an uploaded recording to the store, and turning it into a clip for the
engine. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from triptych.core.errors import InvalidRequest, UnknownModel, UnsupportedOption
from triptych.core.media.audio.decode import ClipReader
from triptych.core.media.audio.intake import VOICE_LIMITS, check_voice
from triptych.core.media.child import DecodePool
from triptych.modalities.tts.api.frontend.base import FrontEnd
from triptych.modalities.tts.api.voices.record import VoiceDescription, VoiceRecord
from triptych.modalities.tts.api.voices.store import VoiceStore
from triptych.modalities.tts.wire import VoiceClip


class VoiceService:
    """Creates voices and keeps them in `store`. Synchronous methods may block on the disk.

    `pool` must serve `core/media/audio/decode.py`.
    """

    def __init__(self, store: VoiceStore, front_ends: Sequence[FrontEnd], pool: DecodePool) -> None:
        self.front_ends: Mapping[str, FrontEnd] = {front.name: front for front in front_ends}
        self.store = store
        self._reader = ClipReader(pool)

    def choose(self, model: str | None) -> Sequence[FrontEnd]:
        """The model of that name, or all of them. Raises `UnknownModel`."""
        if model is None:
            return tuple(self.front_ends.values())
        if model not in self.front_ends:
            raise UnknownModel.among(self.front_ends, model, "speech model")
        return (self.front_ends[model],)

    def cloning_model(self, model: str | None) -> FrontEnd:
        """The model of that name if it imitates recordings, or the first that does.

        Raises `UnknownModel`, or `UnsupportedOption` naming the models that do.
        """
        for front in self.choose(model):
            if front.can_clone:
                return front
        able = ", ".join(front.name for front in self.front_ends.values() if front.can_clone)
        who = model or "Every served model"
        instead = f"{able} can imitate a recording" if able else "serve one that can, such as CSM"
        raise UnsupportedOption(f"{who} supports built-in voices only; {instead}.", param="model")

    async def make(
        self, owner: str, about: VoiceDescription, data: bytes | bytearray
    ) -> VoiceRecord:
        """Create a voice of `owner` for `about.model` from a recording.

        Raises the errors of decoding, `InvalidRequest` for a recording that is silent or too short,
        and the store's errors.
        """
        sample_rate = self.front_ends[about.model].sample_rate
        pcm_S = await self._reader.read(data, sample_rate=sample_rate, limits=VOICE_LIMITS)

        def keep() -> VoiceRecord:
            check_voice(pcm_S, sample_rate)
            return self.store.add(owner, about, pcm_S, sample_rate)

        return await asyncio.to_thread(keep)

    def clip(self, voice_id: str, owner: str, model: str) -> VoiceClip | None:
        """The clip of a voice for `model` to imitate; None where `owner` has no such voice.

        Raises `InvalidRequest` for a voice that was made for another model.
        """
        voice = self.store.read(voice_id, owner)
        if voice is None:
            return None
        about = voice.record.about
        if about.model != model:
            raise InvalidRequest(f"That voice was made for {about.model}.", param="voice")
        return voice.clip(self.front_ends[model].clip_ids(about.transcript))
