"""Fakes of the way from words to images: a model's facts, and an engine that paints colours."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI
from PIL import Image

from support.scripted_engine import ScriptedEngine
from triptych.core.engine_api.caller import Caller, Principal
from triptych.core.engine_api.pixels import Pixels
from triptych.core.http.app import create_app
from triptych.core.media.images import ImageReader
from triptych.core.options.config import (
    AdapterOptions,
    Config,
    ImageOptions,
    ScheduleOptions,
    ServerOptions,
)
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.diffusion.api.image_model import ImageModel
from triptych.modalities.diffusion.api.routes import image_cards, image_links, images_router
from triptych.modalities.diffusion.api.service import ImageCall, ImageService
from triptych.modalities.diffusion.spec import PipelineSpec
from triptych.modalities.diffusion.wire import ImageDelta, ImageRequest

GENERATIONS, EDITS, VARIATIONS = (
    f"/v1/images/{name}" for name in ("generations", "edits", "variations")
)
NUM_PROMPT_TOKENS = 5
PREVIEW_SIDE = 8
LORAS = AdapterOptions(lora_paths=("sketch=a.safetensors", "ink=b.safetensors"))


def image_model(name: str = "paint", **facts: Any) -> ImageModel:
    """A model of 128 x 128 images that begins from one, and looks at none."""
    known = {"default_steps": 10, "default_guidance": 3.0, **facts}
    return ImageModel(
        name=name,
        spec=PipelineSpec(**known),
        multiple=16,
        default_size=(128, 128),
        samplers=("euler", "heun"),
    )


def write_image_folder(
    folder: Path, pipeline: str = "PixArtSigmaPipeline", **facts: Any
) -> ResolvedModel:
    """The JSON files of an image model, without weights."""
    index = {
        "_class_name": pipeline,
        "transformer": ["diffusers", "PixArtTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "scheduler": ["diffusers", "DPMSolverMultistepScheduler"],
        **facts,
    }
    files = {
        "model_index.json": index,
        "transformer/config.json": {"sample_size": 64},
        "vae/config.json": {"block_out_channels": [8, 8, 8, 8]},
        "scheduler/scheduler_config.json": {"_class_name": "DPMSolverMultistepScheduler"},
    }
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
    return ResolvedModel(name="pix", reference="pix", folder=str(folder), digest="0" * 64)


def colour_of(request: ImageRequest, image: int) -> tuple[int, int, int]:
    """What an image is painted with: it depends on all that must decide it."""
    values = f"{request.prompt} {request.seed} {image} {request.num_steps}"
    red, green, blue = hashlib.sha256(values.encode()).digest()[:3]
    return red, green, blue


def plain(width: int, height: int, colour: Sequence[int]) -> Pixels:
    """An image of one colour."""
    return Pixels(width=width, height=height, rgb=bytes(colour) * (width * height))


@dataclass(kw_only=True)
class FakeImageEngine(ScriptedEngine):
    """An engine client: every image of a job becomes its colour, a step at a time.

    `error` ends a job after `num_good` steps; jobs wait for `gate` before each step, and `step_s`
    besides. Remembers what became of every job.
    """

    num_good: int = 0
    step_s: float = 0.0
    gate: threading.Event | None = None
    num_before: int = 0
    is_prompt_cut: bool = False
    num_steps: int = 0

    async def act(self, job_id: str, request: ImageRequest) -> None:
        num_steps = request.num_steps or 10
        for place in range(self.num_before, 0, -1):
            self.send(job_id, ImageDelta(queue_position=place))
        partials = self._partial_steps(request, num_steps)
        for step in range(1, num_steps + 1):
            await self._turn(step - 1)
            for image in range(request.num_images):
                values = {"image": image, "step": step, "num_steps": num_steps}
                values |= {"num_computed": (step + 1) // 2, "num_prompt_tokens": NUM_PROMPT_TOKENS}
                if step in partials:
                    pixels = plain(PREVIEW_SIDE, PREVIEW_SIDE, colour_of(request, image))
                    index = partials.index(step)
                    self.send(job_id, ImageDelta(**values, pixels=pixels, partial_index=index))
                elif request.has_progress and step < num_steps:
                    self.send(job_id, ImageDelta(**values))
        for image in reversed(range(request.num_images)):
            pixels = plain(request.width, request.height, colour_of(request, image))
            is_last = image == 0
            values = {"image": image, "step": num_steps, "num_steps": num_steps}
            values |= {"num_prompt_tokens": NUM_PROMPT_TOKENS, "pixels": pixels}
            values["layers"] = (pixels,) * (request.num_layers or 0)
            values["is_prompt_cut"] = self.is_prompt_cut
            if is_last:
                values["finish_reason"] = "stop"
            self.send(job_id, ImageDelta(**values), is_final=is_last)

    @staticmethod
    def _partial_steps(request: ImageRequest, num_steps: int) -> list[int]:
        count = request.num_partials
        return [max(1, round(num_steps * (n + 1) / (count + 2))) for n in range(count)]

    async def _turn(self, num_done: int) -> None:
        while self.gate is not None and not self.gate.is_set():  # noqa: ASYNC110 - other thread
            await asyncio.sleep(0.002)
        await asyncio.sleep(self.step_s)
        if self.error is not None and num_done >= self.num_good:
            raise self.error
        self.num_steps += 1


def make_image_service(
    engine: FakeImageEngine,
    *models: ImageModel,
    reader: ImageReader | None = None,
    images: ImageOptions | None = None,
    **schedule: int,
) -> ImageService:
    """A service in front of `engine`. Without a `reader` images are read in this process."""
    config = Config(
        images=images or ImageOptions(), adapters=LORAS, schedule=ScheduleOptions(**schedule)
    )
    found = models or (image_model(),)
    return ImageService(config, found, engine, reader=reader or ImageReader(None))


def make_image_app(
    engine: FakeImageEngine,
    service: ImageService | None = None,
    *,
    images: ImageOptions | None = None,
    **server: Any,
) -> FastAPI:
    """The images API in front of `engine`."""
    config = Config(images=images or ImageOptions(), server=ServerOptions(**server))
    service = service or make_image_service(engine)
    router = images_router(service, image_links(config))
    return create_app(config, engine, [router], image_cards(service))


def call(prompt: str = "a red apple", **fields: Any) -> ImageCall:
    """A call of the service; fields of it, of its caller and of its request."""
    principal = Principal(**{name: fields.pop(name) for name in {"key", "tenant"} & fields.keys()})
    caller = Caller(call_id=fields.pop("call_id", "call"), principal=principal)
    own = {name: fields.pop(name) for name in ImageCall.__dataclass_fields__ if name in fields}
    if (size := fields.pop("size", None)) is not None:
        fields["width"], fields["height"] = size
    request = ImageRequest(**{"prompt": prompt, **fields})
    return ImageCall(**{"model": "paint", "caller": caller, **own, "request": request})


def generation(prompt: str = "a red apple", **fields: Any) -> dict[str, Any]:
    """The body of a request for images."""
    return {"model": "paint", "prompt": prompt, **fields}


def opened(data: bytes | str) -> Image.Image:
    """The image in a file, or in base64."""
    raw = base64.b64decode(data, validate=True) if isinstance(data, str) else data
    image = Image.open(io.BytesIO(raw))
    image.load()
    return image


def one_colour(image: Image.Image) -> tuple[int, int, int]:
    """The colour of an image that has only one."""
    raster = np.asarray(image.convert("RGB")).reshape(-1, 3)
    assert (raster == raster[0]).all()
    red, green, blue = raster[0].tolist()
    return red, green, blue
