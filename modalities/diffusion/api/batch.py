"""`triptych imagine --batch`: many prompts at once, from lines into a folder.

Owns the format of a line and the names of files. Knows no engine: the pipeline generates.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import ValidationError

from triptych.core.bulk.cluster_options import model_of, read_cluster
from triptych.core.bulk.results import ResultFile
from triptych.core.bulk.rows import LABELS, BulkRow, Record, RowResult, assign_keys
from triptych.core.bulk.run import BulkRun
from triptych.core.bulk.work import RowWork
from triptych.core.client.parallel import in_order
from triptych.core.errors import ConfigError, InvalidRequest, TriptychError
from triptych.core.http.errors import to_public
from triptych.core.http.validation import invalid_body
from triptych.core.process.cli_io import read_lines, report_write_errors
from triptych.modalities.diffusion.api.pipeline import ImagePipeline
from triptych.modalities.diffusion.api.protocol import GenerationBody
from triptych.modalities.diffusion.api.remote import GENERATIONS, RemoteImages
from triptych.modalities.diffusion.api.results import GeneratedImage
from triptych.modalities.diffusion.api.service import ImageCall
from triptych.modalities.diffusion.arguments import parse_adapter
from triptych.modalities.diffusion.modality import IMAGES

_RESULTS = "results.jsonl"
_ALONE = ("prompt", "image", "mask", "strength", "layers")
_SHORTER = {"num_inference_steps": "steps", "guidance_scale": "guidance"}

_BLOCK = 8  # rows sent together to an engine of a cluster
_NUM_AT_ONCE = 4  # requests to a server
_OWN_FORMAT = ("output_compression", "output_format", "response_format")
OpenPipeline = Callable[[argparse.Namespace], AbstractContextManager[Any]]


def run_batch(args: argparse.Namespace, open_pipeline: OpenPipeline) -> int:
    """Generate the lines of `--batch` that earlier runs left undone; returns 1 if any failed."""
    cluster, folder = read_cluster(args), _folder(args)
    defaults, model = _defaults(args), model_of(args, IMAGES.default)
    lines = read_lines("--batch", args.batch)
    rows = [_row(number, text, defaults) for number, text in lines]
    if not rows:
        raise ConfigError(f"--batch {args.batch}: is empty.")
    with report_write_errors(folder):
        folder.mkdir(exist_ok=True)
    run = BulkRun(
        rows=assign_keys(rows, {"model": model}),
        work=RowWork(
            pipeline="triptych.modalities.diffusion.api.pipeline:ImagePipeline",
            answer="triptych.modalities.diffusion.api.batch:answer_rows",
            options={},
            num_at_once=_BLOCK,
        ),
        sink=ResultFile(folder / _RESULTS),
        open_pipeline=lambda: open_pipeline(args),
        cluster=cluster,
        folder=folder,
        is_whole=_is_whole,
        describe=lambda row: {"line": row.number, "model": model, "request": row.entry},
    )
    return run.run("generated")


def answer_rows(
    pipeline: ImagePipeline | RemoteImages, rows: Sequence[Record], options: Record
) -> Iterator[RowResult]:
    """Generate the images of checked `rows`, in order; there are no options."""
    bodies = [_body(row) for row in rows]
    if isinstance(pipeline, RemoteImages):
        answers = in_order(partial(_ask, pipeline), rows, _NUM_AT_ONCE)
    else:
        answers = pipeline.map(list(map(_call, bodies)))
    for body, answer in zip(bodies, answers, strict=True):
        if isinstance(answer, TriptychError):
            yield RowResult.failed(answer)
        else:
            yield _generated(answer, body)


def _ask(remote: RemoteImages, row: Record) -> list[GeneratedImage]:
    """Generate the images of a row on a server. Files are encoded here, from lossless images."""
    fields = {name: value for name, value in row.items() if name not in _OWN_FORMAT}
    found = [each.image for each in remote.follow(GENERATIONS, fields) if each.image is not None]
    return sorted(found, key=lambda image: image.index)


def _row(number: int, text: str, defaults: Mapping[str, Any]) -> BulkRow:
    """A line of text: a prompt, a prompt in quotes, or an object of fields."""
    stem, fields = f"{number:05}-", {}
    try:
        entry = _entry(text)
        fields = {**defaults, **{_SHORTER.get(name, name): entry[name] for name in entry}}
        asked = {name: value for name, value in fields.items() if name not in LABELS}
        _body(asked)
    except TriptychError as error:
        return BulkRow(number=number, entry=fields, asked={}, stem=stem, error=error)
    return BulkRow(number=number, entry=fields, asked=asked, stem=stem)


def _generated(images: Sequence[GeneratedImage], body: GenerationBody) -> RowResult:
    """The record of a line, and its image files."""
    kind, quality = body.output_format, body.output_compression
    encode = partial(
        GeneratedImage.encode,
        kind=kind,
        quality=quality,
        keeps_alpha=body.background != "opaque",
    )
    return RowResult(
        {
            "seed": images[0].seed,
            "steps": images[0].num_steps,
            "computed": [image.num_computed for image in images],
            "elapsed_s": round(max(image.elapsed_s for image in images), 3),
        },
        {f"{each.index + 1}.{kind}": encode(each) for each in images},
    )


def _folder(args: argparse.Namespace) -> Path:
    given = [name for name in _ALONE if getattr(args, name) not in (None, [])]
    if given:
        raise ConfigError(f"--batch reads prompts and images from its lines: leave out {given[0]}.")
    folder = Path(args.output or "").expanduser()
    if not args.output or folder.is_file():
        raise ConfigError("--batch writes into a folder: name one, as in -o images.")
    return folder


def _defaults(args: argparse.Namespace) -> Record:
    """The command's options as default fields of every line."""
    named = {
        "n": args.num_images if args.num_images != 1 else None,
        "size": args.size,
        "steps": args.steps,
        "guidance": args.guidance,
        "negative_prompt": args.negative or None,
        "sampler": args.sampler or None,
        "output_format": args.format,
        "output_compression": args.quality,
    }
    if args.num_computed is not None:
        named["cache"] = {"name": "auto", "num_computed": args.num_computed}
    if args.adapter:
        uses = map(parse_adapter, args.adapter)
        named["lora"] = [{"name": name, "scale": scale} for name, scale in uses]
    return {name: value for name, value in named.items() if value is not None}


def _entry(text: str) -> Record:
    """The fields in a line. Raises `InvalidRequest`."""
    if text[0] not in '{"':
        return {"prompt": text}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("The line is not valid JSON.") from error
    return value if isinstance(value, dict) else {"prompt": value}


def _body(asked: Record) -> GenerationBody:
    """The fields, validated like a request. Raises subclasses of `RequestError`."""
    try:
        body = GenerationBody.model_validate(asked)
    except ValidationError as error:
        raise to_public(invalid_body(GenerationBody, error)) from error
    for name in ("model", "stream"):
        if getattr(body, name):
            raise InvalidRequest(f"A line cannot set {name}.", param=name)
    return body


def _call(body: GenerationBody) -> ImageCall:
    return ImageCall(request=body.request(), quality=body.known_quality, background=body.background)


def _is_whole(path: Path) -> bool:
    try:
        with Image.open(path) as image:
            image.load()
    except (OSError, SyntaxError):
        return False
    return True
