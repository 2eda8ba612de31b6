"""The voices a server has: those its models bring, and those its callers made.

Owns the making of a voice, from an uploaded recording to the store, and its way to the engine.
Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from triptych.core.errors import InvalidRequest, UnknownModel, UnsupportedOption
from triptych.core.media.audio.decode import ClipReader
from triptych.core.media.audio.intake import VOICE_LIMITS, check_voice
from triptych.core.media.child import DecodePool
from triptych.modalities.tts.api.frontend.base import FrontEnd
from triptych.modalities.tts.api.voices.record import VoiceAbout, VoiceRecord
from triptych.modalities.tts.api.voices.store import VoiceStore
from triptych.modalities.tts.wire import VoiceClip


class VoiceService:
    """Makes voices, kept in its `store`. Methods that are not coroutines may block on the disk.

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

    def cloner(self, model: str | None) -> FrontEnd:
        """The model of that name if it imitates recordings, or the first that does.

        Raises `UnknownModel`, or `UnsupportedOption` naming the models that do.
        """
        for front in self.choose(model):
            if front.can_clone:
                return front
        able = ", ".join(front.name for front in self.front_ends.values() if front.can_clone)
        who = model or "What is served here"
        instead = f"{able} can imitate a recording" if able else "serve one that imitates, as CSM"
        raise UnsupportedOption(f"{who} speaks with its own voices only; {instead}.", param="model")

    async def make(self, owner: str, about: VoiceAbout, data: bytes | bytearray) -> VoiceRecord:
        """Make a voice of `owner` for `about.model` out of a recording.

        Raises what decoding it raises, `InvalidRequest` for one that is silent or too short, and
        what the store raises.
        """
        sample_rate = self.front_ends[about.model].sample_rate
        pcm_S = await self._reader.read(data, sample_rate=sample_rate, limits=VOICE_LIMITS)

        def keep() -> VoiceRecord:
            check_voice(pcm_S, sample_rate)
            return self.store.add(owner, about, pcm_S, sample_rate)

        return await asyncio.to_thread(keep)

    def clip(self, voice_id: str, owner: str, model: str) -> VoiceClip | None:
        """What `model` imitates to speak with a voice; None where `owner` has no such.

        Raises `InvalidRequest` for a voice that was made for another model.
        """
        voice = self.store.read(voice_id, owner)
        if voice is None:
            return None
        about = voice.record.about
        if about.model != model:
            raise InvalidRequest(f"That voice was made for {about.model}.", param="voice")
        words = about.transcript
        return voice.clip(self.front_ends[model].clip_ids(words) if words else ())
