"""Images of arrangements, as training and evaluation take them.

Owns which arrangements are trained on, and images as tensors.

Shapes: B images, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from pictures.arrangements import Arrangement, sample_arrangement
from pictures.compositions import Catalogue
from pictures.drawings import Drawings
from pictures.rendering import drawable, render
from PIL import Image
from torch import Tensor


def sample_trained(
    catalogue: Catalogue, drawings: Drawings, rng: np.random.Generator
) -> Arrangement:
    """A random arrangement that is not held out."""
    while True:
        one = drawable(sample_arrangement(catalogue, rng), catalogue, drawings)
        if not one.is_held_out:
            return one


def pixels_of(
    arrangements: Sequence[Arrangement],
    catalogue: Catalogue,
    drawings: Drawings,
    rng: np.random.Generator,
) -> Tensor:
    """An image of each in -1..1, `[B, 3, H, W]`."""
    return stacked([render(one, catalogue, drawings, rng) for one in arrangements])


def stacked(images: Sequence[Image.Image]) -> Tensor:
    """Images as values in -1..1, `[B, 3, H, W]`."""
    return to_pixels(torch.from_numpy(np.stack([np.asarray(image) for image in images])))


def to_pixels(values: Tensor) -> Tensor:
    """Values `[B, H, W, 3]` of images as `[B, 3, H, W]` in -1..1."""
    return values.permute(0, 3, 1, 2).float() / 127.5 - 1
