"""Documents in the Messages API: those of text become text."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from support.anthropic_requests import message
from triptych.core import limits
from triptych.modalities.llm.api.anthropic.conversation import chat_fields
from triptych.modalities.llm.api.anthropic.protocol import MessagesRequest


def said(*blocks: dict[str, Any]) -> Any:
    """What chat is asked for a turn of these blocks, and for one with them in a result."""
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": list(blocks)}
    turns = [
        {"role": "user", "content": list(blocks)},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    first, _, last = chat_fields(MessagesRequest.model_validate(message(messages=turns)))[
        "messages"
    ]
    return first["content"], last["content"]


@pytest.mark.parametrize(
    "source",
    [
        {"type": "text", "media_type": "text/plain", "data": "One.\n\nTwo."},
        {"type": "content", "content": "One.\n\nTwo."},
        {
            "type": "content",
            "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}],
        },
    ],
)
def test_documents_of_text_are_read(source: dict[str, Any]) -> None:
    block = {"type": "document", "source": source, "title": "T", "context": "C"}
    block["citations"] = {"enabled": False}
    turn, result = said(block, {"type": "text", "text": "Sum it up."})
    text = "T\n\nC\n\nOne.\n\nTwo.\n\nSum it up."
    assert turn == [{"type": "text", "text": text}]
    assert result == text


def test_parts_of_documents_are_counted_before_any_is_validated() -> None:
    texts = [{"type": "text", "text": ""}] * limits.MAX_CONTENT_PARTS
    block = {"type": "document", "source": {"type": "content", "content": texts}}
    num_blocks = limits.MAX_CONVERSATION_PARTS // limits.MAX_CONTENT_PARTS + 1
    turns = [{"role": "user", "content": [block]}] * num_blocks
    with pytest.raises(ValidationError, match="A conversation has at most"):
        MessagesRequest.model_validate(message(messages=turns))


@pytest.mark.parametrize("kind", ["image", "document", "tool_result", "thinking"])
def test_a_block_in_a_wrong_place_is_not_recommended(kind: str) -> None:
    document = {"type": "document", "source": {"type": "content", "content": [{"type": kind}]}}
    for body in (
        {"system": [{"type": kind}]},
        {"messages": [{"role": "user", "content": [document]}]},
    ):
        with pytest.raises(ValidationError, match="only text is accepted in this place"):
            MessagesRequest.model_validate(message(**body))
