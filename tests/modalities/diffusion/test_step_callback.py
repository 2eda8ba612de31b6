"""`callback_on_step_end` through the whole engine, with the embedded model."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.options.config import Config, DeviceOptions
from triptych.modalities.diffusion.api.pipeline import ImagePipeline, image_call
from triptych.modalities.diffusion.api.remote import RemoteImages
from triptych.modalities.diffusion.api.service import check_call
from triptych.modalities.diffusion.api.step_callback import ImageInProgress

pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
PROMPT, OPTIONS = "a red apple", {"size": (64, 64), "num_steps": 4, "seed": 1, "cache": "off"}


@pytest.fixture(scope="module")
def generate() -> Iterator[ImagePipeline]:
    with ImagePipeline.from_pretrained(progress=False) as pipeline:
        yield pipeline


def test_each_image_of_a_call_has_its_own_steps(generate: ImagePipeline) -> None:
    seen = []

    def watch(image: ImageInProgress, step: int, timestep: float, tensors: dict[str, Any]) -> None:
        assert image.num_timesteps == 4
        assert not tensors["latents"].is_inference()
        seen.append((image.index, step))

    plain = generate(PROMPT, num_images=2, **OPTIONS)
    watched = generate(PROMPT, num_images=2, callback_on_step_end=watch, **OPTIONS)
    assert sorted(seen) == [(image, step) for image in range(2) for step in range(4)]
    assert [each.encode() for each in watched] == [each.encode() for each in plain]


def test_an_interrupted_image_is_decoded_as_it_is(generate: ImagePipeline) -> None:
    def stop(image: ImageInProgress, step: int, timestep: float, tensors: dict[str, Any]) -> None:
        time.sleep(0.05)  # so that the next step is in flight
        image.interrupt = (image.index, step) == (1, 1)

    first, second = generate(PROMPT, num_images=2, callback_on_step_end=stop, **OPTIONS)
    assert (first.num_computed, second.num_computed) == (4, 2)
    progress = list(generate.stream(PROMPT, num_images=2, callback_on_step_end=stop, **OPTIONS))
    assert max(each.step for each in progress if each.index == 1) == 2
    (third,) = (each.image for each in progress if each.image and each.index == 1)
    assert third.encode() == second.encode()


def test_what_a_callback_raises_ends_the_call(generate: ImagePipeline) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("of the caller")

    with pytest.raises(ZeroDivisionError, match="of the caller"):
        generate(PROMPT, callback_on_step_end=fail, **OPTIONS)
    with pytest.raises(InvalidRequest, match=r"latents alone.*\[1, 16, 32\]"):
        generate(PROMPT, callback_on_step_end=lambda *_: {"latents": 1}, **OPTIONS)
    for wrong in ([1], 3, torch.zeros(2)):
        with pytest.raises(InvalidRequest, match="a mapping with latents alone"):
            generate(PROMPT, callback_on_step_end=lambda *_, wrong=wrong: wrong, **OPTIONS)
    with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):  # and the engine goes on
        generate(PROMPT, callback_on_step_end=lambda *_: sys.exit(3), **OPTIONS)
    assert generate(PROMPT, **OPTIONS)[0].num_computed == 4


def test_callbacks_that_cannot_be_called_are_refused(generate: ImagePipeline) -> None:
    def watch(*_: object) -> None:
        """Do nothing."""

    with pytest.raises(InvalidRequest, match="shared between images"):
        generate(
            PROMPT, callback_on_step_end=watch, callback_on_step_end_tensor_inputs=["prompt_embeds"]
        )
    divided = Config(device=DeviceOptions(ulysses_degree=2))
    with pytest.raises(UnsupportedOption, match="by 2 ranks here"):
        check_call(image_call(PROMPT, {"callback_on_step_end": watch}), generate.model, divided)
    remote = RemoteImages.__new__(RemoteImages)
    with pytest.raises(UnsupportedOption, match="callback_on_step_end is for a model in this"):
        next(remote.stream(PROMPT, callback_on_step_end=watch))
