"""Turns the deltas of a call into the files and events of its reply.

Knows nothing of HTTP requests, routes and links.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from triptych.core.engine_api.pixels import Pixels
from triptych.core.http.context import Context
from triptych.modalities.diffusion.api.files import encode_image
from triptych.modalities.diffusion.api.protocol import GenerationFields, PromptFields
from triptych.modalities.diffusion.api.replies import (
    CompletedImage,
    ImageData,
    ImageProgress,
    ImagesReply,
    ImageUsage,
    KnownQuality,
    LayerData,
    PartialImage,
    Route,
)
from triptych.modalities.diffusion.api.service import ImageGeneration
from triptych.modalities.diffusion.wire import ImageDelta


class StepClock:
    """Measures the step time of each image from the arrival of its deltas."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, float]] = {}

    def step_s(self, delta: ImageDelta) -> float:
        """Seconds per step since the image's previous delta; 0 for the first delta."""
        now_s = time.monotonic()
        step, then_s = self._last.get(delta.image, (delta.step, now_s))
        self._last[delta.image] = delta.step, now_s
        return round((now_s - then_s) / max(1, delta.step - step), 4)


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """The file of an image, and those of its layers."""

    image: bytes
    layers: Sequence[bytes]

    def data(self, offer: Callable[[bytes], Mapping[str, Any]]) -> dict[str, Any]:
        """The fields of `ImageData`. `offer` returns those of one file: base64, or a link."""
        layers = [LayerData(**offer(layer)) for layer in self.layers]
        return {**offer(self.image), **({"layers": layers} if layers else {})}


def as_base64(file: bytes) -> dict[str, Any]:
    """A file as a field of a reply."""
    return {"b64_json": base64.b64encode(file).decode()}


@dataclass(slots=True)
class ImageReplyBuilder:
    """Builds the reply to one call, whole or as events.

    `form` holds the uploaded images; the reference keeps them counted as memory until the end.
    """

    generation: ImageGeneration
    body: GenerationFields
    context: Context
    route: Route
    form: object = None
    num_prompt_tokens: int = 0
    is_prompt_cut: bool = False
    num_finished: int = 0
    clock: StepClock = field(default_factory=StepClock)

    async def files(self) -> list[ImageFiles]:
        """The files of the finished images, in order."""
        files: dict[int, ImageFiles] = {}
        async with aclosing(self.generation):
            async for delta in self.generation:
                if self._note(delta):
                    files[delta.image] = await asyncio.to_thread(self._files, delta)
        return [files[index] for index in sorted(files)]

    async def events(self) -> AsyncGenerator[BaseModel, None]:
        """The events of a streamed reply."""
        has_progress = isinstance(self.body, PromptFields) and self.body.progress
        async with aclosing(self.generation):
            async for delta in self.generation:
                is_finished = self._note(delta)
                if has_progress:
                    yield self._progress(delta)
                if delta.pixels is None:
                    continue
                files = await asyncio.to_thread(self._files, delta)
                shown = {**self._about(), "index": delta.image, **files.data(as_base64)}
                if is_finished:
                    yield self._completed(shown)
                else:
                    kind = f"{self.route}.partial_image"
                    shown["partial_image_index"] = delta.partial_index
                    yield PartialImage(type=kind, created_at=int(time.time()), **shown)

    def reply(self, data: list[ImageData]) -> ImagesReply:
        """The reply with all images."""
        return ImagesReply(
            created=int(time.time()),
            data=data,
            seed=self.generation.seed,
            prompt_truncated=self.is_prompt_cut,
            usage=ImageUsage.of(self.generation.request, self.num_prompt_tokens, len(data)),
            **self._about(),
        )

    def _note(self, delta: ImageDelta) -> bool:
        """Count the delta. Returns whether it finishes an image."""
        self.num_prompt_tokens = max(self.num_prompt_tokens, delta.num_prompt_tokens)
        self.context.record.prompt_tokens = self.num_prompt_tokens
        self.is_prompt_cut |= delta.is_prompt_cut
        is_finished = delta.pixels is not None and delta.partial_index < 0
        if is_finished:
            self.num_finished += 1
            elapsed_s = time.monotonic() - self.context.arrived_s
            self.context.metrics.observe_image(self.generation.model.name, elapsed_s)
        return is_finished

    @property
    def _keeps_alpha(self) -> bool:
        is_free = self.body.background != "opaque" and self.body.output_format != "jpeg"
        return is_free and self.generation.model.spec.has_alpha

    def _about(self) -> dict[str, Any]:
        width, height = self.generation.frame.shown
        known: KnownQuality = "medium"  # `auto` means medium
        if (asked := self.body.known_quality) != "auto":
            known = asked
        return {
            "background": "transparent" if self._keeps_alpha else "opaque",
            "output_format": self.body.output_format,
            "quality": known,
            "size": f"{width}x{height}",
        }

    def _progress(self, delta: ImageDelta) -> ImageProgress:
        return ImageProgress(
            type=f"{self.route}.progress",
            index=delta.image,
            step=delta.step,
            num_steps=delta.num_steps,
            num_computed=delta.num_computed,
            step_s=self.clock.step_s(delta),
            queue_position=delta.queue_position,
        )

    def _completed(self, shown: dict[str, Any]) -> CompletedImage:
        request = self.generation.request
        usage = ImageUsage.of(request, self.num_prompt_tokens, 1, has_input=self.num_finished == 1)
        return CompletedImage(
            type=f"{self.route}.completed",
            created_at=int(time.time()),
            seed=self.generation.seed,
            prompt_truncated=self.is_prompt_cut,
            usage=usage,
            **shown,
        )

    def _files(self, delta: ImageDelta) -> ImageFiles:
        assert delta.pixels is not None
        return ImageFiles(self._file(delta.pixels), [self._file(each) for each in delta.layers])

    def _file(self, pixels: Pixels) -> bytes:
        return encode_image(
            pixels,
            kind=self.body.output_format,
            compression=self.body.output_compression,
            size=self.generation.frame.shown,
            keeps_alpha=self._keeps_alpha,
        )
