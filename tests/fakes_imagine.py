"""An engine that draws plain colours a step at a time, and the pipeline in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fakes_http import READY

from triptych.core.client import EngineStatus
from triptych.core.config import Config, ImageOptions
from triptych.core.errors import to_info
from triptych.core.images import ImageDelta, ImageRequest, Pixels
from triptych.core.job import Output
from triptych.core.loop_thread import LoopThread
from triptych.core.media.pictures import PictureReader
from triptych.core.streams import JobStream, StreamTable
from triptych.modalities.diffusion.image_model import ImageModel
from triptych.modalities.diffusion.pipeline import ImagePipeline
from triptych.modalities.diffusion.recipes.abilities import Abilities
from triptych.modalities.diffusion.service import ImageService

COLOURS = ((200, 30, 30), (30, 160, 60), (40, 60, 200))
MODEL = ImageModel(
    name="plain",
    abilities=Abilities(default_steps=6, default_guidance=2.0, max_references=2),
    multiple=8,
    default_size=(64, 64),
    samplers=("euler", "heun"),
)


@dataclass
class PlainEngine:
    """An engine client: picture k of a job becomes `COLOURS[k]`; every other step is skipped.

    `error` ends a job after its first step. An endless one never finishes its pictures.
    """

    error: Exception | None = None
    is_endless: bool = False
    submitted: dict[str, ImageRequest] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.table = StreamTable(
            on_cancel=self._cancel,
            on_pause=lambda job_ids, is_paused: None,
            stream_timeout_s=30.0,
            high_water=256,
            low_water=8,
        )

    def submit(
        self, model: str, request: Any, *, job_id: str, deadline_s: float | None = None
    ) -> JobStream:
        self.submitted[job_id] = request
        stream = self.table.open(job_id)
        self._tasks[job_id] = asyncio.create_task(self._run(job_id, request))
        return stream

    async def _run(self, job_id: str, request: ImageRequest) -> None:
        try:
            await self._draw(job_id, request)
        except Exception as error:
            self.table.deliver(Output(job_id=job_id, error=to_info(error), is_final=True))

    async def _draw(self, job_id: str, request: ImageRequest) -> None:
        num_steps = request.num_steps or MODEL.abilities.default_steps
        self._tell(job_id, ImageDelta(queue_position=1))
        step, is_endless = 0, self.is_endless
        while step < num_steps or is_endless:
            await asyncio.sleep(0)
            step += 1
            for picture in range(request.num_images):
                done = min(step, num_steps - 1)
                told = {"step": done, "num_steps": num_steps, "num_computed": (done + 1) // 2}
                if request.has_progress:
                    self._tell(job_id, ImageDelta(picture=picture, **told))
                if step <= request.num_partials:
                    small = _plain(8, 8, picture)
                    partial = ImageDelta(
                        picture=picture, pixels=small, partial_index=step - 1, **told
                    )
                    self._tell(job_id, partial)
            if self.error is not None:
                raise self.error
        for picture in range(request.num_images):
            is_last = picture == request.num_images - 1
            delta = ImageDelta(
                picture=picture,
                step=num_steps,
                num_steps=num_steps,
                num_computed=(num_steps + 1) // 2,
                pixels=_plain(request.width, request.height, picture),
                finish_reason="stop" if is_last else None,
            )
            self._tell(job_id, delta, is_final=is_last)

    def _tell(self, job_id: str, delta: ImageDelta, *, is_final: bool = False) -> None:
        self.table.deliver(Output(job_id=job_id, payload=delta, is_final=is_final))

    def _cancel(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            self.cancelled.append(job_id)
            self._tasks[job_id].cancel()

    def status(self) -> EngineStatus:
        return READY

    async def load(self, model: str) -> None: ...

    async def close(self) -> None: ...


def open_plain(engine: PlainEngine) -> ImagePipeline:
    """The pipeline in front of it."""
    adapters = ImageOptions(
        enable_lora=True, lora_paths=("ink=i.safetensors", "gold=g.safetensors")
    )
    config = Config(images=adapters)
    service = ImageService.from_config(config, [MODEL], engine, reader=PictureReader(None))
    return ImagePipeline(service, MODEL.name, LoopThread("test"))


def _plain(width: int, height: int, picture: int) -> Pixels:
    colour = bytes(COLOURS[picture % len(COLOURS)])
    return Pixels(width=width, height=height, rgb=colour * (width * height))
