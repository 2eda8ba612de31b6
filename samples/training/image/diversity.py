"""Measures of how far images of one prompt differ, and of how near they are to real ones.

Owns the measures, which a model that maps a prompt to one image fails. Knows nothing of features.

Shapes: P prompts, S images of each, N images, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_NEAREST = 3  # neighbours that span the region around an image


def mean_distance(images_PSF: Tensor) -> float:
    """The mean distance of two images of one prompt."""
    found = torch.cdist(images_PSF, images_PSF)
    num_images = images_PSF.shape[1]
    return float(found.sum((1, 2)).mean() / (num_images * (num_images - 1)))


def mean_number(names: Sequence[str], num_images: int) -> float:
    """How many different names the images of one prompt have, on average."""
    groups = [names[first : first + num_images] for first in range(0, len(names), num_images)]
    return sum(len(set(group)) for group in groups) / len(groups)


def mean_spread(values_PSF: Tensor) -> float:
    """The mean standard deviation of values over the images of a prompt."""
    return float(values_PSF.std(1).mean())


def precision_recall(images_NF: Tensor, real_NF: Tensor) -> tuple[float, float]:
    """The share of images in the region of real ones, and of real ones in the region of images.

    A region is all that is within an image's distance to its third neighbour (improved precision
    and recall, Kynkaanniemi et al. 2019, arXiv:1904.06991).
    """
    return _share_within(images_NF, real_NF), _share_within(real_NF, images_NF)


def _share_within(images_NF: Tensor, reference_NF: Tensor) -> float:
    reach = torch.cdist(reference_NF, reference_NF).kthvalue(_NEAREST + 1, dim=1).values
    return float((torch.cdist(images_NF, reference_NF) <= reach).any(1).float().mean())


def nearest_distance(images_NF: Tensor, trained_NF: Tensor) -> float:
    """The median distance of images to the nearest one that was trained on."""
    return float(torch.cdist(images_NF, trained_NF).amin(1).median())
