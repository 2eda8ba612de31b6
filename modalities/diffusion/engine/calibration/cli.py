"""`triptych calibrate`: plans of skipped steps, and settings of the other step caches.

Owns the command line, the calibration prompts, and the place of the file. `tuning` runs the
experiment.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from triptych.core.bundle.resolve import resolve_all
from triptych.core.errors import ConfigError
from triptych.core.options.config import Config
from triptych.core.options.table import add_options, resolve
from triptych.core.process.cli_io import read_lines
from triptych.core.weights.progress import RichProgress
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.diffusion.arguments import UNUSED, parse_size
from triptych.modalities.diffusion.engine.caches.choice import close_plan
from triptych.modalities.diffusion.engine.calibration.file import (
    CalibrationFile,
    cached_path,
    model_digest,
    read_calibration,
)
from triptych.modalities.diffusion.source import EMBEDDED_IMAGES
from triptych.modalities.diffusion.wire import ImageRequest

if TYPE_CHECKING:
    from triptych.modalities.diffusion.engine.calibration.tuning import Report, Tuned, Tuner
    from triptych.modalities.diffusion.engine.recipes.recipe import Recipe

PROMPTS = (
    "a red apple",
    "a penguin next to a house",
    "a blue car on a yellow background",
    "a slice of pizza",
    "a green tree next to a bicycle",
    "a rocket on a black background",
    "a bouquet of flowers",
    "a dog next to a ball",
    "a sailboat on a blue background",
    "a hamburger next to a cup of coffee",
    "a purple umbrella",
    "an elephant",
    "a guitar on an orange background",
    "a castle",
    "a lion next to a tree",
    "a clock on a white background",
)
"""The default prompts."""

_ONE_RANK = frozenset({"cfg_parallel_size", "ulysses_degree"})
"""Options of models on several ranks, which calibration does not use."""


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `triptych calibrate`."""
    parser.add_argument(
        "reference", nargs="?", metavar="MODEL", help="as in --model; default: the embedded model"
    )
    parser.add_argument(
        "--steps", type=int, nargs="+", metavar="N", help="numbers of steps; default: the model's"
    )
    parser.add_argument("--sampler", default="", help="default: the model's")
    parser.add_argument("--size", help="WIDTHxHEIGHT; default: the model's")
    parser.add_argument(
        "--prompts", metavar="FILE", help="one prompt per line; default: built-in prompts"
    )
    parser.add_argument("--num-images", type=int, default=24, metavar="N", help="default 24")
    parser.add_argument(
        "--images-at-once", type=int, default=4, metavar="N", help="default 4; fewer save memory"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="default: in the cache folder; calibration.json in a model's folder is also read",
    )
    add_options(parser, sections=("models", "device"), roles=("image",), exclude=UNUSED | _ONE_RANK)


def run_calibrate(args: argparse.Namespace) -> int:
    """Calibrate, write the file after each number of steps, and print the plans."""
    lines = read_lines("--prompts", args.prompts) if args.prompts else enumerate(PROMPTS)
    prompts = [line for _, line in lines]
    if not prompts:
        raise ConfigError(f"--prompts {args.prompts}: is empty.")
    _check(args)
    args.size = parse_size(args.size) if args.size else None
    if args.reference is not None:
        args.model = [*getattr(args, "model", ()), args.reference]
    config = resolve(args)
    default = EMBEDDED_IMAGES.name
    models = resolve_all(
        config.models, RichProgress(), sources=(EMBEDDED_IMAGES,), defaults=(default,)
    )
    if len(models) > 1:
        raise ConfigError("Only one model is calibrated at a time: name one.")
    (model,) = models
    folder = Path(model.folder)
    digest = model_digest(folder, config.models)
    path = Path(args.output).expanduser() if args.output else cached_path(config, digest)
    with _open_tuner(model, config, args.images_at_once) as (recipe, tuner):
        file = read_calibration(path, digest) or CalibrationFile(
            digest=digest, model_class=type(recipe.model).__name__
        )
        for num_steps in args.steps or [recipe.spec.default_steps]:
            images = _images(args, recipe, prompts, num_steps)
            with _bar(num_steps) as report:
                tuned = tuner.tune(images, report)
            file = file.with_runs([tuned.run])
            file.write(path)
            Console().print(_table(tuned, config.images.step_cache_min_psnr_db))
    Console().print(Text(f"{path} is written"), soft_wrap=True)
    return 0


