"""The corpus: the tower's feature maps of images, and the labels of the images.

Owns the files `middle.npy` `[N, T, C]` and `last.npy` (float16, the tower's maps), `labels.npy`
`[N, S]`, and `done.npy`, which chunks of images are ready. Each chunk is seeded by its own number,
so work can resume, in as many processes as there are cores.

Shapes: N pictures, B of a chunk, T places of a map, C channels, S slots and letters.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from labels import NUM_COLUMNS, kinds, labels
from looks import Looks, fetch_looks
from numpy.typing import NDArray
from pictures.compositions import Catalogue, open_catalogue
from PIL import Image
from precision import has_bfloat16
from rich.progress import track
from scenes import SIDE, draw, sample_seen
from torch import Tensor
from words import lexicon

from triptych.modalities.vlm.engine.slots.tower import (
    LAST_CHANNELS,
    MIDDLE_CHANNELS,
    EfficientNetLite,
    from_released,
)

_CHUNK = 64
_SHAPES = {
    "middle": ((SIDE // 16) ** 2, MIDDLE_CHANNELS),
    "last": ((SIDE // 32) ** 2, LAST_CHANNELS),
}


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of a process."""

    folder: Path
    tokenizer: Path
    tower: Path


def write_features(setup: Setup, num_pictures: int, num_processes: int) -> None:
    """Compose and encode images, except those that are ready."""
    num_chunks = num_pictures // _CHUNK
    for name, shape in _SHAPES.items():
        _grow(setup.folder / f"{name}.npy", np.float16, (num_chunks * _CHUNK, *shape))
    _grow(setup.folder / "labels.npy", np.int16, (num_chunks * _CHUNK, NUM_COLUMNS))
    done = _grow(setup.folder / "done.npy", np.uint8, (num_chunks,))
    left = [(setup, int(chunk)) for chunk in np.flatnonzero(done == 0)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(num_processes, torch.set_num_threads, (1,)) as pool:
        for chunk in track(pool.imap_unordered(_write_chunk, left), "Looking", len(left)):
            done[chunk] = 1


def _write_chunk(task: tuple[Setup, int]) -> int:
    setup, chunk = task
    workshop = _open(setup)
    rng = np.random.default_rng((0, chunk))
    scenes = [sample_seen(workshop.catalogue, workshop.words, rng) for _ in range(_CHUNK)]
    pictures = [draw(scene, workshop.catalogue, workshop.looks, rng) for scene in scenes]
    maps = look_at(workshop.tower, pictures)
    rows = slice(chunk * _CHUNK, (chunk + 1) * _CHUNK)
    for name, values in zip(_SHAPES, maps, strict=True):
        store = np.load(setup.folder / f"{name}.npy", mmap_mode="r+")
        store[rows] = values.half().numpy()
        store.flush()
    classes = kinds(workshop.catalogue)
    store = np.load(setup.folder / "labels.npy", mmap_mode="r+")
    store[rows] = [labels(scene, workshop.catalogue, classes) for scene in scenes]
    store.flush()
    return chunk


@dataclass(frozen=True, slots=True)
class _Workshop:
    catalogue: Catalogue
    words: list[str]
    looks: Looks
    tower: EfficientNetLite


@lru_cache(maxsize=1)
def _open(setup: Setup) -> _Workshop:
    catalogue = open_catalogue()
    looks = fetch_looks(setup.folder / "sprites", catalogue)
    return _Workshop(catalogue, lexicon(setup.tokenizer), looks, open_tower(setup.tower))


def open_tower(file: Path) -> EfficientNetLite:
    """The released network, in bfloat16 where that is fast."""
    tower = EfficientNetLite()
    tower.load_state_dict(from_released(torch.load(file, weights_only=True)))
    dtype = torch.bfloat16 if has_bfloat16(torch.device("cpu")) else torch.float32
    return tower.eval().to(dtype, memory_format=torch.channels_last)


@torch.inference_mode()
def look_at(tower: EfficientNetLite, pictures: list[Image.Image]) -> tuple[Tensor, Tensor]:
    """The tower's maps as sequences, `[B, T, C]`."""
    pixels = torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures]))
    pixels = pixels.permute(0, 3, 1, 2).float().div_(127.5).sub_(1)
    middle, last = tower(pixels.to(next(tower.parameters()).dtype))
    return middle.flatten(2).mT, last.flatten(2).mT


def _grow(file: Path, dtype: type, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """The file's array, created or extended as needed."""
    old = np.load(file, mmap_mode="r+") if file.exists() else None
    if old is not None and len(old) >= shape[0]:
        return old
    partial = file.with_suffix(".part.npy")
    new = np.lib.format.open_memmap(partial, "w+", dtype, shape)
    if old is not None:
        new[: len(old)] = old
        new.flush()
    partial.replace(file)
    return new
