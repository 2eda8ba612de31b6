"""The API of spoken conversation: what it is composed of, and its routes.

Owns the composition, over services that the modalities have opened. Opens no model but that of
voice activity, with the first session.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter

from triptych.core.options.config import Config
from triptych.core.process.once import once
from triptych.core.weights.progress import SilentProgress
from triptych.modalities.modality import ApiPart
from triptych.modalities.talk.hearing.hearing import VoiceHearing
from triptych.modalities.talk.hearing.source import open_network
from triptych.modalities.talk.realtime.holding import SessionCount
from triptych.modalities.talk.realtime.routes import SessionParts, realtime_router
from triptych.modalities.talk.services import TalkServices
from triptych.modalities.talk.speaking.answer import AnswerSpeaker
from triptych.modalities.talk.speaking.chat_sound import ServedSound
from triptych.modalities.talk.speaking.routes import written_router


def open_talk(config: Config, parts: Sequence[ApiPart]) -> list[APIRouter]:
    """Let chat hear and speak, and create the routes over the services of `parts`."""
    services = TalkServices.of(parts)
    services.chat.sound = ServedSound(services.recognition, services.speech)

    @once
    def open_hearing() -> VoiceHearing:
        network = open_network(config.models, SilentProgress())
        return VoiceHearing(services.recognition, network)

    speaker = AnswerSpeaker(services.speech)
    count = SessionCount.of(config.server)
    return [
        realtime_router(SessionParts(services, speaker, open_hearing), config.server, count),
        written_router(services.speech, speaker, config.server, count),
    ]
