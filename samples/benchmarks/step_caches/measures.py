"""Similarity of two images: PSNR, SSIM, features of a network; and the content of an image.

Owns the measures. The network and the judge are the image recipe's (samples/training/image), and
are fetched or fitted at their first use.

Legend: B images, C channels, H height, W width.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

_RECIPES = Path(__file__).resolve().parents[2] / "training"
_PEAK_DB = 99.0
_SIGMA, _WINDOW = 1.5, 11


def psnr_db(images_BCHW: Tensor, others_BCHW: Tensor) -> list[float]:
    """Peak signal-to-noise ratios of images in 0..1; 99 for equal ones."""
    errors = (images_BCHW - others_BCHW).double().square().flatten(1).mean(1)
    return (-10 * errors.log10()).clamp(max=_PEAK_DB).tolist()


def ssim(images_BCHW: Tensor, others_BCHW: Tensor) -> list[float]:
    """Structural similarities of images in 0..1 (Wang et al. 2004), the mean over channels.

    With their Gaussian window of 11 pixels and deviation 1.5, constants 0.01 and 0.03 squared.
    """
    at = torch.arange(_WINDOW, dtype=torch.float64) - _WINDOW // 2
    weights = (-(at**2) / (2 * _SIGMA**2)).exp()
    window = torch.outer(weights, weights)[None, None] / weights.sum() ** 2

    def smooth(values: Tensor) -> Tensor:
        return functional.conv2d(values.flatten(0, 1)[:, None], window)

    one, other = images_BCHW.double(), others_BCHW.double()
    mean, mean_other = smooth(one), smooth(other)
    variance, variance_other = smooth(one**2) - mean**2, smooth(other**2) - mean_other**2
    covariance = smooth(one * other) - mean * mean_other
    brightness = (2 * mean * mean_other + 1e-4) / (mean**2 + mean_other**2 + 1e-4)
    structure = (2 * covariance + 9e-4) / (variance + variance_other + 9e-4)
    found: list[float] = (brightness * structure).view(len(one), -1).mean(1).tolist()
    return found


class Judge:
    """The recipe's network and classifier, in the folder of a training run or an empty one."""

    def __init__(self, folder: Path) -> None:
        sys.path[:0] = [str(_RECIPES / "image"), str(_RECIPES)]
        from evaluation import Extent, Studio
        from judges import Judges
        from pictures.compositions import open_catalogue
        from pictures.drawings import fetch_drawings

        folder.mkdir(parents=True, exist_ok=True)
        catalogue = open_catalogue()
        drawings = fetch_drawings(folder, catalogue)
        self._studio = Studio(catalogue, drawings, Extent())
        self._judges = Judges(folder, catalogue, drawings)

    def captions(self, number: int) -> list[tuple[str, str]]:
        """Prompts of held-out arrangements of one thing, always the same, with its name."""
        shown = list(islice(self._studio.held_out(is_lone=True), number))
        names = [one.things[0].name for one in shown]
        return list(zip(self._studio.describe(shown), names, strict=True))

    @torch.inference_mode()
    def features(self, images_BCHW: Tensor) -> Tensor:
        """Features of images in 0..1, of length 1 each: a product is a cosine."""
        return functional.normalize(self._judges.eye.see(images_BCHW * 2 - 1).means, dim=-1)

    @torch.inference_mode()
    def is_right(self, images_BCHW: Tensor, names: Sequence[str]) -> list[bool]:
        """Whether each image shows the requested object."""
        seen = self._judges.eye.see(images_BCHW * 2 - 1)
        found = self._judges.things(seen, [1] * len(names))
        return [{name} == things for name, things in zip(names, found, strict=True)]


def feature_distances(features: Tensor, others: Tensor) -> list[float]:
    """One less the cosine, for images in pairs."""
    found: list[float] = (1 - (features * others).sum(-1)).tolist()
    return found
