"""`triptych transcribe`: the transcription pipeline on the command line.

Owns the command's input and output. Everything else is the pipeline's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from triptych.core.bulk.results import ResultFile
from triptych.core.bulk.rows import BulkRow, Record, assign_keys, check_unique_stems, read_rows
from triptych.core.bulk.run import BulkRun, add_cluster_options, model_of, read_cluster
from triptych.core.bulk.work import Cluster, RowWork
from triptych.core.errors import ConfigError, RequestError
from triptych.core.options.table import add_options
from triptych.core.process.atomic_files import write_whole
from triptych.core.process.cli_io import STDIN, report_write_errors
from triptych.modalities.asr.api.pipeline import TranscribeOptions, TranscriptionPipeline
from triptych.modalities.asr.api.rows import SUFFIXES, render
from triptych.modalities.asr.api.transcript import Transcript, gather
from triptych.modalities.asr.spec import Task

_SOUNDS = (
    *(".aac", ".aif", ".aiff", ".amr", ".flac", ".m4a", ".mka", ".mkv", ".mov", ".mp3", ".mp4"),
    *(".mpga", ".oga", ".ogg", ".opus", ".wav", ".webm", ".wma"),
)
"""Suffixes of audio files in a folder."""
_BLOCK = 4  # files per block sent to an engine of a cluster
_TASKS: tuple[Task, Task] = ("transcribe", "translate")


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
        return _bulk(args, cluster).run("transcribed")
    files = args.file or [STDIN]
    if files == [STDIN] and sys.stdin.isatty():
        raise ConfigError("Nothing to transcribe: give files, or pipe one in.")
    _check_targets(files, args)
    num_failed = 0
    console = Console(stderr=True)
    with TranscriptionPipeline.from_arguments(args) as pipeline, _bar(console) as bar:
        for file in files:
            task = bar.add_task(Path(file).name, total=None)
            try:
                transcript = _transcribe(pipeline, file, args, (bar, task))
                text = render(transcript, args.format, _TASKS[args.translate], has_words=args.words)
                _write(text, file, args)
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
    for delta in pipeline.deltas(audio, **_call_options(args)):
        deltas.append(delta)
        bar.update(task, total=delta.duration_s, completed=delta.heard_s)
    return gather(deltas)


def _call_options(args: argparse.Namespace) -> TranscribeOptions:
    return TranscribeOptions(
        language=args.language,
        task=_TASKS[args.translate],
        prompt=args.prompt,
        temperature=args.temperature,
        seed=args.request_seed,
        has_word_times=args.words,
    )


def _bulk(args: argparse.Namespace, cluster: Cluster | None) -> BulkRun:
    """A bulk run with one row per file of folders and lines."""
    folder = Path(args.output or "").expanduser()
    if not args.output or folder.is_file():
        raise ConfigError("Several transcripts need an output folder, such as -o texts.")
    rows = _rows(args)
    check_unique_stems(rows)
    with report_write_errors(folder):
        folder.mkdir(exist_ok=True)
    options = {**_call_options(args), "format": args.format}
    return BulkRun(
        rows=assign_keys(rows, {"model": model_of(args), "options": options}),
        work=RowWork(
            pipeline="triptych.modalities.asr.api.pipeline:TranscriptionPipeline",
            answer="triptych.modalities.asr.api.rows:answer_rows",
            options=options,
            num_at_once=_BLOCK,
        ),
        sink=ResultFile(folder / "results.jsonl"),
        open_pipeline=lambda: TranscriptionPipeline.from_arguments(args),
        cluster=cluster,
        folder=folder,
    )


def _rows(args: argparse.Namespace) -> list[BulkRow]:
    """Rows of the named files, of audio files in folders by relative path, and of input lines."""
    named: list[tuple[Path, str]] = []
    for given in map(Path, args.file):
        inside = sorted(each for each in given.rglob("*") if each.suffix.lower() in _SOUNDS)
        places = [(each, str(each.relative_to(given).with_suffix(""))) for each in inside]
        named += places if given.is_dir() else [(given, given.stem)]
    rows = [_row(number, {"file": str(file)}, stem) for number, (file, stem) in enumerate(named, 1)]
    if args.input:
        for row in read_rows("--input", args.input, "/v1/audio/transcriptions"):
            file = str(row.asked.get("file", ""))
            stem = Path(file).stem or f"line-{row.number}"
            number = len(named) + row.number
            rows.append(replace(row, number=number, stem=stem, version=_version(file)))
    if not rows:
        raise ConfigError("Nothing to transcribe: there are no audio files in the input.")
    return rows


def _row(number: int, entry: Record, stem: str) -> BulkRow:
    return BulkRow(
        number=number, entry=entry, asked=entry, stem=stem, version=_version(entry["file"])
    )


def _version(file: str) -> str:
    """Size and modification time of a file; empty if missing, which becomes its row's error."""
    try:
        found = Path(file).stat()
    except OSError:
        return ""
    return f"{found.st_size} {found.st_mtime_ns}"


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
