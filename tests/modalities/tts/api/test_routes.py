"""`/v1/audio/speech`: every format, both ways of streaming, fields, headers, failures."""

from __future__ import annotations

import asyncio
import base64
import math
import threading
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.audio_signals import decode_av, decode_soundfile
from support.http import ask, documents, in_process, live, until
from support.speech_app import (
    RATE,
    TONE_HZ,
    FakeSpeechEngine,
    OneVoice,
    SpellingFrontEnd,
    heard,
    make_speech_app,
    make_speech_service,
    num_samples,
    speech,
)
from triptych.core.errors import EngineDown, NonFinite
from triptych.core.media.audio.containers import FORMATS
from triptych.modalities.tts.api.protocol import REFUSED

PATH = "/v1/audio/speech"
TEXT = "Hello there, this is a sentence. And this is another one, a little longer."
TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg; codecs=opus",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
DELAY = {"aac": 1024, "mp3": 1105}  # samples in front that a plain decoder leaves in


async def post(engine: FakeSpeechEngine, body: dict[str, Any], **server: Any) -> httpx.Response:
    async with in_process(make_speech_app(engine, **server)) as client:
        return await client.post(PATH, json=body)


def decoded(data: bytes, kind: str) -> np.ndarray:
    """Samples at 24 kHz, by a decoder that shares no code with the encoder's framing."""
    if kind == "pcm":
        return np.frombuffer(data, "<i2") / 32767
    pcm_S, rate = decode_av(data, kind)
    return pcm_S[:: rate // RATE]


@pytest.mark.parametrize("kind", FORMATS)
async def test_every_format_is_one_whole_stream_without_a_seam(kind: str) -> None:
    reply = await post(FakeSpeechEngine(step_samples=777), speech(TEXT, response_format=kind))
    assert reply.status_code == 200
    assert reply.headers["content-type"] == TYPES[kind]
    pcm_S, num = decoded(reply.content, kind), num_samples(TEXT)
    assert 0 <= len(pcm_S) - num <= {"aac": 2048, "mp3": 576}.get(kind, 0)
    if kind in ("wav", "opus", "mp3"):
        start = DELAY.get(kind, 0) if kind == "mp3" else 0
        decoded_S, rate = decode_soundfile(reply.content)
        assert len(decoded_S) - start == pytest.approx(num * rate / RATE, abs=700)
    body_S = pcm_S[DELAY["aac"] if kind == "aac" else 0 :][:num]
    wanted_S = heard(TEXT)
    assert np.corrcoef(body_S, wanted_S)[0, 1] > 0.999
    # Every sample of a tone follows from the two before it: a click at a seam would not.
    other_S = (body_S - wanted_S)[2000:-2000]
    clicks_S = (
        other_S[2:] + other_S[:-2] - 2 * math.cos(2 * math.pi * TONE_HZ / RATE) * other_S[1:-1]
    )
    assert np.abs(clicks_S).max() < 0.02


async def test_what_openai_leaves_out_is_mp3_and_the_default_voice() -> None:
    engine = FakeSpeechEngine()
    body = speech()
    del body["voice"]
    reply = await post(engine, body)
    assert reply.headers["content-type"] == "audio/mpeg"
    assert next(iter(engine.submitted.values())).voice == "ada"


async def test_headers_have_rate_coverage_and_request_id() -> None:
    reply = await post(FakeSpeechEngine(), speech("Hello there. Где моя книга?"))
    assert reply.headers["x-speech-sample-rate"] == "24000"
    assert reply.headers["x-speech-coverage"] == "0.476"
    assert reply.headers["x-request-id"]
    assert "content-length" not in reply.headers


@pytest.mark.parametrize("kind", FORMATS)
async def test_events_carry_the_same_file(kind: str) -> None:
    whole = await post(FakeSpeechEngine(), speech(TEXT, response_format=kind))
    body = speech(TEXT, response_format=kind, stream_format="sse")
    reply = await post(FakeSpeechEngine(), body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *deltas, done = documents(reply.text)
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    assert len(deltas) > 5
    audio = [base64.b64decode(delta["audio"], validate=True) for delta in deltas]
    assert all(audio)
    assert b"".join(audio) == whole.content
    num_letters = sum(map(str.isalpha, TEXT))
    num_steps = done["usage"]["output_tokens"]
    usage = {
        "input_tokens": num_letters,
        "output_tokens": num_steps,
        "total_tokens": num_letters + num_steps,
    }
    assert done == {
        "type": "speech.audio.done",
        "usage": usage,
        "token_usage": usage,
        "finish_reason": "stop",
        "coverage": 1.0,
    }


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(["pcm", "wav", "flac", "mp3", "aac"]),
    steps=st.tuples(st.integers(1, 9000), st.integers(1, 9000)),
    speed=st.sampled_from([1.0, 1.5]),
)
def test_how_the_engine_cuts_its_sound_never_changes_a_byte(
    kind: str, steps: tuple[int, int], speed: float
) -> None:
    async def answers() -> list[bytes]:
        body = speech("One two three. Four.", response_format=kind, speed=speed)
        engines = [FakeSpeechEngine(step_samples=max(200, step)) for step in steps]
        return [(await post(engine, body)).content for engine in engines]

    one, two = asyncio.run(answers())
    assert one == two


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": ""}, "input", "empty"),
        ({"input": "🎉"}, "input", "no words"),
        ({"input": "x" * 100_000}, "input", "4096"),
        ({"input": None}, "input", "required"),
        ({"voice": "nobody"}, "voice", "ada and bob"),
        ({"voice": {"id": "../../etc/passwd"}}, "voice", "ada and bob"),
        ({"voice": {"id": "voice_" + 32 * "a"}}, "voice", "built-in voices"),
        ({"voice": {"id": 5}}, "voice.id", "string"),
        ({"voice": {"name": "ada"}}, "voice.id", "required"),
        ({"voice": 5}, "voice", ""),
        ({"speed": 4.5}, "speed", "4"),
        ({"speed": 0.1}, "speed", "0.25"),
        ({"speed": "1"}, "speed", "number"),
        ({"response_format": "mp4"}, "response_format", "'mp3', 'opus'"),
        ({"stream_format": "ws"}, "stream_format", "'audio' or 'sse'"),
        ({"sample_rate": 7999}, "sample_rate", "8000"),
        ({"sample_rate": 48_001}, "sample_rate", "48000"),
        ({"sample_rate": 16_000.5}, "sample_rate", "integer"),
        ({"sample_rate": 44_000}, "sample_rate", "44100, 48000 Hz; wav"),
        ({"language": "Klingon!"}, "language", ""),
        ({"normalize": {"emoji": "sing"}}, "normalize.emoji", "'drop' or 'name'"),
        ({"normalise": {}}, "normalise", "Unknown field"),
        ({"seed": 2**64}, "seed", ""),
    ],
)
@pytest.mark.parametrize("stream_format", ["audio", "sse"])
async def test_mistakes_are_named(
    fields: dict[str, Any], param: str, message: str, stream_format: str
) -> None:
    engine = FakeSpeechEngine()
    reply = await post(engine, speech(stream_format=stream_format) | fields)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["code"] in ("invalid_request", "unsupported_option")
    assert message in error["message"]
    assert engine.submitted == {}


