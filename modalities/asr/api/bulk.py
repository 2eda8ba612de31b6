"""`triptych transcribe` of folders and of JSON Lines, into a folder.

Owns the rows. `core.bulk` resumes and writes; the pipeline transcribes.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from triptych.core.bulk.cluster_options import model_of
from triptych.core.bulk.results import ResultFile
from triptych.core.bulk.rows import BulkRow, Record, assign_keys, check_unique_stems, read_rows
from triptych.core.bulk.run import BulkRun
from triptych.core.bulk.work import Cluster, RowWork
from triptych.core.errors import ConfigError
from triptych.core.process.cli_io import report_write_errors
from triptych.modalities.asr.api.cli import call_options
from triptych.modalities.asr.api.pipeline import TranscriptionPipeline
from triptych.modalities.asr.modality import ASR

_SOUNDS = (
    *(".aac", ".aif", ".aiff", ".amr", ".flac", ".m4a", ".mka", ".mkv", ".mov", ".mp3", ".mp4"),
    *(".mpga", ".oga", ".ogg", ".opus", ".wav", ".webm", ".wma"),
)
"""Suffixes of audio files in a folder."""
_BLOCK = 4  # files per block sent to an engine of a cluster


def run_bulk(args: argparse.Namespace, cluster: Cluster | None) -> int:
    """Transcribe the files of folders and of lines that earlier runs left undone."""
    folder = Path(args.output or "").expanduser()
    if not args.output or folder.is_file():
        raise ConfigError("Several transcripts need an output folder, such as -o texts.")
    rows = _rows(args)
    check_unique_stems(rows)
    with report_write_errors(folder):
        folder.mkdir(exist_ok=True)
    options = {**call_options(args), "format": args.format}
    run = BulkRun(
        rows=assign_keys(rows, {"model": model_of(args, ASR.default), "options": options}),
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
    return run.run("transcribed")


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
