"""The image modality: how its models are recognized, and its API and engine entry points.

Loads neither.
"""

from __future__ import annotations

from triptych.core.options.command import Command
from triptych.core.weights.pipeline_index import is_pipeline
from triptych.modalities.modality import Modality

_HERE = "triptych.modalities.diffusion"
_COMMANDS = (
    Command(
        "imagine",
        "Generate images from a prompt or from other images.",
        f"{_HERE}.api.cli",
        (
            'triptych imagine "a red apple" -o apple.png',
            'triptych imagine "a penguin next to a house" -n 4 --steps 28 -o penguin.webp',
            'triptych imagine "a green car" -i car.png --strength 0.6 -o green.png',
            "triptych imagine --batch prompts.jsonl -o images",
        ),
        operands="[PROMPT]",
        is_named=True,
    ),
    Command(
        "calibrate",
        "Calibrate an image model's step caches.",
        f"{_HERE}.engine.calibration.cli",
        (
            "triptych calibrate --steps 50 28 20",
            "triptych calibrate black-forest-labs/FLUX.1-dev --steps 28 --prompts prompts.txt",
        ),
        operands="[MODEL]",
        is_named=True,
    ),
)

IMAGES = Modality(
    role="image",
    task=("image", "generates", "/v1/images/generations"),
    matches=lambda folder, _: is_pipeline(folder),
    wire=(f"{_HERE}.wire:ImageRequest", f"{_HERE}.wire:ImageDelta"),
    api=f"{_HERE}.api.routes:open_api",
    engine=f"{_HERE}.engine.loader:DiffusionLoader",
    default="triptych-images",
    sources=(f"{_HERE}.source:EMBEDDED_IMAGES",),
    decoders=("triptych.core.media.images",),
    pipelines={"ImagePipeline": f"{_HERE}.api.pipeline"},
    commands=_COMMANDS,
)
