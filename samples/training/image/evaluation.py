"""Evaluation: whether generated images show what is asked, and differ as real ones do.

Owns the held-out prompts, the generation, and the tables. The upper bounds are real composites of
the same prompts, as they are and through the codec.

Shapes: B pictures, C channels, H height, W width, P prompts, S images of each, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from composites import pixels_of, sample_trained
from corpus import Corpus
from diffusers import DiffusionPipeline, FluxPipeline
from diversity import (
    mean_distance,
    mean_number,
    mean_spread,
    nearest_distance,
    precision_recall,
)
from export import DEFAULT_GUIDANCE, DEFAULT_STEPS
from judges import Judges, decoded, through_codec
from pictures.arrangements import COUNTS, Arrangement, sample_arrangement
from pictures.compositions import PICTURE_SIZE, Catalogue
from pictures.descriptions import Describer
from pictures.drawings import Drawings
from pictures.rendering import drawable
from PIL import Image
from prompts import SEEDS_SHEET, SHEET
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sight import Seen
from text import MAX_TOKENS
from torch import Tensor
from torch.nn import functional

from triptych import VisionPipeline

NUM_SEEDS = 8
_BATCH = 20
_QUESTION = "What is in the picture?"
_ANSWER_TOKENS = 40
_WORDINGS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Sampling parameters."""

    num_steps: int = DEFAULT_STEPS
    guidance: float = DEFAULT_GUIDANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How many prompts of each kind, and images that were trained on, are looked at."""

    num_lone: int = 200
    num_related: int = 100
    num_varied: int = 100
    num_trained: int = 4096

    def share(self, part: float) -> Extent:
        """A part of it, for a first look."""
        counts = (self.num_lone, self.num_related, self.num_varied, self.num_trained)
        lone, related, varied, trained = (max(2, round(part * count)) for count in counts)
        return Extent(num_lone=lone, num_related=related, num_varied=varied, num_trained=trained)


@dataclass(frozen=True, slots=True)
class Studio:
    """What real images are made with."""

    catalogue: Catalogue
    drawings: Drawings
    extent: Extent

    def held_out(
        self, *, is_lone: bool, known: AbstractSet[str] = frozenset()
    ) -> Iterator[Arrangement]:
        """Held-out arrangements of one thing, or of several related ones; always the same.

        None has one of the known captions.
        """
        rng = np.random.default_rng(1)
        while True:
            one = drawable(sample_arrangement(self.catalogue, rng), self.catalogue, self.drawings)
            is_right = (one.relation == "") == is_lone and one.relation not in COUNTS
            if one.is_held_out and is_right and known.isdisjoint(self._wordings(one)):
                yield one

    def _wordings(self, arrangement: Arrangement) -> list[str]:
        return self.describe([arrangement] * _WORDINGS)

    def paint(self, arrangements: Sequence[Arrangement], seed: int) -> Tensor:
        """Real images `[B, 3, H, W]`."""
        rng = np.random.default_rng(seed)
        return pixels_of(arrangements, self.catalogue, self.drawings, rng)

    def describe(self, arrangements: Sequence[Arrangement]) -> list[str]:
        """A caption of each."""
        writer = Describer(self.catalogue, np.random.default_rng(3))
        return [writer.describe(one) for one in arrangements]


def draw_prompts(pipeline: FluxPipeline, prompts: Sequence[str], drawing: Drawing) -> Tensor:
    """Images `[B, 3, H, W]` in -1..1, each from its own seed."""
    drawn = []
    for first in track(range(0, len(prompts), _BATCH), "Drawing"):
        numbers = range(first, min(first + _BATCH, len(prompts)))
        pictures = pipeline(
            list(prompts[first : first + _BATCH]),
            negative_prompt=[""] * len(numbers),
            height=PICTURE_SIZE,
            width=PICTURE_SIZE,
            num_inference_steps=drawing.num_steps,
            true_cfg_scale=drawing.guidance,
            max_sequence_length=MAX_TOKENS,
            generator=[torch.Generator().manual_seed(number) for number in numbers],
            output_type="pt",
        ).images
        drawn.append(pictures.float() * 2 - 1)
    return torch.cat(drawn)


@dataclass(frozen=True, slots=True)
class Bench:
    """A model, what judges it, and what it was trained on."""

    pipeline: FluxPipeline
    drawing: Drawing
    studio: Studio
    judges: Judges
    corpus: Corpus

    def seen_in_training(self, num_images: int) -> Seen:
        """Images that were trained on, as the codec gives them back."""
        latents = self.corpus.stored(num_images)
        return self.judges.eye.see(decoded(self.pipeline.vae, latents))


def open_pipeline(model: Path) -> FluxPipeline:
    """An exported folder, in diffusers' own pipeline."""
    pipeline = DiffusionPipeline.from_pretrained(model, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def evaluate(
    folder: Path, model: Path, drawing: Drawing, studio: Studio, sheets: Path | None
) -> None:
    """Print both tables, and generate the sheets into a folder if requested."""
    corpus = Corpus(folder)
    corpus.check(studio.extent.num_trained)
    pipeline = open_pipeline(model)
    if sheets is not None:
        sheets.mkdir(parents=True, exist_ok=True)
        save_grid(draw_prompts(pipeline, SHEET, drawing), sheets / "image_sheet.png")
        repeated = [prompt for prompt in SEEDS_SHEET for _ in range(NUM_SEEDS)]
        save_grid(draw_prompts(pipeline, repeated, drawing), sheets / "image_seeds.png")
    bench = Bench(
        pipeline, drawing, studio, Judges(folder, studio.catalogue, studio.drawings), corpus
    )
    Console(width=160).print(naming_table(bench))
    Console(width=160).print(variety_table(bench))


def naming_table(bench: Bench) -> Table:
    """How often the things are named right, by a classifier and by the embedded model that sees."""
    table = Table("pictures", "one thing", "related things", "seen: one", "related", "wrong")
    pipeline, drawing, studio, judges = bench.pipeline, bench.drawing, bench.studio, bench.judges
    known = set(bench.corpus.captions())
    lone = list(islice(studio.held_out(is_lone=True, known=known), studio.extent.num_lone))
    related = list(islice(studio.held_out(is_lone=False, known=known), studio.extent.num_related))
    real = {"lone": studio.paint(lone, 4), "related": studio.paint(related, 4)}
    ways: dict[str, Callable[[str, list[Arrangement]], Tensor]] = {
        "model": lambda _, asked: draw_prompts(pipeline, studio.describe(asked), drawing),
        "codec alone": lambda kind, _: through_codec(pipeline.vae, real[kind]),
        "real": lambda kind, _: real[kind],
    }
    with VisionPipeline.from_pretrained() as see:
        for label, make in ways.items():
            alone, company = make("lone", lone), make("related", related)
            right, wrong = named_right(judges, alone, lone)
            table.add_row(
                label,
                f"{right:.1%}",
                f"{named_right(judges, company, related)[0]:.1%}",
                f"{seen_right(see, alone, lone, studio.catalogue):.1%}",
                f"{seen_right(see, company, related, studio.catalogue):.1%}",
                ", ".join(wrong[:12]),
            )
    return table


def named_right(
    judges: Judges, pixels: Tensor, asked: Sequence[Arrangement]
) -> tuple[float, list[str]]:
    """How often the classifier's first names are exactly the things asked for, and some errors."""
    wanted = [{thing.name for thing in one.things} for one in asked]
    named = judges.things(judges.eye.see(pixels), [len(names) for names in wanted])
    pairs = list(zip(wanted, named, strict=True))
    wrong = [f"{', '.join(want)}: {', '.join(said)}" for want, said in pairs if want != said]
    return 1 - len(wrong) / len(pairs), wrong


def seen_right(
    see: VisionPipeline, pixels: Tensor, asked: Sequence[Arrangement], catalogue: Catalogue
) -> float:
    """How often the model that sees mentions all the things asked for, of the first two."""
    num_right = 0
    for picture, one in zip(pixels, asked, strict=True):
        said = see(to_image(picture), _QUESTION, max_tokens=_ANSWER_TOKENS, temperature=0.0).text
        num_right += all(
            any(name.replace("-", " ") in said.lower() for name in names)
            for thing in one.things[:2]
            for names in [(thing.name, *catalogue.other_names.get(thing.name, ()))]
        )
    return num_right / len(asked)


def variety_table(bench: Bench) -> Table:
    """The measures of `diversity`, beside those of fresh real images of the same prompts.

    None of those was trained on: how far they are from what was says how far images should be.
    Precision and recall are to real images as they are, and as the codec gives them back: features
    see softer edges that the eye does not, and no model's images are crisper than its codec's.
    """
    pipeline, drawing, studio, judges = bench.pipeline, bench.drawing, bench.studio, bench.judges
    rng = np.random.default_rng(6)
    asked = [
        sample_trained(studio.catalogue, studio.drawings, rng)
        for _ in range(studio.extent.num_varied)
    ]
    prompts = [text for text in studio.describe(asked) for _ in range(NUM_SEEDS)]
    repeated = [one for one in asked for _ in range(NUM_SEEDS)]
    pixels = {
        "model": draw_prompts(pipeline, prompts, drawing),
        "codec alone": through_codec(pipeline.vae, studio.paint(repeated, 7)),
        "real": studio.paint(repeated, 8),
    }
    seen = {label: judges.eye.see(images) for label, images in pixels.items()}
    trained = bench.seen_in_training(studio.extent.num_trained)
    fresh = studio.paint(repeated, 9)
    references = fresh, through_codec(pipeline.vae, fresh)
    others = [judges.eye.see(images) for images in references]
    middle = others[0].means.mean(0)
    regions = [_directions(other, middle) for other in others]
    table = Table(
        *("pictures", "distance in features", "in pixels", "sets of eight", "spread of places"),
        *("precision", "recall", "through the codec: precision", "recall"),
        "to the nearest trained",
    )
    for label, found in seen.items():
        features = _directions(found, middle)
        table.add_row(
            label,
            f"{mean_distance(_grouped(features)):.2f}",
            f"{mean_distance(_grouped(pixels[label].flatten(1))):.1f}",
            f"{mean_number(judges.sets(found), NUM_SEEDS):.2f}",
            f"{_spread_of_places(judges, found, asked):.3f}",
            *(f"{share:.2f}" for region in regions for share in precision_recall(features, region)),
            f"{nearest_distance(features, _directions(trained, middle)):.2f}",
        )
    return table


def _directions(seen: Seen, middle: Tensor) -> Tensor:
    """Features as directions from the middle of real ones: no rare feature outweighs all others."""
    return functional.normalize(seen.means - middle)


def _grouped(rows: Tensor) -> Tensor:
    return rows.unflatten(0, (-1, NUM_SEEDS))


def _spread_of_places(judges: Judges, seen: Seen, asked: Sequence[Arrangement]) -> float:
    is_lone = torch.tensor([one.relation == "" for one in asked])
    return mean_spread(_grouped(judges.places(seen))[is_lone])


def to_image(pixels: Tensor) -> Image.Image:
    """An image `[3, H, W]` in -1..1."""
    values = (pixels.clamp(-1, 1) + 1) * 127.5
    return Image.fromarray(values.round().byte().permute(1, 2, 0).numpy())


def save_grid(pixels: Tensor, file: Path, per_row: int = 8) -> None:
    """Images in -1..1 side by side."""
    rows = [torch.cat(list(row), -1) for row in pixels.split(per_row)]
    picture = to_image(torch.cat(rows, -2))
    picture.quantize(256, Image.Quantize.MEDIANCUT).save(file, optimize=True)
