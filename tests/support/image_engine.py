"""An engine that generates plain colours a step at a time, and the pipeline in front of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from support.hosts import hosted
from support.scripted_engine import ScriptedEngine
from triptych.core.engine_api.pixels import Pixels
from triptych.core.media.images import ImageReader
from triptych.core.options.config import AdapterOptions, Config
from triptych.modalities.diffusion.api.image_model import ImageModel
from triptych.modalities.diffusion.api.pipeline import ImagePipeline
from triptych.modalities.diffusion.api.service import ImageService
from triptych.modalities.diffusion.spec import PipelineSpec
from triptych.modalities.diffusion.wire import ImageDelta, ImageRequest

COLOURS = ((200, 30, 30), (30, 160, 60), (40, 60, 200))
MODEL = ImageModel(
    name="plain",
    spec=PipelineSpec(default_steps=6, default_guidance=2.0, max_references=2),
    multiple=8,
    default_size=(64, 64),
    samplers=("euler", "heun"),
)


@dataclass(kw_only=True)
class PlainEngine(ScriptedEngine):
    """An engine client: image k of a job becomes `COLOURS[k]`; every other step is skipped.

    `error` ends a job after its first step. An endless one never finishes its images.
    """

    high_water: int = 256
    low_water: int = 8
    is_endless: bool = False
    is_prompt_cut: bool = False

    async def act(self, job_id: str, request: ImageRequest) -> None:
        num_steps = request.num_steps or MODEL.spec.default_steps
        self.send(job_id, ImageDelta(queue_position=1))
        step, is_endless = 0, self.is_endless
        while step < num_steps or is_endless:
            await asyncio.sleep(0)
            step += 1
            for image in range(request.num_images):
                done = min(step, num_steps - 1)
                fields = {"step": done, "num_steps": num_steps, "num_computed": (done + 1) // 2}
                if request.has_progress:
                    self.send(job_id, ImageDelta(image=image, **fields))
                if step <= request.num_partials:
                    small = _plain(8, 8, image)
                    partial = ImageDelta(
                        image=image, pixels=small, partial_index=step - 1, **fields
                    )
                    self.send(job_id, partial)
            if self.error is not None:
                raise self.error
        for image in range(request.num_images):
            is_last = image == request.num_images - 1
            delta = ImageDelta(
                is_prompt_cut=self.is_prompt_cut,
                image=image,
                step=num_steps,
                num_steps=num_steps,
                num_computed=(num_steps + 1) // 2,
                pixels=_plain(request.width, request.height, image),
                finish_reason="stop" if is_last else None,
            )
            self.send(job_id, delta, is_final=is_last)


def open_plain(engine: PlainEngine) -> ImagePipeline:
    """The pipeline in front of it."""
    adapters = AdapterOptions(lora_paths=("ink=i.safetensors", "gold=g.safetensors"))
    config = Config(adapters=adapters)
    service = ImageService(config, [MODEL], engine, reader=ImageReader(None))
    return ImagePipeline(MODEL.name, hosted(service, MODEL.name))


def _plain(width: int, height: int, image: int) -> Pixels:
    colour = bytes(COLOURS[image % len(COLOURS)])
    return Pixels(width=width, height=height, rgb=colour * (width * height))