async def test_an_unknown_model_is_not_found() -> None:
    reply = await post(FakeSpeechEngine(), speech() | {"model": "tts-9"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "model")
    assert "hum" in reply.json()["error"]["message"]


@pytest.mark.parametrize("name", REFUSED)
async def test_fields_of_other_servers_are_refused_by_name(name: str) -> None:
    reply = await post(FakeSpeechEngine(), speech() | {name: "x"})
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_option", name)
    for value in (*REFUSED[name].neutral, None):
        assert (await post(FakeSpeechEngine(), speech() | {name: value})).status_code == 200


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
async def test_instructions_reach_the_voices_that_follow_them_and_are_else_reported(
    stream_format: str,
) -> None:
    body = speech(stream_format=stream_format, instructions="softly")
    for takes, ignored in ((True, None), (False, "instructions")):
        engine, front = FakeSpeechEngine(), SpellingFrontEnd(takes_instructions=takes)
        app = make_speech_app(engine, make_speech_service(engine, front))
        async with in_process(app) as client:
            reply = await client.post(PATH, json=body)
        assert (reply.status_code, reply.headers.get("x-triptych-ignored")) == (200, ignored)
        assert [instructions for _, _, instructions, _ in front.planned] == ["softly" * takes]
        plain = await post(FakeSpeechEngine(), body | {"instructions": ""})
        assert "x-triptych-ignored" not in plain.headers


@pytest.mark.parametrize(("voice", "ignored"), [("bob", None), ("nova", "voice")])
async def test_a_voice_that_the_default_stands_in_for_is_reported(
    voice: str, ignored: str | None
) -> None:
    engine = FakeSpeechEngine()
    reply = await post(engine, speech() | {"voice": voice})
    assert (reply.status_code, reply.headers.get("x-triptych-ignored")) == (200, ignored)
    assert next(iter(engine.submitted.values())).voice == ("ada" if ignored else "bob")


@pytest.mark.parametrize("rate", [8000, 16_000, 22_050, 24_000, 44_100, 48_000])
@pytest.mark.parametrize("kind", ["pcm", "wav", "flac", "mp3", "aac"])
async def test_the_file_has_the_rate_that_was_asked_for(kind: str, rate: int) -> None:
    reply = await post(FakeSpeechEngine(), speech(TEXT, response_format=kind, sample_rate=rate))
    assert (reply.status_code, reply.headers["x-speech-sample-rate"]) == (200, str(rate))
    num = math.floor(num_samples(TEXT) * rate / RATE + 0.5)
    if kind == "pcm":
        assert len(reply.content) == 2 * num
        return
    pcm_S, heard_rate = decode_av(reply.content, kind)
    assert heard_rate == rate
    assert 0 <= len(pcm_S) - num <= {"aac": 2048, "mp3": 1152}.get(kind, 0)


async def test_the_longest_text_is_a_choice() -> None:
    engine = FakeSpeechEngine(step_samples=10**6)
    service = make_speech_service(engine, max_characters=6000)
    async with in_process(make_speech_app(engine, service)) as client:
        reply = await client.post(PATH, json=speech("word " * 1000, response_format="pcm"))
        refused = await client.post(PATH, json=speech("word " * 1300))
    assert reply.status_code == 200
    assert "6000" in refused.json()["error"]["message"]


async def test_custom_voices_belong_to_their_key() -> None:
    engine, voices = FakeSpeechEngine(), OneVoice()
    service = make_speech_service(engine, SpellingFrontEnd(can_clone=True), voices=voices)
    app = make_speech_app(engine, service, api_key=("one", "two"))
    bodies = [speech() | {"voice": voice} for voice in ({"id": voices.voice_id}, voices.voice_id)]
    async with in_process(app, authorization="Bearer one") as client:
        assert (await client.post(PATH, json=bodies[0])).status_code == 404
        voices.owner = app_owner("one")
        for body in bodies:
            assert (await client.post(PATH, json=body)).status_code == 200
    async with in_process(app, authorization="Bearer two") as client:
        assert (await client.post(PATH, json=bodies[0])).status_code == 404
    assert all(request.clip is not None for request in engine.submitted.values())


def app_owner(key: str) -> str:
    from triptych.core.http.auth import Keyring

    return Keyring(("one", "two")).identify(f"Bearer {key}").owner


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
async def test_an_error_before_the_first_sound_has_its_own_status(stream_format: str) -> None:
    engine = FakeSpeechEngine(error=EngineDown("The engine died.", retry_after_s=3))
    reply = await post(engine, speech(stream_format=stream_format))
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "3")
    assert reply.json()["error"]["code"] == "engine_down"


