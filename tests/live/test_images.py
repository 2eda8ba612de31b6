"""The embedded model generates through a live server, as the `openai` package asks it to."""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from support.images import hole_mask, saved
from support.serve_process import eventually
from support.tiers import first

OTHER = "a blue car on a yellow background"
APPLE = "a red apple"
SIDE = 128
NUM_STEPS = 8
LEAST_APART = 6.0  # of 255, mean over all values: what two seeds of a prompt differ by at least

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]


def raster(text: str | None) -> np.ndarray:
    image = Image.open(io.BytesIO(base64.b64decode(text or "", validate=True)))
    return np.asarray(image.convert("RGB")).astype(int)


def images(reply: openai.types.ImagesResponse) -> list[np.ndarray]:
    assert reply.data is not None
    return [raster(entry.b64_json) for entry in reply.data]


def generate(client: openai.OpenAI, seed: int = 1, **fields: Any) -> list[np.ndarray]:
    own = {"seed": seed, "steps": NUM_STEPS, **fields.pop("extra_body", {})}
    return images(client.images.generate(**{"prompt": APPLE, "extra_body": own, **fields}))


def distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).mean())


def assert_apart(found: list[np.ndarray]) -> None:
    assert min(distance(one, other) for one, other in combinations(found, 2)) > LEAST_APART


def named(image: np.ndarray, name: str = "a.png") -> io.BytesIO:
    file = io.BytesIO(saved(Image.fromarray(image.astype(np.uint8))))
    file.name = name
    return file


def test_a_seed_repeats_its_images(client: openai.OpenAI) -> None:
    first, second = generate(client, n=2)
    assert first.shape == (SIDE, SIDE, 3)
    assert first.std() > 10
    assert distance(first, second) > LEAST_APART
    again, _ = generate(client, n=2)
    assert np.array_equal(first, again)
    (alone,) = generate(client)
    assert np.abs(first - alone).max() <= 1


def test_the_images_of_a_request_are_different_ones(client: openai.OpenAI) -> None:
    assert_apart(generate(client, n=4))


def test_edits_and_variations_of_an_image_are_different_ones(client: openai.OpenAI) -> None:
    (apple,) = generate(client)
    own = {"strength": 0.8, "steps": NUM_STEPS}
    edits = client.images.edit(image=named(apple), prompt="a green apple", n=3, extra_body=own)
    assert_apart([apple, *images(edits)])
    with pytest.deprecated_call():
        like_it = client.images.create_variation(image=named(apple), n=3, extra_body=own)
    assert_apart([apple, *images(like_it)])


def test_sizes_and_formats(client: openai.OpenAI) -> None:
    (wide,) = generate(client, size="192x96", output_format="webp")
    assert wide.shape == (96, 192, 3)
    with pytest.raises(openai.BadRequestError, match="128x128"):
        generate(client, size="1024x1024")


@pytest.mark.parametrize("cache", first(["taylorseer", "off", "first-block"]))
def test_step_caches(client: openai.OpenAI, cache: str) -> None:
    (whole,) = generate(client)
    (cached,) = generate(client, extra_body={"cache": cache})
    assert np.abs(whole - cached).mean() < (1 if cache == "off" else 40)


def test_stream_has_previews(client: openai.OpenAI) -> None:
    own = {"seed": 1, "steps": NUM_STEPS, "progress": True}
    events = list(
        client.images.generate(prompt=APPLE, stream=True, partial_images=3, extra_body=own)
    )
    kinds = [event.type.removeprefix("image_generation.") for event in events]
    assert [kind for kind in kinds if kind != "progress"] == [*["partial_image"] * 3, "completed"]
    steps = [(event.model_extra or {}).get("step") for event in events]
    steps_reported = [
        step for step, kind in zip(steps, kinds, strict=True) if kind == "progress" and step
    ]
    assert steps_reported == sorted(steps_reported)
    assert steps_reported[-1] == NUM_STEPS
    before_first = [step or 0 for step, kind in zip(steps, kinds, strict=True)][
        : kinds.index("partial_image")
    ]
    assert max(before_first) < 0.4 * NUM_STEPS
    last = raster(events[-1].b64_json)
    (alone,) = generate(client)
    assert np.abs(last - alone).max() <= 1
    (other,) = generate(client, prompt=OTHER)
    for event, kind in zip(events, kinds, strict=True):
        if kind == "partial_image":
            preview = raster(event.b64_json)
            assert np.abs(preview - last).mean() < np.abs(preview - other).mean()


def test_an_edit_keeps_what_is_not_masked(client: openai.OpenAI) -> None:
    (apple,) = generate(client)
    mask = io.BytesIO(hole_mask(SIDE, SIDE, (0, 0, SIDE // 2, SIDE)))
    mask.name = "mask.png"
    reply = client.images.edit(
        image=named(apple), mask=mask, prompt="a blue car", extra_body={"steps": NUM_STEPS}
    )
    (edited,) = images(reply)
    change = np.abs(edited - apple).mean(axis=(0, 2))
    assert change[SIDE // 2 + 8 :].mean() < change[: SIDE // 2].mean()


def test_a_variation_resembles_its_image(client: openai.OpenAI) -> None:
    (apple,) = generate(client)
    with pytest.deprecated_call():
        reply = client.images.create_variation(
            image=named(apple), n=2, extra_body={"strength": 0.3, "steps": NUM_STEPS}
        )
    near = [np.abs(image - apple).mean() for image in images(reply)]
    (other,) = generate(client, prompt=OTHER)
    assert 0 < max(near) < np.abs(other - apple).mean()


def test_many_at_once_are_as_each_alone(client: openai.OpenAI) -> None:
    calls = [{"seed": n, "extra_body": {"steps": 4 + n}} for n in range(6)]
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(lambda call: generate(client, **call)[0], calls))
    for call, image in zip(calls[::3], together[::3], strict=True):
        (alone,) = generate(client, **call)
        assert np.abs(alone - image).max() <= 2


def test_a_client_that_leaves_frees_its_place(client: openai.OpenAI) -> None:
    own = {"steps": 1000, "progress": True}
    stream = client.images.generate(
        prompt=APPLE, stream=True, partial_images=0, n=4, extra_body=own
    )
    next(iter(stream))
    stream.close()
    metrics = str(client.base_url).replace("/v1/", "/metrics")

    def is_idle() -> bool:
        shown = httpx.get(metrics).text
        return "triptych_http_requests_in_flight 1.0" in shown

    eventually(is_idle)
    assert generate(client)