def _check(args: argparse.Namespace) -> None:
    if any(not 1 <= num_steps <= 1000 for num_steps in args.steps or ()):
        raise ConfigError("--steps: must be 1 to 1000.")
    for name in ("num_images", "images_at_once"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: must be at least 1.")


@contextmanager
def _open_tuner(
    model: ResolvedModel, config: Config, batch_size: int
) -> Iterator[tuple[Recipe, Tuner]]:
    """Load the model onto its device. Imports torch."""
    from contextlib import ExitStack

    from triptych.core.runtime.devices.device import open_device
    from triptych.core.runtime.engine.model_memory import ModelMemory
    from triptych.modalities.diffusion.engine.calibration.tuning import Tuner
    from triptych.modalities.diffusion.engine.denoise import Denoiser
    from triptych.modalities.diffusion.engine.families.table import open_model
    from triptych.modalities.diffusion.engine.loading.components import (
        component_bytes,
        open_components,
    )
    from triptych.modalities.diffusion.engine.recipes.registry import open_recipe

    device, ledger = open_device(config.device)
    with ExitStack() as stack:
        memory = ModelMemory(model, config, device, ledger, stack)
        dtype = partial(memory.dtype, takes_blocks=True)
        sizes = component_bytes(model.folder, config.models, dtype=dtype, device=device.torch)
        memory.reserve("weights", sum(sizes.values()))
        components = open_components(
            model.folder,
            config.models,
            device=device.torch,
            dtype=dtype,
            report=lambda share: None,
            native=memory.native_kernels(),
        )
        recipe = open_recipe(components.pipeline, components.parts)
        yield recipe, Tuner(recipe, Denoiser(open_model(recipe.model)), batch_size=batch_size)


def _images(
    args: argparse.Namespace, recipe: Recipe, prompts: Sequence[str], num_steps: int
) -> list[ImageRequest]:
    width, height = args.size or recipe.default_size
    return [
        ImageRequest(
            prompt=prompt,
            width=width,
            height=height,
            num_steps=num_steps,
            sampler=args.sampler,
            seed=seed,
        )
        for seed, prompt in enumerate(islice(cycle(prompts), args.num_images))
    ]


@contextmanager
def _bar(num_steps: int) -> Iterator[Report]:
    """A progress bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    bar = Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(f"calibrating {num_steps} steps", total=1.0)
        yield lambda share: bar.update(task, completed=share)


def _table(tuned: Tuned, least_db: float) -> Table:
    run = tuned.run
    sampler = f" with {run.sampler}" if run.sampler else ""
    table = Table(
        title=f"{run.num_steps} steps{sampler}, {run.num_images} images, {run.width}x{run.height}",
        box=None,
        pad_edge=False,
        title_justify="left",
    )
    for column in ("computed", "order", "expected error", "PSNR", "9 of 10", "speed", ""):
        table.add_column(column, justify="right" if column else "left")
    chosen = close_plan(run, least_db)
    for plan, speedup in zip(run.plans, tuned.speedups, strict=True):
        table.add_row(
            f"{len(plan.computed)}/{run.num_evaluations}",
            str(plan.order),
            f"{plan.expected_error:.4f}",
            f"{plan.median_psnr_db:.1f} dB",
            f"{plan.low_psnr_db:.1f} dB",
            f"{speedup:.2f}x",
            "auto" if plan is chosen else "",
        )
    return table