async def test_events_end_with_an_error_where_the_engine_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeSpeechEngine(error=NonFinite("NaN."), num_good=4)
    body = speech(TEXT, stream_format="sse", response_format="pcm")
    *deltas, last = documents((await post(engine, body)).text)
    assert len(deltas) == 4
    assert last["error"]["code"] == "non_finite"
    assert "stream ended with NonFinite" in caplog.text


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (NonFinite("NaN."), "stream ended with NonFinite"),
        (EngineDown("The engine died."), "stream ended with EngineDown"),
    ],
)
def test_a_file_that_cannot_be_finished_is_cut_off(
    caplog: pytest.LogCaptureFixture, error: Exception, logged: str
) -> None:
    engine = FakeSpeechEngine(error=error, num_good=5)
    with live(make_speech_app(engine)) as server:
        received = bytearray()
        with (
            httpx.Client(base_url=server.url, verify=False) as client,
            client.stream("POST", PATH, json=speech(TEXT, response_format="pcm")) as reply,
        ):
            assert reply.status_code == 200
            with pytest.raises(httpx.TransportError):
                received.extend(byte for chunk in reply.iter_raw() for byte in chunk)
        assert len(received) <= 5 * 2 * 1920
        assert logged in caplog.text
        assert "Exception in ASGI" not in caplog.text
        assert "without completing" not in caplog.text
        engine.error = None
        assert ask(server.url, PATH, json=speech()).status_code == 200
        until(lambda: not server.num_connections or not engine.running)


