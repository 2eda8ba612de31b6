"""Step caches on the embedded image model: ours, diffusers' own, and fewer steps.

    python samples/benchmarks/image_caches.py --output docs/benchmarks

The references are images of 50 steps without a cache. The same prompts and seeds are then generated
with as many computed steps as the plan has:

- by the plan
- by diffusers' FirstBlockCache, TaylorSeer and MagCache through `enable_cache` in its own pipeline,
  with thresholds at which they compute as much on average
- with that number of steps and no cache

All in float32, so that only the cache makes a difference. Last, the time of an image with and
without the plan, taking turns.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import numpy.typing as npt
import torch
from diffusers.hooks import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table

from triptych import ImagePipeline
from triptych.modalities.diffusion.source import FOLDER
from triptych.modalities.diffusion.wire import StepCache

Pixels = npt.NDArray[np.float32]
NUM_STEPS = 50
SIDE = 128
GUIDANCE = json.loads((FOLDER / "model_index.json").read_text(encoding="utf-8"))["default_guidance"]
NUM_BRANCHES = 2  # with the prompt and without
OBJECTS = (
    "a red apple",
    "a penguin",
    "a house",
    "a blue car",
    "a dog",
    "a cat",
    "a tree",
    "a sun",
    "a star",
    "a fish",
    "a bird",
    "an airplane",
    "a slice of pizza",
    "a cake",
    "a key",
    "a guitar",
)
GROUNDS = ("white", "yellow", "blue", "green")


@dataclass(frozen=True, slots=True)
class Wish:
    """A prompt and its seed."""

    prompt: str
    seed: int


Draw = Callable[[Wish], tuple[Pixels, float]]
"""An image, and how many steps computed."""


def wishes(number: int) -> list[Wish]:
    """Objects on backgrounds of every colour, in turn."""
    prompts = [f"{thing} on a {ground} background" for ground in GROUNDS for thing in OBJECTS]
    return [Wish(prompts[index % len(prompts)], index) for index in range(number)]


def psnr_db(picture: Pixels, reference: Pixels) -> float:
    """Peak signal-to-noise ratio of images in 0..1."""
    error = float(np.mean((picture - reference) ** 2))
    return 99.0 if error < 1e-10 else -10 * math.log10(error)


def theirs_draws(pipe: Any, wish: Wish, num_steps: int, output_type: str = "np") -> Any:
    """An image by diffusers' pipeline, with the same guidance as ours."""
    return pipe(
        wish.prompt,
        negative_prompt="",
        true_cfg_scale=GUIDANCE,
        height=SIDE,
        width=SIDE,
        num_inference_steps=num_steps,
        max_sequence_length=pipe.tokenizer_2.model_max_length,
        generator=torch.Generator().manual_seed(wish.seed),
        output_type=output_type,
    ).images[0]


class Ours:
    """Our pipeline."""

    def __init__(self, dtype: str) -> None:
        self._draw = ImagePipeline.from_pretrained(progress=False, dtype=dtype)

    def picture(self, wish: Wish, cache: StepCache, num_steps: int = NUM_STEPS) -> Pixels:
        """An image in 0..1."""
        (found,) = self._draw(wish.prompt, seed=wish.seed, num_steps=num_steps, cache=cache)
        return np.asarray(found.image, np.float32) / 255

    def close(self) -> None:
        """Stop its engine."""
        self._draw.close()


class Theirs:
    """diffusers' own pipeline, with its own caches."""

    def __init__(self) -> None:
        self._pipe: Any = diffusers.DiffusionPipeline.from_pretrained(
            FOLDER, torch_dtype=torch.float32
        )
        self._pipe.set_progress_bar_config(disable=True)
        self._num_runs = 0
        # Inside the last block, so that it only counts where the block computes.
        inner = self._pipe.transformer.single_transformer_blocks[-1].attn.to_q
        inner.register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self._num_runs += 1

    @contextmanager
    def cached(self, config: object) -> Iterator[None]:
        """Enable a cache for the block."""
        self._pipe.transformer.enable_cache(config)
        try:
            yield
        finally:
            self._pipe.transformer.disable_cache()

    def picture(self, wish: Wish) -> tuple[Pixels, float]:
        """An image, and how many model runs each guidance branch took."""
        self._num_runs = 0
        found = theirs_draws(self._pipe, wish, NUM_STEPS)
        return np.asarray(found, np.float32), self._num_runs / NUM_BRANCHES

    def tuned(
        self, make: Callable[[float], object], wanted: int, asked: Sequence[Wish]
    ) -> tuple[object, float]:
        """The threshold at which `asked` take `wanted` runs on average, by bisection."""
        low, high = 0.0, 2.0
        for _ in range(9):
            middle = (low + high) / 2
            with self.cached(make(middle)):
                runs = statistics.fmean(self.picture(wish)[1] for wish in asked)
            low, high = (middle, high) if runs > wanted else (low, middle)
        return make(high), high


@dataclass(slots=True)
class Way:
    """The results of one method."""

    name: str
    psnrs_db: list[float]
    runs: list[float]
    pictures: list[Pixels]


def draw_all(name: str, draw: Draw, asked: Sequence[Wish], refs: list[Pixels]) -> Way:
    """Compare every image with its reference."""
    way = Way(name, [], [], [])
    for wish, reference in track(list(zip(asked, refs, strict=True)), name):
        picture, runs = draw(wish)
        way.psnrs_db.append(psnr_db(picture, reference))
        way.runs.append(runs)
        way.pictures.append(picture)
    return way


