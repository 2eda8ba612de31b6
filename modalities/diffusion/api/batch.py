"""`triptych imagine --batch`: many prompts at once, from lines into a folder.

Owns what a line may be, the names of files, and `results.jsonl`, by which a second run knows what
is left to draw. Knows no engine: the pipeline draws.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from fastapi.exceptions import RequestValidationError
from PIL import Image
from pydantic import ValidationError

from triptych.core.cli_io import count_bar, read_lines, writing
from triptych.core.errors import ConfigError, InvalidRequest, TriptychError
from triptych.core.http.errors import to_public
from triptych.core.options.table import resolve
from triptych.modalities.diffusion.api.pipeline import GeneratedImage, ImagePipeline
from triptych.modalities.diffusion.api.protocol import GenerationBody
from triptych.modalities.diffusion.api.service import ImageCall
from triptych.modalities.diffusion.arguments import parse_adapter

_RESULTS = "results.jsonl"
_LABELS = frozenset({"id", "custom_id"})
"""Fields of a line that are the caller's own: they come back with the result."""
_ALONE = ("prompt", "image", "mask", "strength")
_SHORTER = {"num_inference_steps": "steps", "guidance_scale": "guidance"}

Record = dict[str, Any]
OpenPipeline = Callable[[argparse.Namespace], ImagePipeline]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """What is asked in a line: its fields and those of the command, checked or in error."""

    number: int
    fields: Record
    body: GenerationBody | None = None
    error: TriptychError | None = None

    @classmethod
    def read(cls, number: int, text: str, defaults: Mapping[str, Any]) -> Self:
        """A line of text: a prompt, a prompt in quotes, or an object of fields."""
        try:
            entry = _entry(text)
        except InvalidRequest as error:
            return cls(number=number, fields={}, error=error)
        fields = {**defaults, **{_SHORTER.get(name, name): entry[name] for name in entry}}
        try:
            return cls(number=number, fields=fields, body=_body(fields))
        except TriptychError as error:
            return cls(number=number, fields=fields, error=error)

    def record(self, model: str, rest: Mapping[str, Any]) -> Record:
        """What `results.jsonl` says of it."""
        return {"line": self.number, "model": model, "request": self.fields, **rest}


@dataclass(slots=True)
class _Results:
    """The folder's `results.jsonl`: a record for each line that is done, or failed."""

    path: Path
    records: dict[int, Record] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """What an earlier run has left; a line that it could not finish writing does not count."""
        path = folder / _RESULTS
        text = path.read_text("utf-8") if path.is_file() else ""
        found = (_decoded(line) for line in text.splitlines())
        return cls(path, {each["line"]: each for each in found if "line" in each})

    def holds(self, line: _Line, model: str) -> bool:
        """Whether the line was drawn as it stands now, and its pictures are there and whole."""
        record = self.records.get(line.number, {})
        asked = line.record(model, {})
        is_same = all(record.get(name) == value for name, value in asked.items())
        files = record.get("files", ())
        return is_same and bool(files) and all(_is_whole(self.path.parent / name) for name in files)

    def keep(self, numbers: set[int]) -> None:
        """Forget all but these lines."""
        self.records = {number: self.records[number] for number in sorted(numbers)}
        with writing(self.path):
            self.path.write_text("".join(map(_encoded, self.records.values())), "utf-8")

    def add(self, record: Record) -> None:
        """Write a record at once, so that what breaks off later has not drawn in vain."""
        self.records[record["line"]] = record
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(_encoded(record))

    @property
    def num_failed(self) -> int:
        """Lines without pictures."""
        return sum("error" in record for record in self.records.values())


