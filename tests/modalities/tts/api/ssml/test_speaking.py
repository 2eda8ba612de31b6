"""From an SSML document to its sound: pauses, voices, rates and the times of words."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from support.speech_app import (
    RATE,
    SAMPLES_PER_ID,
    FakeSpeechEngine,
    OneVoice,
    SpellingFrontEnd,
    make_speech_service,
)
from triptych.core.engine_api.caller import Caller
from triptych.core.errors import InvalidRequest, RequestError, UnsupportedOption
from triptych.modalities.tts.api.results import SpeechPiece
from triptych.modalities.tts.api.service import SpeechCall
from triptych.modalities.tts.api.text.guard import Unspeakable
from triptych.modalities.tts.wire import VoiceClip
from triptych.schedulers.admission import Admission


def call(body: str, **fields: Any) -> SpeechCall:
    text = f"<speak>{body}</speak>"
    caller = Caller(call_id="c")
    return SpeechCall(model="hum", text=text, input_format="ssml", caller=caller, **fields)


async def spoken(
    body: str, front: SpellingFrontEnd | None = None, **fields: Any
) -> tuple[list[SpeechPiece], FakeSpeechEngine]:
    engine = FakeSpeechEngine()
    stream = make_speech_service(engine, front or SpellingFrontEnd()).speak(call(body, **fields))
    return [piece async for piece in stream.pieces], engine


def sound(pieces: list[SpeechPiece]) -> np.ndarray:
    return np.concatenate([piece.pcm_S for piece in pieces])


async def test_pauses_are_exact_to_the_sample_and_words_follow_them() -> None:
    body = (
        '<break time="100ms"/>Hi <break time="250.5ms"/>there <sub alias="you all">y</sub>!<break/>'
    )
    pieces, _ = await spoken(body)
    ab, cd = 2 * SAMPLES_PER_ID, 11 * SAMPLES_PER_ID
    first, second, last = (round(seconds * RATE) for seconds in (0.1, 0.2505, 0.75))
    sound_S = sound(pieces)
    assert len(sound_S) == first + ab + second + cd + last
    assert not sound_S[first + ab : first + ab + second].any()
    words = [word for piece in pieces for word in piece.words]
    document = call(body).text
    written = [(word.text, document[slice(*word.source)].strip()) for word in words]
    assert written == [("Hi", "Hi"), ("there", "there"), ("y!", "y</sub>!")]
    starts = [word.start_s * RATE for word in words]
    there = first + ab + second
    np.testing.assert_allclose(starts, [first, there, there + 5 * SAMPLES_PER_ID], atol=1)
    assert words[-1].end_s * RATE == pytest.approx(there + cd, abs=1)
    assert pieces[-1].finish_reason == "stop"
    assert pieces[-1].coverage == 1.0
    assert pieces[-1].usage.num_prompt_tokens == 13


async def test_each_passage_has_its_voice_and_rate() -> None:
    front = SpellingFrontEnd(takes_speed=True)
    body = 'Hi <voice name="BOB">you <prosody rate="150%">now</prosody></voice>'
    _, engine = await spoken(body, front, speed=2.0, seed=5)
    requests = engine.submitted.values()
    assert [(each.voice, each.speed) for each in requests] == [("ada", 2), ("bob", 2), ("bob", 3)]
    assert {each.sampling.seed for each in requests} == {5}


async def test_a_stretched_passage_does_not_stretch_the_pause_after_it() -> None:
    pieces, _ = await spoken('<prosody rate="2">Hello there</prosody><break time="1s"/>you')
    words = [word for piece in pieces for word in piece.words]
    num_slow = 10 * SAMPLES_PER_ID // 2
    assert words[1].end_s == pytest.approx(num_slow / RATE, abs=0.01)
    assert words[2].start_s == pytest.approx(1 + num_slow / RATE, abs=0.05)


async def test_passages_without_a_break_rest_as_the_model_does() -> None:
    front = SpellingFrontEnd()
    front.rest_s = lambda boundary: boundary / 10  # type: ignore[method-assign]
    pieces, _ = await spoken('Hi. <voice name="bob">You</voice>', front)
    assert len(sound(pieces)) == 5 * SAMPLES_PER_ID + round(0.3 * RATE)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ('a <voice name="zoe">b</voice>', InvalidRequest, "line 1, column 28: There are the"),
        ('<prosody rate="9">a</prosody>', InvalidRequest, "speed must be between"),
        ('<lang xml:lang="de">a</lang>', UnsupportedOption, "reads numbers and signs in English"),
    ],
)
async def test_a_passage_is_checked_before_any_sound(
    body: str, error: type[RequestError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        make_speech_service(FakeSpeechEngine()).speak(call(body))
    assert caught.value.param == "input"


async def test_a_field_of_the_call_is_named_as_one() -> None:
    with pytest.raises(InvalidRequest, match="There are the voices") as caught:
        make_speech_service(FakeSpeechEngine()).speak(call("a", voice="zoe"))
    assert caught.value.param == "voice"
    assert "SSML" not in str(caught.value)


async def test_english_words_are_for_english_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    front = SpellingFrontEnd()
    monkeypatch.setattr(front, "reading", lambda *_: None)
    body = '<say-as interpret-as="digits">12</say-as>'
    with pytest.raises(UnsupportedOption, match="for texts in English"):
        make_speech_service(FakeSpeechEngine(), front).speak(call(body))


async def test_a_passage_without_sound_is_missed_and_not_spoken() -> None:
    body = 'Hi <voice name="bob">🎉</voice> <prosody rate="2">йй</prosody>'
    stream = make_speech_service(FakeSpeechEngine()).speak(call(body))
    pieces = [piece async for piece in stream.pieces]
    assert pieces[-1].coverage == 0.5
    assert (await stream.speakable()).fraction == 0.5


async def test_a_document_without_sound_is_refused() -> None:
    with pytest.raises(Unspeakable):
        await spoken('🎉<voice name="bob">…</voice>')


async def test_an_ended_call_leaves_no_job_and_no_plan() -> None:
    engine = FakeSpeechEngine(is_endless=True)
    stream = make_speech_service(engine).speak(call('Hi <voice name="bob">you</voice>'))
    await anext(stream.pieces)
    await asyncio.sleep(0.1)  # the next passage begins while this one is spoken
    await stream.pieces.aclose()
    assert list(engine.submitted) == ["c.passage0.0", "c.passage1.0"]
    assert not engine.running
    assert stream.ignored == ()


async def test_a_passage_begins_near_the_end_of_the_one_before_and_no_sooner() -> None:
    engine = FakeSpeechEngine(is_endless=True)
    body = f'{"so on and on " * 9}<voice name="bob">you</voice><voice name="ada">me</voice>'
    stream = make_speech_service(engine).speak(call(body))
    num_early = 0
    async for piece in stream.pieces:
        await asyncio.sleep(0.001)
        num_early += len(piece.pcm_S)
        if len(engine.submitted) > 1:
            break
    await stream.pieces.aclose()
    assert num_early > 2 * RATE
    assert list(engine.submitted) == ["c.passage0.0", "c.passage1.0"]
    assert engine.submitted["c.passage1.0"].lead_s > num_early / RATE


async def test_a_passage_has_the_time_of_the_sound_with_which_it_is_begun() -> None:
    """Of a model that makes a passage in one piece, nothing else precedes the next."""
    engine = FakeSpeechEngine(step_samples=10 * RATE)
    body = f'{"so on " * 9}<voice name="bob">you</voice>'
    async for _ in make_speech_service(engine).speak(call(body)).pieces:
        pass
    assert engine.submitted["c.passage1.0"].lead_s > 0.9 * 36 * SAMPLES_PER_ID / RATE


async def test_what_a_document_costs_is_what_is_spoken_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs: list[int] = []

    def admit(_: Admission, num_tokens: int, **__: Any) -> nullcontext[None]:
        costs.append(num_tokens)
        return nullcontext()

    monkeypatch.setattr(Admission, "admit", admit)
    word = "hello " * 20
    for body in (word, f"<s><s><s>{word}</s></s></s>", f'<prosody rate="50%">{word}</prosody>'):
        await spoken(body)
    assert costs[0] <= costs[1] <= 1.1 * costs[0] < 1.9 * costs[0] <= costs[2]


async def test_a_voice_of_the_caller_is_checked_once() -> None:
    asked: list[str] = []

    class Voices(OneVoice):
        def clip(self, voice_id: str, owner: str, model: str) -> VoiceClip | None:
            asked.append(voice_id)
            return super().clip(voice_id, owner, model)

    voices = Voices()
    front = SpellingFrontEnd(can_clone=True)
    service = make_speech_service(FakeSpeechEngine(), front, voices=voices)
    body = f'<voice name="{voices.voice_id}">a<break/>b<break/>c</voice>'
    assert [piece async for piece in service.speak(call(body)).pieces]
    assert len(asked) == 1 + 3  # before any sound, and for each job
