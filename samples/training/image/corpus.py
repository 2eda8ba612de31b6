"""The corpus: images of arrangements as latents, with captions, in shards.

Owns the folder `corpus`: `NNNN.npy` (`[N, T, C]`, float16, as the model takes them) with
`NNNN.json` (captions of each image), `labels-NNNN.npy` and `plans-NNNN.npy` (`alignment.py`) and
`codes-NNNN.npy` (`chances.py`), and `scale.json` (mean and deviation of the codec's latents).
Shards are made one after another from their numbers, so a corpus can grow beside the training.

Shapes: N images, B of a batch, T tokens of 2 x 2 latents, C channels, H height, W width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from alignment import Labeller, plan_of
from diffusers import AutoencoderDC
from numpy.typing import NDArray
from pictures.arrangements import Arrangement, sample_arrangement
from pictures.chances import CODE_SIZE, Chances
from pictures.compositions import PICTURE_SIZE, Catalogue
from pictures.descriptions import Describer
from pictures.drawings import Drawings
from pictures.rendering import TOKEN_SIDE, drawable, paint, render, sketch
from PIL import Image
from precision import mixed_precision
from rich.progress import track
from torch import Tensor

SHARD = 4096
NUM_CAPTIONS = 3
_BATCH = 32
NUM_PATCHES = (PICTURE_SIZE // TOKEN_SIDE) ** 2


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
    return to_pixels(np.stack([np.asarray(image) for image in images]))


def to_pixels(values: NDArray[np.uint8]) -> Tensor:
    """Values `[B, H, W, 3]` of images as `[B, 3, H, W]` in -1..1."""
    return torch.from_numpy(values).permute(0, 3, 1, 2).float() / 127.5 - 1


def write_shards(
    folder: Path, codec: AutoencoderDC, catalogue: Catalogue, drawings: Drawings, num_shards: int
) -> None:
    """Compose, caption and encode until there are so many shards."""
    home = folder / "corpus"
    home.mkdir(parents=True, exist_ok=True)
    codec = codec.to(memory_format=torch.channels_last)
    for number in range(num_shards):
        if not (home / f"{number:04}.npy").exists():
            _write_shard(home, number, codec, catalogue, drawings)


@torch.inference_mode()
def _write_shard(
    home: Path, number: int, codec: AutoencoderDC, catalogue: Catalogue, drawings: Drawings
) -> None:
    rng = np.random.default_rng((0, number))
    writer, labeller = Describer(catalogue, rng), Labeller(catalogue)
    captions: list[list[str]] = []
    latents: list[NDArray[np.float16]] = []
    labels: list[NDArray[np.float16]] = []
    codes: list[NDArray[np.float64]] = []
    plans: list[NDArray[np.float16]] = []
    for _ in track(range(SHARD // _BATCH), f"Shard {number}"):
        images = []
        for _ in range(_BATCH):
            one = sample_trained(catalogue, drawings, rng)
            captions.append([writer.describe(one) for _ in range(NUM_CAPTIONS)])
            codes.append(rng.standard_normal(CODE_SIZE))
            chances = Chances.told(codes[-1], rng)
            chosen = sketch(one, catalogue, drawings, chances.places)
            drawn = paint(one, catalogue, drawings, chances, chosen)
            images.append(drawn.image)
            names = [thing.name for thing in one.things]
            labels.append(labeller.labels(drawn, names, chosen.set_name))
            plans.append(plan_of(drawn, chosen.set_name))
        latents.append(_encoded(stacked(images), codec))
    (home / f"{number:04}.json").write_text(json.dumps(captions), encoding="utf-8")
    store = np.concatenate(latents)
    if not (home / "scale.json").exists():
        some = store.astype(np.float32)
        scale = {"mean": float(some.mean()), "deviation": float(some.std())}
        (home / "scale.json").write_text(json.dumps(scale), encoding="utf-8")
    file = home / f"{number:04}.npy"
    np.save(_beside(file, "labels"), np.stack(labels))
    np.save(_beside(file, "plans"), np.stack(plans))
    np.save(_beside(file, "codes"), np.stack(codes).astype(np.float32))
    np.save(home / "part.npy", store)
    (home / "part.npy").replace(file)


def _encoded(pixels: Tensor, codec: AutoencoderDC) -> NDArray[np.float16]:
    """The tokens of images, `[B, T, C]`."""
    given = pixels.to(codec.device).contiguous(memory_format=torch.channels_last)
    with mixed_precision(codec.device):
        latents = codec.encode(given).latent
    return to_tokens(latents.float()).half().cpu().numpy()


def _beside(shard: Path, kind: str) -> Path:
    """The file of a shard's labels, plans or codes, which is written before its latents."""
    return shard.with_name(f"{kind}-{shard.name}")


