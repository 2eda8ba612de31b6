"""The `openai` package speaks through a live server: its client is the interface's judge."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from support.audio_signals import decode_soundfile
from support.http import live, until
from support.speech_app import FakeSpeechEngine, heard, make_speech_app, num_samples, speech
from triptych.core.errors import EngineDown

TEXT = "Hello there, this is a sentence. And this is another."


@pytest.fixture
def engine() -> FakeSpeechEngine:
    return FakeSpeechEngine()


@pytest.fixture
def client(engine: FakeSpeechEngine) -> Iterator[openai.OpenAI]:
    with (
        live(make_speech_app(engine, api_key=("key",))) as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1",
            api_key="key",
            max_retries=0,
            http_client=httpx.Client(verify=False),
        ) as connection,
    ):
        yield connection


def test_speech_to_a_file(client: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    with client.audio.speech.with_streaming_response.create(
        model="hum", voice="ada", input=TEXT, response_format="wav", speed=1.0
    ) as reply:
        assert reply.headers["x-speech-coverage"] == "1.000"
        reply.stream_to_file(path)
    pcm_S, rate = decode_soundfile(path.read_bytes())
    assert rate == 24_000
    np.testing.assert_allclose(pcm_S, heard(TEXT), atol=1e-4)


def test_the_whole_answer_at_once(client: openai.OpenAI) -> None:
    reply = client.audio.speech.create(model="hum", voice="ada", input=TEXT, response_format="pcm")
    assert len(reply.content) == 2 * num_samples(TEXT)


def test_pcm_as_it_comes(client: openai.OpenAI, engine: FakeSpeechEngine) -> None:
    engine.step_s = 0.002
    with client.audio.speech.with_streaming_response.create(
        model="hum", voice="ada", input=TEXT, response_format="pcm"
    ) as reply:
        sizes = [len(chunk) for chunk in reply.iter_bytes()]
    assert sum(sizes) == 2 * num_samples(TEXT)
    assert len(sizes) > 5


def test_events(client: openai.OpenAI) -> None:
    audio, done = b"", None
    with client.audio.speech.with_streaming_response.create(
        model="hum", voice="ada", input=TEXT, response_format="pcm", stream_format="sse"
    ) as reply:
        for line in reply.iter_lines():
            if not line:
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["type"] == "speech.audio.delta":
                assert done is None
                audio += base64.b64decode(event["audio"])
            else:
                done = event
    assert done is not None
    assert done["type"] == "speech.audio.done"
    assert done["usage"]["total_tokens"] > done["usage"]["input_tokens"] > 0
    assert len(audio) == 2 * num_samples(TEXT)


def test_further_fields_go_into_the_body(client: openai.OpenAI, engine: FakeSpeechEngine) -> None:
    client.audio.speech.create(
        model="hum", voice={"id": "ada"}, input="Hi.", extra_body={"seed": 5, "language": "en"}
    )
    (request,) = engine.submitted.values()
    assert request.sampling.seed == 5


def test_mistakes_have_the_types_of_openai(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="ada and bob") as bad:
        client.audio.speech.create(model="hum", voice="nobody", input="Hi.")
    assert bad.value.param == "voice"
    with pytest.raises(openai.BadRequestError, match="no words"):
        client.audio.speech.create(model="hum", voice="ada", input="🎉")
    with pytest.raises(openai.NotFoundError):
        client.audio.speech.create(model="none", voice="ada", input="Hi.")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").audio.speech.create(**speech())
    with pytest.raises(openai.BadRequestError, match="44100"):
        client.audio.speech.create(
            model="hum", voice="ada", input="Hi.", extra_body={"sample_rate": 44_000}
        )


def test_instructions_are_taken_and_reported(client: openai.OpenAI) -> None:
    reply = client.audio.speech.with_raw_response.create(
        model="hum", voice="ada", input="Hi.", instructions="softly"
    )
    assert reply.headers["x-triptych-ignored"] == "instructions"


def test_a_file_that_breaks_off_raises(client: openai.OpenAI, engine: FakeSpeechEngine) -> None:
    engine.error, engine.num_good = EngineDown("The engine died."), 5
    with (
        pytest.raises((httpx.TransportError, openai.APIConnectionError)),
        client.audio.speech.with_streaming_response.create(
            model="hum", voice="ada", input=TEXT, response_format="pcm"
        ) as reply,
    ):
        reply.read()


def test_leaving_a_stream_cancels_it(client: openai.OpenAI, engine: FakeSpeechEngine) -> None:
    engine.is_endless, engine.step_s = True, 0.01
    with client.audio.speech.with_streaming_response.create(
        model="hum", voice="ada", input="Hi.", response_format="pcm"
    ) as reply:
        next(iter(reply.iter_bytes()))
    until(lambda: len(engine.cancelled) == 1)
