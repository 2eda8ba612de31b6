"""The route that speaks a text while it is written."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from support.http import in_process, live, until
from support.speech_app import FakeSpeechEngine, heard, make_speech_service
from triptych.core.http.app import create_app
from triptych.core.http.models import Task
from triptych.core.http.server import HttpServer
from triptych.core.options.config import Config, ServerOptions
from triptych.modalities.registry import MODALITIES
from triptych.modalities.talk.realtime.holding import SessionCount
from triptych.modalities.talk.speaking.answer import AnswerSpeaker
from triptych.modalities.talk.speaking.routes import ROUTE, written_router
from triptych.modalities.tts.api.routes import speech_cards


def app(engine: FakeSpeechEngine, most: int = 4, **server: Any) -> Any:
    service = make_speech_service(engine)
    options = ServerOptions(**server)
    router = written_router(service, AnswerSpeaker(service), options, SessionCount(most=most))
    tasks = [Task(*modality.task) for modality in MODALITIES]
    return create_app(Config(server=options), engine, [router], speech_cards(service), tasks)


@asynccontextmanager
async def opened(server: HttpServer) -> AsyncIterator[ClientConnection]:
    url = f"{server.url.replace('http', 'ws')}{ROUTE}"
    async with asyncio.timeout(30), connect(url, proxy=None) as socket:
        yield socket


async def send(socket: ClientConnection, kind: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": kind, **fields}))


async def received(socket: ClientConnection) -> tuple[list[dict[str, Any]], bytes]:
    """All events and all bytes, up to the end of the session."""
    events, sound = [], b""
    with suppress(ConnectionClosedError):  # of a session that ended with an error
        async for message in socket:
            if isinstance(message, bytes):
                sound += message
            else:
                events.append(json.loads(message))
    return events, sound


async def test_sentences_are_spoken_while_the_text_is_written() -> None:
    with live(app(FakeSpeechEngine())) as server:
        async with opened(server) as socket:
            await send(socket, "session.config", voice="bob", response_format="pcm")
            await send(socket, "input.text", text="Hello there, you. And th")
            first = json.loads(await socket.recv())
            await send(socket, "input.text", text="is.")
            await send(socket, "input.done")
            events, sound = await received(socket)
    assert first == {
        "type": "audio.start",
        "sentence_index": 0,
        "sentence_text": "Hello there, you. ",
        "format": "pcm",
        "sample_rate": 24_000,
    }
    kinds = ["audio.done", "audio.start", "audio.done", "session.done"]
    assert [event["type"] for event in events] == kinds
    assert events[1]["sentence_text"] == "And this."
    assert events[-1] == {"type": "session.done", "total_sentences": 2}
    assert len(sound) == 2 * len(heard("Hello there, you. And this."))
    assert np.frombuffer(sound, "<i2").any()


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([{"type": "input.text", "text": "a"}], "Here a message has the type session.config."),
        ([{"type": "session.config", "pitch": 2}], "pitch"),
        ([{"type": "session.config", "voice": "zoe"}], "voices ada and bob"),
        ([{"type": "session.config", "input_format": "ssml"}], "input_format"),
        ([{"type": "session.config"}, {"type": "input.text", "text": 3}], "text"),
        ([{"type": "session.config"}, {"type": "input.text", "text": "a" * 5000}], "at most 4096"),
        ([{"type": "session.config"}, {"type": "session.config"}], "input.text or input.done"),
        ([["session.config"]], "session.config"),
    ],
)
async def test_a_bad_message_ends_the_session(messages: list[Any], error: str) -> None:
    with live(app(FakeSpeechEngine())) as server:
        async with opened(server) as socket:
            for message in messages:
                await socket.send(json.dumps(message))
            events, _ = await received(socket)
    assert events[-1]["type"] == "error"
    assert error in events[-1]["message"]
    assert socket.close_code == 1008


@pytest.mark.parametrize("is_wanted", [False, True])
async def test_the_text_is_logged_only_where_that_is_wanted(
    is_wanted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with live(app(FakeSpeechEngine(), log_prompts=is_wanted)) as server:
        async with opened(server) as socket:
            await send(socket, "session.config")
            await send(socket, "input.text", text="My secret.")
            await send(socket, "input.done")
            await received(socket)
    texts = [str(getattr(record, "fields", "")) for record in caplog.records]
    assert any("My secret." in text for text in texts) == is_wanted


async def test_the_wait_for_sound_begins_with_the_text() -> None:
    with live(app(FakeSpeechEngine())) as server:
        async with opened(server) as socket:
            await send(socket, "session.config")
            await asyncio.sleep(0.5)  # the writer has not begun yet
            await send(socket, "input.text", text="Hello there.")
            await send(socket, "input.done")
            await received(socket)
        async with httpx.AsyncClient(base_url=server.url) as http:
            metrics = (await http.get("/metrics")).text
    (wait,) = re.findall(r'first_audio_seconds_sum\{model="hum"\} (\S+)', metrics)
    assert 0 < float(wait) < 0.5


async def test_leaving_ends_the_jobs_and_the_count() -> None:
    engine = FakeSpeechEngine(is_endless=True, step_s=0.01)
    with live(app(engine, most=1)) as server:
        async with opened(server) as socket:
            await send(socket, "session.config")
            await send(socket, "input.text", text="Hello there. You.")
            assert json.loads(await socket.recv())["sentence_index"] == 0
            with pytest.raises(InvalidStatus, match="429"):
                async with opened(server):
                    pass
        until(lambda: not engine.running)
        async with opened(server) as socket:
            await send(socket, "session.config")


async def test_an_ordinary_request_is_answered_with_what_to_do() -> None:
    async with in_process(app(FakeSpeechEngine())) as client:
        answer = await client.get(ROUTE)
    assert answer.status_code == 426
