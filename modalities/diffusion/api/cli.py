"""`triptych imagine`: the image pipeline at a terminal.

Owns where images are written, and the progress display on stderr. The pipeline does the rest.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, Unpack

from rich import progress as bars
from rich.console import Console, Group
from rich.live import Live

from triptych.core.bulk.cluster_options import add_cluster_options, read_cluster
from triptych.core.client.choice import Wanted, add_server_options, open_model
from triptych.core.errors import ConfigError
from triptych.core.options.table import add_options
from triptych.core.process.cli_io import report_write_errors
from triptych.core.process.lazy import load
from triptych.modalities.diffusion.api.files import MEDIA_TYPES, ImageKind
from triptych.modalities.diffusion.api.results import (
    GeneratedImage,
    GenerateOptions,
    GenerationProgress,
    kind_of,
)
from triptych.modalities.diffusion.api.terminal import DISPLAYS, ImageStrip, choose_display
from triptych.modalities.diffusion.arguments import UNUSED, parse_adapter, parse_size
from triptych.modalities.diffusion.modality import IMAGES
from triptych.modalities.diffusion.wire import StepCache

if TYPE_CHECKING:
    from triptych.core.options.config import Config
    from triptych.core.weights.resolve import ResolvedModel
    from triptych.modalities.pipeline import Check

_STDIO = "-"
_NUM_PREVIEWS = 3
_DEFAULT_QUALITY = 95
_WANTED = Wanted(
    task=IMAGES.task[0],
    default=IMAGES.default,
    pipeline="triptych.modalities.diffusion.api.pipeline:ImagePipeline",
    remote="triptych.modalities.diffusion.api.remote:RemoteImages",
)


class _GeneratesImages(Protocol):
    """An image model of this process or of a server."""

    def stream(
        self, prompt: str, *, num_previews: int, **options: Unpack[GenerateOptions]
    ) -> Iterator[GenerationProgress]:
        """Generate, and yield progress."""


def add_imagine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `triptych imagine`."""
    parser.add_argument("prompt", nargs="*", help='text to generate from; default, and "-": stdin')
    parser.add_argument("-o", "--output", help='file to write; default, and "-": stdout')
    parser.add_argument(
        "-n",
        "--num-images",
        type=int,
        default=1,
        metavar="N",
        help="several images are written to out-1.png, ...",
    )
    parser.add_argument(
        "--format", choices=tuple(MEDIA_TYPES), help="default: by the file name's suffix"
    )
    parser.add_argument("--quality", type=int, metavar="Q", help="0 to 100, for JPEG and WebP")
    parser.add_argument("--size", help="WIDTHxHEIGHT; default: the model's")
    parser.add_argument("--steps", type=int, metavar="N", help="default: the model's")
    parser.add_argument(
        "--guidance", type=float, metavar="X", help="how strictly to follow the prompt"
    )
    parser.add_argument("--negative", default="", metavar="TEXT", help="what to avoid in the image")
    parser.add_argument("--sampler", default="", help="such as euler, heun, dpm++2m, unipc")
    parser.add_argument(
        "--num-computed",
        type=int,
        metavar="N",
        help="compute at most N steps, by a calibrated plan",
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME[=SCALE]",
        help="a LoRA of --lora-paths",
    )
    _add_source_arguments(parser)
    parser.add_argument(
        "--batch",
        metavar="FILE",
        help="generate each line of FILE into the folder -o: a prompt, or a JSON object with the"
        ' fields of /v1/images/generations; "-": stdin',
    )
    parser.add_argument(
        "--preview", choices=DISPLAYS, default="auto", help="how to show images during generation"
    )
    parser.add_argument(
        "--no-preview",
        dest="preview",
        action="store_const",
        const="off",
        help="show only the progress bar",
    )
    add_server_options(parser)
    add_cluster_options(parser)
    exclude = UNUSED.union(("image_store_mb", "image_store_ttl_s"))
    sections = ("models", "device", "images", "adapters")
    add_options(parser, sections=sections, roles=("image",), exclude=exclude)


