"""Translates requests of Anthropic's API to chat requests.

Owns the translation of turns, blocks, tools and switches. Knows no route.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from triptych.modalities.llm.api.anthropic.blocks import (
    BETWEEN_BLOCKS,
    CALL_PREFIX,
    Block,
    DocumentBlock,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from triptych.modalities.llm.api.anthropic.protocol import (
    ConversationFields,
    MessagesRequest,
    ToolChoiceOption,
    Turn,
    blocks_of,
)
from triptych.modalities.llm.api.translation import (
    Fields,
    Names,
    call_fields,
    schema_form,
    without_none,
)

_BILLING = "x-anthropic-billing-header:"
"""The beginning of a block that coding assistants send for billing; it differs in each request."""
_ERROR = "Error: "
_TEXTS = (TextBlock, DocumentBlock)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_fields(body: ConversationFields) -> Fields:
    """The fields of the equivalent chat request."""
    fields = {
        "model": body.model,
        "messages": list(_messages(body)),
        "continue_final_message": body.messages[-1].role == "assistant" or None,
        **_tool_fields(body),
        **_thinking_fields(body),
        **_form_fields(body),
    }
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
        }
    return without_none(fields)


def chat_names(body: ConversationFields) -> Names:
    """The body's names of the chat request's fields."""
    is_older = body.output_format is not None
    return {
        "messages": "messages",
        "continue_final_message": "messages",
        "response_format": "output_format" if is_older else "output_config.format",
        r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
        r"tools\[(\d+)\]\.function\.description": r"tools[\1].description",
        r"tools\[(\d+)\]\.function\.name": r"tools[\1].name",
        "tool_choice": "tool_choice",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "thinking_budget": "thinking.budget_tokens",
        "enable_thinking": "thinking",
        "reasoning_effort": "output_config.effort",
    }


def _messages(body: ConversationFields) -> Iterator[Fields]:
    if system := _system(body):
        yield {"role": "system", "content": system}
    names: dict[str, str] = {}  # of the tools called, by the calls' ids
    for role, turns in groupby(body.messages, attrgetter("role")):
        blocks = [block for turn in turns for block in _blocks(turn)]
        if role == "assistant":
            names |= {block.id: block.name for block in blocks if isinstance(block, ToolUseBlock)}
            yield _assistant(blocks)
        else:
            yield from _results(blocks, names)
            if parts := list(_parts(_user_blocks(blocks))):
                yield {"role": role, "content": parts}


def _blocks(turn: Turn) -> list[Block]:
    return turn.blocks


def _system(body: ConversationFields) -> str:
    texts = [block.text for block in blocks_of(body.system)]
    return BETWEEN_BLOCKS.join(text for text in texts if not text.startswith(_BILLING))


def _assistant(blocks: Sequence[Block]) -> Fields:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    reasoning = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        call_fields(block.id.removeprefix(CALL_PREFIX), block.name, block.input)
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    message: Fields = {"role": "assistant", "content": BETWEEN_BLOCKS.join(texts)}
    if reasoning:
        message["reasoning_content"] = BETWEEN_BLOCKS.join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _results(blocks: Iterable[Block], names: Mapping[str, str]) -> Iterator[Fields]:
    """The results of tools, one message each, without their images."""
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            content = blocks_of(block.content)
            texts = [part.text for part in content if isinstance(part, _TEXTS)]
            text = BETWEEN_BLOCKS.join(texts)
            if block.is_error and not text.startswith(_ERROR):
                text = _ERROR + text
            call_id = block.tool_use_id.removeprefix(CALL_PREFIX)
            named = {"tool_call_id": call_id, "name": names[block.tool_use_id]}
            yield {"role": "tool", "content": text, **named}


def _user_blocks(blocks: Sequence[Block]) -> Iterator[Block]:
    """The images of results, which only a user's message may have, then all other blocks."""
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            content = blocks_of(block.content)
            yield from (part for part in content if isinstance(part, ImageBlock))
    yield from (block for block in blocks if not isinstance(block, ToolResultBlock))


def _parts(blocks: Iterable[Block]) -> Iterator[Fields]:
    """Parts of images, and joined texts between them."""
    for is_text, group in groupby(blocks, lambda block: isinstance(block, _TEXTS)):
        if is_text:
            texts = [block.text for block in group if isinstance(block, _TEXTS)]
            yield {"type": "text", "text": BETWEEN_BLOCKS.join(texts)}
        else:
            images = [block for block in group if isinstance(block, ImageBlock)]
            for image in images:
                yield {"type": "image_url", "image_url": {"url": image.source.address}}


def _tool_fields(body: ConversationFields) -> Fields:
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
                "strict": tool.strict,
            },
        }
        for tool in body.tools or ()
    ]
    return {"tools": tools or None, **_choice_fields(body.tool_choice)}


def _choice_fields(choice: ToolChoiceOption | None) -> Fields:
    if choice is None:
        return {}
    named = {"type": "function", "function": {"name": choice.name}}
    return {
        "tool_choice": named if choice.type == "tool" else _CHOICES[choice.type],
        "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
    }


def _thinking_fields(body: ConversationFields) -> Fields:
    """Whether to reason: only if requested; `adaptive` leaves it to the template."""
    thinking, output = body.thinking, body.output_config
    effort = output.effort if output else None
    kind = thinking.type if thinking else "disabled"
    return {
        "thinking": None if kind == "adaptive" else {"type": kind},
        "thinking_budget": thinking.budget_tokens if thinking else None,
        "reasoning_effort": "xhigh" if effort == "max" else effort,
    }


def _form_fields(body: ConversationFields) -> Fields:
    output = body.output_config
    form = (output.format if output else None) or body.output_format
    if form is None:
        return {}
    return {"response_format": schema_form(form.schema_)}
