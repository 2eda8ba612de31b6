"""The transcription API over the whole app, in front of a made-up engine."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from support.asr import FakeAsrEngine, asr_app, noise, timed_tokens, wav
from support.http import documents, in_process, live, until
from triptych.core.errors import EngineDown
from triptych.modalities.asr.api import service

PATH = "/v1/audio/transcriptions"
SOUND = wav(noise(5.0))
TEXT = "Hello there, you. Who & what --> <us>?"
WINDOWS = (
    (3.0, (timed_tokens(" Hello there, you.", 0.0, 2.5, has_times=True),)),
    (5.0, (timed_tokens(" Who & what --> <us>?", 2.5, 4.75, has_times=True),)),
)


def engine(**fields: Any) -> FakeAsrEngine:
    return FakeAsrEngine(WINDOWS, **fields)


async def send(
    engine_client: FakeAsrEngine,
    data: dict[str, Any] | None = None,
    *,
    file: bytes = SOUND,
    path: str = PATH,
    is_multilingual: bool = False,
    **server: Any,
) -> httpx.Response:
    app = asr_app(engine_client, is_multilingual=is_multilingual, **server)
    form = {"model": "ears", **(data or {})}
    async with in_process(app) as client:
        return await client.post(path, data=form, files={"file": ("../../a.wav", file)})


def complaint(response: httpx.Response) -> tuple[int, str | None, str]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


async def test_json_is_the_default() -> None:
    response = await send(engine())
    assert response.json() == {"text": TEXT, "usage": {"type": "duration", "seconds": 5.0}}


@pytest.mark.parametrize(
    ("name", "media_type", "expected"),
    [
        ("text", "text/plain", f"{TEXT}\n"),
        (
            "srt",
            "text/plain",
            "1\n00:00:00,000 --> 00:00:02,500\nHello there, you.\n\n"
            "2\n00:00:02,500 --> 00:00:04,750\nWho & what -> <us>?\n\n",
        ),
        (
            "vtt",
            "text/vtt",
            "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nHello there, you.\n\n"
            "00:00:02.500 --> 00:00:04.750\nWho &amp; what -&gt; &lt;us&gt;?\n\n",
        ),
    ],
)
async def test_plain_formats(name: str, media_type: str, expected: str) -> None:
    response = await send(engine(), {"response_format": name})
    assert response.headers["content-type"].startswith(media_type)
    assert response.text == expected


async def test_verbose_json_has_segments() -> None:
    reply = (await send(engine(), {"response_format": "verbose_json"})).json()
    assert (reply["task"], reply["language"], reply["duration"]) == ("transcribe", "english", 5.0)
    assert "words" not in reply
    first, second = reply["segments"]
    assert first == {
        "id": 0,
        "seek": 0,
        "start": 0.0,
        "end": 2.5,
        "text": " Hello there, you.",
        "tokens": list(b" Hello there, you."),
        "temperature": 0.0,
        "avg_logprob": -0.25,
        "compression_ratio": 0.8,
        "no_speech_prob": 0.01,
    }
    assert (second["id"], second["seek"], second["start"]) == (1, 250, 2.5)


@pytest.mark.parametrize(
    ("asked", "has_segments"), [(["word"], False), (["word", "segment"], True)]
)
async def test_words_come_when_asked_for(asked: list[str], has_segments: bool) -> None:
    engine_client = engine()
    form = {"response_format": "verbose_json", "timestamp_granularities[]": asked}
    reply = (await send(engine_client, form)).json()
    assert ("segments" in reply) is has_segments
    words = reply["words"]
    assert [word["word"] for word in words[:3]] == ["Hello", "there,", "you."]
    assert "".join(word["word"] for word in words) == TEXT.replace(" ", "")
    assert all(word["start"] <= word["end"] for word in words)
    (request,) = engine_client.submitted.values()
    assert request.has_word_times


async def test_logprobs_come_when_asked_for() -> None:
    reply = (await send(engine(), {"include[]": ["logprobs"]})).json()
    assert reply["logprobs"][1] == {"token": "H", "bytes": [72], "logprob": -0.25}
    assert bytes(b for token in reply["logprobs"] for b in token["bytes"]).decode() == f" {TEXT}"


async def test_a_stream_of_text() -> None:
    response = await send(engine(), {"stream": "true"})
    assert response.headers["content-type"].startswith("text/event-stream")
    *deltas, done, end = documents(response.text)
    assert end == "[DONE]"
    assert [delta["type"] for delta in deltas] == ["transcript.text.delta"] * 2
    assert "".join(delta["delta"] for delta in deltas) == done["text"] == TEXT
    assert done["type"] == "transcript.text.done"
    assert done["usage"] == {"type": "duration", "seconds": 5.0}


async def test_a_verbose_stream_has_segments_too() -> None:
    events = documents(
        (await send(engine(), {"stream": "true", "response_format": "verbose_json"})).text
    )
    segments = [event for event in events[:-1] if event["type"] == "transcript.text.segment"]
    assert [(s["id"], s["start"], s["end"]) for s in segments] == [
        ("0", 0.0, 2.5),
        ("1", 2.5, 4.75),
    ]


async def test_what_was_asked_reaches_the_engine() -> None:
    engine_client = engine()
    form = {"prompt": "Ada, Bob", "temperature": "0.5", "seed": "7", "language": "English"}
    assert (await send(engine_client, form)).status_code == 200
    (request,) = engine_client.submitted.values()
    assert bytes(request.prompt_ids) == b" Ada, Bob"
    assert (request.temperature, request.seed, request.language) == (0.5, 7, "en")
    assert (request.task, request.has_word_times, request.is_last) == ("transcribe", False, True)
    np.testing.assert_allclose(np.frombuffer(request.pcm, "<f4"), noise(5.0), atol=1e-4)


@pytest.mark.parametrize(
    ("form", "param", "says"),
    [
        ({"colour": "red"}, "colour", "Unknown field"),
        ({"response_format": "diarized_json"}, "response_format", "verbose_json"),
        ({"response_format": "yaml"}, "response_format", "response_format"),
        ({"include[]": "logprobs", "response_format": "text"}, "include[]", "json"),
        ({"stream": "true", "response_format": "srt"}, "stream", "streamed"),
        ({"temperature": "1.5"}, "temperature", "less than or equal"),
        ({"temperature": "nan"}, "temperature", "finite"),
        ({"language": "klingon"}, "language", "english"),
        ({"language": "de"}, "language", "english"),
        ({"keywords[]": "Ada"}, "keywords[]", "prompt"),
        ({"known_speaker_names[]": "Ada"}, "known_speaker_names[]", "speakers"),
        (
            {"chunking_strategy": '{"type": "server_vad", "threshold": 1}'},
            "chunking_strategy",
            "pause",
        ),
        ({"chunking_strategy[threshold]": "0.9"}, "chunking_strategy[threshold]", "pause"),
        ({"prompt": "x" * 9000}, "prompt", "8192"),
    ],
)
async def test_what_cannot_be_honoured_is_named(
    form: dict[str, str], param: str, says: str
) -> None:
    engine_client = engine()
    status, named, message = complaint(await send(engine_client, form))
    assert (status, named) == (400, param)
    assert says in message
    assert not engine_client.submitted


@pytest.mark.parametrize(
    "form",
    [
        {"chunking_strategy": "auto"},
        {"chunking_strategy": '{"type": "server_vad"}'},
        {"chunking_strategy[type]": "server_vad", "chunking_strategy[threshold]": "0.5"},
        {"timestamp_granularities[]": "word"},
        {"timestamp_granularities[]": "word", "response_format": "srt"},
    ],
)
async def test_what_changes_no_answer_is_let_pass(form: dict[str, str]) -> None:
    engine_client = engine()
    reply = await send(engine_client, form)
    assert reply.status_code == 200
    assert "words" not in reply.text
    (request,) = engine_client.submitted.values()
    assert not request.has_word_times


async def test_an_unknown_model() -> None:
    status, param, message = complaint(await send(engine(), {"model": "whisper-9"}))
    assert (status, param) == (404, "model")
    assert "ears" in message


def forged_rate() -> bytes:
    """A WAV that claims four thousand million samples a second."""
    data = bytearray(SOUND)
    data[24:28] = struct.pack("<I", 4_000_000_000)
    return bytes(data)


@pytest.mark.parametrize(
    ("file", "status"),
    [
        (b"", 400),
        (wav(noise(1 / 16_000)), 400),
        (wav(noise(0.09)), 400),
        (wav(np.zeros(16_000, np.float32)), 400),
        (forged_rate(), 400),
        (SOUND[:30], 400),
        (b"%PDF-1.7 and so on", 415),
        (b"hello, this is text", 415),
    ],
)
async def test_files_without_sound(file: bytes, status: int) -> None:
    engine_client = engine()
    response = await send(engine_client, file=file)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == "file"
    assert not engine_client.submitted


async def test_audio_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(service.TRANSCRIPTION_LIMITS, max_seconds=4)
    monkeypatch.setattr(service, "TRANSCRIPTION_LIMITS", limits)
    engine_client = engine()
    status, param, message = complaint(await send(engine_client))
    assert (status, param) == (413, "file")
    assert "4 s" in message
    assert not engine_client.submitted


async def test_larger_forms_than_allowed_are_refused() -> None:
    response = await send(engine(), max_upload_bytes=10_000)
    assert response.status_code == 413


async def test_a_form_without_file() -> None:
    async with in_process(asr_app(engine())) as client:
        response = await client.post(PATH, data={"model": "ears"}, files={"x": ("a", b"b")})
    assert complaint(response)[:2] == (400, "file")


async def test_file_sent_as_text_field_is_refused() -> None:
    async with in_process(asr_app(engine())) as client:
        fields = {"model": (None, b"ears"), "file": (None, b"sound")}
        status, param, message = complaint(await client.post(PATH, files=fields))
    assert (status, param) == (400, "file")
    assert "as a file" in message


async def test_translation_needs_a_model_that_can() -> None:
    path = "/v1/audio/translations"
    status, param, message = complaint(await send(engine(), path=path))
    assert (status, param) == (400, "model")
    assert "multilingual" in message
    engine_client = engine(language="de")
    response = await send(
        engine_client, {"response_format": "verbose_json"}, path=path, is_multilingual=True
    )
    assert (response.json()["task"], response.json()["language"]) == ("translate", "english")
    (request,) = engine_client.submitted.values()
    assert request.task == "translate"
    assert complaint(
        await send(engine_client, {"language": "de"}, path=path, is_multilingual=True)
    ) == (
        400,
        "language",
        "Unknown field: language.",
    )


async def test_an_engine_that_fails() -> None:
    response = await send(engine(error=EngineDown("The engine crashed.")))
    assert response.status_code == 503
    response = await send(
        engine(error=EngineDown("The engine crashed."), num_good=1), {"stream": "true"}
    )
    delta, error, *_ = documents(response.text)
    assert (delta["delta"], error["error"]["code"]) == ("Hello there, you.", "engine_down")


async def test_disconnect_cancels_transcription() -> None:
    engine_client = engine(gate=asyncio.Event())
    sent = asyncio.create_task(send(engine_client))
    await asyncio.to_thread(until, lambda: bool(engine_client.submitted))
    sent.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sent
    assert engine_client.cancelled == list(engine_client.submitted)


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # its own, of translations
def test_the_openai_client_does_not_notice() -> None:
    engine_client = engine()
    with (
        live(asr_app(engine_client, api_key=("key",))) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as client,
    ):
        file = ("speech.wav", SOUND)
        plain = client.audio.transcriptions.create(model="ears", file=file)
        assert (plain.text, plain.usage.seconds) == (TEXT, 5.0)
        verbose = client.audio.transcriptions.create(
            model="ears",
            file=file,
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
        )
        assert [word.word for word in verbose.words[:3]] == ["Hello", "there,", "you."]
        assert [segment.end for segment in verbose.segments] == [2.5, 4.75]
        subtitles = client.audio.transcriptions.create(
            model="ears", file=file, response_format="srt"
        )
        assert subtitles.startswith("1\n00:00:00,000")
        events = list(client.audio.transcriptions.create(model="ears", file=file, stream=True))
        assert "".join(e.delta for e in events if e.type == "transcript.text.delta") == TEXT
        assert events[-1].type == "transcript.text.done"
        with pytest.raises(openai.BadRequestError, match="multilingual"):
            client.audio.translations.create(model="ears", file=file)
        until(lambda: len(engine_client.finished) == 4)
