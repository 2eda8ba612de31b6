"""A conversation with served models: a voice asks, the answer is heard, speech interrupts it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.resources.realtime.realtime import AsyncRealtimeConnection

from support.serve_process import Server

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]
RATE = 24_000
PIECE = RATE // 10 * 2
SILENCE = bytes(RATE * 2)


async def hear(talk: AsyncRealtimeConnection, sound: bytes) -> None:
    """Send sound as fast as it is spoken."""
    for start in range(0, len(sound), PIECE):
        piece = base64.b64encode(sound[start : start + PIECE]).decode()
        await talk.input_audio_buffer.append(audio=piece)
        await asyncio.sleep(0.1)


async def until(talk: AsyncRealtimeConnection, *kinds: str) -> list[Any]:
    """The events up to one of these types."""
    events: list[Any] = []
    async for event in talk:
        events.append(event)
        if event.type in kinds:
            break
    return events


@pytest.fixture
async def client(default_server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = f"http://127.0.0.1:{default_server.port}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as connection:
        yield connection


async def spoken(client: openai.AsyncOpenAI, text: str) -> bytes:
    reply = await client.audio.speech.create(
        model="triptych-voice", voice="alloy", input=text, response_format="pcm"
    )
    return reply.content


async def test_a_question_is_heard_answered_and_interrupted(client: openai.AsyncOpenAI) -> None:
    question = await spoken(client, "What is the capital of Italy?")
    async with (
        asyncio.timeout(240),
        client.realtime.connect(model="smollm2-135m-instruct") as talk,
    ):
        audio: Any = {"input": {"transcription": {"model": "whisper-tiny.en"}}}
        await talk.session.update(session={"type": "realtime", "audio": audio})
        asking = asyncio.create_task(hear(talk, question + SILENCE))
        events = await until(talk, "response.output_audio.delta")
        await asking
        heard = [
            each.transcript for each in events if each.type.endswith("transcription.completed")
        ]
        assert "capital of italy" in heard[0].lower()
        await until(talk, "response.done")
        content: Any = [{"type": "input_text", "text": "Tell a long story about a king."}]
        item: Any = {"type": "message", "role": "user", "content": content}
        await talk.conversation.item.create(item=item)
        await talk.response.create()
        await until(talk, "response.output_audio.delta")
        interrupting = asyncio.create_task(hear(talk, question))
        events = await until(talk, "conversation.item.truncated")
        await interrupting
    done = next(each.response for each in events if each.type == "response.done")
    assert done.status == "cancelled"
    assert done.status_details.reason == "turn_detected"
    assert events[-1].audio_end_ms >= 0


async def test_dictation(client: openai.AsyncOpenAI) -> None:
    sound = await spoken(client, "The morning train leaves at nine.")
    query = {"intent": "transcription"}
    async with (
        asyncio.timeout(240),
        client.realtime.connect(model="whisper-tiny.en", extra_query=query) as talk,
    ):
        saying = asyncio.create_task(hear(talk, sound + SILENCE))
        events = await until(talk, "conversation.item.input_audio_transcription.completed")
        await saying
    assert "train leaves" in events[-1].transcript.lower()
    assert all(not each.type.startswith("response.") for each in events)
