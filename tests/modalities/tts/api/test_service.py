"""From a call to its sound: checks, parts, jobs, speed, the account."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.speech_app import (
    RATE,
    SAMPLES_PER_ID,
    FakeSpeechEngine,
    OneVoice,
    SpellingFrontEnd,
    heard,
    make_speech_service,
    num_samples,
)
from triptych.core.engine_api.caller import Caller, Principal
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.errors import (
    EngineDown,
    InvalidRequest,
    NotFound,
    Overloaded,
    RateLimited,
    TriptychError,
    UnsupportedOption,
)
from triptych.modalities.tts.api.results import SpeechPiece
from triptych.modalities.tts.api.service import SpeechCall, SpeechService

LONG = "This is a sentence of some length that is spoken. " * 60


def call(text: str = "Hello there.", *, call_id: str = "c", **fields: Any) -> SpeechCall:
    names = {"key", "tenant", "owner"} & fields.keys()
    principal = Principal(**{name: fields.pop(name) for name in names})
    caller = Caller(call_id=call_id, principal=principal)
    return SpeechCall(model="hum", text=text, caller=caller, **fields)


async def spoken(service: SpeechService, wanted: SpeechCall) -> list[SpeechPiece]:
    return [piece async for piece in service.speak(wanted).pieces]


def sound(pieces: list[SpeechPiece]) -> np.ndarray:
    return np.concatenate([piece.pcm_S for piece in pieces])


async def test_a_text_becomes_its_sound() -> None:
    engine = FakeSpeechEngine()
    pieces = await spoken(make_speech_service(engine), call("Hello there, you."))
    np.testing.assert_allclose(sound(pieces), heard("Hello there, you."), atol=1e-5)
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == "stop"
    assert pieces[-1].coverage == 1.0
    assert pieces[-1].usage.num_prompt_tokens == 13
    assert pieces[-1].usage.num_output_tokens == engine.num_steps
    assert engine.finished == ["c.0"]
    assert engine.submitted["c.0"].is_live


async def test_returned_samples_are_writable_copies() -> None:
    pcm_S = (await spoken(make_speech_service(FakeSpeechEngine()), call()))[0].pcm_S
    pcm_S *= 2  # not a read-only view of what crossed the wire
    assert pcm_S.dtype == np.float32


async def test_a_call_reaches_model_and_engine_as_it_was_meant() -> None:
    engine, front = FakeSpeechEngine(), SpellingFrontEnd(takes_instructions=True, takes_speed=True)
    wanted = call(
        "I paid $3.",
        voice="BOB",
        instructions="softly",
        language="en-GB",
        speed=2.0,
        seed=7,
        is_live=False,
        tenant="t",
    )
    await spoken(make_speech_service(engine, front), wanted)
    assert front.planned == [("I paid three dollars.", "bob", "softly", "en-GB")]
    request = engine.submitted["c.0"]
    assert (request.voice, request.speed, request.tenant) == ("bob", 2.0, "t")
    assert request.sampling == SamplingParams(temperature=0.7, seed=7)
    assert not request.is_live


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "March fourth"),
        ({"language": "en-GB"}, "third of April"),
        ({"dialect": "uk"}, "third of April"),
        ({"dialect": "us", "language": "en-GB"}, "March fourth"),
        ({"voice": "eve"}, "third of April"),
    ],
)
async def test_dates_are_read_as_the_dialect_has_them(fields: dict[str, Any], words: str) -> None:
    front = SpellingFrontEnd()
    front.voices = [*front.voices, type(front.voices[0])(name="eve", language="en-GB")]
    await spoken(make_speech_service(FakeSpeechEngine(), front), call("It was 3/4/2024.", **fields))
    assert words in front.planned[0][0]


async def test_a_text_of_an_unknown_language_is_english_if_a_dialect_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    front = SpellingFrontEnd()
    monkeypatch.setattr(front, "reading", lambda *_: None)
    service = make_speech_service(FakeSpeechEngine(), front)
    for fields in ({}, {"dialect": "uk"}, {"dialect": "uk", "emoji": "name"}):
        await spoken(service, call("Room 21", **fields))
    assert [text for text, *_ in front.planned] == ["Room 21", *["Room twenty-one"] * 2]
    for fields in ({"emoji": "name"}, {"dialect": "uk", "language": "en"}):
        with pytest.raises(UnsupportedOption, match="for texts in English"):
            await spoken(service, call("Room 21", **fields))


async def test_emoji_and_acronyms_are_read_as_asked() -> None:
    front = SpellingFrontEnd()
    service = make_speech_service(FakeSpeechEngine(), front)
    await spoken(service, call("NATO 🎉", emoji="name", acronyms="keep"))
    await spoken(service, call("NATO 🎉"))
    assert "NATO" in front.planned[0][0]
    assert "party popper" in front.planned[0][0]
    assert "party popper" not in front.planned[1][0]


async def test_orders_to_the_model_are_left_in_the_text() -> None:
    for tags, words in (((), "laugh"), (("laugh",), "<laugh>")):
        front = SpellingFrontEnd(tags=tags)
        await spoken(make_speech_service(FakeSpeechEngine(), front), call("Hi <laugh> there."))
        assert words in front.planned[0][0]
        assert ("<" in front.planned[0][0]) == bool(tags)


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"text": ""}, InvalidRequest, "input"),
        ({"text": " \n\t"}, InvalidRequest, "input"),
        ({"text": "x" * 4097}, InvalidRequest, "input"),
        ({"speed": 0.2}, InvalidRequest, "speed"),
        ({"speed": float("nan")}, InvalidRequest, "speed"),
        ({"seed": 2**63}, InvalidRequest, "seed"),
        ({"voice": "../../etc/passwd"}, InvalidRequest, "voice"),
        ({"voice": "voice_" + 32 * "a"}, UnsupportedOption, "voice"),
        ({"instructions": "softly"}, UnsupportedOption, "instructions"),
        ({"language": "fr"}, UnsupportedOption, "language"),
        ({"model": "none"}, NotFound, "model"),
    ],
)
async def test_invalid_calls_are_refused_before_submission(
    fields: dict[str, Any], error: type[TriptychError], param: str
) -> None:
    engine = FakeSpeechEngine()
    with pytest.raises(error) as caught:
        make_speech_service(engine).speak(replace(call(), **fields))
    assert caught.value.param == param
    assert engine.submitted == {}


@pytest.mark.parametrize("text", ["🎉🎊", "...!?", "—", "\u200b\u200f", "你好"])
async def test_text_without_speakable_characters_is_not_submitted(text: str) -> None:
    engine = FakeSpeechEngine()
    with pytest.raises(InvalidRequest) as caught:
        await spoken(make_speech_service(engine), call(text))
    assert caught.value.param == "input"
    assert engine.submitted == {}


async def test_a_voice_of_the_callers_own() -> None:
    engine, voices = FakeSpeechEngine(), OneVoice(owner="me")
    service = make_speech_service(engine, SpellingFrontEnd(can_clone=True), voices=voices)
    await spoken(service, call(voice=voices.voice_id, owner="me"))
    assert engine.submitted["c.0"].clip is not None
    assert engine.submitted["c.0"].voice == ""
    for wrong in (call(voice=voices.voice_id, owner="you"), call(voice="voice_" + 32 * "b")):
        with pytest.raises(NotFound):
            await spoken(service, wrong)
    without = make_speech_service(engine, SpellingFrontEnd(can_clone=True))
    with pytest.raises(NotFound):
        await spoken(without, call(voice=voices.voice_id, owner="me"))


async def test_seeds_repeat_and_are_sampled_where_there_is_none() -> None:
    engine = FakeSpeechEngine()
    sampled = []
    for default, seed in ((None, None), (None, -1), (5, -1), (5, None), (5, 6)):
        await spoken(make_speech_service(engine, default_seed=default), call(seed=seed))
        sampled.append(engine.submitted["c.0"].sampling.seed)
    assert len({*sampled[:3], -1, 5}) == 5
    assert sampled[3:] == [5, 6]


async def test_a_long_text_is_spoken_by_jobs_in_a_row_without_a_seam() -> None:
    engine = FakeSpeechEngine()
    pieces = await spoken(make_speech_service(engine), call(LONG))
    np.testing.assert_allclose(sound(pieces), heard(LONG), atol=1e-4)
    assert pieces[-1].coverage == 1.0
    assert list(engine.submitted) == [f"c.{index}" for index in range(len(engine.submitted))]
    assert len(engine.submitted) >= 3
    assert {request.sampling.seed for request in engine.submitted.values()} == {
        engine.submitted["c.0"].sampling.seed
    }
    indices = [request.sampling.sample_index for request in engine.submitted.values()]
    assert indices == list(range(len(indices)))
    text = "".join(
        chr(token)
        for request in engine.submitted.values()
        for segment in request.segments
        for token in segment.prompt_ids
    )
    assert text == "".join(filter(str.isalpha, LONG))


async def test_later_job_gets_the_buffered_lead() -> None:
    engine = FakeSpeechEngine()
    await spoken(make_speech_service(engine), call(LONG))
    first, *later = (request.lead_s for request in engine.submitted.values())
    assert first == 0.0
    assert all(lead_s > 5.0 for lead_s in later)  # it hums faster than anybody listens


async def test_the_next_job_is_submitted_when_the_last_segment_of_one_begins() -> None:
    engine = FakeSpeechEngine(
        step_samples=SAMPLES_PER_ID * 10, step_s=0.001, gate=threading.Event()
    )
    front = SpellingFrontEnd()
    task = asyncio.create_task(spoken(make_speech_service(engine, front), call(LONG)))
    await asyncio.to_thread(front.is_done.wait)
    assert engine.gate is not None
    engine.gate.set()
    await task
    for number in range(len(engine.submitted) - 1):
        ahead = engine.events.index(f"submit {number + 1}")
        before, after = engine.events[:ahead], engine.events[ahead:]
        num_segments = len(engine.submitted[f"c.{number}"].segments)
        assert before.count(f"step {number}") > num_segments  # most of it was there
        assert f"step {number}" in after  # and some was not
        assert f"submit {number + 2}" in [*after, f"submit {len(engine.submitted)}"]


async def test_sound_begins_before_a_long_text_is_planned() -> None:
    class Slow(SpellingFrontEnd):
        gate = threading.Event()

        def plan(self, *args: Any, **kwargs: Any) -> Any:
            for number, planned in enumerate(super().plan(*args, **kwargs)):
                assert number < 25 or self.gate.wait(10)
                yield planned

    engine, front = FakeSpeechEngine(), Slow()
    speaking = make_speech_service(engine, front).speak(call(LONG))
    first = await anext(speaking.pieces)
    assert len(first.pcm_S)
    assert not front.gate.is_set()
    front.gate.set()
    assert (await speaking.speakable()).fraction == 1.0
    assert [piece async for piece in speaking.pieces][-1].coverage == 1.0


async def test_a_plan_that_breaks_in_the_middle_ends_the_call_with_its_error() -> None:
    class Broken(SpellingFrontEnd):
        def plan(self, *args: Any, **kwargs: Any) -> Any:
            for number, planned in enumerate(super().plan(*args, **kwargs)):
                if number == 40:
                    raise InvalidRequest("No such sound.", param="input")
                yield planned

    engine = FakeSpeechEngine()
    with pytest.raises(InvalidRequest, match="No such sound"):
        await spoken(make_speech_service(engine, Broken()), call(LONG))
    assert engine.num_steps
    assert not engine.running


@pytest.mark.parametrize("num_received", [0, 1, 30])
async def test_closing_cancels_what_runs_and_what_was_submitted_ahead(num_received: int) -> None:
    engine = FakeSpeechEngine(step_samples=SAMPLES_PER_ID * 10)
    speaking = make_speech_service(engine).speak(call(LONG))
    for _ in range(num_received):
        await anext(speaking.pieces)
    await speaking.pieces.aclose()
    assert set(engine.submitted) == {*engine.finished, *engine.cancelled}
    num_steps = engine.num_steps
    await asyncio.sleep(0.02)
    assert engine.num_steps == num_steps


async def test_cancelling_the_task_that_listens_cancels_the_jobs() -> None:
    engine = FakeSpeechEngine(is_endless=True, step_s=0.001)
    task = asyncio.create_task(spoken(make_speech_service(engine), call()))
    while engine.num_steps < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.cancelled == ["c.0"]


async def test_engine_failure_ends_the_call() -> None:
    engine = FakeSpeechEngine(error=EngineDown("The engine crashed."), num_good=3)
    speaking = make_speech_service(engine).speak(call())
    for _ in range(3):
        assert len((await anext(speaking.pieces)).pcm_S)
    with pytest.raises(EngineDown):
        await anext(speaking.pieces)


@pytest.mark.parametrize("speed", [0.25, 0.5, 1.7, 4.0])
async def test_a_model_without_speed_is_stretched_across_segments(speed: float) -> None:
    engine = FakeSpeechEngine()
    pieces = await spoken(make_speech_service(engine), call(LONG[:400], speed=speed))
    pcm_S = sound(pieces)
    assert len(pcm_S) == round(num_samples(LONG[:400]) / speed)
    assert engine.submitted["c.0"].speed == 1.0
    spectrum = np.abs(np.fft.rfft(pcm_S[RATE // 10 : -RATE // 10]))
    peak_hz = np.argmax(spectrum) * RATE / (len(pcm_S) - RATE // 5)
    assert peak_hz == pytest.approx(300, abs=8)
    assert pieces[-1].coverage == 1.0


async def test_letters_without_sounds_and_segments_cut_short_are_missing_in_the_account() -> None:
    pieces = await spoken(
        make_speech_service(FakeSpeechEngine()), call("Hello there. Где моя книга?")
    )
    assert pieces[-1].coverage == pytest.approx(10 / 21)
    assert pieces[-1].finish_reason == "stop"
    engine = FakeSpeechEngine(finish="loop")
    pieces = await spoken(make_speech_service(engine), call(LONG))
    assert pieces[-1].finish_reason == "loop"
    assert 0.5 < pieces[-1].coverage < 1.0


async def test_coverage_is_known_before_speech_begins() -> None:
    service = make_speech_service(FakeSpeechEngine())
    speaking = service.speak(call("Hello there. Где моя книга?"))
    await anext(speaking.pieces)
    assert (await speaking.speakable()).header() == "0.476"
    await speaking.pieces.aclose()


async def test_pauses_are_not_taken_for_speech() -> None:
    engine = FakeSpeechEngine(finish="length")
    services = [make_speech_service(engine, SpellingFrontEnd(pause_s=s)) for s in (0.0, 2.0)]
    without, behind = [(await spoken(service, call()))[-1].coverage for service in services]
    assert without == behind < 1.0


async def test_more_work_than_admitted_is_refused_and_room_comes_back() -> None:
    engine = FakeSpeechEngine(gate=threading.Event())
    service = make_speech_service(engine, max_queue_size=1, max_batch_size=1, max_jobs_per_key=1)
    one = asyncio.create_task(spoken(service, call(key="a", call_id="1")))
    two = asyncio.create_task(spoken(service, call(key="b", call_id="2")))
    while len(engine.submitted) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    with pytest.raises(RateLimited):
        await spoken(service, call(key="a", call_id="3"))
    with pytest.raises(Overloaded):
        await spoken(service, call(key="c", call_id="4"))
    assert engine.gate is not None
    engine.gate.set()
    await asyncio.gather(one, two)
    await spoken(service, call(key="a", call_id="5"))


async def test_speech_costs_by_its_length() -> None:
    service = make_speech_service(FakeSpeechEngine(), max_queue_tokens=100)
    await spoken(service, call("Hello there."))
    with pytest.raises(InvalidRequest, match="tokens"):
        await spoken(service, call(LONG))
    slow = call("Hello there, my dear.", speed=0.25)
    with pytest.raises(InvalidRequest, match="tokens"):
        await spoken(service, slow)


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(min_size=1, max_size=400),
    step=st.integers(1, 5000),
    pause_s=st.sampled_from([0.0, 0.1]),
)
def test_any_text_is_spoken_or_refused(text: str, step: int, pause_s: float) -> None:
    engine = FakeSpeechEngine(step_samples=step)
    service = make_speech_service(engine, SpellingFrontEnd(pause_s=pause_s))

    async def run() -> None:
        try:
            pieces = await spoken(service, call(text))
        except InvalidRequest:
            assert engine.submitted == {}
        else:
            assert pieces[-1].finish_reason == "stop"
            assert 0.0 <= pieces[-1].coverage <= 1.0
        assert not engine.running

    asyncio.run(run())


@pytest.mark.parametrize(
    "text",
    [
        "Hello\0there",
        "\u202eHello\u202c there",
        "H" + "\u0301" * 10_000,
        "Zalgo " + "e\u0301\u0302\u0303" * 1000,
        "a" * 4096,
        "word " * 800,
        "1" * 4000,
        "(" * 2000 + "x" + ")" * 2000,
        "https://example.com/" + "a/" * 2000,
    ],
)
async def test_hostile_text_is_spoken_in_bounds_or_refused(text: str) -> None:
    engine = FakeSpeechEngine(step_samples=10**9)
    service = make_speech_service(engine, max_characters=20_000)
    try:
        pieces = await spoken(service, call(text))
    except InvalidRequest:
        assert engine.submitted == {}
    else:
        assert 0.0 < pieces[-1].coverage <= 1.0
        assert len(sound(pieces)) <= SAMPLES_PER_ID * 20 * len(text)
