"""Calls for images: what is asked of the engine, what is refused, admission, cancelling."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from support.image_app import (
    FakeImageEngine,
    call,
    colour_of,
    image_model,
    make_image_service,
    plain,
)
from support.images import hole_mask, image, saved, turned
from triptych.core.errors import (
    EngineDown,
    InvalidRequest,
    NotFound,
    Overloaded,
    RateLimited,
    RequestError,
    UnsupportedMedia,
    UnsupportedOption,
)
from triptych.core.media.images import ImageReader
from triptych.core.options.config import Config, DeviceOptions, ImageOptions
from triptych.modalities.diffusion.api.service import ImageCall, ImageFile, ImageService
from triptych.modalities.diffusion.wire import AdapterUse, ImageDelta, ImageRequest, StepCache

PNG = ImageFile(saved(image(256, 128)), "image/png")
MASK = ImageFile(hole_mask(256, 128, (0, 0, 128, 128)))


async def generated(service: ImageService, asked: ImageCall) -> list[ImageDelta]:
    return [delta async for delta in service.generate(asked)]


async def asked_for(asked: ImageCall, **spec: Any) -> ImageRequest:
    """What the engine is asked for the sake of a call."""
    engine = FakeImageEngine()
    await generated(make_image_service(engine, image_model(**spec)), asked)
    (request,) = engine.submitted.values()
    return request


async def test_a_call_becomes_images() -> None:
    engine = FakeImageEngine()
    generation = make_image_service(engine).generate(call(seed=3, num_images=2))
    deltas = [delta async for delta in generation]
    request = generation.request
    for index in range(2):
        (last,) = (d for d in deltas if d.image == index and d.pixels is not None)
        assert last.pixels == plain(128, 128, colour_of(request, index))
    assert deltas[-1].finish_reason == "stop"
    assert engine.finished == ["call"]


async def test_everything_asked_for_reaches_the_engine() -> None:
    uses = (AdapterUse("sketch", 0.5),)
    cache = StepCache(name="teacache", threshold=0.3)
    request = await asked_for(
        call(
            "a blue car",
            negative_prompt="red",
            size=(160, 96),
            num_images=3,
            num_steps=7,
            guidance_scale=2.5,
            sampler="heun",
            cache=cache,
            adapters=uses,
            seed=-5,
            num_partials=2,
            has_progress=True,
            tenant="t",
        )
    )
    assert request == ImageRequest(
        prompt="a blue car",
        negative_prompt="red",
        width=160,
        height=96,
        seed=-5,
        num_images=3,
        num_steps=7,
        guidance_scale=2.5,
        sampler="heun",
        cache=cache,
        adapters=uses,
        num_partials=2,
        has_progress=True,
        tenant="t",
    )


async def test_what_is_left_out_is_left_to_the_engine() -> None:
    request = await asked_for(call())
    assert (request.width, request.height, request.num_steps) == (128, 128, None)
    assert (request.guidance_scale, request.cache) == (None, StepCache())


@pytest.mark.parametrize(
    ("quality", "num_steps", "cache"),
    [("auto", None, "auto"), ("medium", None, "auto"), ("low", 5, "auto"), ("high", 15, "off")],
)
async def test_quality_is_a_number_of_steps(
    quality: Any, num_steps: int | None, cache: str
) -> None:
    request = await asked_for(call(quality=quality))
    assert (request.num_steps, request.cache.name) == (num_steps, cache)
    wanted = StepCache(name="planned", num_computed=4)
    assert (await asked_for(call(quality=quality, cache=wanted))).cache == wanted


async def test_seeds_are_generated_or_configured() -> None:
    service = make_image_service(engine := FakeImageEngine())
    for n in range(3):
        await generated(service, call(call_id=str(n)))
    assert len({request.seed for request in engine.submitted.values()}) == 3
    config = Config(device=DeviceOptions(seed=17))
    reader = ImageReader(None)
    fixed = ImageService(config, [image_model()], engine, reader=reader)
    await generated(fixed, call(call_id="x"))
    assert engine.submitted["x"].seed == 17


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "\udcff"}, "prompt"),
        ({"negative_prompt": "\udcff"}, "negative_prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 32_001}, "prompt"),
        ({"num_images": 0}, "n"),
        ({"num_images": 11}, "n"),
        ({"num_steps": 0}, "steps"),
        ({"num_steps": 10_000}, "steps"),
        ({"guidance_scale": math.nan}, "guidance"),
        ({"guidance_scale": -1.0}, "guidance"),
        ({"seed": 2**63}, "seed"),
        ({"num_partials": 4}, "partial_images"),
        ({"sampler": "magic"}, "sampler"),
        ({"adapters": (AdapterUse("chalk"),)}, "lora"),
        ({"size": (1023, 7)}, "size"),
        ({"size": (20_000, 20_000)}, "size"),
        ({"strength": 0.5}, "strength"),
        ({"mask": MASK}, "mask"),
        ({"sources": (PNG,), "strength": 0.0}, "strength"),
        ({"sources": (PNG, PNG)}, "image"),
    ],
)
async def test_invalid_calls_are_refused_before_submission(
    fields: dict[str, Any], param: str
) -> None:
    service = make_image_service(engine := FakeImageEngine())
    with pytest.raises(InvalidRequest) as refused:
        service.generate(call(**fields))
    assert refused.value.param == param
    assert engine.submitted == {}


async def test_a_model_refuses_what_it_cannot_do() -> None:
    service = make_image_service(FakeImageEngine(), image_model(has_negative=False))
    with pytest.raises(UnsupportedOption, match="negative"):
        service.generate(call(negative_prompt="rain"))
    service = make_image_service(FakeImageEngine())
    with pytest.raises(InvalidRequest, match="guidance above 1; here it is 1"):
        service.generate(call(negative_prompt="rain", guidance_scale=1.0))
    with pytest.raises(NotFound, match="Image models: paint"):
        service.generate(call(model="crayon"))
    assert service.generate(call(model="")).model.name == "paint"


async def test_an_image_to_begin_from_comes_as_large_as_what_is_generated() -> None:
    request = await asked_for(call(sources=(PNG,), mask=MASK, strength=0.7))
    assert (request.width, request.height) == (192, 96)  # the image's shape, the model's area
    (source,) = request.sources
    assert (source.width, source.height) == (192, 96)
    mask = np.frombuffer(request.mask, np.uint8).reshape(96, 192)
    assert (mask[:, : 192 // 2 - 4] == 255).all()
    assert (mask[:, 192 // 2 + 4 :] == 0).all()
    assert request.strength == 0.7


async def test_a_size_that_is_asked_for_cuts_the_image() -> None:
    request = await asked_for(call(sources=(PNG,), size=(128, 128)))
    (source,) = request.sources
    raster = np.frombuffer(source.rgb, np.uint8).reshape(128, 128, 3)
    assert 60 < raster[0, 0, 0] < 70  # the left quarter is cut off
    assert 185 < raster[0, -1, 0] < 195


async def test_reference_images_keep_their_shape_and_are_not_too_large() -> None:
    tall = ImageFile(saved(image(100, 700)))
    small = ImageFile(saved(image(40, 20)))
    request = await asked_for(call(sources=(tall, small), size=(128, 128)), max_references=2)
    shapes = [(source.width, source.height) for source in request.sources]
    assert shapes[1] == (40, 20)
    assert math.prod(shapes[0]) == pytest.approx(128 * 128, rel=0.03)
    assert shapes[0][1] / shapes[0][0] == pytest.approx(7, rel=0.05)
    begun = await asked_for(
        call(sources=(tall, small), size=(128, 128), strength=0.5), max_references=2
    )
    assert [(source.width, source.height) for source in begun.sources] == [(128, 128), (40, 20)]


async def test_a_turned_image_has_its_upright_shape() -> None:
    file = ImageFile(turned("jpeg", 6, 256, 128), "image/jpeg")
    request = await asked_for(call(sources=(file,)))
    assert (request.width, request.height) == (96, 192)


@pytest.mark.parametrize(
    ("fields", "param", "error"),
    [
        ({"sources": (ImageFile(b"GIF89a"),)}, "image", UnsupportedMedia),
        ({"sources": (ImageFile(PNG.data, "text/html"),)}, "image", UnsupportedMedia),
        ({"sources": (ImageFile(bytes(PNG.data)[:200]),)}, "image", InvalidRequest),
        ({"sources": (PNG,), "mask": ImageFile(b"x")}, "mask", UnsupportedMedia),
        ({"sources": (PNG,), "mask": PNG}, "mask", InvalidRequest),
        (
            {"sources": (PNG,), "mask": ImageFile(hole_mask(128, 128, (0, 0, 9, 9)))},
            "mask",
            InvalidRequest,
        ),
    ],
)
async def test_bad_images_are_named_and_cost_nothing(
    fields: dict[str, Any], param: str, error: type[RequestError]
) -> None:
    service = make_image_service(engine := FakeImageEngine())
    with pytest.raises(error) as refused:
        await generated(service, call(**fields))
    assert refused.value.param == param
    assert engine.submitted == {}
    await generated(service, call(sources=(PNG,)))  # nothing is still counted as held or admitted


async def test_admission_counts_pixels_times_steps() -> None:
    tokens = 128 * 128 // 256 * 10
    service = make_image_service(FakeImageEngine(), max_queue_tokens=2 * tokens)
    await generated(service, call(num_images=2))
    await generated(service, call(num_steps=20))
    for fields in ({"num_images": 3}, {"num_steps": 21}, {"size": (256, 256), "num_steps": 10}):
        with pytest.raises(InvalidRequest, match="tokens"):
            await generated(service, call(**fields))


async def test_overload_says_when_to_come_back() -> None:
    engine = FakeImageEngine(step_s=0.01)
    service = make_image_service(engine, max_queue_size=1, max_batch_size=2, max_jobs_per_key=2)
    first = service.generate(call(num_images=2, key="a", has_progress=True))
    await anext(first)
    with pytest.raises(RateLimited) as mine:
        await generated(service, call(key="a", call_id="b"))
    with pytest.raises(Overloaded) as all_of_us:
        await generated(service, call(num_images=2, key="b", call_id="c"))
    for refused in (mine, all_of_us):
        assert refused.value.retry_after_s is not None
        assert refused.value.retry_after_s >= 1
    await first.aclose()
    await generated(service, call(num_images=2, key="a", call_id="d"))


async def test_leaving_cancels_within_a_step_and_gives_everything_back() -> None:
    engine = FakeImageEngine(step_s=0.005)
    service = make_image_service(engine, max_queue_size=1, max_batch_size=1)
    generation = service.generate(
        call(num_images=2, num_steps=1000, has_progress=True, sources=(PNG,))
    )
    await anext(generation)
    before = engine.num_steps
    await generation.aclose()
    assert engine.cancelled == ["call"]
    await asyncio.sleep(0.05)
    assert engine.num_steps <= before + 1
    assert service._images.held == 0
    await generated(service, call(num_images=2, call_id="next"))


async def test_what_ends_the_engines_job_ends_the_call() -> None:
    engine = FakeImageEngine(error=EngineDown("The engine died."), num_good=3)
    service = make_image_service(engine)
    generation = service.generate(call(has_progress=True))
    assert [(await anext(generation)).step for _ in range(3)] == [1, 2, 3]
    with pytest.raises(EngineDown):
        await anext(generation)


async def test_images_of_all_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from triptych.modalities.diffusion.api import service as module

    monkeypatch.setattr(module, "MAX_HELD_BYTES", 3 * 192 * 96)
    engine = FakeImageEngine(step_s=0.005)
    service = make_image_service(engine)
    first = service.generate(call(sources=(PNG,), has_progress=True))
    await anext(first)
    with pytest.raises(Overloaded, match="edited"):
        await generated(service, call(sources=(PNG,), call_id="b"))
    await first.aclose()
    monkeypatch.setattr(module, "MAX_SOURCE_BYTES", 1000)
    with pytest.raises(InvalidRequest, match="in total"):
        await generated(service, call(sources=(PNG,), call_id="c"))


@pytest.mark.parametrize(("most", "side"), [(128 * 128, 128), (128 * 128 - 1, 112), (4096, 64)])
async def test_without_a_size_the_largest_that_the_server_generates(most: int, side: int) -> None:
    engine = FakeImageEngine()
    service = make_image_service(engine, images=ImageOptions(max_image_pixels=most))
    await generated(service, call())
    (request,) = engine.submitted.values()
    assert (request.width, request.height) == (side, side)


async def test_the_server_bounds_images() -> None:
    service = make_image_service(FakeImageEngine(), images=ImageOptions(max_image_pixels=128 * 128))
    with pytest.raises(InvalidRequest, match="16384"):
        service.generate(call(size=(144, 128)))
