"""A session without models, whose events are checked with OpenAI's package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from triptych.modalities.talk.ports import SpeechStarted, SpeechStopped
from triptych.modalities.talk.realtime.events import parse_event
from triptych.modalities.talk.realtime.holding import HeldBytes
from triptych.modalities.talk.realtime.inputs import (
    AnswerSpeech,
    EndTurn,
    Learned,
    StartAnswer,
    TranscriptEnded,
)
from triptych.modalities.talk.realtime.session import Out, Session
from triptych.modalities.talk.realtime.settings import Conversation, Settings

ADAPTER: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
OURS = ("input_audio_buffer.speech_suspected", "input_audio_buffer.speech_dismissed")
USAGE = {"total_tokens": 3, "input_tokens": 2, "output_tokens": 1}


class Talk:
    """A session, its clock, and all that came out of it. Events are valid for OpenAI's package."""

    def __init__(self, settings: Settings | None = None, held: HeldBytes | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.now_ms = 0.0
        settings = settings or Conversation(model="tiny")
        self.session = Session(settings, self.new_id, held=held)
        self.check(self.session.open())

    def new_id(self, kind: str) -> str:
        self.counts[kind] += 1
        return f"{kind}_{self.counts[kind]}"

    def check(self, outs: Iterable[Out]) -> list[Out]:
        found = list(outs)
        for out in found:
            if isinstance(out, dict) and out["type"] not in OURS:
                ADAPTER.validate_python({**out, "event_id": "e"})
        return found

    def say(self, kind: str, **fields: Any) -> list[Out]:
        event = parse_event({"type": kind, **fields})
        return self.check(self.session.take(event, self.now_ms))

    def learn(self, *news: Learned) -> list[Out]:
        return [out for each in news for out in self.check(self.session.learn(each, self.now_ms))]

    def update(self, **fields: Any) -> list[Out]:
        return self.say("session.update", session={"type": "realtime", **fields})

    def ask(self, text: str = "hi") -> str:
        """Ask in text; returns the id of the response."""
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        self.say("conversation.item.create", item=item)
        return started(self.say("response.create")).response_id

    def speak(self, text: str, begin_ms: int = 0) -> list[Out]:
        """A detected turn of the user with this transcript; returns what follows from that."""
        outs = self.learn(SpeechStarted(begin_ms), SpeechStopped(begin_ms + 900))
        (item_id,) = [out.item_id for out in outs if isinstance(out, EndTurn)]
        return self.learn(TranscriptEnded(item_id, text, 0.9))


def kinds(outs: Iterable[Out]) -> list[str]:
    """The types of events, and the names of effects."""
    return [out["type"] if isinstance(out, dict) else type(out).__name__ for out in outs]


def one(outs: Iterable[Out], kind: str) -> dict[str, Any]:
    (found,) = [out for out in outs if isinstance(out, dict) and out["type"] == kind]
    return found


def started(outs: Iterable[Out]) -> StartAnswer:
    (found,) = [out for out in outs if isinstance(out, StartAnswer)]
    return found


def spoken(talk: Talk, answer: str) -> list[Out]:
    """Two sentences of a second each, in pieces, faster than they are played."""
    half = b"\0" * 24_000
    return talk.learn(
        AnswerSpeech(answer, "One two three four. ", half, 500.0),
        AnswerSpeech(answer, "", half, 500.0),
        AnswerSpeech(answer, "Five six seven eight.", half, 500.0),
        AnswerSpeech(answer, "", half, 500.0),
    )
