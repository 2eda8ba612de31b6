"""Reference images: tokens appended to the model's own, with their own positions.

Owns the order of events and image sizes. Recipes encode the tokens and set their positions.

Legend: T tokens of an image, C channels.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from triptych.core.runtime.devices.transfer import to_device
from triptych.modalities.diffusion.engine.families.model import Conditioning
from triptych.modalities.diffusion.engine.recipes.latents import image_tensor, resize
from triptych.modalities.diffusion.engine.recipes.recipe import BranchPrompt, EncodedText, Recipe
from triptych.modalities.diffusion.wire import ImageRequest

_MAX_ASPECT = 100  # image processors raise at twice that


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """An image as `height` x `width` tokens, row by row."""

    tokens_TC: Tensor
    height: int
    width: int


class ReferenceRecipe(Recipe):
    """A recipe whose model takes reference images as tokens, without noise."""

    @override
    def add_references(
        self, branches: list[Conditioning], request: ImageRequest, generator: torch.Generator
    ) -> list[Conditioning]:
        if not request.sources:
            return branches
        references = self.references(request)
        context = torch.cat([reference.tokens_TC for reference in references])
        shapes = tuple((reference.height, reference.width) for reference in references)
        return [
            replace(
                branch,
                context=to_device(context, self.device),
                shared={**branch.shared, **self.reference_arguments(branch.shared, references)},
                key=(branch.key, shapes),
            )
            for branch in branches
        ]

    def references(self, request: ImageRequest) -> list[Reference]:
        """The request's images, encoded."""
        return [
            self.encode_reference(self.fit_reference(image_tensor(image), request))
            for image in request.sources
        ]

    @override
    def num_reference_tokens(self, request: ImageRequest) -> int:
        """From sizes alone, before an image is read."""
        sizes = [(3, image.height, image.width) for image in request.sources]
        fitted = [self.fit_reference(torch.empty(size, device="meta"), request) for size in sizes]
        return sum(math.prod(image.shape[1:]) for image in fitted) // self.token_side**2

    @abstractmethod
    def fit_reference(self, image_3HW: Tensor, request: ImageRequest) -> Tensor:
        """Resize an image in 0..1, of any size, to that of a reference of a request."""

    @abstractmethod
    def encode_reference(self, image_3HW: Tensor) -> Reference:
        """Encode a fitted image as a reference."""

    @abstractmethod
    def reference_arguments(
        self, shared: Mapping[str, Any], references: Sequence[Reference]
    ) -> dict[str, Any]:
        """The shared arguments with the positions of the image and its references."""


class SeeingRecipe(ReferenceRecipe):
    """A recipe whose text encoder reads the reference images, too."""

    @override
    def prompts(self, request: ImageRequest) -> list[BranchPrompt]:
        prompts = super().prompts(request)
        return [replace(prompt, images=request.sources) for prompt in prompts]

    @override
    def encode_all(self, prompts: Sequence[BranchPrompt]) -> list[EncodedText]:
        return [self.read(prompt) for prompt in prompts]

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> EncodedText:
        return self.read(BranchPrompt(prompt, is_negative))

    @abstractmethod
    def read(self, prompt: BranchPrompt) -> EncodedText:
        """Encode a prompt and its images as model arguments."""


def bounded_aspect(image_3HW: Tensor) -> float:
    """Width / height, unless that is extreme."""
    _, height, width = image_3HW.shape
    return min(max(width / height, 1 / _MAX_ASPECT), _MAX_ASPECT)


def fit_within(image_3HW: Tensor, num_pixels: int, multiple: int) -> Tensor:
    """Shrink an image to at most `num_pixels`, and crop its sides to multiples of `multiple`.

    A side shorter than `multiple` is stretched to it.
    """
    _, height, width = image_3HW.shape
    scale = min(1.0, math.sqrt(num_pixels / (height * width)))
    height, width = max(multiple, int(height * scale)), max(multiple, int(width * scale))
    image = resize(image_3HW, height, width)
    _, height, width = image.shape
    top, left = height % multiple // 2, width % multiple // 2
    height, width = height - height % multiple, width - width % multiple
    return image[:, top : top + height, left : left + width]
