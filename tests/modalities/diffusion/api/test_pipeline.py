"""The Python object, in front of an engine that generates plain colours."""

from __future__ import annotations

import asyncio
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops, ImageStat

from support.http import until
from support.image_engine import COLOURS, PlainEngine, open_plain
from support.images import hole_mask, image, saved
from triptych.core.errors import ConfigError, InvalidRequest, NonFinite
from triptych.modalities.diffusion.api.pipeline import (
    GenerateOptions,
    ImagePipeline,
    image_call,
)
from triptych.modalities.diffusion.api.results import kind_of
from triptych.modalities.diffusion.wire import AdapterUse, ImageRequest, StepCache


@pytest.fixture
def engine() -> PlainEngine:
    return PlainEngine()


@pytest.fixture
def generate(engine: PlainEngine) -> Iterator[ImagePipeline]:
    with open_plain(engine) as pipeline:
        yield pipeline


def asked(engine: PlainEngine) -> ImageRequest:
    return list(engine.submitted.values())[-1]


def test_a_call_returns_the_images(generate: ImagePipeline, engine: PlainEngine) -> None:
    images = generate("a red apple", num_images=3, seed=5, size=(64, 32), num_steps=4)
    assert [found.index for found in images] == [0, 1, 2]
    for found, colour in zip(images, COLOURS, strict=True):
        assert found.image.size == (64, 32)
        assert found.image.getpixel((3, 3)) == colour
        assert (found.seed, found.num_steps, found.num_computed) == (5, 4, 2)
        assert found.elapsed_s > 0
    request = asked(engine)
    assert (request.prompt, request.num_images, request.seed) == ("a red apple", 3, 5)
    assert not request.has_progress


def test_random_seed_is_returned(generate: ImagePipeline, engine: PlainEngine) -> None:
    (found,) = generate("a red apple")
    assert found.seed == asked(engine).seed


def test_minus_one_asks_for_a_new_seed(generate: ImagePipeline, engine: PlainEngine) -> None:
    seeds = [generate("a red apple", seed=-1)[0].seed for _ in range(3)]
    assert len(set(seeds)) == 3
    assert min(seeds) >= 0
    assert asked(engine).seed == seeds[-1]


def test_a_prompt_that_was_cut_is_warned_of_once(
    generate: ImagePipeline, engine: PlainEngine
) -> None:
    engine.is_prompt_cut = True
    with pytest.warns(UserWarning, match="longer than the model reads") as warned:
        generate("a red apple", num_images=3)
    assert len(warned) == 1
    engine.is_prompt_cut = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate("a red apple")


def test_images_of_shapes_off_the_grid_come_back_in_their_shape(
    generate: ImagePipeline, engine: PlainEngine
) -> None:
    progress = list(generate.stream("a hen", image=image(100, 57), num_previews=1))
    (found,) = [one.image for one in progress if one.image]
    width, height = found.image.size
    assert width / height == pytest.approx(100 / 57, rel=0.01)
    request = asked(engine)
    assert width <= request.width
    assert height <= request.height
    assert (width, height) != (request.width, request.height)
    (preview,) = [one.preview for one in progress if one.preview]
    assert preview.size == (
        round(8 * width / request.width),
        round(8 * height / request.height),
    )


def test_options_reach_the_engine(generate: ImagePipeline, engine: PlainEngine) -> None:
    generate(
        "a hen",
        negative_prompt="blurry",
        guidance_scale=3.5,
        sampler="heun",
        cache=StepCache(name="teacache", threshold=0.2),
        adapters={"ink": 0.5},
    )
    request = asked(engine)
    assert (request.negative_prompt, request.guidance_scale) == ("blurry", 3.5)
    assert (request.sampler, request.adapters) == ("heun", (AdapterUse("ink", 0.5),))
    assert request.cache == StepCache(name="teacache", threshold=0.2)
    generate("a hen", cache="off")
    assert asked(engine).cache == StepCache(name="off")


