"""From the body of a request of Ollama's API to the chat request that means the same.

Owns how messages, options and switches are said in the words of chat. Knows no route.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

from triptych.modalities.llm.api.ollama.protocol import (
    AnswerFields,
    GenerateRequest,
    OllamaChatRequest,
    OllamaMessage,
    OllamaOptions,
)

Fields = dict[str, Any]
_SAME = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "stop"),
    *("repeat_penalty", "presence_penalty", "frequency_penalty"),
)
"""Options that chat calls the same."""


def chat_fields(body: OllamaChatRequest, model: str) -> Fields:
    """The fields of a chat request to `model` that asks for the same."""
    messages = body.messages or []
    is_begun = bool(messages) and messages[-1].role == "assistant"
    calls = _Calls()
    fields = {
        "messages": [part for message in messages for part in calls.read(message)],
        "continue_final_message": True if is_begun else None,
        "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()] or None,
    }
    return _given(fields) | answer_fields(body, model)


def generate_fields(body: GenerateRequest, model: str) -> Fields:
    """The same of a prompt, which is a conversation's beginning."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    asked = {"role": "user", "content": _content(body.prompt or "", body.images or ())}
    return {"messages": [*system, asked], **answer_fields(body, model)}


def answer_fields(body: AnswerFields, model: str) -> Fields:
    """What both have in common."""
    options = body.options or OllamaOptions()
    is_word = isinstance(body.think, str)
    fields = {
        "model": model,
        **{name: getattr(options, name) for name in _SAME},
        "response_format": _form(body.format),
        "thinking": True if is_word else body.think,
        "reasoning_effort": body.think if is_word else None,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
    }
    return _given(fields)


def _given(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if value is not None}


def _form(form: str | dict[str, Any] | None) -> Fields | None:
    if isinstance(form, dict):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form}}
    return {"type": "json_object"} if form else None


def _content(text: str, images: Sequence[str]) -> str | list[Fields]:
    """Pictures come before the words on them."""
    if not images:
        return text
    urls = [image if image.startswith("data:") else f"data:;base64,{image}" for image in images]
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*pictures, {"type": "text", "text": text}]


class _Calls:
    """Reads messages in order, and gives calls the ids that Ollama's have not.

    A result is that of the first call of its tool that has none yet.
    """

    def __init__(self) -> None:
        self._num_calls = 0
        self._open: defaultdict[str, deque[str]] = defaultdict(deque)

    def read(self, message: OllamaMessage) -> Iterator[Fields]:
        """The message in the words of chat; the pictures of a tool's are a user's."""
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
            self._open[call.function.name].append(call_id)
            arguments = json.dumps(call.function.arguments or {}, ensure_ascii=False)
            function = {"name": call.function.name, "arguments": arguments}
            yield {"id": call_id, "type": "function", "function": function}

    def _result(self, message: OllamaMessage) -> Fields:
        open_ids = self._open[message.tool_name] if message.tool_name else self._next_open()
        call_id = message.tool_call_id or (open_ids.popleft() if open_ids else None)
        return _given({"tool_call_id": call_id, "name": message.tool_name})

    def _next_open(self) -> deque[str]:
        return next((ids for ids in self._open.values() if ids), deque())