def _add_source_arguments(parser: argparse.ArgumentParser) -> None:
    sources = parser.add_argument_group("images to begin from")
    sources.add_argument(
        "-i",
        "--image",
        action="append",
        metavar="FILE",
        help="image to edit; to vary, without a prompt",
    )
    sources.add_argument(
        "--mask", metavar="FILE", help="white or transparent where the image may change"
    )
    sources.add_argument(
        "--strength", type=float, metavar="X", help="0 keeps the image, 1 regenerates it"
    )
    sources.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="take the image apart, with Qwen-Image-Layered, and write out-layer-1.png, ...",
    )


def run_imagine(args: argparse.Namespace) -> int:
    """Generate images from a prompt into files, or one image into stdout."""
    if args.batch:
        from triptych.modalities.diffusion.api.batch import run_batch  # slow to import

        return run_batch(args, _open_pipeline)
    if read_cluster(args):
        raise ConfigError("--ray-address distributes the lines of --batch: give --batch too.")
    prompt, sink = _read_prompt(args), _Sink.of(args)
    options = _options(args)
    console = Console(stderr=True)
    display = choose_display(args.preview, console, os.environ)
    num_previews = 0 if display == "off" else _NUM_PREVIEWS
    with _open_pipeline(args, _checking(prompt, options)) as pipeline:
        stream = pipeline.stream(prompt, num_previews=num_previews, **options)
        with _shown(console, ImageStrip(max(1, args.num_images), display)) as show:
            for progress in stream:
                show(progress)
                if progress.image is not None:
                    line = sink.take(progress.image)
                    console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


def _open_pipeline(
    args: argparse.Namespace, check: Check | None = None
) -> AbstractContextManager[_GeneratesImages]:
    is_variation = bool(args.image) and not args.prompt
    only_here = "A variation (an image without a prompt)" if is_variation else ""
    opened: AbstractContextManager[_GeneratesImages]
    opened = open_model(args, _WANTED, only_here=only_here, check=check)
    return opened


def _checking(prompt: str, options: GenerateOptions) -> Check:
    """The check of a call before a model is loaded in this process."""

    def check(resolved: ResolvedModel, config: Config) -> None:
        place = "triptych.modalities.diffusion.api.pipeline:checking"
        load(place)(prompt, **options)(resolved, config)

    return check


def _read_prompt(args: argparse.Namespace) -> str:
    prompt = " ".join(args.prompt).strip()
    is_piped = prompt == _STDIO or not (args.prompt or args.image)
    if is_piped:
        try:
            prompt = "" if sys.stdin.isatty() else sys.stdin.read().strip()
        except UnicodeDecodeError as error:
            raise ConfigError("The prompt on stdin is not UTF-8 text.") from error
    if not (prompt or args.image):
        raise ConfigError(
            'The prompt is missing: give one, as in `triptych imagine "a red apple" -o a.png`.'
        )
    return prompt


def _options(args: argparse.Namespace) -> GenerateOptions:
    return GenerateOptions(
        negative_prompt=args.negative,
        size=parse_size(args.size) if args.size else None,
        num_images=args.num_images,
        num_steps=args.steps,
        guidance_scale=args.guidance,
        sampler=args.sampler,
        cache=StepCache(num_computed=args.num_computed),
        adapters=dict(map(parse_adapter, args.adapter)),
        image=args.image,
        mask=args.mask,
        strength=args.strength,
        num_layers=args.layers,
    )


