"""Rows of `triptych transcribe`, answered by a transcription pipeline, here or on a cluster.

Owns the fields of a row and of its record, and rendering transcripts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from triptych.core.bulk.rows import Record, RowFields, RowResult
from triptych.core.errors import TriptychError
from triptych.modalities.asr.api.formats import SUFFIXES, as_srt, as_text, as_vtt
from triptych.modalities.asr.api.pipeline import TranscriptionPipeline
from triptych.modalities.asr.api.protocol import (
    MAX_PROMPT_CHARS,
    json_reply,
    verbose_reply,
)
from triptych.modalities.asr.api.transcript import Transcript
from triptych.modalities.asr.traits import Task


class TranscribeRow(RowFields):
    """A row: an audio file, and options of its transcription."""

    file: str
    model: str | None = None
    language: str | None = None
    task: Task | None = None
    prompt: str | None = Field(default=None, max_length=MAX_PROMPT_CHARS)
    temperature: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = None

    def entry(self, options: Mapping[str, Any]) -> Record:
        """The row as an entry of `TranscriptionPipeline.map`."""
        own = self.model_dump(exclude_none=True, exclude={"file"})
        return {**options, **own, "audio": Path(self.file)}


def answer_rows(
    pipeline: TranscriptionPipeline, rows: Sequence[Record], options: Record
) -> Iterator[RowResult]:
    """The transcripts of `rows`, in order, as files in `options["format"]`.

    The other options are those of a call.
    """
    call = {name: value for name, value in options.items() if name != "format"}
    read = list(map(TranscribeRow.read, rows))
    good = [row.entry(call) for row in read if isinstance(row, TranscribeRow)]
    found = zip(good, pipeline.map(good), strict=True)
    for row in read:
        if isinstance(row, TriptychError):
            yield RowResult.failed(row)
        else:
            yield _result(*next(found), kind=options["format"])


def render(transcript: Transcript, kind: str, task: Task, *, has_words: bool) -> str:
    """A transcript in one of the formats of `SUFFIXES`."""
    write = {"text": as_text, "srt": as_srt, "vtt": as_vtt}.get(kind)
    if write is not None:
        return write(transcript)
    if kind == "json":
        return json_reply(transcript, has_logprobs=False).model_dump_json(exclude_unset=True) + "\n"
    verbose = verbose_reply(transcript, task, has_segments=True, has_words=has_words)
    return verbose.model_dump_json(exclude_unset=True) + "\n"


def _result(entry: Record, transcript: Transcript | TriptychError, *, kind: str) -> RowResult:
    if isinstance(transcript, TriptychError):
        return RowResult.failed(transcript)
    text = render(transcript, kind, entry["task"], has_words=entry["has_word_times"])
    about = {"language": transcript.language, "duration_s": round(transcript.duration_s, 3)}
    return RowResult(about, {SUFFIXES[kind]: text.encode()})
