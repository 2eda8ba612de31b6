"""Rows of `triptych generate`, answered by a chat pipeline: here, or in each actor of a cluster.

Owns the fields of a row's result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from triptych.core.bulk.rows import Record, RowResult
from triptych.core.errors import TriptychError
from triptych.modalities.llm.api.pipeline import ChatAnswer, ChatPipeline


def answer_rows(
    pipeline: ChatPipeline, rows: Sequence[Record], options: Record
) -> Iterator[RowResult]:
    """The answers of `rows`, in order; `options` are those of `ChatPipeline.map`."""
    return map(_result, pipeline.map([_entry(row) for row in rows], **options))


def _entry(row: Record) -> Record:
    """A row as `ChatPipeline.map` takes it, with OpenAI's newer name of `max_tokens` replaced."""
    newer = row.get("max_completion_tokens")
    if newer is None:
        return row
    rest = {name: row[name] for name in row if name != "max_completion_tokens"}
    return {**rest, "max_tokens": newer}


def _result(answer: ChatAnswer | TriptychError) -> RowResult:
    if isinstance(answer, TriptychError):
        return RowResult.failed(answer)
    texts = [sample.text for sample in answer.samples]
    first = answer.samples[0]
    calls = [{"name": call.name, "arguments": call.arguments} for call in first.tool_calls]
    return RowResult(
        {
            "text": texts[0],
            **({"texts": texts} if len(texts) > 1 else {}),
            **({"reasoning": first.reasoning} if first.reasoning else {}),
            **({"tool_calls": calls} if calls else {}),
            "finish_reason": answer.finish_reason,
            "prompt_tokens": answer.usage.num_prompt_tokens,
            "completion_tokens": sum(sample.usage.num_output_tokens for sample in answer.samples),
        }
    )
