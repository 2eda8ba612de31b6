"""An answer that is spoken while it is written: order, urgency, rests, cancelling, pressure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from support.speech_app import (
    RATE,
    FakeSpeechEngine,
    SpellingFrontEnd,
    make_speech_service,
    num_samples,
)
from triptych.core.engine_api.caller import Caller, Principal
from triptych.core.errors import InvalidRequest, JobFailed, RateLimited
from triptych.modalities.talk.ports import SpokenChunk
from triptych.modalities.talk.speaking import answer
from triptych.modalities.talk.speaking.answer import AnswerSpeaker
from triptych.modalities.tts.api.service import SpeechCall

CALL = SpeechCall(model="hum", text="", caller=Caller(call_id="c", principal=Principal(key="k")))
SENTENCE = "This is one whole sentence. "


async def written(
    texts: Iterable[str], error: Exception | None = None
) -> AsyncGenerator[str, None]:
    for text in texts:
        yield text
        await asyncio.sleep(0)
    if error is not None:
        raise error


async def never() -> AsyncGenerator[str, None]:
    raise AssertionError("nothing is read")
    yield ""


async def spoken(speaker: AnswerSpeaker, *texts: str) -> list[SpokenChunk]:
    return [chunk async for chunk in speaker.speak(written(texts), CALL)]


async def _collect(chunks: AsyncGenerator[SpokenChunk, None], texts: list[str]) -> None:
    async for chunk in chunks:
        texts.append(chunk.text)  # noqa: PERF401 - also what precedes an error


def make_speaker(engine: FakeSpeechEngine, front: SpellingFrontEnd | None = None) -> AnswerSpeaker:
    return AnswerSpeaker(make_speech_service(engine, front, max_characters=20))


def length(chunks: Iterable[SpokenChunk]) -> int:
    return sum(len(chunk.pcm_S) for chunk in chunks)


async def test_pieces_are_spoken_in_order_with_their_texts() -> None:
    engine = FakeSpeechEngine()
    text = "Hello there, you two.\n```\ncode.\n```\n\N{GRINNING FACE} It is a longer one. Bye."
    chunks = await spoken(make_speaker(engine), *text)
    assert length(chunks) == num_samples("Hello there, you two. It is a longer one. Bye.")
    assert "".join(chunk.text for chunk in chunks) == text
    assert next(chunk for chunk in chunks if "code" in chunk.text).pcm_S.size == 0
    assert engine.finished == [f"c.say{n}.0" for n in range(1, len(engine.finished) + 1)]


async def test_the_first_sound_comes_while_the_sentence_is_written() -> None:
    async def slow() -> AsyncGenerator[str, None]:
        yield "The capital of France is Paris, and "
        await asyncio.sleep(30)

    async with aclosing(make_speaker(FakeSpeechEngine()).speak(slow(), CALL)) as chunks:
        async with asyncio.timeout(5):
            first = await anext(chunks)
    assert first.text == "The capital of France is Paris, "


async def test_later_jobs_are_due_after_the_sound_before_them() -> None:
    engine = FakeSpeechEngine()
    await spoken(make_speaker(engine), SENTENCE, "And here is another. ", "End.")
    leads = [request.lead_s for request in engine.submitted.values()]
    assert leads[0] == 0.0
    assert 0.5 < leads[1] < leads[2]
    assert len({request.sampling.seed for request in engine.submitted.values()}) == 1


async def test_rests_are_between_pieces_alone() -> None:
    front = SpellingFrontEnd(pause_s=0.25, most=500)
    chunks = await spoken(make_speaker(FakeSpeechEngine(), front), SENTENCE, "And here is another.")
    second = next(chunk for chunk in chunks if chunk.text.startswith("And"))
    assert np.abs(second.pcm_S[: RATE // 4]).max() == 0
    assert np.abs(chunks[0].pcm_S).max() > 0


async def test_what_has_no_sound_is_passed_over() -> None:
    chunks = await spoken(make_speaker(FakeSpeechEngine()), "Это не слышно. ", "This is heard.")
    assert chunks[0].text == "Это не слышно. "
    assert length(chunks) == num_samples("This is heard.")


async def test_closing_ends_the_jobs_and_the_answer() -> None:
    engine, closed = FakeSpeechEngine(is_endless=True), asyncio.Event()

    async def endless() -> AsyncGenerator[str, None]:
        try:
            while True:
                yield SENTENCE
                await asyncio.sleep(0.001)
        finally:
            closed.set()

    service = make_speech_service(engine)
    async with aclosing(AnswerSpeaker(service).speak(endless(), CALL)) as chunks:
        await anext(chunks)
    assert closed.is_set()
    assert engine.cancelled == ["c.say1.0"]
    assert service._admission.num_jobs == 0


async def test_a_writer_waits_for_slow_speech(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "MAX_WAITING", 100)
    num_written = 0

    async def endless() -> AsyncGenerator[str, None]:
        nonlocal num_written
        while True:
            num_written += 1
            yield SENTENCE

    async with aclosing(
        make_speaker(FakeSpeechEngine(is_endless=True)).speak(endless(), CALL)
    ) as chunks:
        await anext(chunks)
        await asyncio.sleep(0.05)
    assert num_written < 12


async def test_errors_of_the_answer_and_of_speech_end_it() -> None:
    failed = make_speaker(FakeSpeechEngine()).speak(
        written([SENTENCE, "And half"], JobFailed("over")), CALL
    )
    texts: list[str] = []
    with pytest.raises(JobFailed, match="over"):
        await _collect(failed, texts)
    assert "".join(texts) == SENTENCE + "And half"
    with pytest.raises(JobFailed, match="hoarse"):
        await spoken(make_speaker(FakeSpeechEngine(error=JobFailed("hoarse"))), SENTENCE)


async def test_voice_and_room_are_checked_before_anything_is_written() -> None:
    with pytest.raises(InvalidRequest, match="ada and bob"):
        await anext(make_speaker(FakeSpeechEngine()).speak(never(), replace(CALL, voice="cy")))
    full = make_speech_service(FakeSpeechEngine(), max_tokens_per_key=10_000)
    with full._admission.admit(key="k", num_jobs=1, num_tokens=9_000), pytest.raises(RateLimited):
        await anext(AnswerSpeaker(full).speak(never(), CALL))
