"""Make the diagram and the image of step caches in docs/images.md.

python docs/cache_images.py

Owns the prompts, the caches and the budgets of both; samples/benchmarks/image_caches.py compares
caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from triptych import ImagePipeline
from triptych.modalities.diffusion.api.pipeline import GeneratedImage
from triptych.modalities.diffusion.wire import StepCache

FILE = Path(__file__).with_name("images") / "step_caches.webp"
OFF = StepCache(name="off")
PROMPTS = (
    ("a large red apple", 5),
    ("a penguin next to a house", 2),
    ("a large rocket on a black background", 5),
    ("a large panda on a pink background", 1),
)
"""Prompts of the image, with seeds."""
NUM_STEPS, BUDGETS, NUM_SEEDS = 50, (20, 8), 8
DIAGRAM_STEPS = 20
CACHES = {
    "off": OFF,
    "planned": StepCache(name="planned"),
    "taylorseer": StepCache(name="taylorseer"),
    "teacache": StepCache(name="teacache"),
    "first-block": StepCache(name="first-block", threshold=0.1),
    "magcache": StepCache(name="magcache"),
}
"""Caches of the diagram."""
SIDE, GAP, HEAD_HEIGHT, FONT_SIZE = 128, 9, 44, 13


def psnr_db(image: Image.Image, other: Image.Image) -> float:
    """How close two images are; 99 where they are equal."""
    error = np.asarray(image, float) - np.asarray(other, float)
    return min(99.0, float(10 * np.log10(255**2 / max((error**2).mean(), 1e-9))))


def trace(pipeline: ImagePipeline, cache: StepCache) -> str:
    """A mark for each step of the first prompt's image; skips are reported with the next run."""
    marks, num_before = "", 0
    for progress in pipeline.stream(PROMPTS[0][0], seed=0, num_steps=DIAGRAM_STEPS, cache=cache):
        if num_new := progress.step - len(marks):
            mark = "#" if progress.num_computed > num_before else "."
            marks, num_before = marks + mark.rjust(num_new, "."), progress.num_computed
    assert marks.count("#") == num_before, "an event reported two computed steps"
    return marks


def of_seeds(pipeline: ImagePipeline, cache: StepCache) -> list[Image.Image]:
    """Images of the first two prompts, some seeds each."""
    return [
        made.image
        for prompt, _ in PROMPTS[:2]
        for made in pipeline(
            prompt, seed=0, num_images=NUM_SEEDS, num_steps=DIAGRAM_STEPS, cache=cache
        )
    ]


def columns(pipeline: ImagePipeline) -> Iterator[tuple[str, list[GeneratedImage]]]:
    """Each column's head and images: all steps, plans, and the same numbers without a cache."""

    def generated(num_steps: int, cache: StepCache) -> list[GeneratedImage]:
        return [
            pipeline(prompt, seed=seed, num_steps=num_steps, cache=cache)[0]
            for prompt, seed in PROMPTS
        ]

    yield f"{NUM_STEPS} steps", generated(NUM_STEPS, OFF)
    for budget in BUDGETS:
        plan = StepCache(name="planned", num_computed=budget)
        yield f"{budget} of {NUM_STEPS}", generated(NUM_STEPS, plan)
        yield f"{budget} steps", generated(budget, OFF)


def sheet(made: list[tuple[str, list[GeneratedImage]]]) -> Image.Image:
    """All columns side by side, below their heads with the median PSNR to the first one."""
    exact = made[0][1]
    size = len(made) * (SIDE + GAP) - GAP, HEAD_HEIGHT + len(exact) * (SIDE + GAP) - GAP
    whole, font = Image.new("RGB", size, "white"), ImageFont.load_default(FONT_SIZE)
    pen = ImageDraw.Draw(whole)
    for column, (head, images) in enumerate(made):
        text = head
        if column:
            pairs = zip(images, exact, strict=True)
            text += f"\n{median(psnr_db(a.image, b.image) for a, b in pairs):.0f} dB"
        left = column * (SIDE + GAP)
        place = (left + SIDE // 2, HEAD_HEIGHT // 2)
        pen.multiline_text(place, text, "black", font, "mm", align="center")
        for row, image in enumerate(images):
            whole.paste(image.image, (left, HEAD_HEIGHT + row * (SIDE + GAP)))
    return whole


def main() -> None:
    """Print the diagram, write the image."""
    with ImagePipeline.from_pretrained() as pipeline:
        exact = of_seeds(pipeline, OFF)
        for name, cache in CACHES.items():
            marks, made = trace(pipeline, cache), of_seeds(pipeline, cache)
            error_db = median(psnr_db(*pair) for pair in zip(made, exact, strict=True))
            print(f"{name:13} {marks}   {marks.count('#'):2}   {error_db:.0f} dB")
        sheet(list(columns(pipeline))).save(FILE, quality=88)


if __name__ == "__main__":
    main()
