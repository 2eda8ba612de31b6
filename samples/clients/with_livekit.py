# /// script
# dependencies = ["livekit-agents==1.8.9", "livekit-plugins-openai==1.8.9"]
# ///
"""LiveKit's agents with its plugin for OpenAI: an answer, a call, spoken conversations.

The server needs a speech model and a transcription model, too. A session here has no room: text or
sound goes in, and its output is recorded.
"""

from __future__ import annotations

import asyncio

from checks import Server, run_checks, said
from livekit import rtc
from livekit.agents import Agent, AgentSession, function_tool, llm
from livekit.agents.voice.io import AudioOutput, AudioOutputCapabilities
from livekit.agents.voice.run_result import FunctionCallEvent
from livekit.plugins import openai
from openai.types.realtime import AudioTranscription
from tasks import MAX_TOKENS, PRICE_QUESTION, QUESTION
from tasks import look_up_price as find_price

PIECE, SILENCE = 2400, 24_000
"""Samples of a piece of sound, and of the silence that ends a turn, at 24 kHz."""
INSTRUCTIONS = "You are a helpful voice AI assistant. Answer in one short sentence."


class Recorder(AudioOutput):
    """The sound of a session, recorded instead of played."""

    def __init__(self, sample_rate: int) -> None:
        capabilities = AudioOutputCapabilities(pause=False)
        super().__init__(label="recorder", capabilities=capabilities, sample_rate=sample_rate)
        self.frames: list[rtc.AudioFrame] = []

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        """Record the next piece."""
        await super().capture_frame(frame)
        self.frames.append(frame)

    def flush(self) -> None:
        """Report the end of an utterance as played."""
        super().flush()
        if self.frames:
            seconds = sum(frame.duration for frame in self.frames)
            self.on_playback_finished(playback_position=seconds, interrupted=False)

    def clear_buffer(self) -> None:
        """Nothing waits to be played."""


@function_tool
async def look_up_price(item: str) -> str:
    """Look up the price of an item, such as "apple"."""
    return find_price(item)


def llm_of(server: Server) -> openai.LLM:
    """The chat model."""
    return openai.LLM(
        model=server.model,
        base_url=server.v1,
        api_key=server.key,
        temperature=0,
        max_completion_tokens=MAX_TOKENS,
    )


def tts_of(server: Server) -> openai.TTS:
    """The voice; its instructions are ignored by models that follow none."""
    return openai.TTS(
        model=server.speech_model,
        voice="ash",
        instructions="Speak in a friendly and conversational tone.",
        base_url=server.v1,
        api_key=server.key,
    )


def stt_of(server: Server) -> openai.STT:
    """The recognizer of speech."""
    return openai.STT(model=server.transcription_model, base_url=server.v1, api_key=server.key)


async def answer(server: Server) -> str:
    """Ask for one answer."""
    async with AgentSession(llm=llm_of(server)) as session:
        await session.start(Agent(instructions=INSTRUCTIONS))
        events = await session.run(user_input=QUESTION)
        message = events.expect.next_event().is_message(role="assistant").event()
    return said(message.item.text_content, "Paris")


async def call(server: Server) -> str:
    """A call by choice."""
    async with AgentSession(llm=llm_of(server), max_tool_steps=1) as session:
        await session.start(Agent(instructions=INSTRUCTIONS, tools=[look_up_price]))
        result = await session.run(user_input=PRICE_QUESTION)
    calls = [event.item for event in result.events if isinstance(event, FunctionCallEvent)]
    return said(calls[0].arguments if calls else "", "lamp")


async def conversation(server: Server) -> str:
    """A spoken question, and a spoken answer to it."""
    tts, stt = tts_of(server), stt_of(server)
    question = [event.frame async for event in tts.synthesize(QUESTION)]
    recorder = Recorder(tts.sample_rate)
    async with AgentSession(llm=llm_of(server), tts=tts, stt=stt) as session:
        session.output.audio = recorder
        await session.start(Agent(instructions=INSTRUCTIONS))
        await session.run(user_input=await heard(stt, question))
        await session.drain()
    return said(await heard(stt, recorder.frames), "Paris")


async def realtime(server: Server) -> str:
    """A spoken question to a realtime model, and its answer."""
    tts = tts_of(server)
    frames = [event.frame async for event in tts.synthesize(QUESTION)]
    question = rtc.combine_audio_frames(frames)
    model = openai.realtime.RealtimeModel(
        model=server.model,
        voice="alloy",
        input_audio_transcription=AudioTranscription(model=server.transcription_model),
        base_url=server.v1,
        api_key=server.key,
    )
    session = model.session()
    answers: asyncio.Queue[llm.GenerationCreatedEvent] = asyncio.Queue()
    errors: list[object] = []
    session.on("generation_created", answers.put_nowait)
    session.on("error", errors.append)
    await session.update_instructions(INSTRUCTIONS)
    for start in range(0, len(question.data) + SILENCE, PIECE):
        piece = (bytes(question.data) + bytes(2 * SILENCE))[2 * start : 2 * (start + PIECE)]
        session.push_audio(rtc.AudioFrame(piece, question.sample_rate, 1, len(piece) // 2))
        await asyncio.sleep(PIECE / question.sample_rate)
    answer = await asyncio.wait_for(answers.get(), 60)
    text = "".join(
        [str(part) async for each in answer.message_stream async for part in each.text_stream]
    )
    await session.aclose()
    assert not errors, errors
    return said(text, "Paris")


async def heard(stt: openai.STT, frames: list[rtc.AudioFrame]) -> str:
    """The words in a sound."""
    event = await stt.recognize(rtc.combine_audio_frames(frames))
    return event.alternatives[0].text


def main() -> None:
    """Run the checks."""
    run_checks("livekit-agents", answer, call, conversation, realtime)


if __name__ == "__main__":
    main()
