"""The image service, shared by HTTP routes and the Python pipeline.

Owns the steps of a call: checks, sizes, decoding of its images, admission, the engine job. Knows
nothing of HTTP, of encoded files, or of torch.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Literal, Self

from msgspec.structs import replace
from typing_extensions import override

from triptych.core.engine_api.caller import Caller
from triptych.core.engine_api.client import EngineClient
from triptych.core.errors import InvalidRequest, RequestError, UnsupportedOption
from triptych.core.limits import MAX_SEED
from triptych.core.media.images import ImageReader
from triptych.core.options.config import Config
from triptych.core.text.unicode import check_text
from triptych.modalities.diffusion.adapter_names import check_uses
from triptych.modalities.diffusion.api.adapters import ImageAdapterNames
from triptych.modalities.diffusion.api.image_model import ImageFrame, ImageModel, Size
from triptych.modalities.diffusion.step_hook import HookedRequest
from triptych.modalities.diffusion.wire import AUTO, ImageDelta, ImageRequest, StepCache
from triptych.modalities.service import HoldLimit, ModelService, default_seed
from triptych.schedulers.admission import Admission

MAX_PROMPT_CHARS = 32_000  # OpenAI's
MAX_IMAGES = 10  # OpenAI's
MAX_STEPS = 1000
MAX_GUIDANCE = 100.0
MAX_PARTIALS = 3  # OpenAI's
MAX_LAYERS = 8
PIXELS_PER_TOKEN = 256
"""One token of usage and of admission stands for 16 x 16 pixels."""
MAX_SOURCE_BYTES = 48 * 2**20
"""Bytes of raw pixels in one call: as much as a message to the engine holds."""
MAX_HELD_BYTES = 2**30
"""Bytes of raw pixels that all calls in progress may hold together."""

Quality = Literal["auto", "low", "medium", "high"]
Background = Literal["auto", "transparent", "opaque"]
STEPS_OF_QUALITY: Mapping[Quality, float] = MappingProxyType(
    {"auto": 1.0, "low": 0.5, "medium": 1.0, "high": 1.5}
)
"""Factors on the model's default number of steps."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A caller's image, as PNG, JPEG or WebP; `media_type` is the caller's claim."""

    data: bytes | bytearray | memoryview
    media_type: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCall:
    """One call: the engine request, and the settings that stay in the API process.

    `sources` are images to begin from or to refer to; `mask` is transparent where the first may
    change. `quality` chooses the number of steps if the request has none. A transparent
    `background` needs a model that makes one. The service sets the request's `tenant`.
    """

    request: ImageRequest
    model: str = ""
    quality: Quality = "auto"
    background: Background = "auto"
    sources: tuple[ImageFile, ...] = ()
    mask: ImageFile | None = None
    caller: Caller = field(default_factory=Caller)

    @property
    def size(self) -> Size | None:
        """The requested width and height, if any."""
        asked = self.request
        return None if asked.width == asked.height == AUTO else (asked.width, asked.height)


