"""Judges of images, on the features of an EfficientNet that nobody here trained (`sight.py`).

Owns three judges trained on fresh composites: which things are shown (`naming.py`, which trains
the network's last blocks, too), from which set the drawings are, and where and how large a lone
thing is.

Shapes: B pictures, F features, P places, C channels, H height, W width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from composites import sample_trained, stacked
from diffusers import AutoencoderDC
from naming import Labels, Namer, NamerTraining, train_namer
from pictures.arrangements import Arrangement
from pictures.compositions import Catalogue, Thing
from pictures.drawings import SETS, Drawings
from pictures.placement import SIZES
from pictures.rendering import Sketch, render, sketch
from rich.progress import track
from sight import GRID, Eye, Seen
from torch import Tensor
from torch.nn import functional

from triptych.modalities.diffusion.source import FOLDER

SET_NAMES = tuple(SETS)
_VIEWS = 40  # composites of each object alone, and in company
_MOST_THINGS = 5
_BATCH = 20
_PENALTY = 0.03


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
        file = folder / f"judges-{_digest(catalogue)}.pt"
        if not file.exists():
            draft = file.with_suffix(".tmp")
            torch.save(self._learn(catalogue, drawings), draft)
            draft.replace(file)
        self._layers: dict[str, Tensor] = torch.load(file, weights_only=True)
        self._namer = Namer(self.eye.last_blocks, len(self.names))
        self._namer.load_state_dict(_below(self._layers, "things."))

    def things(self, seen: Seen, counts: Sequence[int]) -> list[set[str]]:
        """The so many most likely things of each image."""
        order = self._namer.scores(seen.early).argsort(-1, descending=True)
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
        namer = Namer(self.eye.last_blocks, len(self.names))
        train_namer(namer, views.seen.early, self._labels(views), NamerTraining())
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
                x, y = (min(int(at * GRID), GRID - 1) for at in (placed.spot.x, placed.spot.y))
                places[row, column] = y * GRID + x
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
                render(one, catalogue, drawings, rng, chosen)
                for one, chosen in zip(
                    shown[first : first + _BATCH], sketches[first : first + _BATCH], strict=True
                )
            ]
            pixels = stacked(drawn)
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
    return decoded(codec, torch.cat([codec.encode(part).latent for part in pixels.split(_BATCH)]))


@torch.inference_mode()
def decoded(codec: AutoencoderDC, latents: Tensor) -> Tensor:
    """Images `[B, 3, H, W]` of latents as the codec has them."""
    return torch.cat([codec.decode(part).sample for part in latents.split(_BATCH)]).clamp(-1, 1)


def _digest(catalogue: Catalogue) -> str:
    """Of what judges tell apart, the sizes in which they have seen it, and the codec they saw."""
    codec = (FOLDER / "vae" / "diffusion_pytorch_model.safetensors").read_bytes()
    known = catalogue.names, SET_NAMES, SIZES.tolist(), hashlib.sha256(codec).hexdigest()
    return hashlib.sha256(repr(known).encode()).hexdigest()[:8]


def _below(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The part of a state below a prefix."""
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def fit(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A linear layer on standardized features for shares of classes, by L-BFGS."""
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
