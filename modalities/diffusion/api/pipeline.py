"""Images from Python: load a model, call it, stream its progress.

Owns the `ImagePipeline` object: the same engine and image service as the server, in this process.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Unpack

from triptych.core.engine_api.client import EngineClient
from triptych.core.errors import InvalidRequest, TriptychError
from triptych.core.media.images import ImageReader
from triptych.core.options.config import Config
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.diffusion.adapter_names import check_uses
from triptych.modalities.diffusion.api.files import to_image
from triptych.modalities.diffusion.api.image_model import ImageModel
from triptych.modalities.diffusion.api.results import (
    PROMPT_CUT,
    GeneratedImage,
    GenerateOptions,
    GenerationProgress,
    image_file,
    mask_file,
    source_images,
)
from triptych.modalities.diffusion.api.service import (
    ImageCall,
    ImageFile,
    ImageGeneration,
    ImageService,
    check_call,
)
from triptych.modalities.diffusion.api.step_callback import StepCallback
from triptych.modalities.diffusion.modality import IMAGES
from triptych.modalities.diffusion.step_hook import TENSOR_NAMES, HookedRequest
from triptych.modalities.diffusion.wire import (
    AUTO,
    AdapterUse,
    ImageDelta,
    ImageRequest,
    StepCache,
)
from triptych.modalities.host import EngineHost
from triptych.modalities.modality import Modality
from triptych.modalities.pipeline import Check, Pipeline


class ImagePipeline(Pipeline[ImageService]):
    """An image model in this process.

        with ImagePipeline.from_pretrained() as generate:
            generate("a red apple", seed=1)[0].save("apple.png")
            for progress in generate.stream("a penguin next to a house", num_previews=2):
                print(progress.step, progress.num_steps, progress.preview)

    Every call has an async variant that may be awaited on any loop.
    """

    _modalities: ClassVar[tuple[Modality, ...]] = (IMAGES,)

    def __init__(self, model: str, host: EngineHost, *, owns_host: bool = True) -> None:
        super().__init__(model, host, owns_host=owns_host)
        self._active: dict[str, float] = {}

    @classmethod
    def _open_service(
        cls, resolved: ResolvedModel, config: Config
    ) -> Callable[[EngineClient], ImageService]:
        model = ImageModel.open(resolved)
        reader = ImageReader(None)  # the images are the user's own
        return lambda client: ImageService(config, [model], client, reader=reader)

    @property
    def model(self) -> ImageModel:
        """The model's facts: sizes, samplers, use of source images."""
        return self._service.model(self._model)

    def __call__(
        self, prompt: str = "", **options: Unpack[GenerateOptions]
    ) -> list[GeneratedImage]:
        """Generate images from a prompt; without a prompt, variations of `image`.

        Raises subclasses of `core.errors.RequestError`, as for a size the model cannot generate.
        """
        return self._loop.run(self._whole(prompt, options))

    async def acall(
        self, prompt: str = "", **options: Unpack[GenerateOptions]
    ) -> list[GeneratedImage]:
        """Async variant of calling the pipeline."""
        return await self._loop.run_async(self._whole(prompt, options))

    def stream(
        self, prompt: str = "", *, num_previews: int = 0, **options: Unpack[GenerateOptions]
    ) -> Iterator[GenerationProgress]:
        """Generate, and yield the progress of each step. Leaving the loop early cancels generation.

        Each image yields up to `num_previews` previews, at most 3.
        """
        return self._loop.iterate(lambda: self._generated(prompt, options, num_previews))

    def astream(
        self, prompt: str = "", *, num_previews: int = 0, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[GenerationProgress, None]:
        """Async variant of `stream`."""
        return self._loop.iterate_async(lambda: self._generated(prompt, options, num_previews))

    def map(
        self, entries: Sequence[Mapping[str, Any] | ImageCall]
    ) -> Iterator[list[GeneratedImage] | TriptychError]:
        """Generate many calls, as many at once as are admitted, and yield their images in order.

        An entry holds `prompt` and the options of a call. An entry that fails yields its error.
        """

        async def generate(entry: Mapping[str, Any] | ImageCall) -> list[GeneratedImage]:
            if isinstance(entry, ImageCall):
                return await self._images(entry)
            options: Any = {name: value for name, value in entry.items() if name != "prompt"}
            return await self._whole(entry.get("prompt", ""), options)

        largest = max(map(_num_images, entries), default=1)
        return self._map_entries(generate, entries, max(1, self._service.max_jobs // largest))

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the LoRA adapters that a call may name in `adapters`."""
        return tuple(self._service.adapters)

    def load_lora_weights(
        self, path: str | Path, adapter_name: str | None = None, *, weight_name: str | None = None
    ) -> None:
        """Load a LoRA adapter: a safetensors file, a folder with one, or a hub id.

        As in diffusers, it is called `adapter_name`, by default `default_0` and so on, and the
        first one is active. `weight_name` is a file in the folder. Raises `RequestError` for a name
        that is taken, and for an adapter that is not there or does not fit the model.
        """
        names = self._service.adapters
        name = adapter_name or next(
            each for each in map("default_{}".format, itertools.count()) if each not in names
        )
        if weight_name is not None and not Path(path).is_dir():
            raise InvalidRequest("weight_name is for a folder; give the file itself.", param="lora")
        place = Path(path) / weight_name if weight_name else path
        self._loop.run(names.load(self._model, name, str(place)))
        if len(names.loaded) == 1 and not self._active:
            self._active = {name: 1.0}

    def set_adapters(
        self,
        adapter_names: str | Sequence[str],
        adapter_weights: float | Sequence[float | None] | None = None,
    ) -> None:
        """Choose the adapters, with their scales, of calls that name none.

        As in diffusers: a scale of `None` is 1, and an empty list turns all off. Raises
        `InvalidRequest` for unknown names, and scales of single parts or blocks of a model.
        """
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        is_one = adapter_weights is None or isinstance(adapter_weights, int | float)
        weights: Any = [adapter_weights] * len(names) if is_one else adapter_weights
        if isinstance(weights, Mapping) or any(isinstance(each, Mapping) for each in weights):
            raise InvalidRequest(
                "adapter_weights has a number for each adapter: one acts on its whole model.",
                param="lora",
            )
        if len(weights) != len(names):
            raise InvalidRequest(
                f"{len(names)} adapters need {len(names)} weights, not {len(weights)}.",
                param="lora",
            )
        scales = [1.0 if weight is None else float(weight) for weight in weights]
        uses = check_uses(list(map(AdapterUse, names, scales)), self.adapters)
        self._active = {use.name: use.scale for use in uses}

    def get_active_adapters(self) -> list[str]:
        """The adapters of calls that name none."""
        return list(self._active)

    def delete_adapters(self, adapter_names: str | Sequence[str]) -> None:
        """Unload adapters, once the images that use them have ended. Raises `NotFound`."""
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        self._loop.run(self._service.adapters.unload(self._model, names))
        self._active = {name: self._active[name] for name in self._active if name not in names}

    def unload_lora_weights(self) -> None:
        """Unload all adapters that were loaded, once the images that use them have ended."""
        self.delete_adapters(list(self._service.adapters.loaded))

    def _call(self, prompt: str, options: GenerateOptions, **sent: Any) -> ImageCall:
        """A call with the active adapters, unless it names its own."""
        own: Any = {"adapters": self._active, **options}
        return image_call(prompt, own, **sent)

    async def _whole(self, prompt: str, options: GenerateOptions) -> list[GeneratedImage]:
        return await self._images(self._call(prompt, options))

    async def _images(self, call: ImageCall) -> list[GeneratedImage]:
        async with aclosing(self._progress(call)) as stream:
            found = [progress.image async for progress in stream]
        images = [image for image in found if image is not None]
        return sorted(images, key=lambda image: image.index)

    def _generated(
        self, prompt: str, options: GenerateOptions, num_previews: int
    ) -> AsyncGenerator[GenerationProgress, None]:
        return self._progress(
            self._call(prompt, options, num_partials=num_previews, has_progress=True)
        )

    async def _progress(self, call: ImageCall) -> AsyncGenerator[GenerationProgress, None]:
        started_s = time.monotonic()
        call = replace(call, model=self._model)
        hook = getattr(call.request, "on_step_end", None)
        async with aclosing(self._service.generate(call)) as generation:
            is_warned = False
            async for delta in generation:
                if isinstance(hook, StepCallback):
                    hook.check()
                if delta.is_prompt_cut and not is_warned:
                    is_warned = True
                    warnings.warn(PROMPT_CUT, stacklevel=2)
                yield _progress(delta, generation, time.monotonic() - started_s)


def checking(prompt: str = "", **options: Unpack[GenerateOptions]) -> Check:
    """A check that raises as this call would, as far as is known without the weights."""

    def check(resolved: ResolvedModel, config: Config) -> None:
        check_call(image_call(prompt, options), ImageModel.open(resolved), config)

    return check


def image_call(
    prompt: str, options: GenerateOptions, *, num_partials: int = 0, has_progress: bool = False
) -> ImageCall:
    """Build a call of the service. Raises `ConfigError` for an image that cannot be read."""
    rest: dict[str, Any] = dict(options)
    images, mask = source_images(rest.pop("image", None)), rest.pop("mask", None)
    quality = rest.pop("quality", "auto")
    cache, adapters = rest.pop("cache", "auto"), rest.pop("adapters", {})
    width, height = rest.pop("size", None) or (AUTO, AUTO)
    callback = rest.pop("callback_on_step_end", None)
    names = rest.pop("callback_on_step_end_tensor_inputs", TENSOR_NAMES)
    kind: Any = ImageRequest
    if callback is not None:
        kind, rest["on_step_end"] = HookedRequest, StepCallback(callback, names)
    request = kind(
        prompt=prompt,
        width=width,
        height=height,
        cache=cache if isinstance(cache, StepCache) else StepCache(name=cache),
        adapters=tuple(AdapterUse(name, scale) for name, scale in adapters.items()),
        num_partials=num_partials,
        has_progress=has_progress,
        **rest,
    )
    return ImageCall(
        request=request,
        quality=quality,
        sources=tuple(ImageFile(image_file(image)) for image in images),
        mask=None if mask is None else ImageFile(mask_file(mask)),
    )


def _num_images(entry: Mapping[str, Any] | ImageCall) -> int:
    if isinstance(entry, ImageCall):
        return entry.request.num_images
    return int(entry.get("num_images", 1))


def _progress(
    delta: ImageDelta, generation: ImageGeneration, elapsed_s: float
) -> GenerationProgress:
    shown = None
    if (pixels := delta.pixels) is not None:
        shown = to_image(pixels)
    is_preview = delta.partial_index >= 0
    image = None
    if shown is not None and not is_preview:
        image = GeneratedImage(
            image=shown,
            index=delta.image,
            seed=generation.seed,
            num_steps=delta.num_steps,
            num_computed=delta.num_computed,
            elapsed_s=elapsed_s,
            layers=tuple(map(to_image, delta.layers)),
        )
    return GenerationProgress(
        index=delta.image,
        step=delta.step,
        num_steps=delta.num_steps,
        num_computed=delta.num_computed,
        queue_position=delta.queue_position,
        preview=shown if is_preview else None,
        image=image,
    )
