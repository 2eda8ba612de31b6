"""From latents to pixels: the picture by the autoencoder, previews by a linear map.

Owns rounding, and when the autoencoder works in tiles. Knows no row and no step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from triptych.core.sampling.host_copy import HostCopy
from triptych.modalities.diffusion.engine.preview import Preview
from triptych.modalities.diffusion.engine.recipes.recipe import Recipe
from triptych.modalities.diffusion.wire import ImageRequest


class LatentDecoder:
    """Shows a recipe's pictures; those of more than `whole_pixels` are decoded in tiles."""

    def __init__(self, recipe: Recipe, preview: Preview, whole_pixels: int) -> None:
        self._recipe = recipe
        self._preview = preview
        self._whole_pixels = whole_pixels
        self._shares_runs = recipe.device.type != "cpu"

    def make_room(self, request: ImageRequest) -> None:
        """Set the autoencoder to whole pictures or to overlapping tiles, before it works."""
        vae, num_pixels = self._recipe.vae, request.width * request.height
        (vae.disable_tiling if num_pixels <= self._whole_pixels else vae.enable_tiling)()

    def decode(
        self, samples: Sequence[tuple[Tensor, ImageRequest]]
    ) -> list[tuple[HostCopy, HostCopy]]:
        """Finished pictures, bytes `[height, width, 3]`, and whether each is finite.

        Those of one size are decoded together, as many as there is room for; on a CPU one by one,
        since what shares a run there differs in its last bits.
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

    def foretell(self, clean: Tensor, request: ImageRequest) -> HostCopy:
        """A preview of a sample that is clean, or foretold to be: bytes, a pixel per latent."""
        return HostCopy(_bytes(self._preview.draw(self._recipe.to_latents(clean, request))))

    def _decode(
        self, samples: Sequence[tuple[Tensor, ImageRequest]]
    ) -> list[tuple[HostCopy, HostCopy]]:
        self.make_room(samples[0][1])
        pixels_N3HW = self._recipe.decode_all(samples)
        return [
            (HostCopy(_bytes(pixels_3HW)), HostCopy(pixels_3HW.isfinite().all()))
            for pixels_3HW in pixels_N3HW
        ]


def _bytes(pixels_3HW: Tensor) -> Tensor:
    return (pixels_3HW * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
