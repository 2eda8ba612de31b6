"""The corpus: images of arrangements as latents, with captions, in shards.

Owns the folder `corpus`: `NNNN.npy` (`[N, T, C]`, float16, as the model takes them) with
`NNNN.json` (captions of each image), `labels-NNNN.npy` and `plans-NNNN.npy` (`alignment.py`) and
`codes-NNNN.npy` (`chances.py`), and `scale.json` (mean and deviation of the codec's latents).

Shapes: N images, B of a batch, T tokens of 2 x 2 latents, C channels, H height, W width, F of a
label, P of a plan.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pictures.compositions import PICTURE_SIZE
from pictures.rendering import TOKEN_SIDE
from torch import Tensor

SHARD = 1024
NUM_CAPTIONS = 3
NUM_PATCHES = (PICTURE_SIZE // TOKEN_SIDE) ** 2


@dataclass(frozen=True, slots=True)
class Shard:
    """Latents `[N, T, C]`, labels `[N, T, F]`, plans `[N, P]`, codes `[N, C]`, captions of each."""

    latents: NDArray[np.float16]
    labels: NDArray[np.float16]
    plans: NDArray[np.float16]
    codes: NDArray[np.float32]
    captions: list[list[str]]


class Corpus:
    """The folder's shards, by their numbers."""

    def __init__(self, folder: Path) -> None:
        self._home = folder / "corpus"

    def has(self, number: int) -> bool:
        """Whether a shard is done."""
        return self._file(number).exists()

    def wait(self, num_shards: int) -> None:
        """Wait for the first shards, which `latents` may be making beside."""
        said = f"Waiting for images in {self._home}: run the stage `latents` beside."
        while not self._has_first(num_shards):
            if said:
                print(said, flush=True)
            said = ""
            time.sleep(1)

    @property
    def has_scale(self) -> bool:
        """Whether the latents' mean and deviation are known."""
        return (self._home / "scale.json").exists()

    @property
    def scale(self) -> tuple[float, float]:
        """Mean and deviation of the codec's latents."""
        scale = json.loads((self._home / "scale.json").read_text(encoding="utf-8"))
        return scale["mean"], scale["deviation"]

    def add(self, number: int, shard: Shard) -> None:
        """Write a shard; its latents, which say that it is done, last."""
        self._home.mkdir(parents=True, exist_ok=True)
        if not self.has_scale:
            some = shard.latents.astype(np.float32)
            scale = {"mean": float(some.mean()), "deviation": float(some.std())}
            (self._home / "scale.json").write_text(json.dumps(scale), encoding="utf-8")
        file = self._file(number)
        file.with_suffix(".json").write_text(json.dumps(shard.captions), encoding="utf-8")
        np.save(_beside(file, "labels"), shard.labels)
        np.save(_beside(file, "plans"), shard.plans)
        np.save(_beside(file, "codes"), shard.codes)
        draft = _beside(file, "part")
        np.save(draft, shard.latents)
        draft.replace(file)

    def shard(self, number: int) -> Shard:
        """A shard that is done."""
        file = self._file(number)
        return Shard(
            np.load(file),
            np.load(_beside(file, "labels")),
            np.load(_beside(file, "plans")),
            np.load(_beside(file, "codes")),
            self._captions(number),
        )

    def check(self, num_images: int) -> None:
        """Raises `SystemExit` if there are not so many images."""
        num_shards = math.ceil(num_images / SHARD)
        if not self._has_first(num_shards):
            advice = f"run `latents --shards {num_shards}`"
            raise SystemExit(f"Too few images in {self._home}: {advice}.")

    def stored(self, num_images: int) -> Tensor:
        """The first images' latents as the codec has them, `[N, C, H, W]`."""
        self.check(num_images)
        shards = [np.load(self._file(number)) for number in range(math.ceil(num_images / SHARD))]
        tokens = np.concatenate(shards)[:num_images]
        return to_latents(torch.from_numpy(tokens).float())

    def captions(self) -> Iterator[str]:
        """All captions."""
        for number in takewhile(self.has, count()):
            for captions in self._captions(number):
                yield from captions

    def _has_first(self, num_shards: int) -> bool:
        return all(map(self.has, range(num_shards)))

    def _captions(self, number: int) -> list[list[str]]:
        file = self._file(number).with_suffix(".json")
        captions: list[list[str]] = json.loads(file.read_text(encoding="utf-8"))
        return captions

    def _file(self, number: int) -> Path:
        return self._home / f"{number:04}.npy"


def _beside(shard: Path, kind: str) -> Path:
    """The file of a shard's labels, plans or codes."""
    return shard.with_name(f"{kind}-{shard.name}")


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