def test_sound_is_sent_while_it_is_made() -> None:
    engine = FakeSpeechEngine(gate=threading.Event())
    with live(make_speech_app(engine)) as server, httpx.Client(verify=False) as client:
        assert engine.gate is not None
        engine.gate.set()
        engine.step_s = 0.005
        body = speech(TEXT, response_format="wav")
        with client.stream("POST", server.url + PATH, json=body) as reply:
            chunks = reply.iter_raw()
            data = next(chunks)
            engine.gate.clear()
            assert data[:4] == b"RIFF"
            assert engine.num_steps < 20
            engine.gate.set()
            engine.step_s = 0
            data += b"".join(chunks)
    assert len(data) == 44 + 2 * num_samples(TEXT)


async def test_first_sound_and_seconds_are_measured() -> None:
    app = make_speech_app(FakeSpeechEngine())
    async with in_process(app) as client:
        await client.post(PATH, json=speech())
        metrics = (await client.get("/metrics")).text
    assert 'triptych_time_to_first_audio_seconds_count{model="hum"} 1.0' in metrics
    assert 'triptych_audio_seconds_total{model="hum"} 0.5' in metrics


async def test_texts_are_logged_only_where_that_is_wanted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    for wanted in (False, True):
        await post(FakeSpeechEngine(), speech("My secret."), log_prompts=wanted)
        texts = [str(getattr(record, "fields", "")) for record in caplog.records]
        assert any("My secret." in text for text in texts) == wanted


async def test_runaway_speech_is_reported_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeSpeechEngine(finish="loop")
    done = documents((await post(engine, speech(TEXT, stream_format="sse"))).text)[-1]
    assert done["finish_reason"] == "loop"
    assert done["coverage"] < 1
    assert "did not end by itself" in caplog.text


async def test_ssml_is_spoken_and_what_it_ignores_is_named() -> None:
    text = '<speak><emphasis>Hi</emphasis><voice name="nova"> you</voice><break time="1s"/></speak>'
    body = speech(text, input_format="ssml", response_format="pcm")
    answer = await post(FakeSpeechEngine(), body)
    assert len(answer.content) == 2 * (num_samples("Hi you") + RATE)
    assert answer.headers["x-triptych-ignored"] == "voice, emphasis"
    assert answer.headers["x-speech-coverage"] == "1.000"
    refused = await post(FakeSpeechEngine(), speech("<speak><mark/></speak>", input_format="ssml"))
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "unsupported_option"
    assert "line 1, column 8: <mark> is not supported" in refused.json()["error"]["message"]


async def test_captions_come_with_the_last_event() -> None:
    body = speech("Hi you. Bye.", stream_format="sse", caption_format="vtt")
    *deltas, last = documents((await post(FakeSpeechEngine(), body)).text)
    assert last["captions"].startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.250\nHi you.\n\n")
    assert not any({"words", "captions"} & event.keys() for event in deltas)
    refused = await post(FakeSpeechEngine(), speech(caption_format="vtt"))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "caption_format"
