"""`triptych transcribe`: the transcription pipeline at a terminal.

Owns what the command prints and writes. Everything else is the pipeline's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from triptych.core.cli_io import STDIN, writing
from triptych.core.errors import ConfigError, RequestError
from triptych.core.options.table import add_options
from triptych.modalities.recognition.api.formats import as_srt, as_text, as_vtt
from triptych.modalities.recognition.api.pipeline import TranscribeOptions, TranscriptionPipeline
from triptych.modalities.recognition.api.protocol import json_reply, verbose_reply
from triptych.modalities.recognition.api.transcript import Transcript, gather
from triptych.modalities.recognition.spec import Task

SUFFIXES: Mapping[str, str] = MappingProxyType(
    {"text": ".txt", "srt": ".srt", "vtt": ".vtt", "json": ".json", "verbose_json": ".json"}
)
"""Formats, and how their files are called."""
_TASKS: tuple[Task, Task] = ("transcribe", "translate")


def add_transcribe_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `triptych transcribe`."""
    parser.add_argument("file", nargs="*", help='files with sound; "-" or none: stdin')
    parser.add_argument(
        "-o",
        "--output",
        help="file to write, or folder for several files' transcripts; default stdout",
    )
    parser.add_argument("--format", choices=tuple(SUFFIXES), default="text", help="what to write")
    parser.add_argument("--words", action="store_true", help="times of words, in verbose_json")
    parser.add_argument("--language", default="", help="spoken language; default: found out")
    parser.add_argument("--translate", action="store_true", help="write English, whatever is said")
    parser.add_argument("--prompt", default="", help="what was said before, or names to expect")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: likeliest tokens first")
    parser.add_argument("--request-seed", type=int, metavar="SEED", help="repeat a past transcript")
    add_options(parser, sections=("models", "device", "schedule"), roles=("recognition",))


def run_transcribe(args: argparse.Namespace) -> int:
    """Write down every file. One that cannot be is reported, and harms no other."""
    if args.words and args.format != "verbose_json":
        raise ConfigError("--words goes with --format verbose_json.")
    if not 0 <= args.temperature <= 1:
        raise ConfigError("--temperature lies between 0 and 1.")
    files = args.file or [STDIN]
    if files == [STDIN] and sys.stdin.isatty():
        raise ConfigError("Nothing to hear: give files, or pipe one in.")
    _check_targets(files, args)
    num_failed = 0
    console = Console(stderr=True)
    with TranscriptionPipeline.from_arguments(args) as pipeline, _bar(console) as bar:
        for file in files:
            task = bar.add_task(Path(file).name, total=None)
            try:
                transcript = _transcribe(pipeline, file, args, (bar, task))
                _write(_render(transcript, args), file, args)
            except RequestError as error:
                num_failed += 1
                console.print(f"[red]{escape(file)}: {escape(error.message)}[/]")
            bar.remove_task(task)
    return 1 if num_failed else 0


def _transcribe(
    pipeline: TranscriptionPipeline,
    file: str,
    args: argparse.Namespace,
    progress: tuple[Progress, TaskID],
) -> Transcript:
    bar, task = progress
    deltas = []
    audio = sys.stdin.buffer.read() if file == STDIN else Path(file)
    options = TranscribeOptions(
        language=args.language,
        task=_TASKS[args.translate],
        prompt=args.prompt,
        temperature=args.temperature,
        seed=args.request_seed,
        has_word_times=args.words,
    )
    for delta in pipeline.deltas(audio, **options):
        deltas.append(delta)
        bar.update(task, total=delta.duration_s, completed=delta.heard_s)
    return gather(deltas)


def _render(transcript: Transcript, args: argparse.Namespace) -> str:
    write = {"text": as_text, "srt": as_srt, "vtt": as_vtt}.get(args.format)
    if write is not None:
        return write(transcript)
    if args.format == "json":
        return json_reply(transcript, has_logprobs=False).model_dump_json(exclude_unset=True) + "\n"
    task = _TASKS[args.translate]
    verbose = verbose_reply(transcript, task, has_segments=True, has_words=args.words)
    return verbose.model_dump_json(exclude_unset=True) + "\n"


def _target(file: str, args: argparse.Namespace) -> Path:
    """Where the transcript of `file` is written."""
    output = Path(args.output)
    if len(args.file) > 1 or output.is_dir():
        return output / (Path(file).stem + SUFFIXES[args.format])
    return output


def _check_targets(files: Sequence[str], args: argparse.Namespace) -> None:
    """Refuse files of one name, of whose transcripts but the last would be left."""
    if args.output is None:
        return
    sources: dict[Path, str] = {}
    for file in files:
        if (other := sources.setdefault(_target(file, args), file)) != file:
            raise ConfigError(f"{other} and {file} would be written to one file; do them apart.")


def _write(text: str, file: str, args: argparse.Namespace) -> None:
    if args.output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    target = _target(file, args)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def _bar(console: Console) -> Progress:
    """Seconds transcribed, of those there are."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:.0f} s"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