class ImageService(ModelService[ImageModel]):
    """Serves images from an engine client."""

    kind = "image model"
    seed_bits = 48  # replies hold seeds: exact even in JSON readers that have only floats

    def __init__(
        self,
        config: Config,
        models: Sequence[ImageModel],
        client: EngineClient,
        *,
        reader: ImageReader,
        admission: Admission | None = None,
    ) -> None:
        """`admission` may be shared with other services."""
        admission = admission or Admission(options=config.schedule)
        super().__init__(client, models, admission, default_seed=default_seed(config))
        self._config = config
        self._reader = reader
        self.adapters = ImageAdapterNames(client, config)
        self._images = HoldLimit("Too many images are being edited; try again later.")

    @override
    def model(self, name: str) -> ImageModel:
        """The model called `name`, or the first if empty. Raises `UnknownModel`."""
        return super().model(name or next(iter(self.models), ""))

    def generate(self, call: ImageCall) -> ImageGeneration:
        """Check a call, and return its lazy generation.

        Raises `core.errors.RequestError` here or from the first delta, which may also raise
        `core.errors.Unavailable`.
        """
        model = self.model(call.model)
        check_call(call, model, self._config, self.adapters.loaded)
        return ImageGeneration(model, call.request, partial(self._deltas, call, model))

    async def _deltas(
        self, call: ImageCall, model: ImageModel, generation: ImageGeneration
    ) -> AsyncGenerator[ImageDelta, None]:
        shapes, most = await self._shapes(call), self._config.images.max_image_pixels
        if shapes and not call.size:
            frame = model.frame_like(shapes[0])
        else:
            frame = ImageFrame.whole(call.size or model.size_within(most))
        generation.frame = frame
        model.check_size(frame.generated, max_pixels=most)
        frames = _source_frames(call, model, frame, shapes)
        num_frames = 1 + model.spec.num_layers(call.request.num_layers)
        num_pixels = math.prod(frame.generated) * call.request.num_images * num_frames
        num_pixels *= _num_steps(call, model)
        num_tokens = math.ceil(num_pixels / PIXELS_PER_TOKEN)
        caller = call.caller
        ticket = self._admission.admit(
            key=caller.principal.key, num_jobs=call.request.num_images, num_tokens=num_tokens
        )
        with ticket, self._holding(3 * sum(math.prod(source.generated) for source in frames)):
            request = generation.request = await self._request(call, model, frame.generated, frames)
            outputs = self.client.submit(
                model.name,
                request,
                job_id=caller.call_id,
                deadline_s=caller.deadline_s,
                client=caller.client,
            )
            async with aclosing(outputs) as stream:
                async for output in stream:
                    if isinstance(output.payload, ImageDelta):
                        yield _shown(output.payload, frame)

    async def _shapes(self, call: ImageCall) -> list[Size]:
        """The sizes of the call's images, from their headers."""
        with _naming("image"):
            shapes = [
                await self._reader.measure(file.data, media_type=file.media_type)
                for file in call.sources
            ]
        if call.mask:
            with _naming("mask"):
                file = call.mask
                shape = await self._reader.measure(file.data, media_type=file.media_type)
                if shape != shapes[0]:
                    raise InvalidRequest("The mask must have the size of the first image.")
        return shapes

    async def _request(
        self, call: ImageCall, model: ImageModel, size: Size, frames: Sequence[ImageFrame]
    ) -> ImageRequest:
        """The complete engine request. Decodes the images."""
        mask = b""
        with _naming("image"):
            sources = [
                await self._reader.read(
                    file.data, media_type=file.media_type, size=frame.shown, canvas=frame.generated
                )
                for file, frame in zip(call.sources, frames, strict=True)
            ]
        if call.mask:
            with _naming("mask"):
                file = call.mask
                first = frames[0]
                mask = await self._reader.read_mask(
                    file.data, media_type=file.media_type, size=first.shown, canvas=first.generated
                )
        is_default = call.request.num_steps is None and STEPS_OF_QUALITY[call.quality] == 1
        return replace(
            call.request,
            width=size[0],
            height=size[1],
            seed=self._seed(call.request.seed),
            num_steps=None if is_default else _num_steps(call, model),
            cache=_cache(call),
            adapters=await self.adapters.resolve(model.name, call.request.adapters),
            sources=tuple(sources),
            mask=mask,
            tenant=call.caller.principal.tenant,
        )

    def _holding(self, num_bytes: int) -> AbstractContextManager[None]:
        if num_bytes > MAX_SOURCE_BYTES:
            raise InvalidRequest("The images are too large in total; send fewer.", param="image")
        return self._images.hold(num_bytes, MAX_HELD_BYTES)


class ImageGeneration:
    """Lazy stream of a call's deltas. Work starts with the first `anext`.

    From the first delta on, `request` is the complete engine request, and `frame` says which part
    of the images is shown.
    """

    frame: ImageFrame

    def __init__(
        self,
        model: ImageModel,
        request: ImageRequest,
        start: Callable[[ImageGeneration], AsyncGenerator[ImageDelta, None]],
    ) -> None:
        self.model = model
        self.request = request
        self._deltas = start(self)

    @property
    def seed(self) -> int:
        """The seed of the images. May be read from the first delta on."""
        assert self.request.seed is not None, "the generation has not started"
        return self.request.seed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ImageDelta:
        return await anext(self._deltas)

    async def aclose(self) -> None:
        """Cancel the generation."""
        await self._deltas.aclose()


def check_call(
    call: ImageCall, model: ImageModel, config: Config, loaded: Collection[str] = ()
) -> None:
    """Raise `RequestError` for a call that cannot be generated, whatever its images hold.

    `loaded` are adapters beyond those of `--lora-paths`.
    """
    _check_fields(call, model)
    declared = [each.name for each in config.adapters.places()]
    check_uses(call.request.adapters, [*declared, *loaded])
    if isinstance(call.request, HookedRequest) and config.device.num_image_ranks > 1:
        raise UnsupportedOption(
            "callback_on_step_end needs the whole model on one device: its steps are shared by"
            f" {config.device.num_image_ranks} ranks here.",
            param="callback_on_step_end",
        )
    if call.size is not None:
        model.check_size(call.size, max_pixels=config.images.max_image_pixels)


