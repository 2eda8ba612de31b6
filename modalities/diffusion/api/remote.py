"""Images of a running server, as the pipeline of this process returns them.

Owns the fields of a request for a call's options, and reading the events of its reply.
"""

from __future__ import annotations

import base64
import io
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Unpack

from PIL import Image

from triptych.core.client.choice import RemoteModel
from triptych.core.errors import UnsupportedOption
from triptych.modalities.diffusion.api.results import (
    PROMPT_CUT,
    GeneratedImage,
    GenerateOptions,
    GenerationProgress,
    image_file,
    mask_file,
    source_images,
)
from triptych.modalities.diffusion.wire import StepCache

GENERATIONS = "/v1/images/generations"
_EDITS = "/v1/images/edits"


class RemoteImages(RemoteModel):
    """An image model of a server."""

    def stream(
        self, prompt: str = "", *, num_previews: int = 0, **options: Unpack[GenerateOptions]
    ) -> Iterator[GenerationProgress]:
        """Generate, and yield the progress as `ImagePipeline.stream` does, from a prompt."""
        fields = {**_fields(options), "prompt": prompt, "partial_images": num_previews}
        route = _EDITS if "images" in fields else GENERATIONS
        return self.follow(route, fields)

    def follow(self, route: str, fields: Mapping[str, Any]) -> Iterator[GenerationProgress]:
        """Yield the progress of a request with these fields."""
        started_s = time.monotonic()
        latest: dict[int, Mapping[str, Any]] = {}
        is_warned = False
        body = {**self.request(fields), "stream": True, "progress": True}
        for event in self.connection.events(route, body):
            kind = event["type"].rpartition(".")[2]
            if kind == "progress":
                latest[event["index"]] = event
                yield _progress(event)
                continue
            if event.get("prompt_truncated") and not is_warned:
                is_warned = True
                warnings.warn(PROMPT_CUT, stacklevel=2)
            shown = _decoded(event["b64_json"])
            before = latest[event["index"]]
            if kind == "partial_image":
                yield _progress(before, preview=shown)
                continue
            image = GeneratedImage(
                image=shown,
                index=event["index"],
                seed=event["seed"],
                num_steps=before["num_steps"],
                num_computed=before["num_computed"],
                elapsed_s=time.monotonic() - started_s,
                layers=tuple(_decoded(layer["b64_json"]) for layer in event.get("layers", ())),
            )
            yield _progress(before, image=image)


def _progress(event: Mapping[str, Any], **shown: Any) -> GenerationProgress:
    return GenerationProgress(
        index=event["index"],
        step=event["step"],
        num_steps=event["num_steps"],
        num_computed=event["num_computed"],
        queue_position=event["queue_position"],
        **shown,
    )


def _decoded(text: str) -> Image.Image:
    image = Image.open(io.BytesIO(base64.b64decode(text)))
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def _fields(options: GenerateOptions) -> dict[str, Any]:
    """The fields of a request; absent ones have the model's defaults.

    Raises `UnsupportedOption` for a callback, which cannot be called from a server.
    """
    if options.get("callback_on_step_end"):
        raise UnsupportedOption(
            "callback_on_step_end is for a model in this process: use ImagePipeline, or follow"
            " the progress of a stream.",
            param="callback_on_step_end",
        )
    size, cache = options.get("size"), options.get("cache", "auto")
    sources, mask = source_images(options.get("image")), options.get("mask")
    adapters = options.get("adapters") or {}
    fields: dict[str, Any] = {
        "n": options.get("num_images", 1),
        "negative_prompt": options.get("negative_prompt", ""),
        "size": f"{size[0]}x{size[1]}" if size else "auto",
        "steps": options.get("num_steps"),
        "guidance": options.get("guidance_scale"),
        "sampler": options.get("sampler", ""),
        "seed": options.get("seed"),
        "cache": _cache(cache) if isinstance(cache, StepCache) else cache,
        "lora": [{"name": name, "scale": scale} for name, scale in adapters.items()],
        "strength": options.get("strength"),
        "layers": options.get("num_layers"),
        "images": [_reference(image_file(image)) for image in sources] or None,
        "mask": None if mask is None else _reference(mask_file(mask)),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _cache(cache: StepCache) -> dict[str, Any]:
    given = {"name": cache.name, "num_computed": cache.num_computed}
    return {name: value for name, value in given.items() if value is not None}


def _reference(file: bytes) -> dict[str, str]:
    """An image as a data URL; servers recognize its format from its bytes."""
    return {"image_url": f"data:image/png;base64,{base64.b64encode(file).decode()}"}
