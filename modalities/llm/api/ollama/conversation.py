"""Translates requests of Ollama's API to chat requests.

Owns the translation of messages, options and switches. Knows no route.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from triptych.core.errors import InvalidRequest
from triptych.modalities.llm.api.ollama.protocol import (
    AnswerFields,
    GenerateRequest,
    OllamaChatRequest,
    OllamaMessage,
    OllamaOptions,
)
from triptych.modalities.llm.api.translation import Fields, call_fields, schema_form, without_none

_SAME = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "stop"),
    *("repeat_penalty", "presence_penalty", "frequency_penalty"),
)
"""Options with the same name in chat."""
CHAT_NAMES = {
    "messages": "messages",
    "continue_final_message": "messages",
    "response_format": "format",
    "thinking_budget|enable_thinking|reasoning_effort": "think",
}
"""This API's names of chat's fields."""
GENERATE_NAMES = {**CHAT_NAMES, "messages": "prompt"}


def chat_fields(body: OllamaChatRequest, model: str) -> Fields:
    """The fields of the equivalent chat request to `model`. Raises `InvalidRequest`."""
    messages = body.messages or []
    is_begun = bool(messages) and messages[-1].role == "assistant"
    calls = _Calls()
    fields = {
        "messages": [part for message in messages for part in calls.read(message)],
        "continue_final_message": True if is_begun else None,
        "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()] or None,
    }
    return without_none(fields) | answer_fields(body, model)


def generate_fields(body: GenerateRequest, model: str) -> Fields:
    """The fields of a chat request with a single prompt."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    asked = {"role": "user", "content": _content(body.prompt or "", body.images or ())}
    return {"messages": [*system, asked], **answer_fields(body, model)}


def answer_fields(body: AnswerFields, model: str) -> Fields:
    """The fields of the answer, for chat and generate."""
    options = body.options or OllamaOptions()
    is_word = isinstance(body.think, str)
    fields = {
        "model": model,
        **{name: getattr(options, name) for name in _SAME},
        "max_tokens": options.max_tokens,
        "response_format": _form(body.format),
        "thinking": True if is_word else body.think,
        "reasoning_effort": body.think if is_word else None,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
    }
    return without_none(fields)


def _form(form: str | dict[str, Any] | None) -> Fields | None:
    if isinstance(form, dict):
        return schema_form(form)
    return {"type": "json_object"} if form else None


def _content(text: str, images: Sequence[str]) -> str | list[Fields]:
    """The content of a message: images before the text."""
    if not images:
        return text
    urls = [image if image.startswith("data:") else f"data:;base64,{image}" for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*parts, {"type": "text", "text": text}]


class _Calls:
    """Translates messages in order, and adds ids to calls.

    A result belongs to the call with its id, else to the first call without a result of its tool,
    else to the first call without a result.
    """

    def __init__(self) -> None:
        self._num_calls = 0
        self._ids: set[str] = set()
        self._open: dict[str, str] = {}
        """The tools of the calls without a result, by the calls' ids."""

    def read(self, message: OllamaMessage) -> Iterator[Fields]:
        """The message as chat messages; images of a tool's message become a user's message."""
        fields: Fields = {"role": message.role, "content": message.content or ""}
        if message.role == "user":
            fields["content"] = _content(message.content or "", message.images or ())
        if message.thinking:
            fields["reasoning_content"] = message.thinking
        if message.tool_calls:
            fields["tool_calls"] = list(self._calls(message))
        if message.role == "tool":
            fields |= self._result(message)
        yield fields
        if message.role == "tool" and message.images:
            yield {"role": "user", "content": _content("", message.images)[:-1]}

    def _calls(self, message: OllamaMessage) -> Iterator[Fields]:
        for call in message.tool_calls or ():
            self._num_calls += 1
            call_id = call.id or f"call{self._num_calls:05}"
            self._ids.add(call_id)
            self._open[call_id] = call.function.name
            yield call_fields(call_id, call.function.name, call.function.arguments or {})

    def _result(self, message: OllamaMessage) -> Fields:
        """The call that a result answers. Raises `InvalidRequest` if there is none."""
        call_id, name = message.tool_call_id, message.tool_name
        if call_id not in self._ids:
            fitting = (each for each, tool in self._open.items() if tool == name)
            call_id = next(fitting, None) or next(iter(self._open), None)
        if call_id not in self._open:
            raise InvalidRequest(
                "A message of role tool answers an earlier tool call of the assistant, and all have"
                " a result.",
                param="messages",
            )
        tool = self._open.pop(call_id)
        return {"tool_call_id": call_id, "name": name or tool}