def _check_fields(call: ImageCall, model: ImageModel) -> None:
    asked = call.request
    if not (asked.prompt or call.sources):
        raise InvalidRequest("The prompt is empty.", param="prompt")
    for name, value, low, high in (
        ("prompt", len(asked.prompt), 0, MAX_PROMPT_CHARS),
        ("negative_prompt", len(asked.negative_prompt), 0, MAX_PROMPT_CHARS),
        ("n", asked.num_images, 1, MAX_IMAGES),
        ("steps", asked.num_steps, 1, MAX_STEPS),
        ("guidance", asked.guidance_scale, 0, MAX_GUIDANCE),
        ("seed", asked.seed, -MAX_SEED, MAX_SEED),
        ("partial_images", asked.num_partials, 0, MAX_PARTIALS),
        ("layers", asked.num_layers, 1, MAX_LAYERS),
    ):
        if value is not None and not low <= value <= high:
            what = "the length of " if "prompt" in name else ""
            raise InvalidRequest(f"{what}{name} must be between {low} and {high}.", param=name)
    check_text(asked.prompt, "prompt")
    check_text(asked.negative_prompt, "negative_prompt")
    if asked.sampler and asked.sampler not in model.samplers:
        known = ", ".join(model.samplers)
        raise InvalidRequest(
            f"{model.name} has no sampler {asked.sampler!r:.80}; it has: {known}.", param="sampler"
        )
    if asked.negative_prompt:
        _check_negative(asked, model)
    if asked.num_layers is not None and not model.spec.default_layers:
        raise UnsupportedOption(
            f"{model.name} makes no layers: use a model that takes images apart.", param="layers"
        )
    if call.background == "transparent" and not model.spec.has_alpha:
        raise UnsupportedOption(
            f"{model.name} makes no transparent background: ask for a plain background in the"
            " prompt and cut it out.",
            param="background",
        )
    model.spec.check_images(
        len(call.sources),
        num_steps=_num_steps(call, model),
        strength=asked.strength,
        has_mask=call.mask is not None,
    )


def _check_negative(asked: ImageRequest, model: ImageModel) -> None:
    """Raise `RequestError` if the negative prompt would have no effect."""
    if not model.spec.has_negative:
        raise UnsupportedOption(
            f"{model.name} takes no negative prompt: describe the wanted image in the prompt.",
            param="negative_prompt",
        )
    scale = asked.guidance_scale
    if scale is None:
        scale = model.spec.default_guidance
    if not model.spec.is_guided(scale):
        raise InvalidRequest(
            "A negative prompt needs guidance above "
            f"{model.spec.neutral_guidance:g}; here it is {scale:g}.",
            param="negative_prompt",
        )


def _num_steps(call: ImageCall, model: ImageModel) -> int:
    if call.request.num_steps is not None:
        return call.request.num_steps
    return math.ceil(model.spec.default_steps * STEPS_OF_QUALITY[call.quality])


def _cache(call: ImageCall) -> StepCache:
    """The step cache of a call: high quality computes every step unless a cache is chosen."""
    is_free = call.request.cache.name == "auto" and call.quality == "high"
    return StepCache(name="off") if is_free else call.request.cache


def _source_frames(
    call: ImageCall, model: ImageModel, frame: ImageFrame, shapes: Sequence[Size]
) -> list[ImageFrame]:
    """The sizes at which images go to the engine; one to begin from has the generated size."""
    scales = [min(1.0, math.sqrt(model.default_pixels / math.prod(shape))) for shape in shapes]
    sizes = [
        (max(1, round(width * scale)), max(1, round(height * scale)))
        for (width, height), scale in zip(shapes, scales, strict=True)
    ]
    frames = list(map(ImageFrame.whole, sizes))
    spec = model.spec
    is_edited = call.mask or call.request.strength is not None or not spec.max_references
    if frames and is_edited:
        frames[0] = frame
    return frames


def _shown(delta: ImageDelta, frame: ImageFrame) -> ImageDelta:
    """The delta with its pixels, also those of a smaller preview, cropped to the shown part."""
    if delta.pixels is None or frame.is_whole:
        return delta
    width, height = (
        max(1, round(side * shown / generated))
        for side, generated, shown in zip(
            (delta.pixels.width, delta.pixels.height), frame.generated, frame.shown, strict=True
        )
    )
    return replace(
        delta,
        pixels=delta.pixels.crop(width, height),
        layers=tuple(layer.crop(width, height) for layer in delta.layers),
    )


@contextmanager
def _naming(param: str) -> Iterator[None]:
    """Add the field name to errors of a caller's image."""
    try:
        yield
    except RequestError as error:
        raise type(error)(error.message, param=error.param or param) from error