def run_batch(args: argparse.Namespace, open_pipeline: OpenPipeline) -> int:
    """Draw what the lines of `--batch` ask for and no earlier run has drawn; 1 if any failed."""
    started_s = time.monotonic()
    folder, defaults = _folder(args), _defaults(args)
    lines = [_Line.read(*line, defaults) for line in read_lines("--batch", args.batch)]
    if not lines:
        raise ConfigError(f"--batch {args.batch}: is empty.")
    model = ", ".join(resolve(args).models.model) or "embedded"
    with writing(folder):
        folder.mkdir(exist_ok=True)
    results = _Results.open(folder)
    done = {line.number for line in lines if results.holds(line, model)}
    results.keep(done)
    left = [line for line in lines if line.number not in done]
    for line, rest in _drawn(args, open_pipeline, left, folder):
        results.add(line.record(model, rest))
        if "error" in rest:
            sys.stderr.write(f"line {line.number}: {rest['error']['message']}\n")
    results.keep(set(results.records))  # in order
    num_failed, elapsed_s = results.num_failed, time.monotonic() - started_s
    sys.stderr.write(
        f"Lines: {len(lines)}, drawn: {len(left) - num_failed}, there before: {len(done)},"
        f" failed: {num_failed}. It took {elapsed_s:.1f} s.\n"
    )
    return 1 if num_failed else 0


def _drawn(
    args: argparse.Namespace, open_pipeline: OpenPipeline, lines: Sequence[_Line], folder: Path
) -> Iterator[tuple[_Line, Record]]:
    """What came of each line. Without any that can be drawn no model is loaded."""
    for line in lines:
        if line.error is not None:
            yield line, _error(line.error)
    asked = [(line, line.body) for line in lines if line.body is not None]
    if not asked:
        return
    with open_pipeline(args) as pipeline, count_bar() as bar:
        task = bar.add_task("drawing", total=sum(body.n for _, body in asked))
        answers = pipeline.map([_call(body) for _, body in asked])
        for (line, body), answer in zip(asked, answers, strict=True):
            if isinstance(answer, TriptychError):
                yield line, _error(answer)
            else:
                yield line, _written(answer, body, folder, line.number)
            bar.advance(task, body.n)


def _written(
    pictures: Sequence[GeneratedImage], body: GenerationBody, folder: Path, number: int
) -> Record:
    """Write a line's pictures; returns what its record says of them."""
    names = [f"{number:05}-{each.index + 1}.{body.output_format}" for each in pictures]
    for name, picture in zip(names, pictures, strict=True):
        data = picture.encode(body.output_format, quality=body.output_compression)
        with writing(folder / name):
            (folder / name).write_bytes(data)
    return {
        "files": names,
        "seed": pictures[0].seed,
        "steps": pictures[0].num_steps,
        "computed": [picture.num_computed for picture in pictures],
        "elapsed_s": round(max(picture.elapsed_s for picture in pictures), 3),
    }


def _folder(args: argparse.Namespace) -> Path:
    given = [name for name in _ALONE if getattr(args, name) not in (None, [])]
    if given:
        raise ConfigError(f"--batch takes all it draws from its lines: leave out {given[0]}.")
    folder = Path(args.output or "").expanduser()
    if not args.output or folder.is_file():
        raise ConfigError("--batch draws into a folder: name one, as in -o pictures.")
    return folder


def _defaults(args: argparse.Namespace) -> Record:
    """What the command says of all lines, in the words of a line."""
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


def _body(fields: Mapping[str, Any]) -> GenerationBody:
    """The fields, checked as those of a request. Raises `InvalidRequest` and its kin."""
    asked = {name: value for name, value in fields.items() if name not in _LABELS}
    try:
        body = GenerationBody.model_validate(asked)
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise to_public(RequestValidationError(found)) from error
    for name in ("model", "stream"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} is nothing that a line can choose.", param=name)
    return body


def _call(body: GenerationBody) -> ImageCall:
    return ImageCall(request=body.request(), quality=body.known_quality)


def _error(error: TriptychError) -> Record:
    return {"error": {"code": error.code, "message": error.message}}


def _is_whole(path: Path) -> bool:
    try:
        with Image.open(path) as image:
            image.load()
    except (OSError, SyntaxError):
        return False
    return True


def _encoded(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _decoded(line: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