def test_stream_yields_steps_and_previews(generate: ImagePipeline) -> None:
    updates = list(generate.stream("a hen", num_previews=2, num_steps=4))
    assert updates[0].queue_position == 1
    previews = [progress.preview for progress in updates if progress.preview is not None]
    assert [preview.size for preview in previews] == [(8, 8), (8, 8)]
    steps = [(progress.step, progress.num_steps) for progress in updates if progress.num_steps]
    assert steps == sorted(steps)
    assert [progress.image is None for progress in updates] == [True] * (len(updates) - 1) + [False]
    assert updates[-1].image is not None
    assert updates[-1].image.image.size == (64, 64)


def test_leaving_a_stream_early_cancels_it(generate: ImagePipeline, engine: PlainEngine) -> None:
    engine.is_endless = True
    stream = generate.stream("a hen")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    engine.is_endless = False
    generate("a hen")
    until(lambda: len(engine.cancelled) == 1)  # a stream is left at once, and ended soon


async def test_async_twins_work_on_any_loop(generate: ImagePipeline) -> None:
    one, two = await asyncio.gather(generate.acall("a hen"), generate.acall("a fox", num_images=2))
    assert (len(one), len(two)) == (1, 2)
    updates = [progress async for progress in generate.astream("a hen", num_steps=3)]
    assert updates[-1].image is not None


@pytest.mark.parametrize("form", ["image", "bytes", "path", "text"])
def test_images_are_begun_from(
    generate: ImagePipeline, engine: PlainEngine, tmp_path: Path, form: str
) -> None:
    path = tmp_path / "source.png"
    path.write_bytes(saved(image(48, 48)))
    forms: dict[str, Any] = {
        "image": image(48, 48),
        "bytes": path.read_bytes(),
        "path": path,
        "text": str(path),
    }
    generate("a hen", image=forms[form], strength=0.4)
    request = asked(engine)
    assert request.strength == 0.4
    (source,) = request.sources
    assert (source.width, source.height) == (64, 64)
    generate("a hen", image=[image(), image()])
    assert len(asked(engine).sources) == 2


def test_a_variation_has_no_words(generate: ImagePipeline, engine: PlainEngine) -> None:
    generate(image=image(64, 64))
    assert asked(engine).prompt == ""
    with pytest.raises(InvalidRequest):
        generate()


def test_masks_are_white_or_transparent_where_the_image_may_change(
    generate: ImagePipeline, engine: PlainEngine
) -> None:
    white = Image.new("L", (64, 64))
    white.paste(255, (0, 0, 32, 64))
    for mask in (white, hole_mask(64, 64, (0, 0, 32, 64))):
        generate("a hen", image=image(64, 64), mask=mask)
        found = Image.frombytes("L", (64, 64), asked(engine).mask)
        assert found.tobytes() == white.tobytes()
    with pytest.raises(InvalidRequest, match="mask cannot be read as an image"):
        generate("a hen", image=image(64, 64), mask=b"nonsense")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.png", "png"), ("a.JPG", "jpeg"), ("a.b.jpeg", "jpeg"), ("x.webp", "webp")],
)
def test_files_are_saved_in_the_format_of_their_name(
    generate: ImagePipeline, tmp_path: Path, name: str, kind: str
) -> None:
    (found,) = generate("a hen")
    assert kind_of(name) == kind
    found.save(tmp_path / name)
    with Image.open(tmp_path / name) as image:
        assert (image.format or "").lower() == kind
        assert image.size == (64, 64)


def test_a_name_without_a_format_says_what_to_do(generate: ImagePipeline, tmp_path: Path) -> None:
    (found,) = generate("a hen")
    with pytest.raises(ConfigError, match=r"use \.png, \.jpeg, \.webp, or name the format"):
        found.save(tmp_path / "image.doc")
    found.save(tmp_path / "image.doc", kind="png")
    with Image.open(io.BytesIO(found._repr_png_())) as image:
        assert image.size == (64, 64)


