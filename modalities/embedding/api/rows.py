"""Rows of `triptych embed`, answered by an embedding pipeline, here or on a cluster.

Owns the fields of a row and of its record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from triptych.core.bulk.rows import Record, RowFields, RowResult
from triptych.core.errors import TriptychError
from triptych.core.limits import MAX_DIMENSIONS
from triptych.modalities.embedding.api.remote import Floats, RemoteEmbedder

if TYPE_CHECKING:
    from triptych.modalities.embedding.api.pipeline import EmbeddingPipeline

_NUM_IN_FLIGHT = 256


class EmbedRow(RowFields):
    """A row: one `text`, or OpenAI's `input` with one or several."""

    input: str | Annotated[list[str], Field(min_length=1)]
    model: str | None = None
    dimensions: int | None = Field(default=None, ge=1, le=MAX_DIMENSIONS)
    prompt_name: str | None = None
    encoding_format: Literal["float"] = "float"

    @model_validator(mode="before")
    @classmethod
    def _take_text(cls, given: Record) -> Record:
        if "text" not in given or "input" in given:
            return given
        return {"input" if name == "text" else name: value for name, value in given.items()}

    def entry(self, options: Mapping[str, object]) -> Record:
        """The row as an entry of `EmbeddingPipeline.map`."""
        own = {"model": self.model, "dimensions": self.dimensions, "prompt_name": self.prompt_name}
        given = {name: value for name, value in own.items() if value is not None}
        return {**options, **given, "texts": self.input}


def answer_rows(
    pipeline: EmbeddingPipeline | RemoteEmbedder, rows: Sequence[Record], options: Record
) -> Iterator[RowResult]:
    """The vectors of `rows`, in order; `options` are those of `EmbedCall`."""
    read = list(map(EmbedRow.read, rows))
    good = [row.entry(options) for row in read if isinstance(row, EmbedRow)]
    vectors = pipeline.map(good, num_in_flight=_NUM_IN_FLIGHT)
    for row in read:
        yield _result(row, next(vectors)) if isinstance(row, EmbedRow) else RowResult.failed(row)


def _result(row: EmbedRow, vectors: Floats | TriptychError) -> RowResult:
    if isinstance(vectors, TriptychError):
        return RowResult.failed(vectors)
    if isinstance(row.input, list):
        return RowResult({"embeddings": vectors.tolist()})
    return RowResult({"embedding": vectors[0].tolist()})