def diffusers_ways(
    theirs: Theirs, wanted: int, ratios: Sequence[float], asked: Sequence[Wish], refs: list[Pixels]
) -> list[Way]:
    """Diffusers' three caches at `wanted` runs on average."""

    def magcache(threshold: float) -> MagCacheConfig:
        return MagCacheConfig(
            threshold=threshold,
            max_skip_steps=8,  # the default of 3 never skips as much as the plan
            retention_ratio=0.1,
            num_inference_steps=NUM_STEPS,
            mag_ratios=list(ratios),
        )

    few = asked[::8]
    first_block, at = theirs.tuned(lambda x: FirstBlockCacheConfig(threshold=x), wanted, few)
    mag, mag_at = theirs.tuned(magcache, wanted, few)
    interval = math.ceil((NUM_STEPS - 3) / (wanted - 3))
    configs: Mapping[str, object] = {
        f"diffusers FirstBlockCache, threshold {at:.3f}": first_block,
        f"diffusers MagCache, threshold {mag_at:.3f}": mag,
        f"diffusers TaylorSeer, interval {interval}, order 1": TaylorSeerCacheConfig(
            cache_interval=interval, disable_cache_before_step=3, max_order=1
        ),
    }
    ways = []
    for name, config in configs.items():
        with theirs.cached(config):
            ways.append(draw_all(name, theirs.picture, asked, refs))
    return ways


def times_s(asked: Sequence[Wish], plan: StepCache, repeats: int) -> dict[str, list[float]]:
    """Seconds per picture with and without the plan, in the type the server would choose."""
    ours = Ours("auto")
    caches = {"uncached": StepCache(name="off"), "planned": plan}
    for cache in caches.values():
        ours.picture(asked[0], cache)
    found: dict[str, list[float]] = {name: [] for name in caches}
    for wish in asked[:repeats]:
        for name, cache in caches.items():
            started_s = time.perf_counter()
            ours.picture(wish, cache)
            found[name].append(time.perf_counter() - started_s)
    ours.close()
    return found


def table_of(ways: Sequence[Way]) -> Table:
    """A row per method; the first is ours."""
    table = Table("", "steps computed", "PSNR, dB: mean", "lowest", "the plan leads by", "wins")
    plan = ways[0]
    for way in ways:
        leads = [a - b for a, b in zip(plan.psnrs_db, way.psnrs_db, strict=True)]
        table.add_row(
            way.name,
            f"{statistics.fmean(way.runs):.1f}",
            f"{statistics.fmean(way.psnrs_db):.2f}",
            f"{min(way.psnrs_db):.2f}",
            "" if way is plan else f"{statistics.fmean(leads):.2f} dB",
            "" if way is plan else f"{sum(lead > 0 for lead in leads)} of {len(leads)}",
        )
    return table


def grid(refs: Sequence[Pixels], ways: Sequence[Way], number: int) -> Image.Image:
    """Some images: uncached on the left, then every method."""
    rows = [np.hstack([refs[i], *(way.pictures[i] for way in ways)]) for i in range(number)]
    return Image.fromarray((np.vstack(rows) * 255).round().astype(np.uint8))


def main() -> None:
    """Generate, compare, time, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=64)
    parser.add_argument("--computed", type=int, default=13, help="steps that compute")
    parser.add_argument("--repeats", type=int, default=20, help="images that are timed")
    parser.add_argument("--output", type=Path, help="folder for image_caches.json and .png")
    args = parser.parse_args()
    asked = wishes(args.seeds)
    plan = StepCache(name="planned", num_computed=args.computed)
    off = StepCache(name="off")

    seconds = times_s(asked, plan, args.repeats)
    ours = Ours("float32")
    refs = [ours.picture(wish, off) for wish in track(asked, "uncached")]
    ways = [
        draw_all("planned", lambda wish: (ours.picture(wish, plan), args.computed), asked, refs),
        draw_all(
            f"{args.computed} steps",
            lambda wish: (ours.picture(wish, off, args.computed), args.computed),
            asked,
            refs,
        ),
    ]
    ours.close()
    theirs = Theirs()
    same = psnr_db(theirs.picture(asked[0])[0], refs[0])
    calibration = json.loads((FOLDER / "calibration.json").read_text(encoding="utf-8"))
    ratios = next(
        run["ratios"]
        for run in calibration["runs"]
        if run["num_steps"] == NUM_STEPS and not run["sampler"]
    )
    ways += diffusers_ways(theirs, args.computed, ratios, asked, refs)

    console = Console()
    console.print(table_of(ways))
    console.print(f"Uncached, diffusers' picture and ours are {same:.0f} dB apart (8 bits).")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    speed = medians["uncached"] / medians["planned"]
    console.print(
        f"A picture takes {1e3 * medians['uncached']:.0f} ms uncached and"
        f" {1e3 * medians['planned']:.0f} ms planned: {speed:.2f} times faster."
    )
    if args.output:
        document = {
            "ways": [
                {"name": way.name, "runs": way.runs, "psnr_db": [round(p, 2) for p in way.psnrs_db]}
                for way in ways
            ],
            "seconds": seconds,
        }
        path = args.output / "image_caches.json"
        path.write_text(json.dumps(document) + "\n", encoding="utf-8")
        grid(refs, ways, 6).save(args.output / "image_caches.png", optimize=True)


if __name__ == "__main__":
    main()
