"""Images that a model looks at while it generates: tokens after its own, at places of their own.

Owns the order of events and the images' sizes. Which tokens an image becomes, and at
which places, is the recipe's.

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

from triptych.core.runtime.devices.transfer import sent
from triptych.modalities.diffusion.engine.families.model import Conditioning
from triptych.modalities.diffusion.engine.recipes.latents import fitted, image_tensor
from triptych.modalities.diffusion.engine.recipes.recipe import Recipe
from triptych.modalities.diffusion.wire import ImageRequest


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """An image as tokens, row by row: `height` x `width` of them."""

    tokens_TC: Tensor
    height: int
    width: int


class Referring(Recipe):
    """A recipe whose model looks at images, each as itself and none noised."""

    @override
    def refer(self, branches: list[Conditioning], request: ImageRequest) -> list[Conditioning]:
        if not request.sources:
            return branches
        references = [self.look(image_tensor(image)) for image in request.sources]
        context = torch.cat([reference.tokens_TC for reference in references])
        shapes = tuple((reference.height, reference.width) for reference in references)
        return [
            replace(
                branch,
                context=sent(context, self.device),
                shared={**branch.shared, **self.places(branch.shared, references)},
                key=(branch.key, shapes),
            )
            for branch in branches
        ]

    @abstractmethod
    def look(self, image_3HW: Tensor) -> Reference:
        """An image in 0..1, of any size, as the model looks at it."""

    @abstractmethod
    def places(self, shared: Mapping[str, Any], references: Sequence[Reference]) -> dict[str, Any]:
        """The shared arguments that place the image and its references."""


def within(image_3HW: Tensor, num_pixels: int, multiple: int) -> Tensor:
    """An image made no larger than `num_pixels`, its edges cut to whole multiples of a side.

    A side shorter than `multiple` is stretched to it: something must be left.
    """
    _, height, width = image_3HW.shape
    scale = min(1.0, math.sqrt(num_pixels / (height * width)))
    height, width = max(multiple, int(height * scale)), max(multiple, int(width * scale))
    image = fitted(image_3HW, height, width)
    _, height, width = image.shape
    top, left = height % multiple // 2, width % multiple // 2
    height, width = height - height % multiple, width - width % multiple
    return image[:, top : top + height, left : left + width]
