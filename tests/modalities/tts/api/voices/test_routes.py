"""`/v1/audio/voices` over HTTP, with recordings decoded in a real child."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from support.http import in_process, live
from support.voices_app import DECODE, RATE, SINGER, make_voice_app, make_voice_service, recording
from triptych.core.errors import InvalidRequest
from triptych.core.media.child import DecodePool
from triptych.modalities.tts.api.voices.service import VoiceService

VOICES = "/v1/audio/voices"
KEYS = {"api_key": ("ada", "bob")}


@pytest.fixture(scope="module")
def pool() -> Iterator[DecodePool]:
    pool = DecodePool([DECODE])
    yield pool
    asyncio.run(pool.close())


@pytest.fixture
def service(tmp_path: Path, pool: DecodePool) -> VoiceService:
    return make_voice_service(tmp_path / "voices", pool)


@asynccontextmanager
async def asking(
    service: VoiceService, key: str = "", **server: Any
) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with in_process(make_voice_app(service, **server), **headers) as client:
        yield client


async def create(
    client: httpx.AsyncClient,
    sound: bytes | None = None,
    *,
    file: str = "audio_sample",
    **fields: str,
) -> httpx.Response:
    data = {"name": "Ada", "consent": "Ada agreed on 1 May."} | fields
    files = {file: ("voice.wav", recording() if sound is None else sound, "audio/wav")}
    return await client.post(
        VOICES, data={name: text for name, text in data.items() if text != "-"}, files=files
    )


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_a_voice_is_made_shown_listed_and_deleted(service: VoiceService) -> None:
    async with asking(service) as client:
        made = (await create(client, language="en-GB", transcript="La la.")).json()
        assert made["id"].startswith("voice_")
        assert made["created_at"] > 1_700_000_000
        shape = {"object": "audio.voice", "type": "audio_sample", "name": "Ada", "model": "parrot"}
        assert made.items() >= {**shape, "language": "en-GB", "duration_s": 2.0}.items()
        assert (await client.get(f"{VOICES}/{made['id']}")).json() == made
        listed = (await client.get(VOICES)).json()
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["alto", "bass", "polly", made["id"]]
        assert listed["voices"] == listed["data"]
        gone = (await client.delete(f"{VOICES}/{made['id']}")).json()
        assert gone == {"id": made["id"], "object": "audio.voice.deleted", "deleted": True}
        for method in ("GET", "DELETE"):
            refusal(await client.request(method, f"{VOICES}/{made['id']}"), 404)


async def test_the_list_may_be_of_one_model(service: VoiceService) -> None:
    async with asking(service) as client:
        made = (await create(client, model="mynah")).json()["id"]
        for model, ids in {
            "singer": ["alto", "bass"],
            "parrot": ["polly"],
            "mynah": [made],
        }.items():
            listed = (await client.get(VOICES, params={"model": model})).json()["data"]
            assert [card["id"] for card in listed] == ids
        error = refusal(await client.get(VOICES, params={"model": "owl"}), 404)
        assert "singer, parrot, mynah" in error["message"]


async def test_the_engine_gets_the_recording_at_the_models_rate(service: VoiceService) -> None:
    async with asking(service) as client:
        made = (await create(client, recording(2, 44_100), model="mynah")).json()["id"]
        clip = service.clip(made, "", "mynah")
        assert clip is not None
        assert (clip.sample_rate, clip.prompt_ids) == (16_000, ())
        assert np.frombuffer(clip.pcm, "<f4").shape == (32_000,)
        created_id = (await create(client, transcript="Hi")).json()["id"]
        clip = service.clip(created_id, "", "parrot")
        assert clip is not None
        assert (clip.sample_rate, clip.prompt_ids) == (RATE, (72, 105))
    assert service.clip(made, "someone else", "mynah") is None
    with pytest.raises(InvalidRequest, match="made for mynah"):
        service.clip(made, "", "parrot")


async def test_a_voice_is_its_makers_alone(service: VoiceService) -> None:
    async with asking(service, "ada", **KEYS) as ada, asking(service, "bob", **KEYS) as bob:
        made = (await create(ada)).json()["id"]
        assert made not in (await bob.get(VOICES)).text
        for method in ("GET", "DELETE"):
            refusal(await bob.request(method, f"{VOICES}/{made}"), 404)
    async with asking(service, "ada", **KEYS) as ada:  # another run of the server
        assert (await ada.get(f"{VOICES}/{made}")).status_code == 200
    async with asking(service, "eve", **KEYS) as eve:
        for method in ("GET", "POST"):
            refusal(await eve.request(method, VOICES), 401)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"name": "-"}, "name", "required"),
        ({"name": " "}, "name", "1 to 256 characters"),
        ({"name": "x" * 10_000}, "name", "1 to 256 characters"),
        ({"name": "a\0b"}, "name", "control"),
        ({"name": "\u202eadA"}, "name", "direction"),
        ({"consent": "-"}, "consent", "required"),
        ({"consent": ""}, "consent", "at least 1"),
        ({"transcript": "x" * 5000}, "transcript", "4096"),
        ({"language": "../en"}, "language", "pattern"),
        ({"colour": "red"}, "colour", "Unknown field"),
        ({"type": "prompt", "prompt": "A gruff sailor"}, "prompt", "recordings"),
        ({"type": "song"}, "type", "audio_sample"),
        ({"model": "singer"}, "model", "singer supports built-in voices only; parrot, mynah can"),
    ],
)
async def test_a_wrong_field_is_named(
    service: VoiceService, fields: dict[str, str], param: str, message: str
) -> None:
    async with asking(service) as client:
        error = refusal(await create(client, **fields))
        assert (error["param"], message in error["message"]) == (param, True), error
        assert (await client.get(VOICES)).json()["data"][-1]["id"] == "polly"


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "voice_" + "0" * 32, "👩\u200d🚀 李", '"; rm -rf', "a/b\\c"]
)
async def test_a_hostile_name_is_only_shown(service: VoiceService, name: str) -> None:
    async with asking(service) as client:
        made = (await create(client, name=name)).json()
        assert (made["name"], "/" in made["id"]) == (name, False)
        assert (await client.get(f"{VOICES}/{made['id']}")).json()["name"] == name


@pytest.mark.parametrize(
    ("filename"), ["../../x.wav", "x\0.wav", "x" * 3000, "\u202egpj.wav", "con", ""]
)
async def test_uploaded_file_name_is_ignored(service: VoiceService, filename: str) -> None:
    async with asking(service) as client:
        files = {"audio_sample": (filename or "x", recording(), "text/html")}
        data = {"name": "Ada", "consent": "yes"}
        response = await client.post(VOICES, data=data, files=files)
        assert response.status_code == 200, response.text


async def test_without_a_model_that_imitates_there_is_nothing_to_make(
    tmp_path: Path, pool: DecodePool
) -> None:
    async with asking(make_voice_service(tmp_path, pool, SINGER)) as client:
        assert "serve one that can" in refusal(await create(client))["message"]
        assert "serve one" in refusal(await create(client, model="singer"))["message"]
        refusal(await create(client, model="owl"), 404)


async def test_a_file_is_needed_and_only_one(service: VoiceService) -> None:
    async with asking(service) as client:
        data = {"name": "Ada", "consent": "yes"}
        response = await client.post(
            VOICES, files={name: (None, text) for name, text in data.items()}
        )
        assert refusal(response)["message"] == "audio_sample is required, as a file."
        assert refusal(await create(client, file="recording"))["param"] == "audio_sample"
        assert (await create(client, file="file")).status_code == 200
        assert refusal(await client.post(VOICES, json=data), 415)


async def test_quota_errors(service: VoiceService) -> None:
    async with asking(service, "ada", **KEYS) as ada, asking(service, "bob", **KEYS) as bob:
        for _ in range(3):
            assert (await create(ada)).status_code == 200
        assert "delete one first" in refusal(await create(ada))["message"]
        assert (await create(bob)).status_code == 200


async def test_what_a_model_brings_is_shown_and_stays(service: VoiceService) -> None:
    async with asking(service) as client:
        alto = (await client.get(f"{VOICES}/alto")).json()
        expected = {"name": "alto", "type": "built_in", "model": "singer", "created_at": 0}
        assert alto.items() >= {**expected, "description": "warm", "language": "en-US"}.items()
        assert "cannot be deleted" in refusal(await client.delete(f"{VOICES}/alto"))["message"]


@pytest.mark.parametrize("voice_id", ["..%2f..%2fetc%2fpasswd", "voice_%00", "x" * 300, "%2e%2e"])
async def test_a_hostile_id_names_nothing(service: VoiceService, voice_id: str) -> None:
    async with asking(service) as client:
        for method in ("GET", "DELETE"):
            response = await client.request(method, f"{VOICES}/{voice_id}")
            assert response.status_code in (400, 404, 405), response.text


async def test_an_upload_over_the_cap_is_refused(service: VoiceService) -> None:
    async with asking(service, max_upload_bytes=50_000) as client:
        assert "50000 bytes" in refusal(await create(client), 413)["message"]


def test_openais_own_client_makes_and_deletes(service: VoiceService) -> None:
    with (
        live(make_voice_app(service)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        made = client.audio.voices.create(
            name="Ada", consent="cons_1", audio_sample=("a.wav", recording(), "audio/wav")
        )
        assert (made.object, made.type, made.name) == ("audio.voice", "audio_sample", "Ada")
        gone = client.audio.voices.delete(made.id)
        assert (gone.id, gone.deleted, gone.object) == (made.id, True, "audio.voice.deleted")
