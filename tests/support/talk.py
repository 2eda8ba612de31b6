"""A realtime route in front of made-up engines, ears and voices, and a client of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI
from websockets.asyncio.client import ClientConnection, connect

from support.asr import asr_service
from support.http import FakeEngine, make_service
from support.speech_app import FakeSpeechEngine, SpellingFrontEnd
from triptych.core.errors import EngineDown
from triptych.core.http.app import create_app
from triptych.core.http.models import Task
from triptych.core.http.page import Pages, PagesRouter
from triptych.core.http.server import HttpServer
from triptych.core.media.audio.resampling import Pcm
from triptych.core.options.config import Config, ScheduleOptions, ServerOptions
from triptych.modalities.asr.api.routes import asr_cards
from triptych.modalities.asr.api.service import TranscribeCall
from triptych.modalities.llm.api.replies import card_of
from triptych.modalities.registry import MODALITIES
from triptych.modalities.talk.ports import (
    SpeechStarted,
    SpeechStopped,
    SpokenChunk,
    TurnEvent,
    TurnOptions,
)
from triptych.modalities.talk.realtime.routes import SessionParts, realtime_router
from triptych.modalities.talk.services import TalkServices
from triptych.modalities.tts.api.routes import speech_cards
from triptych.modalities.tts.api.service import SpeechCall, SpeechService
from triptych.schedulers.admission import Admission


class LoudnessDetector:
    """Takes each loud sample for speech, each silent one for its end."""

    def __init__(self) -> None:
        self._num_heard = 0
        self._is_loud = False
        self.was_answering: list[bool] = []

    def push(self, pcm_S: Pcm, *, is_answering: bool = False) -> Sequence[TurnEvent]:
        self.was_answering.append(is_answering)
        events: list[TurnEvent] = []
        for value in np.abs(pcm_S[::160]) > 0.1:
            if bool(value) != self._is_loud:
                self._is_loud = bool(value)
                kind = SpeechStarted if value else SpeechStopped
                events.append(kind(self._num_heard // 16))
            self._num_heard += 160
        return events

    def rest(self) -> None: ...

    def reset(self) -> None:
        self._is_loud = False


@dataclass(eq=False)
class KnowingTranscriber:
    """Knows the words before they are said."""

    words: str
    num_heard: int = 0
    is_closed: bool = False
    pieces: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    tell: Callable[[str], None] | None = None

    def push(self, pcm_S: Pcm) -> None:
        self.num_heard += len(pcm_S)

    def on_expected(self, tell: Callable[[str], None]) -> None:
        self.tell = tell

    async def deltas(self) -> AsyncGenerator[str, None]:
        while (piece := await self.pieces.get()) is not None:
            yield piece

    async def finish(self) -> str:
        if self.words == "fail":
            raise EngineDown("gone")
        self.pieces.put_nowait(self.words)
        self.pieces.put_nowait(None)
        return self.words

    async def close(self) -> None:
        self.is_closed = True
        self.pieces.put_nowait(None)


@dataclass
class FakeEars:
    """Hearing without models; `words` are those of the next turns."""

    words: str = "Hello there"
    opened: list[KnowingTranscriber] = field(default_factory=list)
    detectors: list[LoudnessDetector] = field(default_factory=list)
    calls: list[TranscribeCall] = field(default_factory=list)

    def open_detector(self, options: TurnOptions) -> LoudnessDetector:
        self.detectors.append(LoudnessDetector())
        return self.detectors[-1]

    def open_transcriber(self, call: TranscribeCall) -> KnowingTranscriber:
        self.calls.append(call)
        self.opened.append(KnowingTranscriber(self.words))
        return self.opened[-1]


@dataclass
class FakeVoice:
    """Speaks each delta as a sentence of a tenth of a second; endless if so asked."""

    calls: list[SpeechCall] = field(default_factory=list)
    num_open: int = 0

    async def speak(
        self, texts: AsyncIterator[str], call: SpeechCall
    ) -> AsyncGenerator[SpokenChunk, None]:
        self.calls.append(call)
        self.num_open += 1
        try:
            async for text in texts:
                yield SpokenChunk(
                    text=text, pcm_S=np.full(2400, 0.5, np.float32), sample_rate=24_000
                )
        finally:
            self.num_open -= 1


@dataclass
class TalkApp:
    """The app, and what is behind it."""

    app: FastAPI
    chat: FakeEngine
    ears: FakeEars
    voice: FakeVoice


def talk_app(
    folder: Path, chat: FakeEngine | None = None, *, pages: Pages | None = None, **server: Any
) -> TalkApp:
    """An app with the realtime route alone, and `pages` for browsers."""
    chat, ears, voice = chat or FakeEngine(answer="Hi."), FakeEars(), FakeVoice()
    text = make_service(folder, chat)
    speech = SpeechService(
        FakeSpeechEngine(),
        [SpellingFrontEnd()],
        Admission(options=ScheduleOptions()),
        max_characters=4096,
    )
    recognition = asr_service(None, is_multilingual=True)
    services = TalkServices(chat=text, recognition=recognition, speech=speech)
    config = Config(server=ServerOptions(**server))
    router = realtime_router(SessionParts(services, voice, lambda: ears), config.server)
    cards = [card_of(model) for model in text.models.values()]
    cards += [*speech_cards(speech), *asr_cards(recognition)]
    tasks = [Task(*modality.task) for modality in MODALITIES]
    routers = [router, *([PagesRouter(pages)] if pages else [])]
    return TalkApp(create_app(config, chat, routers, cards, tasks), chat, ears, voice)


class RealtimeClient:
    """A client that reads events in order."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def next(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(await self.socket.recv())
        return event

    async def until(self, kind: str) -> list[dict[str, Any]]:
        """The events up to one of this type."""
        events = [await self.next()]
        while events[-1]["type"] != kind:
            events.append(await self.next())
        return events

    async def ask(self, text: str) -> None:
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        await self.send("conversation.item.create", item=item)
        await self.send("response.create")


@asynccontextmanager
async def realtime(
    server: HttpServer, query: str = "?model=tiny", **kwargs: Any
) -> AsyncIterator[RealtimeClient]:
    """A session that has begun."""
    url = f"{server.url.replace('http', 'ws')}/v1/realtime{query}"
    async with asyncio.timeout(30), connect(url, proxy=None, **kwargs) as socket:
        client = RealtimeClient(socket)
        assert (await client.next())["type"] == "session.created"
        yield client
