"""Rows of `triptych generate`, answered by a pipeline (here or on a cluster) or by a server.

Owns the fields of a row's result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from triptych.core.bulk.rows import Record, RowResult
from triptych.core.client.parallel import in_order
from triptych.core.errors import TriptychError
from triptych.modalities.llm.api.remote import RemoteChat

if TYPE_CHECKING:
    from triptych.modalities.llm.api.pipeline import ChatAnswer, ChatPipeline

_NAMES = {"max_completion_tokens": "max_tokens", "lora_path": "adapter"}


def answer_rows(
    pipeline: ChatPipeline | RemoteChat, rows: Sequence[Record], options: Record
) -> Iterator[RowResult]:
    """The answers of `rows`, in order; `options` are those of `ChatPipeline.map`."""
    if isinstance(pipeline, RemoteChat):
        call = {name: value for name, value in options.items() if name != "num_in_flight"}
        replies = in_order(partial(pipeline.answer, options=call), rows, options["num_in_flight"])
        return map(_of_reply, replies)
    return map(_result, pipeline.map([_entry(row) for row in rows], **options))


def _entry(row: Record) -> Record:
    """A row as `ChatPipeline.map` takes it: fields of the HTTP API get their names of Python."""
    given = {
        _NAMES[name]: value for name, value in row.items() if name in _NAMES and value is not None
    }
    return {name: value for name, value in row.items() if name not in _NAMES} | given


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


def _of_reply(reply: Record | TriptychError) -> RowResult:
    if isinstance(reply, TriptychError):
        return RowResult.failed(reply)
    messages = [choice["message"] for choice in reply["choices"]]
    first = messages[0]
    texts = [message.get("content") or "" for message in messages]
    calls = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in first.get("tool_calls") or ()
    ]
    return RowResult(
        {
            "text": texts[0],
            **({"texts": texts} if len(texts) > 1 else {}),
            **({"reasoning": first["reasoning"]} if first.get("reasoning") else {}),
            **({"tool_calls": calls} if calls else {}),
            "finish_reason": reply["choices"][0]["finish_reason"],
            "prompt_tokens": reply["usage"]["prompt_tokens"],
            "completion_tokens": reply["usage"]["completion_tokens"],
        }
    )
