"""Chat that hears and speaks: whole and streamed answers, recordings, references, refusals."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from support.asr import wav
from support.full_app import FullApp, open_full_app
from support.http import documents, in_process, live, refused, until
from support.speech_app import num_samples
from triptych.core.media.audio.containers import encode_clip
from triptych.core.media.audio.framing import read_wav_header
from triptych.modalities.asr.api.service import AsrService
from triptych.modalities.llm.api import spoken_answers
from triptych.modalities.llm.api.tools.formats import AnswerSyntax
from triptych.modalities.talk.speaking.chat_sound import ServedSound

CHAT = "/v1/chat/completions"
SAID = "The capital is Paris, and it is large. ```x``` Bye."
SPOKEN: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "ada"}}
NOISE = np.random.default_rng(0).normal(0, 0.1, 32_000).astype(np.float32)
HEARD = base64.b64encode(wav(NOISE)).decode()


@pytest.fixture(scope="module")
def full_app(tmp_path_factory: pytest.TempPathFactory) -> FullApp:
    full_app = open_full_app(tmp_path_factory.mktemp("models"))
    full_app.chat.answer = SAID
    return full_app


@pytest.fixture
async def client(full_app: FullApp) -> AsyncIterator[httpx.AsyncClient]:
    async with in_process(full_app.app) as client:
        yield client


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    asked = messages or ({"role": "user", "content": "Where?"},)
    return {"model": "tiny", "messages": list(asked), **fields}


def recording(data: str = HEARD, form: str = "wav") -> dict[str, Any]:
    part = {"type": "input_audio", "input_audio": {"data": data, "format": form}}
    return {"role": "user", "content": [part]}


async def post(client: httpx.AsyncClient, wanted: dict[str, Any]) -> dict[str, Any]:
    reply = await client.post(CHAT, json=wanted)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


async def test_a_whole_answer_has_text_and_sound(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    reply = await post(client, body(**SPOKEN))
    (line,) = [each for each in caplog.records if each.getMessage() == "request"]
    assert line.__dict__["fields"]["completion_tokens"] == len(SAID)
    assert "triptych_time_to_first_audio_seconds_count" in (await client.get("/metrics")).text
    message = reply["choices"][0]["message"]
    assert message["content"] is None
    audio = message["audio"]
    assert audio["transcript"] == SAID
    rate, start = read_wav_header(file := base64.b64decode(audio["data"])) or (0, 0)
    assert (rate, len(file) - start) == (24_000, 2 * num_samples(SAID))
    spoken = round(20 * num_samples(SAID) / 24_000)
    assert reply["usage"]["completion_tokens_details"]["audio_tokens"] == spoken
    assert reply["usage"]["completion_tokens"] == len(SAID) + spoken


async def test_a_stream_has_text_and_sound(client: httpx.AsyncClient) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    reply = await client.post(CHAT, json=body(**SPOKEN, **options))
    *chunks, counted, done = documents(reply.text)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": None}
    sounds = [delta["audio"] for delta in deltas if "audio" in delta]
    assert [each for each in sounds if "id" in each] == sounds[:1]
    assert "".join(each.get("transcript", "") for each in sounds) == SAID
    pcm = base64.b64decode("".join(each.get("data", "") for each in sounds))
    assert len(pcm) == 2 * num_samples(SAID)
    assert list(sounds[-1]) == ["expires_at"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert counted["usage"]["completion_tokens_details"]["audio_tokens"] > 0


async def test_a_spoken_answer_is_short_by_default(
    client: httpx.AsyncClient, full_app: FullApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def limit(**fields: Any) -> int:
        await post(client, body(**fields))
        return list(full_app.chat.submitted.values())[-1].sampling.max_tokens

    tool = {"type": "function", "function": {"name": "look"}}
    assert await limit(**SPOKEN) == 200
    assert await limit(**SPOKEN, max_completion_tokens=300) == 300
    assert await limit(**SPOKEN, tools=[tool]) > 1000
    assert await limit() > 1000
    monkeypatch.setattr(AnswerSyntax, "has_reasoning", True)
    assert await limit(**SPOKEN) > 1000


@pytest.mark.parametrize("form", ["wav", "mp3", "flac", "opus", "aac", "pcm16"])
@pytest.mark.parametrize("stream", [False, True])
async def test_every_format_is_a_file(client: httpx.AsyncClient, form: str, stream: bool) -> None:
    wanted = body(modalities=["text", "audio"], audio={"format": form}, stream=stream)
    reply = await client.post(CHAT, json=wanted)
    found = documents(reply.text)[:-1] if stream else [reply.json()]
    answers = [choice for each in found for choice in each["choices"]]
    sounds = [(each["delta"] if stream else each["message"]).get("audio", {}) for each in answers]
    file = base64.b64decode("".join(each.get("data", "") for each in sounds))
    head = {"wav": b"RIFF", "flac": b"fLaC", "opus": b"OggS", "aac": b"\xff\xf1", "mp3": b"\xff"}
    assert file.startswith(head.get(form, b""))
    assert len(file) > 1000


async def test_a_later_message_refers_to_a_spoken_answer(
    client: httpx.AsyncClient, full_app: FullApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    audio = (await post(client, body(**SPOKEN)))["choices"][0]["message"]["audio"]
    written = await post(client, body({"role": "assistant", "content": SAID}))
    for reference in ({"id": audio["id"]}, audio):
        referred = await post(client, body({"role": "assistant", "audio": reference}))
        assert referred["usage"]["prompt_tokens"] == written["usage"]["prompt_tokens"]
    monkeypatch.setattr(spoken_answers.time, "time", lambda: audio["expires_at"])
    gone = body({"role": "assistant", "audio": {"id": audio["id"]}})
    assert "send its transcript" in refused(await client.post(CHAT, json=gone), 404)["message"]


async def test_a_recording_is_transcribed_once(
    client: httpx.AsyncClient, full_app: FullApp
) -> None:
    written = await post(client, body({"role": "user", "content": "Hello."}))
    before = len(full_app.transcription.submitted)
    for _ in range(2):
        heard = await post(client, body(recording()))
        assert heard["usage"]["prompt_tokens_details"]["audio_tokens"] == 20
        assert heard["usage"]["prompt_tokens"] == written["usage"]["prompt_tokens"] + 20
    assert len(full_app.transcription.submitted) == before + 1
    counted = await client.post(f"{CHAT}/input_tokens", json=body(recording()))
    assert counted.json()["input_tokens"] == heard["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (recording("!!!!"), "not valid base64"),
        (recording("AAAA"), "not in a supported audio format"),
        (recording(form="mp3"), "not mp3: its bytes are wav"),
        (recording(base64.b64encode(wav(0 * NOISE)).decode()), "The audio is silent"),
        (recording(base64.b64encode(wav(NOISE)[:40]).decode()), "input_audio: "),
        ({**recording(), "role": "assistant"}, "Only a user's message"),
        ({"role": "assistant", "audio": {"id": "audio_1"}}, "no spoken answer 'audio_1'"),
        ({"role": "user", "content": "a", "audio": {"id": "audio_1"}}, "Only an assistant's"),
    ],
)
async def test_sound_that_cannot_be_heard(
    client: httpx.AsyncClient, message: dict[str, Any], words: str
) -> None:
    reply = await client.post(CHAT, json=body(message))
    assert 400 <= reply.status_code < 500
    assert words in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"].startswith("messages")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"modalities": ["audio"]}, "an answer is always written"),
        ({"modalities": ["text", "text"]}, "an answer is always written"),
        ({"audio": {"voice": "ada"}}, "audio needs modalities"),
        ({**SPOKEN, "n": 2}, "n is not offered in a spoken answer"),
        ({**SPOKEN, "echo": True}, "echo is not offered"),
        ({**SPOKEN, "response_format": {"type": "json_object"}}, "response_format is not offered"),
        ({"modalities": ["text", "audio"], "audio": {"voice": "zoe"}}, "voices ada and bob"),
        ({"modalities": ["text", "audio"], "audio": {"voice": {"id": "voice_1"}}}, "voice"),
        ({"modalities": ["text", "audio"], "audio": {"model": "tiny"}}, "tiny"),
        ({"modalities": ["text", "audio"], "audio": {"format": "wma"}}, "format"),
    ],
)
async def test_what_is_not_offered_is_refused_before_any_work(
    client: httpx.AsyncClient, full_app: FullApp, fields: dict[str, Any], words: str
) -> None:
    before = full_app.chat.num_steps
    reply = await client.post(CHAT, json=body(**fields))
    assert 400 <= reply.status_code < 500
    assert words in reply.json()["error"]["message"]
    assert full_app.chat.num_steps == before


async def test_text_alone_is_as_before(client: httpx.AsyncClient) -> None:
    message = (await post(client, body(modalities=["text"])))["choices"][0]["message"]
    assert message == {"role": "assistant", "content": SAID, "refusal": None}


async def test_other_routes_read_no_sound(client: httpx.AsyncClient) -> None:
    reply = await client.post("/apply-template", json=body(recording()))
    assert "/v1/chat/completions alone" in refused(reply)["message"]


async def test_without_models_the_error_says_what_to_start(full_app: FullApp) -> None:
    from triptych.core.engine_api.caller import Caller
    from triptych.core.errors import UnsupportedOption
    from triptych.modalities.llm.api.sound import VoiceChoice
    from triptych.modalities.tts.api.service import SpeechService

    admission: Any = None
    none = ServedSound(
        AsrService(full_app.transcription, [], admission, admission),
        SpeechService(full_app.speech, [], admission, max_characters=1),
    )
    with pytest.raises(UnsupportedOption, match="triptych-voice"):
        await none.check_voice(VoiceChoice(), Caller())
    with pytest.raises(UnsupportedOption, match="No recognizer is served"):
        await none.hear(encode_clip("wav", 8000, NOISE), "wav", Caller())


def test_a_client_that_leaves_ends_chat_and_speech(tmp_path: Path) -> None:
    full_app = open_full_app(tmp_path)
    full_app.chat.answer, full_app.chat.is_endless = "One whole sentence. ", True
    full_app.chat.step_s = 0.001
    with live(full_app.app) as server:
        wanted = body(**SPOKEN, stream=True)
        with httpx.stream("POST", f"{server.url}{CHAT}", json=wanted, timeout=30) as reply:
            next(line for line in reply.iter_lines() if '"data":' in line)
        until(lambda: not full_app.chat.running and not full_app.speech.running)
    assert full_app.chat.cancelled