@dataclass(frozen=True, slots=True)
class _Sink:
    """The destination of images: `path`, numbered if there are several, or stdout."""

    path: Path | None
    kind: ImageKind
    quality: int
    is_numbered: bool

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """The sink the arguments name. Raises `ConfigError`."""
        quality = _DEFAULT_QUALITY if args.quality is None else args.quality
        if not 0 <= quality <= 100:
            raise ConfigError(f"--quality {quality}: must be 0 to 100.")
        path = None if args.output in (None, _STDIO) else Path(args.output).expanduser()
        if path is None and args.num_images > 1:
            raise ConfigError("Several images need a file name: -o image.png.")
        if path is None and args.layers:
            raise ConfigError("Layers need a file name: -o image.png.")
        if path is None and sys.stdout.isatty():
            raise ConfigError("Name a file to write the image to: -o image.png.")
        if path is not None and path.is_dir():
            raise ConfigError(f"--output {args.output} is a folder: name a file in it.")
        if path is not None and not path.parent.is_dir():
            raise ConfigError(
                f"--output {args.output}: the folder {path.parent.name} does not exist."
            )
        kind = args.format or (kind_of(path) if path else "png")
        if args.quality is not None and kind == "png":
            raise ConfigError("--quality is for JPEG and WebP: PNG is lossless.")
        return cls(path, kind, quality, is_numbered=args.num_images > 1)

    def take(self, image: GeneratedImage) -> str:
        """Write an image; returns a line describing it."""
        name = "stdout"
        if self.path is None:
            sys.stdout.buffer.write(image.encode(self.kind, quality=self.quality))
            sys.stdout.buffer.flush()
        else:
            number = f"-{image.index + 1}" if self.is_numbered else ""
            path = self.path.with_stem(self.path.stem + number)
            name = str(path)
            layers = [replace(image, image=layer, layers=()) for layer in image.layers]
            places = [path.with_stem(f"{path.stem}-layer-{n + 1}") for n in range(len(layers))]
            for place, each in zip([path, *places], [image, *layers], strict=True):
                with report_write_errors(place):
                    place.write_bytes(each.encode(self.kind, quality=self.quality))
        width, height = image.image.size
        steps = f"{image.num_steps} steps ({image.num_computed} computed)"
        return f"{name}: {width}x{height}, seed {image.seed}, {steps}, {image.elapsed_s:.1f} s"


@contextmanager
def _shown(console: Console, strip: ImageStrip) -> Iterator[Callable[[GenerationProgress], None]]:
    """A function that shows progress: images and a bar on a terminal, nothing elsewhere."""
    if not console.is_terminal:
        yield lambda progress: None
        return
    bar = _Bar(console, strip.num_images)
    with Live(Group(strip, bar.columns), console=console, refresh_per_second=5) as live:

        def show(progress: GenerationProgress) -> None:
            bar.add(progress)
            image = progress.image.image if progress.image else progress.preview
            if image is not None:
                strip.show(progress.index, image)
                live.refresh()

        yield show


class _Bar:
    """Progress of all images of a call: steps done and computed, and the time of a step."""

    def __init__(self, console: Console, num_images: int) -> None:
        self.columns = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.TextColumn("{task.fields[text]}"),
            console=console,
        )
        self._task = self.columns.add_task("generating", total=None, text="")
        self._num_images = num_images
        self._latest: dict[int, GenerationProgress] = {}
        self._begun: tuple[float, int] | None = None

    def add(self, progress: GenerationProgress) -> None:
        """Update the progress of one image."""
        if not progress.num_steps:
            waits = progress.queue_position > 0
            text = f"waiting, {progress.queue_position} ahead in the queue" if waits else ""
            self.columns.update(self._task, text=text)
            return
        self._latest[progress.index] = progress
        done = sum(latest.step for latest in self._latest.values())
        computed = sum(latest.num_computed for latest in self._latest.values())
        total = progress.num_steps * self._num_images
        text = f"{done}/{total} steps, {computed} computed{self._pace(done)}"
        self.columns.update(self._task, completed=done, total=total, text=text)

    def _pace(self, done: int) -> str:
        """The mean time of a step since the first one shown, skipped steps included."""
        now_s = time.monotonic()
        if self._begun is None:
            self._begun = now_s, done
        began_s, before = self._begun
        return (
            f", {(now_s - began_s) / (done - before) * 1000:.0f} ms per step"
            if done > before
            else ""
        )
