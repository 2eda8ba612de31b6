"""The models of one session: which chat, recognition and speech model it uses.

Owns the meaning of names in its query and its settings. Knows no event.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from starlette.datastructures import State

from triptych.core.engine_api.caller import Caller
from triptych.core.errors import NotFound, UnsupportedOption
from triptych.core.http.model_names import model_meant
from triptych.modalities.asr.api.service import TranscribeCall
from triptych.modalities.llm.api.audio_fields import MAX_SPOKEN_TOKENS, SPOKEN_INSTRUCTIONS
from triptych.modalities.talk.ports import Hearing, LiveTranscriber
from triptych.modalities.talk.realtime.session import Session
from triptych.modalities.talk.realtime.settings import Conversation, Dictation, Settings, SettingsT
from triptych.modalities.talk.services import TalkServices
from triptych.modalities.tts.api.service import SpeechCall

ConversationT = TypeVar("ConversationT", bound=Conversation)


@dataclass(frozen=True, slots=True)
class SessionModels:
    """The models of a session by name; empty: there is none. Without `chat` it only transcribes."""

    services: TalkServices
    state: State
    chat: str
    recognition: str
    speech: str

    @classmethod
    def choose(
        cls, services: TalkServices, state: State, *, given: str, is_dictation: bool
    ) -> Self:
        """Choose the models of a session whose query names the model `given`, or none.

        It is the chat model of a conversation, the recognition model of a transcription session.
        Raises `UnknownModel`, and `NotFound` where no model of the kind is served.
        """
        chat = "" if is_dictation else _meant(state, "realtime", "chat", given)
        heard = _meant(state, "transcription", "transcription", given if is_dictation else "")
        if chat or not is_dictation:
            services.chat.model(chat)
        if is_dictation:
            services.recognition.model(heard)
        return cls(services, state, chat, heard, _meant(state, "speech", "speech", ""))

    def settings(self) -> Settings:
        """Return the settings that a session begins with."""
        if not self.chat:
            return Dictation()
        given: dict[str, Any] = {"model": self.chat}
        given["output_modalities"] = ["audio" if self.speech else "text"]
        if self.speech:
            voice = self.services.speech.model(self.speech).default_voice
            given |= {"audio": {"output": {"voice": voice}}}
        return self._shortened(Conversation.model_validate(given))

    def check(self, settings: SettingsT) -> SettingsT:
        """Return settings with the names of the model and of the voice that speaks.

        A conversation that speaks has instructions and a limit to be short, unless they are set.
        Raises `RequestError`s for unknown names.
        """
        transcription = settings.audio.input.transcription
        if transcription is not None:
            self.services.recognition.check(self.transcription(settings))
        if isinstance(settings, Conversation) and settings.speaks:
            output = settings.audio.output
            if not self.speech:
                raise UnsupportedOption(
                    'No speech model is served: set output_modalities to ["text"].',
                    param="output_modalities",
                )
            voice = SpeechCall(
                model=self.speech, text="", voice=output.voice_name, speed=output.speed
            )
            front, own_voice = self.services.speech.check(voice)
            if front.replaces(output.voice_name):  # the client sees which voice speaks
                settings = settings.model_copy(
                    update={
                        "audio": settings.audio.model_copy(
                            update={"output": output.model_copy(update={"voice": own_voice})}
                        )
                    }
                )
        if isinstance(settings, Conversation) and settings.model is not None:
            own = _meant(self.state, "realtime", "chat", settings.model)
            settings = settings.model_copy(update={"model": own})
        return self._shortened(settings) if isinstance(settings, Conversation) else settings

    def _shortened(self, settings: ConversationT) -> ConversationT:
        """Return settings with the defaults of spoken answers."""
        model = self.services.chat.model(self.chat)
        values: dict[str, Any] = {}
        if settings.speaks and model.traits.takes_system:
            values["instructions"] = SPOKEN_INSTRUCTIONS
        if settings.speaks and not settings.tools and not model.answers.has_reasoning:
            values["max_output_tokens"] = MAX_SPOKEN_TOKENS
        return settings.with_defaults(**values)

    def transcription(self, settings: Settings) -> TranscribeCall:
        """Return the call that transcribes a turn. Raises `NotFound` without a model for it."""
        if not self.recognition:
            raise NotFound("No transcription model is served: send text.", param="model")
        given = settings.audio.input.transcription
        if given is None:
            return TranscribeCall(model=self.recognition)
        named = _meant(self.state, "transcription", "transcription", given.model or "")
        return TranscribeCall(
            model=named if given.model else self.recognition,
            language=given.language or "",
            prompt=given.prompt or "",
        )

    def ears(self, hearing: Hearing, caller: Caller) -> SessionEars:
        """Return what opens transcribers for the session of `caller`."""
        return SessionEars(hearing, self, caller)


@dataclass(frozen=True, slots=True)
class SessionEars:
    """Opens the transcribers of one session, as its settings are at the time."""

    hearing: Hearing
    models: SessionModels
    caller: Caller

    def open_transcriber(self, session: Session, call_id: str) -> LiveTranscriber:
        """Open the transcriber of a turn."""
        caller = replace(self.caller, call_id=f"{self.caller.call_id}.{call_id}")
        call = replace(self.models.transcription(session.settings), caller=caller)
        return self.hearing.open_transcriber(call)


def _meant(state: State, kind: str, task: str, given: str) -> str:
    """Return the model that `given` means; without it the first of the task, or nothing.

    `kind` are the names of OpenAI's that may stand for it.
    """
    names = list(state.models_by_task.get(task, ()))
    if not given:
        return names[0] if names else ""
    if given in state.tasks or any(given in each for each in state.more_models):
        return given
    meant = state.further_names.get(given) or model_meant(state.accepted_names, given, kind, names)
    return meant or given
