"""The images API with images of the caller's: forms, and what comes of them."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from support.http import documents, in_process
from support.image_app import (
    EDITS,
    VARIATIONS,
    FakeImageEngine,
    image_model,
    make_image_app,
    make_image_service,
    opened,
)
from support.images import hole_mask, image, saved
from triptych.modalities.diffusion.wire import AdapterUse, StepCache

PNG = ("a.png", saved(image(128, 128)), "image/png")
MASK = ("m.png", hole_mask(128, 128, (0, 0, 64, 64)), "image/png")


async def send(
    path: str, files: Any, engine: FakeImageEngine | None = None, **fields: Any
) -> httpx.Response:
    engine = engine or FakeImageEngine()
    service = make_image_service(engine, image_model(max_references=3))
    async with in_process(make_image_app(engine, service)) as client:
        return await client.post(path, data={"model": "paint", **fields}, files=files)


@pytest.mark.parametrize("fields", [{}, {"response_format": "url"}, {"stream": "true"}])
async def test_layers_are_within_their_image(fields: dict[str, str]) -> None:
    engine = FakeImageEngine()
    service = make_image_service(
        engine, image_model(max_references=1, default_layers=4, has_alpha=True)
    )
    async with in_process(make_image_app(engine, service)) as client:
        data = {"model": "paint", "prompt": "x", "layers": "2", **fields}
        reply = await client.post(EDITS, data=data, files={"image": PNG})
    (request,) = engine.submitted.values()
    assert request.num_layers == 2
    found = documents(reply.text)[-1] if "stream" in fields else reply.json()["data"][0]
    assert len(found["layers"]) == 2
    kind = "url" if "response_format" in fields else "b64_json"
    assert all(set(layer) == {kind} for layer in found["layers"])
    assert found[kind]


async def test_an_edit_sends_images_and_mask() -> None:
    engine = FakeImageEngine()
    reply = await send(
        EDITS,
        {"image": PNG, "mask": MASK},
        engine,
        prompt="a hat",
        n="2",
        size="128x128",
        seed="5",
        steps="6",
        guidance="1.5",
        strength="0.5",
        output_format="jpeg",
        output_compression="80",
    )
    assert reply.status_code == 200, reply.text
    (request,) = engine.submitted.values()
    assert (request.num_images, request.num_steps, request.seed) == (2, 6, 5)
    assert (request.guidance_scale, request.strength) == (1.5, 0.5)
    assert len(request.sources) == 1
    assert request.sources[0].rgb == image(128, 128).tobytes()
    assert request.mask.count(255) == 64 * 64
    body = reply.json()
    assert [opened(entry["b64_json"]).format for entry in body["data"]] == ["JPEG", "JPEG"]
    assert body["usage"]["input_tokens_details"]["image_tokens"] == 64


@pytest.mark.parametrize("shape", [(70, 61), (300, 230), (100, 33), (37, 100), (128, 64)])
async def test_an_edit_has_the_shape_of_its_image(shape: tuple[int, int]) -> None:
    engine = FakeImageEngine()
    width, height = shape
    source = ("s.png", saved(image(*shape)), "image/png")
    mask = ("m.png", hole_mask(*shape, (0, 0, width, height // 2)), "image/png")
    reply = await send(EDITS, {"image": source, "mask": mask}, engine, prompt="a hat")
    body = reply.json()
    edited = opened(body["data"][0]["b64_json"])
    assert body["size"] == f"{edited.width}x{edited.height}"
    aspect = max(min(width / height, 3), 1 / 3)
    assert edited.width / edited.height == pytest.approx(aspect, rel=0.01)
    (request,) = engine.submitted.values()
    (begun,) = request.sources
    assert (begun.width, begun.height) == (request.width, request.height)
    grid_B = np.frombuffer(request.mask, np.uint8).reshape(request.height, request.width)
    assert (grid_B[: edited.height // 2 - 2] == 255).all()  # also beyond what is shown
    assert (grid_B[edited.height // 2 + 2 :] == 0).all()


@pytest.mark.parametrize("seed", ["-1", None])
async def test_a_new_seed_is_returned(seed: str | None) -> None:
    engine = FakeImageEngine()
    fields = {} if seed is None else {"seed": seed}
    replies = [await send(EDITS, {"image": PNG}, engine, prompt="x", **fields) for _ in range(2)]
    seeds = [reply.json()["seed"] for reply in replies]
    assert seeds == [request.seed for request in engine.submitted.values()]
    assert len({*seeds, -1}) == 3


async def test_several_images() -> None:
    engine = FakeImageEngine()
    files = [("image[]", (f"{n}.png", saved(image(64, 64 + n)), "image/png")) for n in range(3)]
    reply = await send(EDITS, files, engine, prompt="together")
    assert reply.status_code == 200, reply.text
    (request,) = engine.submitted.values()
    assert [source.height for source in request.sources] == [64, 65, 66]


@pytest.mark.parametrize(
    "fields",
    [
        {"cache": '{"name": "planned", "num_computed": 4}', "lora": '[{"name": "ink"}]'},
        {"cache[name]": "planned", "cache[num_computed]": "4", "lora[][name]": "ink"},
    ],
)
async def test_objects_in_a_form(fields: dict[str, str]) -> None:
    engine = FakeImageEngine()
    reply = await send(EDITS, {"image": PNG}, engine, prompt="a hat", **fields)
    assert reply.status_code == 200, reply.text
    (request,) = engine.submitted.values()
    assert request.cache == StepCache(name="planned", num_computed=4)
    assert request.adapters == (AdapterUse("ink", 1.0),)


async def test_objects_come_as_openai_takes_them_apart() -> None:
    whole = {
        "cache": {"name": "teacache", "coefficients": [-4.5, 2], "max_skips": 3},
        "lora": [{"name": "ink", "scale": 0.5}, {"name": "sketch", "scale": 2}],
    }
    engine = FakeImageEngine()
    with openai.OpenAI(api_key="none") as client:
        fields = client._serialize_multipartform(whole)
    reply = await send(EDITS, {"image": PNG}, engine, prompt="a hat", **fields)
    assert reply.status_code == 200, reply.text
    (request,) = engine.submitted.values()
    assert request.cache == StepCache(name="teacache", coefficients=(-4.5, 2.0), max_skips=3)
    assert request.adapters == (AdapterUse("ink", 0.5), AdapterUse("sketch", 2.0))


async def test_an_edit_streams_events_of_its_own() -> None:
    reply = await send(
        EDITS, {"image": PNG}, prompt="a hat", stream="true", partial_images="1", progress="true"
    )
    kinds = [event["type"] for event in documents(reply.text)]
    assert set(kinds) == {"image_edit.progress", "image_edit.partial_image", "image_edit.completed"}
    assert kinds[-1] == "image_edit.completed"


async def test_a_variation_needs_an_image_alone() -> None:
    engine = FakeImageEngine()
    reply = await send(VARIATIONS, {"image": PNG}, engine, n="2", size="64x64")
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["data"]) == 2
    (request,) = engine.submitted.values()
    assert (request.prompt, request.width, len(request.sources)) == ("", 64, 1)


@pytest.mark.parametrize(
    ("path", "files", "fields", "status", "param"),
    [
        (EDITS, {}, {"prompt": "x"}, 400, "image"),
        (EDITS, {"image": PNG}, {}, 400, "prompt"),
        (EDITS, {"mask": MASK}, {"prompt": "x"}, 400, "image"),
        (EDITS, {"image": PNG, "markup": PNG}, {"prompt": "x"}, 400, "image"),
        (EDITS, [("image[]", PNG)] * 4, {"prompt": "x"}, 400, "image"),
        (EDITS, [("image[]", PNG)] * 17, {"prompt": "x"}, 400, "image"),
        (EDITS, {"image": PNG}, {"prompt": "x", "strength": "2"}, 400, "strength"),
        (EDITS, {"image": PNG}, {"prompt": "x", "layers": "9"}, 400, "layers"),
        (EDITS, {"image": PNG}, {"prompt": "x", "layers": "2"}, 400, "layers"),
        (EDITS, {"image": PNG}, {"prompt": "x", "n": "two"}, 400, "n"),
        (EDITS, {"image": PNG}, {"prompt": "x", "cache": "{"}, 400, None),
        (
            EDITS,
            {"image": PNG},
            {"prompt": "x", "cache": "off", "cache[name]": "off"},
            400,
            "cache",
        ),
        (EDITS, {"image": PNG}, {"prompt": "x", "input_fidelity": "high"}, 400, "input_fidelity"),
        (
            EDITS,
            {"image": PNG},
            {"prompt": "x", "lora[][name]": ["ink", "ink"], "lora[][scale]": "1"},
            400,
            "lora",
        ),
        (
            EDITS,
            {"image": PNG},
            {"prompt": "x", "cache[order]": "1", "cache[order][]": "2"},
            400,
            "cache",
        ),
        (EDITS, {"image": PNG}, {"prompt": "x", "unknown": "x"}, 400, "unknown"),
        (EDITS, {"image": PNG}, {"prompt": "x", "model": "crayon"}, 404, "model"),
        (EDITS, {"image": PNG, "mask": PNG}, {"prompt": "x"}, 400, "mask"),
        (EDITS, {"image": ("a", b"GIF89a")}, {"prompt": "x"}, 415, "image"),
        (EDITS, {"image": ("a.htm", PNG[1], "text/html")}, {"prompt": "x"}, 415, "image"),
        (
            EDITS,
            {"image": PNG},
            {"prompt": "x", "guidance": "1", "guidance_scale": "2"},
            400,
            "guidance_scale",
        ),
        (VARIATIONS, {}, {}, 400, "image"),
        (VARIATIONS, {"image": PNG}, {"prompt": "x"}, 400, "prompt"),
        (VARIATIONS, {"image": PNG}, {"stream": "true"}, 400, "stream"),
        (VARIATIONS, {"image": PNG, "mask": MASK}, {}, 400, "image"),
    ],
)
async def test_mistakes_in_forms_are_named(
    path: str, files: Any, fields: dict[str, str], status: int, param: str | None
) -> None:
    engine = FakeImageEngine()
    no_file = {"n": (None, "1")}
    reply = await send(path, files or no_file, engine, **fields)
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["param"] == param
    assert engine.submitted == {}


async def test_an_edit_without_a_form_is_refused() -> None:
    async with in_process(make_image_app(FakeImageEngine())) as client:
        reply = await client.post(EDITS, content=b"x", headers={"content-type": "text/plain"})
    assert reply.status_code == 415


def reference(file: tuple[str, bytes, str]) -> dict[str, str]:
    return {"image_url": f"data:{file[2]};base64,{base64.b64encode(file[1]).decode()}"}


async def send_json(body: dict[str, Any], engine: FakeImageEngine) -> httpx.Response:
    service = make_image_service(engine, image_model(max_references=3))
    async with in_process(make_image_app(engine, service)) as client:
        return await client.post(EDITS, json={"model": "paint", **body})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "size": "128x128", "steps": 6, "guidance": 1.5, "strength": 0.5},
        {"output_format": "jpeg", "output_compression": 80, "cache": {"name": "off"}},
        {"lora": [{"name": "ink", "scale": 0.5}], "negative_prompt": "rain", "mask": None},
    ],
)
@pytest.mark.parametrize("has_mask", [True, False])
async def test_json_asks_for_what_a_form_does(fields: dict[str, Any], has_mask: bool) -> None:
    asked: dict[str, Any] = {"prompt": "a hat", "seed": 5, **fields}
    files = {"image": PNG, **({"mask": MASK} if has_mask else {})}
    form = {name: value for name, value in asked.items() if name not in ("cache", "lora", "mask")}
    form |= {name: json.dumps(asked[name]) for name in ("cache", "lora") if name in asked}
    masks = {"mask": reference(MASK)} if has_mask else {}
    by_form, by_json = FakeImageEngine(), FakeImageEngine()
    first = await send(EDITS, files, by_form, **{name: str(form[name]) for name in form})
    second = await send_json({**asked, "images": [reference(PNG)], **masks}, by_json)
    assert (first.status_code, second.status_code) == (200, 200), second.text
    assert list(by_form.submitted.values()) == list(by_json.submitted.values())
    assert first.json()["data"] == second.json()["data"]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"images": []}, 400, "images"),
        ({}, 400, "images"),
        ({"images": [reference(PNG)] * 17}, 400, "images"),
        ({"images": [{"file_id": "file-1"}]}, 400, "file_id"),
        ({"images": [{}]}, 400, "image_url"),
        ({"images": [{"image_url": "https://example.com/a.png"}]}, 400, "image"),
        ({"images": [{"image_url": "data:image/png;base64,?"}]}, 400, "image"),
        ({"images": [{"image_url": "data:image/png;base64,AAAA"}]}, 415, "image"),
        ({"images": [reference(PNG)], "mask": reference(PNG)}, 400, "mask"),
        ({"images": [reference(PNG)], "strength": 2}, 400, "strength"),
        ({"images": [reference(PNG)], "unknown": 1}, 400, "unknown"),
    ],
)
async def test_mistakes_in_json_are_named(fields: dict[str, Any], status: int, param: str) -> None:
    reply = await send_json({"prompt": "x", **fields}, engine := FakeImageEngine())
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["param"] == param
    assert engine.submitted == {}
