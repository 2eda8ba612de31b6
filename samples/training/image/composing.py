"""Composing the corpus: shards of images of arrangements as latents, with captions.

Owns the workers. Each makes shards from their numbers, so that a corpus is the same whoever makes
it, and can grow beside the training. What a shard holds is `corpus.py`'s.

Shapes: B of a batch, T tokens of 2 x 2 latents, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from alignment import Labeller, plan_of
from codec import open_codec
from composites import sample_trained, stacked
from corpus import NUM_CAPTIONS, SHARD, Corpus, Shard, to_tokens
from diffusers import AutoencoderDC
from numpy.typing import NDArray
from pictures.chances import CODE_SIZE, Chances
from pictures.compositions import Catalogue, open_catalogue
from pictures.descriptions import Describer
from pictures.drawings import Drawings, fetch_drawings
from pictures.rendering import paint, sketch
from PIL import Image
from precision import mixed_precision
from rich.progress import track
from torch import Tensor
from workers import worker_pool

_BATCH = 32


def write_shards(folder: Path, num_shards: int, num_workers: int) -> None:
    """Compose, caption and encode until there are so many shards, in so many processes."""
    corpus = Corpus(folder)
    missing = [number for number in range(num_shards) if not corpus.has(number)]
    fetch_drawings(folder, open_catalogue())  # before workers would at once
    with worker_pool(num_workers) as pool:
        if missing and not corpus.has_scale:
            pool.submit(_write, folder, missing.pop(0)).result()  # the first shard tells the scale
        written = pool.map(partial(_write, folder), missing)
        for _ in track(written, "Composing", total=len(missing)):
            pass


def _write(folder: Path, number: int) -> None:
    Corpus(folder).add(number, _composer(folder).shard(number))


@cache
def _composer(folder: Path) -> ShardComposer:
    catalogue = open_catalogue()
    codec = open_codec(folder).to(memory_format=torch.channels_last)
    return ShardComposer(codec, catalogue, fetch_drawings(folder, catalogue))


@dataclass(frozen=True, slots=True)
class ShardComposer:
    """Makes shards from their numbers."""

    codec: AutoencoderDC
    catalogue: Catalogue
    drawings: Drawings

    @torch.inference_mode()
    def shard(self, number: int) -> Shard:
        """A shard, by its number."""
        rng = np.random.default_rng((0, number))
        writer, labeller = Describer(self.catalogue, rng), Labeller(self.catalogue)
        images: list[Image.Image] = []
        captions, codes, labels, plans = [], [], [], []
        for _ in range(SHARD):
            one = sample_trained(self.catalogue, self.drawings, rng)
            captions.append([writer.describe(one) for _ in range(NUM_CAPTIONS)])
            codes.append(rng.standard_normal(CODE_SIZE))
            chances = Chances.told(codes[-1], rng)
            chosen = sketch(one, self.catalogue, self.drawings, chances.places)
            drawn = paint(one, self.catalogue, self.drawings, chances, chosen)
            images.append(drawn.image)
            names = [thing.name for thing in one.things]
            labels.append(labeller.labels(drawn, names, chosen.set_name))
            plans.append(plan_of(drawn, chosen.set_name))
        latents = [
            _encoded(stacked(images[first : first + _BATCH]), self.codec)
            for first in range(0, SHARD, _BATCH)
        ]
        return Shard(
            np.concatenate(latents),
            np.stack(labels),
            np.stack(plans),
            np.stack(codes).astype(np.float32),
            captions,
        )


def _encoded(pixels: Tensor, codec: AutoencoderDC) -> NDArray[np.float16]:
    """The tokens of images, `[B, T, C]`."""
    given = pixels.contiguous(memory_format=torch.channels_last)
    with mixed_precision(codec.device):
        latents = codec.encode(given).latent
    return to_tokens(latents.float()).half().numpy()
