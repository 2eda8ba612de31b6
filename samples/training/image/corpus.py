"""The corpus: compositions with captions, and their latents.

Owns the files `compositions.jsonl` (captions of each picture), `latents.npy` (`[N, T, C]`,
float16, as the model takes them) and `latents.json` (mean and deviation of the codec's latents).

Shapes: N pictures, B of a batch, T tokens of 2 x 2 latents, C channels, H height, W width.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from codec_training import LATENT_CHANNELS
from diffusers import AutoencoderDC
from numpy.typing import NDArray
from pictures.captions import Writer
from pictures.compositions import PICTURE_SIZE, Catalogue, Composition, Thing, draw, sample
from pictures.sprites import Sprites
from rich.progress import track
from torch import Tensor

NUM_CAPTIONS = 4
_RARE_TIMES = 4
_BATCH = 32
NUM_TOKENS = (PICTURE_SIZE // 16) ** 2


@dataclass(frozen=True, slots=True)
class Record:
    """An image of the corpus and its captions."""

    composition: Composition
    captions: list[str]


def _is_rare(composition: Composition) -> bool:
    is_moved = len(composition.spots) == 1 and composition.layout != "single"
    return is_moved or composition.style == "flat"


def write_compositions(folder: Path, catalogue: Catalogue, num_pictures: int) -> None:
    """Sample compositions, none of them held out, and caption them."""
    rng = np.random.default_rng(0)
    writer = Writer(catalogue, rng)
    with (folder / "compositions.jsonl").open("w", encoding="utf-8") as file:
        num_written = 0
        while num_written < num_pictures:
            composition = sample(catalogue, rng)
            if composition.is_held_out:
                continue
            captions = [writer.caption(composition) for _ in range(NUM_CAPTIONS)]
            file.write(json.dumps({**_to_json(composition), "captions": captions}) + "\n")
            num_written += 1


def read_records(folder: Path) -> list[Record]:
    """The corpus' images in order."""
    lines = (folder / "compositions.jsonl").read_text(encoding="utf-8").splitlines()
    return [_from_json(json.loads(line)) for line in lines]


def _to_json(composition: Composition) -> dict[str, object]:
    return {
        "layout": composition.layout,
        "things": [[thing.name, thing.colour] for thing in composition.things],
        "background": composition.background,
        "style": composition.style,
    }


def _from_json(entry: dict[str, str | list[str]]) -> Record:
    things = tuple(Thing(name, colour) for name, colour in entry["things"])
    composition = Composition(
        str(entry["layout"]), things, str(entry["background"]), str(entry["style"])
    )
    return Record(composition, list(entry["captions"]))


def pixels_of(compositions: list[Composition], catalogue: Catalogue, sprites: Sprites) -> Tensor:
    """Images in -1..1, `[B, 3, H, W]`."""
    drawn = np.stack([np.asarray(draw(one, catalogue, sprites)) for one in compositions])
    return torch.from_numpy(drawn).permute(0, 3, 1, 2).float() / 127.5 - 1


@torch.inference_mode()
def write_latents(
    folder: Path, codec: AutoencoderDC, catalogue: Catalogue, sprites: Sprites
) -> None:
    """Compose and encode every image."""
    records = read_records(folder)
    shape = (len(records), NUM_TOKENS, 4 * LATENT_CHANNELS)
    store = np.lib.format.open_memmap(folder / "latents.part.npy", "w+", np.float16, shape)
    codec = codec.to(memory_format=torch.channels_last)
    for first in track(range(0, len(records), _BATCH), "Encoding"):
        rows = [record.composition for record in records[first : first + _BATCH]]
        pixels = pixels_of(rows, catalogue, sprites).to(codec.device)
        with torch.autocast(codec.device.type, torch.bfloat16):
            latents = codec.encode(pixels.contiguous(memory_format=torch.channels_last)).latent
        store[first : first + len(rows)] = to_tokens(latents.float()).cpu().numpy()
    store.flush()
    some = np.asarray(store[:4096], np.float32)
    scale = {"mean": float(some.mean()), "deviation": float(some.std())}
    (folder / "latents.json").write_text(json.dumps(scale), encoding="utf-8")
    (folder / "latents.part.npy").replace(folder / "latents.npy")


def to_tokens(latents: Tensor) -> Tensor:
    """Latents `[B, C, H, W]` as FLUX takes them, `[B, H W / 4, 4 C]`."""
    rows, channels, height, width = latents.shape
    patches = latents.reshape(rows, channels, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(rows, -1, 4 * channels)


def to_latents(tokens: Tensor) -> Tensor:
    """The inverse of `to_tokens`, for square pictures."""
    side = round(tokens.shape[1] ** 0.5)
    patches = tokens.reshape(len(tokens), side, side, -1, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), -1, 2 * side, 2 * side)


class Corpus:
    """Latents, of mean 0 and deviation 1, with captions."""

    def __init__(self, folder: Path) -> None:
        self._latents = np.load(folder / "latents.npy", mmap_mode="r")
        records = read_records(folder)
        self._captions = [record.captions for record in records]
        self._times = [_RARE_TIMES if _is_rare(record.composition) else 1 for record in records]
        scale = json.loads((folder / "latents.json").read_text(encoding="utf-8"))
        self.mean, self.deviation = scale["mean"], scale["deviation"]

    def order(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Image numbers in random order, those of rare positions and the rare style repeatedly."""
        return rng.permutation(np.repeat(np.arange(len(self._times)), self._times))

    def captions(self) -> Iterator[str]:
        """All captions."""
        for captions in self._captions:
            yield from captions

    def batch(
        self, numbers: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[Tensor, list[str]]:
        """Latents `[B, T, C]` and one caption of each."""
        rows = torch.from_numpy(self._latents[np.sort(numbers)]).float()
        captions = [str(rng.choice(self._captions[number])) for number in np.sort(numbers)]
        return (rows - self.mean) / self.deviation, captions
