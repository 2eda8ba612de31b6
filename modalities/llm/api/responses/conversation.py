"""Translates requests of the Responses API to chat requests.

Owns the translation of items, tools and formats, and this API's names of chat's fields. Knows no
route and no store.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from triptych.core.errors import InvalidRequest
from triptych.modalities.llm.api.responses.items import (
    Content,
    FunctionCallItem,
    FunctionOutputItem,
    ImageContent,
    KeptItem,
    MessageItem,
    ReasoningItem,
)
from triptych.modalities.llm.api.responses.protocol import ResponseInput, ResponseRequest
from triptych.modalities.llm.api.sampling_fields import SamplingFields
from triptych.modalities.llm.api.translation import Fields, Names, without_none

_LEADING = ("system", "developer")
_BETWEEN = "\n\n"
_DETAILS = {"original": "high"}
CHAT_NAMES: Names = MappingProxyType(
    {
        "max_completion_tokens|max_tokens": "max_output_tokens",
        r"^messages|messages\[\d+\]": "input",  # "messages" is a word of errors, too
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
    }
)
"""This API's names of chat's fields."""


def chat_fields(body: ResponseInput, items: Sequence[KeptItem]) -> Fields:
    """The fields of a chat request with these items as messages."""
    fields = {
        "model": body.model,
        "messages": _messages(body.instructions, items),
        **body.tool_set.for_chat(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = body.text.format.for_chat()
    if isinstance(body, ResponseRequest):
        fields |= {
            **{name: getattr(body, name) for name in SamplingFields.model_fields},
            "max_completion_tokens": body.max_output_tokens,
            "structured_outputs": body.structured_outputs
            and body.structured_outputs.model_dump(by_alias=True, exclude_none=True),
        }
        if body.has_logprobs:
            fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return without_none(fields)


def _messages(instructions: str | None, items: Sequence[KeptItem]) -> list[Fields]:
    """The messages; all leading system messages become one, as many templates require."""
    said = [] if instructions is None else [instructions]
    num_leading = 0
    for item in items:
        if not isinstance(item, MessageItem) or item.role not in _LEADING:
            break
        said.append(item.text)
        num_leading += 1
    messages = [{"role": "system", "content": _BETWEEN.join(said)}] if said else []
    results = _results(items)
    spoken = _with_images_said(_whole(items[num_leading:], results))
    return [*messages, *_turns(spoken)]


def _results(items: Sequence[KeptItem]) -> set[str]:
    """The ids of calls with a result. Raises `InvalidRequest` for a result without a call."""
    called: set[str] = set()
    results: set[str] = set()
    for item in items:
        if isinstance(item, FunctionCallItem):
            called.add(item.call_id)
        elif isinstance(item, FunctionOutputItem):
            results.add(item.call_id)
            if item.call_id not in called:
                raise InvalidRequest(
                    "A function_call_output needs the call_id of an earlier function_call;"
                    f" {item.call_id[:80]!a} is unknown.",
                    param="input",
                )
    return results


@dataclass(slots=True)
class _Answer:
    """An earlier answer, assembled from its items."""

    text: str | None = None
    reasoning: list[str] = field(default_factory=list)
    calls: list[Fields] = field(default_factory=list)

    def add(self, item: KeptItem) -> bool:
        """Add an item of the same answer; false for an item that does not belong to it."""
        match item:
            case ReasoningItem() if self.text is None and not self.calls:
                self.reasoning.append(item.text)
            case MessageItem(role="assistant") if self.text is None and not self.calls:
                self.text = item.text
            case FunctionCallItem():
                function = {"name": item.place.model_name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                self.calls.append(call)
            case _:
                return False
        return True

    def message(self) -> Fields:
        """The answer as a chat message."""
        message: Fields = {"role": "assistant", "content": self.text or ""}
        if self.calls:
            message["tool_calls"] = self.calls
        if any(self.reasoning):
            message["reasoning_content"] = _BETWEEN.join(self.reasoning)
        return message


def _turns(items: Iterable[KeptItem]) -> Iterator[Fields]:
    answer: _Answer | None = None
    for item in items:
        if answer is not None and answer.add(item):
            continue
        if answer is not None:
            yield answer.message()
        answer = _Answer()
        if not answer.add(item):
            answer = None
            yield _turn(item)
    if answer is not None:
        yield answer.message()


def _whole(items: Iterable[KeptItem], results: Container[str]) -> Iterator[KeptItem]:
    """The items without incomplete calls, unless a call has a result."""
    for item in items:
        match item:
            case FunctionCallItem(status="incomplete") if item.call_id not in results:
                continue
            case _:
                yield item


def _with_images_said(items: Iterable[KeptItem]) -> Iterator[KeptItem]:
    """The items with images of results in the user's next message: only users' may have images."""
    images: list[Content] = []
    for item in items:
        if isinstance(item, FunctionOutputItem):
            yield item
            images += item.images
        elif isinstance(item, MessageItem) and item.role == "user" and images:
            yield _image_message([*images, *item.parts])
            images = []
        else:
            if images:
                yield _image_message(images)
            images = []
            yield item
    if images:
        yield _image_message(images)


def _image_message(parts: list[Content]) -> MessageItem:
    return MessageItem.model_construct(role="user", content=parts)


def _turn(item: KeptItem) -> Fields:
    if isinstance(item, FunctionOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": item.text}
    assert isinstance(item, MessageItem)
    if not item.images:
        return {"role": item.role, "content": item.text}
    parts = [
        _image(part) if isinstance(part, ImageContent) else {"type": "text", "text": part.text}
        for part in item.parts
    ]
    return {"role": item.role, "content": parts}


def _image(part: ImageContent) -> Fields:
    asked = part.detail or "auto"
    detail = _DETAILS.get(asked, asked)
    if part.file_id is not None:
        return {"type": "image_file", "image_file": {"file_id": part.file_id, "detail": detail}}
    return {"type": "image_url", "image_url": {"url": part.image_url, "detail": detail}}
