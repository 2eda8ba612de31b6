"""Decodes latents to pixels: images by the autoencoder, previews by a linear map.

Owns rounding, and when the autoencoder works in tiles. Knows no row and no step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate

from triptych.core.errors import WeightsError
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.modalities.diffusion.engine.recipes.recipe import Recipe
from triptych.modalities.diffusion.spec import downscale
from triptych.modalities.diffusion.wire import ImageRequest

FILE_NAME = "preview.safetensors"
_SIDE = 12  # side, in latents, of the images that a map is fitted to
_NUM_IMAGES = 6
_RIDGE = 1e-3


class Preview:
    """A linear map, `weight_3C` and `bias_3`, from a latent to its mean colour in 0..1."""

    def __init__(self, weight_3C: Tensor, bias_3: Tensor) -> None:
        self._weight_3C = weight_3C
        self._bias_3 = bias_3

    @classmethod
    def open(cls, folder: Path, recipe: Recipe) -> Preview:
        """The map in the model's folder, else a fitted one. Raises `WeightsError`."""
        path, device = folder / FILE_NAME, recipe.device
        if not path.is_file():
            return cls.fit(recipe)
        return cls(*[tensor.to(device, torch.float32) for tensor in _read(path)])

    @classmethod
    def fit(cls, recipe: Recipe) -> Preview:
        """Fit a map, by least squares, to images encoded by the autoencoder.

        The images are random smooth colours and random flat blocks, the same each time.
        """
        seen, colours = _examples(recipe)
        with_one = torch.cat([seen, torch.ones_like(seen[:, :1])], dim=1)
        ridge = _RIDGE * len(with_one) * torch.eye(with_one.shape[1]).to(with_one)
        found = torch.linalg.solve(with_one.T @ with_one + ridge, with_one.T @ colours).float()
        return cls(found[:-1].T.contiguous(), found[-1])

    def colours(self, latents_CHW: Tensor) -> Tensor:
        """The colours of latents, `[3, H, W]` in 0..1."""
        latents_NC = latents_CHW.flatten(1).T.float()
        colours_N3 = torch.addmm(self._bias_3, latents_NC, self._weight_3C.T)
        return colours_N3.T.reshape(3, *latents_CHW.shape[1:]).clamp(0, 1)


@torch.no_grad()
def _examples(recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Latents `[N, C]` and their mean colours `[N, 3]`."""
    side = _SIDE * downscale(recipe.vae.config)
    request = ImageRequest(prompt="", width=side, height=side)
    seen, colours = [], []
    for image_3HW in _images(side).to(recipe.device):
        sample = recipe.image_sample(image_3HW, None)
        latents_CHW = recipe.to_latents(sample, request)
        seen.append(latents_CHW.flatten(1).T)
        _, height, width = latents_CHW.shape
        pooled = adaptive_avg_pool2d(image_3HW, (height, width))
        colours.append(pooled.flatten(1).T)
    return torch.cat(seen).double(), torch.cat(colours).double()


def _images(side: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand((_NUM_IMAGES, 3, 5, 5), generator=generator)
    half = _NUM_IMAGES // 2
    smooth = interpolate(coarse[:half], (side, side), mode="bicubic").clamp(0, 1)
    return torch.cat([smooth, interpolate(coarse[half:], (side, side), mode="nearest")])


def _read(path: Path) -> tuple[Tensor, Tensor]:
    try:
        tensors = load_file(path)
        weight_3C, bias_3 = tensors["weight"], tensors["bias"]
    except (SafetensorError, OSError, KeyError) as error:
        raise WeightsError(
            f"{path.name} does not hold the weight and bias of a linear map."
        ) from error
    if weight_3C.ndim != 2 or len(weight_3C) != 3 or bias_3.shape != (3,):
        raise WeightsError(f"{path.name} must hold a weight of 3 x channels and a bias of 3.")
    return weight_3C, bias_3


class LatentDecoder:
    """Decodes a recipe's images; those of more than `whole_pixels` in tiles."""

    def __init__(self, recipe: Recipe, preview: Preview, whole_pixels: int) -> None:
        self._recipe = recipe
        self._preview = preview
        self._whole_pixels = whole_pixels
        self._shares_runs = recipe.device.type != "cpu"

    def make_room(self, request: ImageRequest) -> None:
        """Set the autoencoder to decode the image whole or in overlapping tiles."""
        vae, num_pixels = self._recipe.vae, request.width * request.height
        (vae.disable_tiling if num_pixels <= self._whole_pixels else vae.enable_tiling)()

    def decode(
        self, samples: Sequence[tuple[Tensor, ImageRequest]]
    ) -> list[tuple[HostCopy, HostCopy]]:
        """Decode finished images to bytes, and whether each is finite.

        Bytes are `[height, width, 3 or 4]`, or with layers `[1 + layers, height, width, 4]`.

        Images of one size are decoded together, as far as memory allows; on a CPU one by one,
        because sharing a run there would change the last bits.
        """
        sizes: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for index, (_, request) in enumerate(samples):
            sizes[request.width, request.height].append(index)
        shown: dict[int, tuple[HostCopy, HostCopy]] = {}
        for (width, height), members in sizes.items():
            room = self._whole_pixels // (width * height) if self._shares_runs else 1
            size = max(1, room)
            for start in range(0, len(members), size):
                chosen = members[start : start + size]
                shown.update(zip(chosen, self._decode([samples[i] for i in chosen]), strict=True))
        return [shown[index] for index in range(len(samples))]

    def preview(self, clean: Tensor, request: ImageRequest) -> HostCopy:
        """Preview a clean sample, or a prediction of it: bytes, one pixel per latent."""
        return HostCopy(_bytes(self._preview.colours(self._recipe.to_latents(clean, request))))

    def _decode(
        self, samples: Sequence[tuple[Tensor, ImageRequest]]
    ) -> list[tuple[HostCopy, HostCopy]]:
        self.make_room(samples[0][1])
        return [
            (HostCopy(_bytes(pixels)), HostCopy(pixels.isfinite().all()))
            for pixels in self._recipe.decode_all(samples)
        ]


def _bytes(pixels: Tensor) -> Tensor:
    """Pixels `[..., C, H, W]` in 0..1 as bytes, with channels last."""
    return (pixels * 255).round().to(torch.uint8).movedim(-3, -1).contiguous()