def read_scale(folder: Path) -> tuple[float, float]:
    """Mean and deviation of the codec's latents."""
    scale = json.loads((folder / "corpus" / "scale.json").read_text(encoding="utf-8"))
    return scale["mean"], scale["deviation"]


def to_tokens(latents: Tensor) -> Tensor:
    """Latents `[B, C, H, W]` as FLUX takes them, `[B, H W / 4, 4 C]`."""
    rows, channels, height, width = latents.shape
    patches = latents.reshape(rows, channels, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(rows, -1, 4 * channels)


def to_latents(tokens: Tensor) -> Tensor:
    """`to_tokens` undone, for square images: `[B, T, 4 C]` to `[B, C, H, W]`."""
    rows, count, channels = tokens.shape
    side = math.isqrt(count)
    patches = tokens.reshape(rows, side, side, channels // 4, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(rows, channels // 4, 2 * side, 2 * side)


@dataclass(frozen=True, slots=True)
class Rows:
    """Latents `[B, T, C]`, labels `[B, T, F]`, plans `[B, P]`, codes `[B, C]`, and captions."""

    clean: Tensor
    labels: Tensor
    plans: Tensor
    codes: Tensor
    captions: list[str]


class Corpus:
    """Latents, of mean 0 and deviation 1, with captions; new shards are taken in as they come."""

    def __init__(self, folder: Path) -> None:
        self._home = folder / "corpus"
        self._latents: list[NDArray[np.float16]] = []
        self._labels: list[NDArray[np.float16]] = []
        self._plans: list[NDArray[np.float16]] = []
        self._codes: list[NDArray[np.float32]] = []
        self._captions: list[list[str]] = []
        self.mean, self.deviation = read_scale(folder)
        self.refresh()

    def refresh(self) -> None:
        """Take in the shards that were finished since."""
        for file in sorted(self._home.glob("[0-9]*.npy"))[len(self._latents) :]:
            self._latents.append(np.load(file, mmap_mode="r"))
            self._labels.append(np.load(_beside(file, "labels"), mmap_mode="r"))
            self._plans.append(np.load(_beside(file, "plans")))
            self._codes.append(np.load(_beside(file, "codes")))
            self._captions += json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))

    def __len__(self) -> int:
        return len(self._captions)

    def stored(self, num_images: int) -> Tensor:
        """The first images' latents as the codec has them, `[N, C, H, W]`."""
        shards = self._latents[: math.ceil(num_images / SHARD)]
        tokens = np.concatenate(shards)[:num_images]
        return to_latents(torch.from_numpy(tokens).float())

    def captions(self) -> Iterator[str]:
        """All captions."""
        for captions in self._captions:
            yield from captions

    def batch(self, numbers: NDArray[np.int64], rng: np.random.Generator) -> Rows:
        """Images by their numbers, with one caption of each."""
        places = [divmod(number, SHARD) for number in numbers.tolist()]
        latents, labels, plans, codes = (
            torch.from_numpy(np.stack([shards[shard][row] for shard, row in places])).float()
            for shards in (self._latents, self._labels, self._plans, self._codes)
        )
        captions = [str(rng.choice(self._captions[number])) for number in numbers]
        return Rows((latents - self.mean) / self.deviation, labels, plans, codes, captions)
