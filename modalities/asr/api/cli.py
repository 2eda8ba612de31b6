"""`triptych transcribe`: the transcription pipeline on the command line.

Owns the command's input and output. Everything else is the pipeline's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from triptych.core.bulk.cluster_options import add_cluster_options, read_cluster
from triptych.core.client.choice import Wanted, add_server_options, choose_server, open_model
from triptych.core.errors import ConfigError, InvalidRequest, RequestError
from triptych.core.options.table import add_options
from triptych.core.process.atomic_files import write_whole
from triptych.core.process.cli_io import STDIN, read_file, report_write_errors
from triptych.core.process.lazy import load
from triptych.modalities.asr.api.formats import SUFFIXES
from triptych.modalities.asr.api.remote import RemoteRecognizer
from triptych.modalities.asr.modality import ASR

if TYPE_CHECKING:
    from triptych.modalities.asr.api.pipeline import TranscribeOptions, TranscriptionPipeline
    from triptych.modalities.asr.traits import Task

TASKS: tuple[Task, Task] = ("transcribe", "translate")
_WANTED = Wanted(
    task=ASR.task[0],
    default=ASR.default,
    pipeline="triptych.modalities.asr.api.pipeline:TranscriptionPipeline",
    remote="triptych.modalities.asr.api.remote:RemoteRecognizer",
)


def add_transcribe_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `triptych transcribe`."""
    parser.add_argument(
        "file", nargs="*", help='audio files, or folders of them; "-" or none: stdin'
    )
    parser.add_argument(
        "-i",
        "--input",
        metavar="FILE",
        help='JSONL: one {"file": ...} per line, optionally with language, prompt, task,'
        ' temperature or seed; "id" and "custom_id" are returned unchanged',
    )
    parser.add_argument(
        "-o",
        "--output",
        help="file to write, or folder for several transcripts, where a second run over"
        " --input or a folder resumes; default stdout",
    )
    parser.add_argument("--format", choices=tuple(SUFFIXES), default="text", help="output format")
    parser.add_argument("--words", action="store_true", help="word timestamps, in verbose_json")
    parser.add_argument("--language", default="", help="spoken language; default: detected")
    parser.add_argument("--translate", action="store_true", help="translate to English")
    parser.add_argument("--prompt", default="", help="preceding text, or names to expect")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0: likeliest tokens, with fallback"
    )
    parser.add_argument("--request-seed", type=int, metavar="SEED", help="repeat a past transcript")
    add_server_options(parser)
    add_cluster_options(parser)
    add_options(parser, sections=("models", "device", "schedule"), roles=("asr",))


def run_transcribe(args: argparse.Namespace) -> int:
    """Transcribe every file. A failure is reported and does not affect the other files."""
    if args.words and args.format != "verbose_json":
        raise ConfigError("--words needs --format verbose_json.")
    if not 0 <= args.temperature <= 1:
        raise ConfigError("--temperature must be between 0 and 1.")
    cluster = read_cluster(args)
    if args.input or cluster or any(Path(file).is_dir() for file in args.file):
        if cluster is None:
            choose_server(args, _WANTED, only_here="A folder of transcripts")  # refuses --server
        return int(load("triptych.modalities.asr.api.bulk:run_bulk")(args, cluster))
    files = args.file or [STDIN]
    if files == [STDIN] and sys.stdin.isatty():
        raise ConfigError("Nothing to transcribe: give files, or pipe one in.")
    _check_targets(files, args)
    num_failed = 0
    console = Console(stderr=True)
    with _open_pipeline(args) as pipeline, _bar(console) as bar:
        for file in files:
            task = bar.add_task(Path(file).name, total=None)
            try:
                _write(_transcribe(pipeline, file, args, (bar, task)), file, args)
            except RequestError as error:
                num_failed += 1
                console.print(f"[red]{escape(file)}: {escape(error.message)}[/]")
            bar.remove_task(task)
    return 1 if num_failed else 0


def _open_pipeline(
    args: argparse.Namespace,
) -> AbstractContextManager[TranscriptionPipeline | RemoteRecognizer]:
    is_fuller = args.translate and (args.language or args.words)
    only_here = "--translate with --language or --words" if is_fuller else ""
    opened: AbstractContextManager[TranscriptionPipeline | RemoteRecognizer]
    opened = open_model(args, _WANTED, only_here=only_here)
    return opened


def _transcribe(
    pipeline: TranscriptionPipeline | RemoteRecognizer,
    file: str,
    args: argparse.Namespace,
    progress: tuple[Progress, TaskID],
) -> str:
    """The transcript of a file, in the format of the arguments."""
    options = call_options(args)
    if isinstance(pipeline, RemoteRecognizer):
        return pipeline.transcript(_read(file), Path(file).name, args.format, **options)
    from triptych.modalities.asr.api.rows import render
    from triptych.modalities.asr.api.transcript import gather

    bar, task = progress
    deltas = []
    audio = _read(file) if file == STDIN else Path(file)
    for delta in pipeline.deltas(audio, **options):
        deltas.append(delta)
        bar.update(task, total=delta.duration_s, completed=delta.heard_s)
    return render(gather(deltas), args.format, TASKS[args.translate], has_words=args.words)


def _read(file: str) -> bytes:
    if file == STDIN:
        return sys.stdin.buffer.read()
    try:
        return read_file(file, "file")
    except ConfigError as error:  # one of several files; the others are transcribed
        raise InvalidRequest(error.message) from error


def call_options(args: argparse.Namespace) -> TranscribeOptions:
    """The call options in the arguments."""
    return {
        "language": args.language,
        "task": TASKS[args.translate],
        "prompt": args.prompt,
        "temperature": args.temperature,
        "seed": args.request_seed,
        "has_word_times": args.words,
    }


def _target(file: str, args: argparse.Namespace) -> Path:
    """The path of the transcript of `file`."""
    output = Path(args.output)
    if len(args.file) > 1 or output.is_dir():
        return output / (Path(file).stem + SUFFIXES[args.format])
    return output


def _check_targets(files: Sequence[str], args: argparse.Namespace) -> None:
    """Raise `ConfigError` if two files' transcripts would have the same path."""
    if args.output is None:
        return
    sources: dict[Path, str] = {}
    for file in files:
        if (other := sources.setdefault(_target(file, args), file)) != file:
            raise ConfigError(
                f"{other} and {file} would be written to the same file; run them separately."
            )


def _write(text: str, file: str, args: argparse.Namespace) -> None:
    if args.output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    target = _target(file, args)
    with report_write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, (text.encode(),))


def _bar(console: Console) -> Progress:
    """A progress bar of the seconds transcribed."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:.0f} s"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