def test_mistakes_say_what_to_do(generate: ImagePipeline, engine: PlainEngine) -> None:
    with pytest.raises(InvalidRequest, match="64x64"):
        generate("a hen", size=(63, 64))
    with pytest.raises(ConfigError, match=r"source\.png cannot be read"):
        generate("a hen", image="/no/such/source.png")
    with pytest.raises(TypeError, match="promt"):
        generate("a hen", promt="x")  # type: ignore[call-arg]
    engine.error = NonFinite("NaN.")
    with pytest.raises(NonFinite):
        generate("a hen")


def test_pipeline_lists_abilities(generate: ImagePipeline) -> None:
    assert generate.model.default_size == (64, 64)
    assert generate.model.samplers == ("euler", "heun")


@pytest.fixture(scope="module")
def embedded() -> Iterator[ImagePipeline]:
    with ImagePipeline.from_pretrained(progress=False, threads=1) as pipeline:
        yield pipeline


def test_a_real_image_is_the_same_alone_and_batched(embedded: ImagePipeline) -> None:
    options = GenerateOptions(num_steps=4, seed=3, cache="off")
    together = embedded("a red apple", num_images=3, **options)
    (alone,) = embedded("a red apple", **options)
    assert alone.image.size == embedded.model.default_size
    assert (alone.num_steps, alone.num_computed) == (4, 4)
    assert len({image.image.tobytes() for image in together}) == 3
    difference = ImageChops.difference(alone.image, together[0].image)
    assert max(high for _, high in difference.getextrema()) <= 4


def test_a_real_image_can_be_watched_and_left(embedded: ImagePipeline) -> None:
    updates = list(embedded.stream("a red apple", num_previews=2, num_steps=6, cache="off"))
    assert sum(progress.preview is not None for progress in updates) == 2
    assert updates[-1].image is not None
    assert {progress.step for progress in updates} >= {1, 2, 3, 4, 5}
    for _ in range(20):  # more than may be generated at once: a leak would block the last ones
        stream = embedded.stream("a red apple", num_steps=50, cache="off")
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    assert len(embedded("a red apple", num_steps=2)) == 1


def test_a_real_cache_skips_steps_and_changes_the_image_a_little(embedded: ImagePipeline) -> None:
    options = GenerateOptions(num_steps=16, seed=3)
    (whole,) = embedded("a red apple", cache="off", **options)
    cache = StepCache(name="taylorseer", interval=2, warmup=6)
    (cached,) = embedded("a red apple", cache=cache, **options)
    assert (whole.num_computed, cached.num_computed) == (16, 11)
    assert whole.image.tobytes() != cached.image.tobytes()
    difference = ImageChops.difference(whole.image, cached.image)
    assert ImageStat.Stat(difference).mean[0] < 4


def test_a_real_image_is_begun_from(embedded: ImagePipeline) -> None:
    red = Image.new("RGB", (128, 128), (220, 30, 30))
    (near,) = embedded("an apple on red", image=red, strength=0.25, num_steps=8, cache="off")
    far = ImageStat.Stat(ImageChops.difference(near.image, red)).mean
    assert sum(far) / 3 < 40
    assert near.num_computed == 2


def test_the_embedded_model_comes_calibrated(embedded: ImagePipeline) -> None:
    for num_steps, most in ((50, 25), (28, 14), (20, 10)):
        (found,) = embedded("a red apple", num_steps=num_steps, seed=1)
        assert 2 <= found.num_computed <= most


@pytest.mark.parametrize("alpha", [255, 128])
def test_masks_whose_alpha_says_nothing_are_read_by_their_white(alpha: int) -> None:
    painted = Image.new("RGBA", (64, 64), (0, 0, 0, alpha))
    painted.paste((255, 255, 255, alpha), (0, 0, 32, 64))
    call = image_call("a hen", {"image": image(64, 64), "mask": painted})
    assert call.mask is not None
    with Image.open(io.BytesIO(bytes(call.mask.data))) as mask:
        assert mask.getchannel("A").getcolors() == [(32 * 64, 0), (32 * 64, 255)]
