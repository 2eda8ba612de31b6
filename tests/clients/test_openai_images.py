"""The `openai` package generates through a live server: its client is the interface's judge."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from io import BytesIO

import httpx
import openai
import pytest
from openai.types import ImageGenCompletedEvent, ImageGenPartialImageEvent
from openai.types.image_edit_completed_event import ImageEditCompletedEvent
from openai.types.image_edit_partial_image_event import ImageEditPartialImageEvent

from support.http import live, until
from support.image_app import (
    FakeImageEngine,
    colour_of,
    image_model,
    make_image_app,
    make_image_service,
    one_colour,
    opened,
)
from support.images import hole_mask, image, saved
from triptych.core.errors import EngineDown
from triptych.modalities.diffusion.wire import StepCache

APPLE = "a red apple"


@pytest.fixture
def engine() -> FakeImageEngine:
    return FakeImageEngine()


@pytest.fixture
def client(engine: FakeImageEngine) -> Iterator[openai.OpenAI]:
    service = make_image_service(engine, image_model(), image_model("looks", max_references=16))
    app = make_image_app(engine, service, api_key=("key",))
    with (
        live(app) as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1",
            api_key="key",
            max_retries=0,
            http_client=httpx.Client(verify=False),
        ) as connection,
    ):
        yield connection


def named(name: str = "a.png", width: int = 128, height: int = 128) -> BytesIO:
    file = BytesIO(saved(image(width, height)))
    file.name = name
    return file


def test_generate(client: openai.OpenAI, engine: FakeImageEngine) -> None:
    reply = client.images.generate(
        model="paint",
        prompt=APPLE,
        n=2,
        size="160x96",
        quality="low",
        background="opaque",
        output_format="webp",
        output_compression=70,
        moderation="low",
        user="u",
    )
    (request,) = engine.submitted.values()
    assert request.num_steps == 5
    assert reply.data is not None
    assert [opened(entry.b64_json or "").size for entry in reply.data] == [(160, 96)] * 2
    assert (reply.size, reply.quality, reply.output_format) == ("160x96", "low", "webp")
    assert reply.background == "opaque"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens


def test_generate_with_nothing_but_a_prompt(client: openai.OpenAI) -> None:
    reply = client.images.generate(prompt=APPLE)
    assert reply.data is not None
    assert opened(reply.data[0].b64_json or "").size == (128, 128)


def test_a_link(client: openai.OpenAI) -> None:
    reply = client.images.generate(model="paint", prompt=APPLE, response_format="url")
    assert reply.data is not None
    url = reply.data[0].url
    assert url is not None
    file = httpx.get(url, headers={"authorization": "Bearer key"}, verify=False)
    assert opened(file.content).size == (128, 128)
    assert httpx.get(url, verify=False).status_code == 401


def test_generate_streams(client: openai.OpenAI, engine: FakeImageEngine) -> None:
    stream = client.images.generate(model="paint", prompt=APPLE, stream=True, partial_images=3)
    *partials, last = list(stream)
    assert [type(event) for event in partials] == [ImageGenPartialImageEvent] * 3
    for index, event in enumerate(partials):
        assert isinstance(event, ImageGenPartialImageEvent)
        assert event.partial_image_index == index
        assert opened(event.b64_json).size == (128, 128)
    assert isinstance(last, ImageGenCompletedEvent)
    (request,) = engine.submitted.values()
    assert one_colour(opened(last.b64_json)) == colour_of(request, 0)
    assert last.usage.output_tokens == 64
    assert (last.size, last.quality, last.background) == ("128x128", "medium", "opaque")


def test_further_fields_go_into_the_body(client: openai.OpenAI, engine: FakeImageEngine) -> None:
    cache = {"name": "taylorseer", "interval": 3, "order": 1}
    extra = {"seed": 11, "steps": 6, "guidance": 2.0, "negative_prompt": "rain", "cache": cache}
    client.images.generate(model="paint", prompt=APPLE, extra_body=extra)
    (request,) = engine.submitted.values()
    assert (request.seed, request.num_steps, request.guidance_scale) == (11, 6, 2.0)
    assert request.negative_prompt == "rain"
    assert request.cache == StepCache(name="taylorseer", interval=3, order=1)


def test_edit(client: openai.OpenAI, engine: FakeImageEngine) -> None:
    mask = BytesIO(hole_mask(128, 128, (0, 0, 64, 128)))
    mask.name = "mask.png"
    reply = client.images.edit(
        model="paint",
        image=named(),
        mask=mask,
        prompt="a hat",
        n=2,
        size="128x128",
        quality="high",
        output_format="jpeg",
        extra_body={"seed": 3, "strength": 0.8, "cache": {"name": "planned", "num_computed": 5}},
    )
    (request,) = engine.submitted.values()
    assert len(request.sources) == 1
    assert request.mask.count(255) == 64 * 128
    assert (request.seed, request.strength, request.num_steps) == (3, 0.8, 15)
    assert request.cache == StepCache(name="planned", num_computed=5)
    assert reply.data is not None
    assert [opened(entry.b64_json or "").format for entry in reply.data] == ["JPEG"] * 2


def test_edit_with_several_images(client: openai.OpenAI, engine: FakeImageEngine) -> None:
    images = [named(f"{n}.png", 64, 32 + n) for n in range(16)]
    client.images.edit(model="looks", image=images, prompt="all of them")
    (request,) = engine.submitted.values()
    assert [source.height for source in request.sources] == list(range(32, 48))
    with pytest.raises(openai.BadRequestError, match="16"):
        client.images.edit(model="looks", image=[*images, named()], prompt="all of them")


def test_edit_with_bytes_alone(client: openai.OpenAI) -> None:
    reply = client.images.edit(model="paint", image=saved(image(), "jpeg"), prompt="a hat")
    assert reply.size == "144x96"


def test_edit_streams(client: openai.OpenAI) -> None:
    stream = client.images.edit(
        model="paint", image=named(), prompt="a hat", stream=True, partial_images=1
    )
    partial, last = list(stream)
    assert isinstance(partial, ImageEditPartialImageEvent)
    assert isinstance(last, ImageEditCompletedEvent)
    assert last.usage.input_tokens_details.image_tokens == 64


def test_variation(client: openai.OpenAI, engine: FakeImageEngine) -> None:
    with pytest.deprecated_call():  # by OpenAI
        reply = client.images.create_variation(
            model="paint", image=named(), n=2, response_format="b64_json", extra_body={"seed": 5}
        )
    assert reply.data is not None
    assert len(reply.data) == 2
    (request,) = engine.submitted.values()
    assert (request.prompt, request.seed) == ("", 5)


def test_mistakes_have_the_types_of_openai(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="multiples of 16") as bad:
        client.images.generate(model="paint", prompt=APPLE, size="100x100")
    assert bad.value.param == "size"
    with pytest.raises(openai.BadRequestError, match="style is not offered"):
        client.images.generate(model="paint", prompt=APPLE, style="vivid")
    with pytest.raises(openai.NotFoundError, match="Image models: paint"):
        client.images.generate(model="dall-e-3", prompt=APPLE)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").images.generate(prompt=APPLE)


def test_an_image_under_another_kinds_name_is_read(client: openai.OpenAI) -> None:
    assert client.images.edit(model="paint", image=named("a.jpg"), prompt="a hat").data


def test_a_stream_that_breaks_raises(client: openai.OpenAI, engine: FakeImageEngine) -> None:
    engine.error, engine.num_good = EngineDown("The engine died."), 6
    stream = client.images.generate(model="paint", prompt=APPLE, stream=True, partial_images=3)
    with pytest.raises(openai.APIError, match="The engine died"):
        list(stream)


def test_leaving_a_stream_cancels_it(client: openai.OpenAI, engine: FakeImageEngine) -> None:
    engine.step_s, engine.gate = 0.01, threading.Event()
    engine.gate.set()
    stream = client.images.generate(
        model="paint",
        prompt=APPLE,
        stream=True,
        partial_images=1,
        extra_body={"steps": 1000, "progress": True},
    )
    first = next(iter(stream))
    assert first.type == "image_generation.progress"
    stream.close()
    until(lambda: len(engine.cancelled) == 1)


def test_base64_is_plain(client: openai.OpenAI) -> None:
    reply = client.images.generate(model="paint", prompt=APPLE)
    assert reply.data is not None
    assert base64.b64decode(reply.data[0].b64_json or "", validate=True)[:4] == b"\x89PNG"
