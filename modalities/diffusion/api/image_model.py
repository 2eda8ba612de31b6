"""An image model as the API sees it: its capabilities and image sizes.

Owns the facts read from the JSON files next to the weights, and the checks that need only those.
Knows nothing of HTTP or torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from triptych.core.errors import InvalidRequest
from triptych.core.weights.layout import read_json
from triptych.core.weights.pipeline_index import read_pipeline
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.diffusion.sampler_names import sampler_names
from triptych.modalities.diffusion.spec import PipelineSpec, size_within, spec_of

Size = tuple[int, int]
"""Width and height in pixels."""

MAX_ASPECT = 3
"""The largest ratio of the longer to the shorter side: OpenAI's bound."""
_SIZE_RANGE = 4
"""The largest ratio between a side and that of the model's default size."""
_PIXEL_RANGE = 4
_PIXEL_SHARES = (0.5, 1.5)
"""Bounds on the pixels of a size chosen by aspect, as shares of the default size's pixels."""
_UNSEEN = 0.01
"""A difference of log aspect that is not visible."""


class ImageFrame(NamedTuple):
    """The size generated, and the part shown of it, from the upper left corner: mostly all."""

    generated: Size
    shown: Size

    @classmethod
    def whole(cls, size: Size) -> Self:
        """A frame that shows all of a size."""
        return cls(size, size)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is cut off."""
        return self.generated == self.shown


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageModel:
    """One image model. Sides of its images are multiples of `multiple`.

    `default_size` is the size it generates best; `samplers` are those a request may choose.
    """

    name: str
    spec: PipelineSpec
    multiple: int
    default_size: Size
    samplers: tuple[str, ...]

    @classmethod
    def open(cls, resolved: ResolvedModel) -> Self:
        """The model in a folder. Raises `WeightsError` where it is unknown or damaged."""
        folder = Path(resolved.folder)
        index = read_pipeline(folder)
        vae = read_json(folder / "vae" / "config.json")
        denoiser = "transformer" if "transformer" in index.parts else "unet"
        model = read_json(folder / denoiser / "config.json")
        spec = spec_of(index.pipeline, model, index.facts)
        return cls(
            name=resolved.name,
            spec=spec,
            multiple=spec.pixel_multiple(vae),
            default_size=spec.default_size(model, vae, index.facts),
            samplers=sampler_names(read_json(folder / "scheduler" / "scheduler_config.json")),
        )

    @property
    def default_pixels(self) -> int:
        """Pixels of the default size."""
        return math.prod(self.default_size)

    @property
    def max_pixels(self) -> int:
        """Pixels of the largest image allowed."""
        return _PIXEL_RANGE * self.default_pixels

    @property
    def min_side(self) -> int:
        """The shortest side allowed, in pixels."""
        return self._on_grid(min(self.default_size) / _SIZE_RANGE)

    @property
    def max_side(self) -> int:
        """The longest side allowed, in pixels."""
        return self._on_grid(max(self.default_size) * _SIZE_RANGE)

    def size_within(self, max_pixels: int) -> Size:
        """The size nearest to the default with at most `max_pixels` pixels."""
        return size_within(self.default_size, max_pixels, self.multiple)

    def check_size(self, size: Size, *, max_pixels: int) -> None:
        """Raise `InvalidRequest`, which names the rule, for a size that cannot be generated."""
        shown = f"{size[0]}x{size[1]}"
        if size[0] % self.multiple or size[1] % self.multiple:
            rule = f"both sides must be multiples of {self.multiple}"
        elif min(size) < self.min_side or max(size) > self.max_side:
            rule = f"sides are {self.min_side} to {self.max_side} pixels"
        elif max(size) > MAX_ASPECT * min(size):
            rule = f"one side is at most {MAX_ASPECT} times the other"
        elif math.prod(size) > (most := min(self.max_pixels, max_pixels)):
            rule = f"an image has at most {most} pixels"
        else:
            return
        width, height = self.default_size
        raise InvalidRequest(
            f"{self.name} cannot generate {shown}: {rule}. Its default size is {width}x{height}.",
            param="size",
        )

    def frame_like(self, image: Size) -> ImageFrame:
        """The size with the aspect of `image` that is nearest to the default size.

        If no multiple has this aspect, slightly more is generated than shown.
        """
        aspect = min(max(image[0] / image[1], 1 / MAX_ASPECT), MAX_ASPECT)
        size = min(self._near_sizes(aspect), key=lambda size: self._misfit(size, aspect))
        if self._misfit(size, aspect)[0] <= _UNSEEN:
            return ImageFrame.whole(size)
        frames = (ImageFrame(size, _inside(size, aspect)) for size in self._near_sizes(aspect))
        return min(frames, key=self._waste)

    def _near_sizes(self, aspect: float) -> Iterator[Size]:
        """Sizes of about the default number of pixels: each height with the nearest width."""
        low, high = (share * self.default_pixels for share in _PIXEL_SHARES)
        first = self._on_grid(math.sqrt(low / aspect) - self.multiple)
        last = self._on_grid(math.sqrt(high / aspect) + self.multiple)
        for height in range(first, last + 1, self.multiple):
            width = self._on_grid(height * aspect)
            sides = min(width, height), max(width, height)
            is_possible = self.min_side <= sides[0] and sides[1] <= self.max_side
            is_near = low < width * height < high and sides[1] <= MAX_ASPECT * sides[0]
            if is_possible and is_near:
                yield width, height

    def _misfit(self, size: Size, aspect: float) -> tuple[float, float]:
        """The visible error in aspect, then the error in the number of pixels."""
        off = abs(math.log(size[0] / size[1] / aspect))
        return max(off, _UNSEEN), abs(math.log(math.prod(size) / self.default_pixels))

    def _waste(self, frame: ImageFrame) -> float:
        """The frame's distance from the default size, plus the share that is cut off."""
        shown = math.prod(frame.shown)
        far = abs(math.log(shown / self.default_pixels))
        return far + math.log(math.prod(frame.generated) / shown)

    def _on_grid(self, side: float) -> int:
        return max(1, round(side / self.multiple)) * self.multiple


def _inside(size: Size, aspect: float) -> Size:
    """The largest part of a size that has another aspect, to the pixel."""
    width, height = size
    if width > height * aspect:
        return round(height * aspect), height
    return width, round(width / aspect)
