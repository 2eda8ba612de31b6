"""What the codec is trained on: sprites on plain grounds, and images as the model generates them.

Owns the workers that draw them.

Shapes: B images, H height, W width.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

import numpy as np
import torch
from composites import sample_trained
from numpy.typing import NDArray
from pictures.compositions import PICTURE_SIZE, Catalogue, open_catalogue
from pictures.drawings import Drawings, fetch_drawings
from pictures.rendering import render
from pictures.sprites import STYLES, TINTS, Sprites, fetch_sprites
from PIL import Image
from torch import Tensor
from workers import worker_pool

_CROP = PICTURE_SIZE // 2
_SIZES = (46, 46, 58, 58, 72, 100)  # small ones are harder
_TINT_SHARE = 0.15
_FLAT_SHARE = 0.25
_AHEAD, _KEPT = 3, 512  # batches of each worker, and of all

Values = NDArray[np.uint8]


class Crops:
    """Endless batches of images; `subject_share` of them are such as the model generates."""

    def __init__(self, folder: Path, num_workers: int) -> None:
        self.subject_share = 0.0
        self._folder, self._num_workers = folder, num_workers
        _sampler(folder)  # fetches, before workers would at once

    def batches(self, seed: int, num_rows: int, device: torch.device) -> Iterator[Tensor]:
        """Values `[B, H, W, 3]` on the device, of the last few batches that were drawn.

        Trainer and workers do not wait for each other: a batch that comes takes the oldest's place.
        """
        numbers, choices = count(), random.Random(seed)
        ahead: deque[Future[Values]] = deque()
        drawn: deque[Tensor] = deque(maxlen=_KEPT)
        share = -1.0
        with worker_pool(self._num_workers) as pool:

            def order() -> None:
                given = self._folder, (seed, next(numbers)), num_rows, share
                ahead.append(pool.submit(_draw, *given))

            while True:
                if share != self.subject_share:  # what was drawn before is not wanted any more
                    share = self.subject_share
                    for future in ahead:
                        future.cancel()
                    ahead.clear()
                    drawn.clear()
                    for _ in range(_AHEAD * self._num_workers):
                        order()
                while not drawn or ahead[0].done():
                    drawn.append(torch.from_numpy(ahead.popleft().result()).to(device))
                    order()
                yield choices.choice(drawn)


def _draw(folder: Path, seed: tuple[int, int], num_rows: int, subject_share: float) -> Values:
    rng = np.random.default_rng(seed)
    return np.stack([_sampler(folder).image(rng, subject_share) for _ in range(num_rows)])


@cache
def _sampler(folder: Path) -> _ImageSampler:
    catalogue = open_catalogue()
    sprites = fetch_sprites(folder / "sprites")
    return _ImageSampler(sprites, catalogue, fetch_drawings(folder, catalogue))


@dataclass(frozen=True, slots=True)
class _ImageSampler:
    """What a worker draws with."""

    sprites: Sprites
    catalogue: Catalogue
    drawings: Drawings

    def image(self, rng: np.random.Generator, subject_share: float) -> Values:
        """Values `[H, W, 3]`: an image of an arrangement, or four crops side by side."""
        if rng.random() < subject_share:
            shown = sample_trained(self.catalogue, self.drawings, rng)
            return np.asarray(render(shown, self.catalogue, self.drawings, rng))
        upper, lower = (np.concatenate([self.crop(rng) for _ in range(2)], 1) for _ in range(2))
        return np.concatenate((upper, lower))

    def crop(self, rng: np.random.Generator) -> Values:
        """A part of a sprite, which may be any, on a plain ground."""
        style = STYLES[int(rng.random() < _FLAT_SHARE)]
        tint = str(rng.choice(list(TINTS))) if rng.random() < _TINT_SHARE else None
        code = str(rng.choice(self.sprites.codes(style)))
        sprite = self.sprites.draw(style, code, tint, int(rng.choice(_SIZES)))
        ground = Image.new("RGB", (_CROP, _CROP), tuple(int(v) for v in _ground(rng)))
        left, top = (int(rng.integers(-side // 2, _CROP - side // 2 + 1)) for side in sprite.size)
        ground.paste(sprite, (left, top), sprite)
        return np.asarray(ground)


def _ground(rng: np.random.Generator) -> NDArray[np.int64]:
    return np.array([255] * 3) if rng.random() < 0.3 else rng.integers(0, 256, 3)
