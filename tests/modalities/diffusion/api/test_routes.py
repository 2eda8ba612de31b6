"""The images API: fields, answers, events, links."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from support.http import documents, in_process
from support.image_app import (
    GENERATIONS,
    NUM_PROMPT_TOKENS,
    FakeImageEngine,
    colour_of,
    generation,
    image_model,
    make_image_app,
    make_image_service,
    one_colour,
    opened,
)
from triptych.core.errors import EngineDown, NonFinite
from triptych.core.options.config import ImageOptions
from triptych.modalities.diffusion.api.protocol import REFUSED
from triptych.modalities.diffusion.wire import AdapterUse, StepCache


async def post(engine: FakeImageEngine, body: dict[str, Any], **server: Any) -> httpx.Response:
    async with in_process(make_image_app(engine, **server)) as client:
        return await client.post(GENERATIONS, json=body)


@pytest.mark.parametrize(
    ("fields", "background"),
    [
        ({}, "transparent"),
        ({"background": "transparent", "output_format": "webp"}, "transparent"),
        ({"background": "opaque"}, "opaque"),
        ({"output_format": "jpeg"}, "opaque"),
    ],
)
async def test_a_model_of_transparent_images_says_what_it_sent(
    fields: dict[str, str], background: str
) -> None:
    engine = FakeImageEngine()
    service = make_image_service(engine, image_model(has_alpha=True))
    reply = await post(engine, generation(**fields), service=service)
    assert reply.json()["background"] == background


async def test_images_come_in_base64_with_what_they_are() -> None:
    engine = FakeImageEngine()
    reply = await post(engine, generation(n=3, seed=4))
    assert reply.status_code == 200
    (request,) = engine.submitted.values()
    document = reply.json()
    assert document["created"] > 1_600_000_000
    for index, entry in enumerate(document["data"]):
        image = opened(entry["b64_json"])
        assert (image.format, image.size) == ("PNG", (128, 128))
        assert one_colour(image) == colour_of(request, index)
        assert set(entry) == {"b64_json"}
    assert len(document["data"]) == 3
    del document["data"], document["created"]
    assert document == {
        "background": "opaque",
        "output_format": "png",
        "quality": "medium",
        "size": "128x128",
        "prompt_truncated": False,
        "seed": 4,
        "usage": {
            "input_tokens": NUM_PROMPT_TOKENS,
            "input_tokens_details": {"text_tokens": NUM_PROMPT_TOKENS, "image_tokens": 0},
            "output_tokens": 3 * 64,
            "output_tokens_details": {"text_tokens": 0, "image_tokens": 3 * 64},
            "total_tokens": NUM_PROMPT_TOKENS + 3 * 64,
        },
    }


async def test_a_prompt_is_enough() -> None:
    reply = await post(FakeImageEngine(), {"prompt": "a red apple"})
    assert reply.status_code == 200
    assert opened(reply.json()["data"][0]["b64_json"]).size == (128, 128)


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
async def test_formats(kind: str) -> None:
    body = generation(output_format=kind, size="64x96")
    if kind != "png":
        body["output_compression"] = 50
    document = (await post(FakeImageEngine(), body)).json()
    image = opened(document["data"][0]["b64_json"])
    assert (image.format, image.size) == (kind.upper(), (64, 96))
    assert (document["output_format"], document["size"]) == (kind, "64x96")


async def test_every_field_reaches_the_engine() -> None:
    engine = FakeImageEngine()
    body = generation(
        size="160x96",
        n=2,
        seed=9,
        steps=7,
        guidance=2.5,
        negative_prompt="red",
        sampler="heun",
        cache={"name": "teacache", "threshold": 0.25, "coefficients": [1.5, 0.0], "max_skips": 3},
        lora=[{"name": "sketch", "scale": 0.5}, {"name": "ink"}],
        background="opaque",
        moderation="low",
        user="u",
        safety_identifier="s",
    )
    assert (await post(engine, body)).status_code == 200
    (request,) = engine.submitted.values()
    assert (request.width, request.height, request.num_images) == (160, 96, 2)
    assert (request.seed, request.num_steps, request.guidance_scale) == (9, 7, 2.5)
    assert (request.negative_prompt, request.sampler) == ("red", "heun")
    assert request.cache == StepCache(
        name="teacache", threshold=0.25, coefficients=(1.5, 0.0), max_skips=3
    )
    assert request.adapters == (AdapterUse("sketch", 0.5), AdapterUse("ink", 1.0))


async def test_other_names_of_the_same() -> None:
    engine = FakeImageEngine()
    body = generation(num_inference_steps=4, guidance_scale=1.5, cache="taylorseer")
    assert (await post(engine, body)).status_code == 200
    (request,) = engine.submitted.values()
    assert (request.num_steps, request.guidance_scale) == (4, 1.5)
    assert request.cache == StepCache(name="taylorseer")


@pytest.mark.parametrize(
    ("quality", "num_steps", "reported"),
    [
        ("low", 5, "low"),
        ("medium", None, "medium"),
        ("standard", None, "medium"),
        ("high", 15, "high"),
        ("hd", 15, "high"),
    ],
)
async def test_quality(quality: str, num_steps: int | None, reported: str) -> None:
    engine = FakeImageEngine()
    reply = await post(engine, generation(quality=quality))
    assert reply.json()["quality"] == reported
    assert next(iter(engine.submitted.values())).num_steps == num_steps


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": ""}, "prompt", "at least 1 character"),
        ({"prompt": "x" * 32_001}, "prompt", "32000"),
        ({"n": 0}, "n", "1"),
        ({"n": 11}, "n", "10"),
        ({"n": "2"}, "n", "integer"),
        ({"size": "1024"}, "size", "as in 1024x768"),
        ({"size": "0x128"}, "size", "as in 1024x768"),
        ({"size": "-1x128"}, "size", "as in 1024x768"),
        ({"size": "128x128x128"}, "size", "as in 1024x768"),
        ({"size": "99999x99999"}, "size", "multiples of 16"),
        ({"size": "20000x20000"}, "size", "32 to 512"),
        ({"size": "1023x7"}, "size", "multiples of 16"),
        ({"size": "1x1"}, "size", "multiples of 16"),
        ({"size": "512x128"}, "size", "3 times"),
        ({"size": "1024x1024"}, "size", "Its default size is 128x128"),
        ({"quality": "xhigh"}, "quality", "'auto', 'low'"),
        ({"background": "transparent"}, "background", "makes no transparent background"),
        (
            {"background": "transparent", "output_format": "jpeg"},
            "output_format",
            "ask for png or webp",
        ),
        ({"output_format": "gif"}, "output_format", "'png', 'jpeg' or 'webp'"),
        ({"output_compression": 50}, "output_compression", "jpeg or webp"),
        ({"output_format": "jpeg", "output_compression": 101}, "output_compression", "100"),
        ({"partial_images": 2}, "partial_images", "goes with stream"),
        ({"partial_images": 4, "stream": True}, "partial_images", "3"),
        ({"progress": True}, "progress", "goes with stream"),
        ({"stream": True, "response_format": "url"}, "response_format", "not links"),
        ({"response_format": "file"}, "response_format", "'url' or 'b64_json'"),
        ({"steps": 0}, "steps", "1"),
        ({"steps": 10_000}, "steps", "1000"),
        ({"steps": 5, "quality": "low"}, "steps", "send either quality or steps"),
        ({"guidance": -1}, "guidance", "0"),
        ({"guidance": 1e9}, "guidance", "100"),
        ({"seed": 2**63}, "seed", ""),
        ({"sampler": "magic"}, "sampler", "euler, heun"),
        ({"cache": "best"}, "cache", "'auto', 'off'"),
        ({"cache": {"name": "teacache", "speed": 3}}, "cache.speed", "Unknown field"),
        ({"cache": {"threshold": 0.1}}, "cache.name", "required"),
        ({"lora": [{"name": "a"}] * 9}, "lora", "8"),
        ({"lora": [{"name": "a", "scale": 1e9}]}, "lora[0].scale", "10"),
        ({"lora": [{"path": "/etc/passwd"}]}, "lora[0].name", "required"),
        ({"strength": 0.5}, "strength", "/v1/images/edits"),
        ({"image": "data:image/png;base64,AAAA"}, "image", "/v1/images/edits"),
        ({"colour": "red"}, "colour", "Unknown field"),
    ],
)
async def test_mistakes_are_named(fields: dict[str, Any], param: str, message: str) -> None:
    engine = FakeImageEngine()
    reply = await post(engine, generation() | fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]
    assert engine.submitted == {}


@pytest.mark.parametrize("name", REFUSED)
async def test_fields_of_others_are_refused_by_name(name: str) -> None:
    reply = await post(FakeImageEngine(), generation(**{name: "x"}))
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "unsupported_option")
    assert error["param"] == name
    for neutral in (None, *REFUSED[name].neutral):
        reply = await post(FakeImageEngine(), generation(**{name: neutral}))
        assert reply.status_code == 200


async def test_null_asks_for_nothing() -> None:
    names = ("model", "n", "size", "quality", "background", "output_format", "stream", "user")
    own = ("seed", "steps", "guidance", "negative_prompt", "sampler", "cache", "lora")
    body = {"prompt": "x", **dict.fromkeys((*names, *own, "partial_images", "response_format"))}
    assert (await post(FakeImageEngine(), body)).status_code == 200
    reply = await post(FakeImageEngine(), {"prompt": None})
    assert reply.json()["error"]["message"] == "prompt is required."
    reply = await post(FakeImageEngine(), {"prompt": "x", "hue": None})
    assert reply.json()["error"]["message"] == "Unknown field: hue."


async def test_an_unknown_model_is_not_found() -> None:
    reply = await post(FakeImageEngine(), generation(model="crayon"))
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "model")
    assert "paint" in reply.json()["error"]["message"]


async def test_stream_events_of_a_generation() -> None:
    engine = FakeImageEngine(num_before=2)
    body = generation(stream=True, partial_images=2, progress=True, seed=1, output_format="webp")
    reply = await post(engine, body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = documents(reply.text)
    names = [line[7:] for line in reply.text.splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    assert not reply.text.endswith("[DONE]\n\n")

    progress = [event for event in events if event["type"] == "image_generation.progress"]
    assert [event["queue_position"] for event in progress[:3]] == [2, 1, -1]
    assert [event["step"] for event in progress[2:]] == list(range(1, 11))
    assert {event["num_steps"] for event in progress[2:]} == {10}
    assert progress[5]["num_computed"] == 2
    assert all(event["step_s"] >= 0 for event in progress)

    partials = [event for event in events if event["type"] == "image_generation.partial_image"]
    assert [event["partial_image_index"] for event in partials] == [0, 1]
    image = opened(partials[0]["b64_json"])
    assert (image.format, image.size) == ("WEBP", (128, 128))
    last = events[-1]
    assert last["type"] == "image_generation.completed"
    assert opened(last["b64_json"]).size == (128, 128)
    assert last["usage"]["total_tokens"] == NUM_PROMPT_TOKENS + 64
    assert last["seed"] == 1
    for event in (*partials, last):
        assert event["created_at"] > 1_600_000_000
        about = ("background", "output_format", "quality", "size")
        assert [event[name] for name in about] == ["opaque", "webp", "medium", "128x128"]


async def test_a_stream_of_several_completes_each() -> None:
    engine = FakeImageEngine()
    reply = await post(engine, generation(stream=True, n=3))
    events = documents(reply.text)
    assert {event["type"] for event in events} == {"image_generation.completed"}
    (request,) = engine.submitted.values()
    assert request.has_progress is False
    for event in events:
        colour = one_colour(opened(event["b64_json"]))
        assert colour == colour_of(request, event["index"])
    assert sorted(event["index"] for event in events) == [0, 1, 2]
    usages = [event["usage"] for event in events]
    assert [usage["input_tokens"] for usage in usages] == [NUM_PROMPT_TOKENS, 0, 0]
    assert [usage["output_tokens"] for usage in usages] == [64, 64, 64]


async def test_engine_errors_become_responses_and_events() -> None:
    reply = await post(FakeImageEngine(error=NonFinite("NaN.")), generation())
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "non_finite")
    reply = await post(FakeImageEngine(error=EngineDown("Gone.")), generation(stream=True))
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    late = FakeImageEngine(error=EngineDown("Gone."), num_good=4)
    reply = await post(late, generation(stream=True, progress=True))
    assert reply.status_code == 200
    *_, last = documents(reply.text)
    assert last["error"]["code"] == "engine_down"


async def test_links_lead_to_the_image() -> None:
    engine = FakeImageEngine()
    async with in_process(make_image_app(engine)) as client:
        body = generation(response_format="url", n=2, output_format="jpeg")
        document = (await client.post(GENERATIONS, json=body)).json()
        for entry in document["data"]:
            assert set(entry) == {"url"}
            assert entry["url"].startswith("http://t/v1/images/files/")
            reply = await client.get(entry["url"])
            assert reply.headers["content-type"] == "image/jpeg"
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert "private" in reply.headers["cache-control"]
            assert opened(reply.content).size == (128, 128)
            for wrong in (entry["url"][:-5] + ".png", entry["url"][:-6] + ".jpeg"):
                assert (await client.get(wrong)).status_code == 404


async def test_links_are_the_keys_own() -> None:
    app = make_image_app(FakeImageEngine(), api_key=("one", "two"))
    body = generation(response_format="url")
    async with in_process(app, authorization="Bearer one") as client:
        url = (await client.post(GENERATIONS, json=body)).json()["data"][0]["url"]
        assert (await client.get(url)).status_code == 200
        for authorization, status in (("Bearer two", 404), ("Bearer no", 401), ("", 401)):
            reply = await client.get(url, headers={"authorization": authorization})
            assert reply.status_code == status


async def test_links_may_have_another_address() -> None:
    reply = await post(
        FakeImageEngine(), generation(response_format="url"), public_url="https://pictures.test/x/"
    )
    url = reply.json()["data"][0]["url"]
    assert url.startswith("https://pictures.test/x/v1/images/files/")


async def test_a_server_without_a_store_sends_no_links() -> None:
    app = make_image_app(FakeImageEngine(), images=ImageOptions(image_store_mb=0))
    async with in_process(app) as client:
        reply = await client.post(GENERATIONS, json=generation(response_format="url"))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "response_format")


async def test_odd_hosts_do_no_harm() -> None:
    async with in_process(make_image_app(FakeImageEngine())) as client:
        for host in ("", "[::1", "a b", 'evil.test"><script>', "[", "x:99999999"):
            headers = {"host": host.encode()}
            body = generation(response_format="url")
            reply = await client.post(GENERATIONS, json=body, headers=headers)
            assert reply.status_code == (403 if "." in host else 200)
            if reply.status_code == 200:
                assert "/v1/images/files/" in reply.json()["data"][0]["url"]


async def test_finished_images_are_counted() -> None:
    async with in_process(make_image_app(FakeImageEngine())) as client:
        await client.post(GENERATIONS, json=generation(n=2))
        shown = (await client.get("/metrics")).text
    assert 'triptych_image_seconds_count{model="paint"} 2.0' in shown


async def test_models_are_listed() -> None:
    async with in_process(make_image_app(FakeImageEngine())) as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["task"]) == ("paint", "image")


async def test_prompts_are_logged_only_on_demand(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    await post(FakeImageEngine(), generation("a secret apple"))
    assert "secret" not in json.dumps([vars(record) for record in caplog.records], default=str)
    await post(FakeImageEngine(), generation("a secret apple"), log_prompts=True)
    assert "secret" in json.dumps([vars(record) for record in caplog.records], default=str)


@pytest.mark.parametrize("is_cut", [True, False])
async def test_a_prompt_that_was_cut_says_so(is_cut: bool) -> None:
    reply = await post(FakeImageEngine(is_prompt_cut=is_cut), generation())
    assert reply.json()["prompt_truncated"] is is_cut
    assert reply.headers.get("x-prompt-truncated") == ("true" if is_cut else None)
    streamed = await post(FakeImageEngine(is_prompt_cut=is_cut), generation(stream=True))
    assert [*documents(streamed.text)][-1]["prompt_truncated"] is is_cut
