"""The requests of Anthropic's API, field by field.

Owns the values that each field may have, by the rules of `core.http.fields`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, takewhile
from operator import attrgetter
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from triptych.core import limits
from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.http.fields import (
    IgnoresHints,
    Label,
    NamesModel,
    Refusing,
    Strict,
    Text,
    inert,
    unknown_type,
    without_refused,
)
from triptych.core.limits import SAMPLING_RANGES
from triptych.modalities.llm.api.anthropic import unsupported
from triptych.modalities.llm.api.anthropic.blocks import (
    Block,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from triptych.modalities.llm.api.constraints import JsonSchema
from triptych.modalities.llm.api.messages import CacheControl, TextOrParts, check_num_parts
from triptych.modalities.llm.api.sampling_fields import StopString, within
from triptych.modalities.llm.api.tools.schema import ToolName

ShownReasoning = Literal["whole", "omitted", "hidden"]
"""How reasoning is shown: whole, as blocks without text, or not at all."""
_OF_ROLE = {
    "user": {"text", "image", "document", "tool_result"},
    "assistant": {"text", "thinking", "redacted_thinking", "tool_use"},
    "system": {"text"},
}
"""The types of blocks in messages of each role."""


class Turn(Strict):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: TextOrParts[Block]

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        wrong = {block.type for block in self.blocks} - _OF_ROLE[self.role]
        if wrong:
            raise InvalidRequest(
                f"A message of role {self.role} has no {min(wrong)} block.", param="messages"
            )
        return self

    @property
    def blocks(self) -> list[Block]:
        """The blocks of the content."""
        return blocks_of(self.content)


def blocks_of(content: str | list[Any] | None) -> list[Any]:
    """The blocks of a content: a text is one block, and so is an empty content."""
    if isinstance(content, str):
        return [TextBlock(type="text", text=content)]
    return content or blocks_of("")


def check_calls(turns: Sequence[Turn]) -> None:
    """Raise `InvalidRequest` unless each call has one result, at the beginning of the next turn."""
    known: set[str] = set()
    pending: set[str] = set()
    spoken = [turn for turn in turns if turn.role != "system"]
    for role, group in groupby(spoken, attrgetter("role")):
        blocks = [block for turn in group for block in blocks_of(turn.content)]
        if role == "assistant":
            pending = _calls_of(blocks, known)
        else:
            _check_results(blocks, pending)
            pending = set()
    if pending:
        raise _without_result(pending)


def _calls_of(blocks: Sequence[Block], known: set[str]) -> set[str]:
    """The ids of the calls in `blocks`, added to `known`. Raises `InvalidRequest` for one twice."""
    ids = [block.id for block in blocks if isinstance(block, ToolUseBlock)]
    fresh = set(ids) - known
    if len(fresh) < len(ids):
        raise InvalidRequest("Two blocks of tool_use have one id.", param="messages")
    known |= fresh
    return fresh


def _check_results(blocks: Sequence[Block], pending: set[str]) -> None:
    """Raise `InvalidRequest` unless a turn begins with the results of calls before it."""
    begin = list(takewhile(lambda block: isinstance(block, ToolResultBlock), blocks))
    ids = [block.tool_use_id for block in blocks if isinstance(block, ToolResultBlock)]
    if len(ids) > len(set(ids)):
        raise InvalidRequest("Two blocks of tool_result have one tool_use_id.", param="messages")
    if orphans := set(ids) - pending:
        raise InvalidRequest(
            f"tool_result {min(orphans)[:80]!a} has no tool_use in the turn before.",
            param="messages",
        )
    if pending - set(ids):
        raise _without_result(pending - set(ids))
    if len(begin) < len(ids):
        raise InvalidRequest("A turn begins with its tool_result blocks.", param="messages")


def _without_result(ids: set[str]) -> InvalidRequest:
    return InvalidRequest(
        f"tool_use {min(ids)[:80]!a} has no tool_result: the next turn begins with one for each.",
        param="messages",
    )


class ToolDefinition(Strict):
    """A tool of the client. `input_schema` is a JSON schema of an object."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Text | None = None
    input_schema: JsonSchema
    strict: bool | None = Field(
        default=None,
        description="Enforce the schema also under `auto`; forced calls always follow it.",
    )
    eager_input_streaming: bool | None = inert("eager_input_streaming")
    cache_control: CacheControl | None = inert("cache_control")

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        if kind := unknown_type(value, "custom"):
            raise UnsupportedOption(
                f"A tool of type {kind} is not offered: {unsupported.IN_CLIENT}",
                param="tools",
            )
        return without_refused(value, unsupported.TOOL)


class ToolChoiceOption(Strict):
    """Whether the model calls a tool, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = Field(
        default=None, description="End an answer with its first call."
    )

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise InvalidRequest("name goes with the type tool, and with no other.", param="name")
        return self


class ThinkingConfig(Strict):
    """Whether the model reasons first, and how the reasoning is shown."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=SAMPLING_RANGES["max_tokens"][1])] | None = Field(
        default=None, description="Max tokens of reasoning."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description="`omitted`: reasoning is counted but not shown."
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") == "between_tools":
            raise UnsupportedOption(
                "thinking between_tools is not offered: use enabled, disabled or adaptive.",
                param="thinking",
            )
        return value

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise InvalidRequest(
                "budget_tokens goes with the type enabled, and with no other.",
                param="thinking.budget_tokens",
            )
        return self


class OutputFormat(Strict):
    """The format of an answer."""

    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")


class OutputConfig(Refusing):
    """Options of the answer."""

    refused = unsupported.OUTPUT

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="Amount of reasoning, if the template supports it."
    )
    format: OutputFormat | None = Field(default=None, description="JSON by a schema.")


class ContextEdit(Strict):
    """A way to shorten a conversation; only the one without effect is accepted."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        wanted = {"type": "clear_thinking_20251015", "keep": "all"}
        if isinstance(value, dict) and value != wanted:
            raise UnsupportedOption(
                "Conversations are not shortened here: do it in the client. Of context_management"
                " only clear_thinking_20251015 with keep 'all' is accepted.",
                param="context_management",
            )
        return value


class ContextManagement(Strict):
    """How a conversation is shortened before it is answered."""

    edits: Annotated[list[ContextEdit], Field(max_length=16, fail_fast=True)] | None = None


class Diagnosis(Strict):
    """Questions of clients about caches."""

    previous_message_id: Label | None = None


class RequestLabels(Strict):
    """The client's id of its user."""

    user_id: Label | None = None


class ConversationFields(NamesModel, IgnoresHints, Refusing):
    """The common fields of answering and counting tokens."""

    refused = unsupported.BODY
    ignored = unsupported.IGNORED
    tasks = ("chat",)

    messages: Annotated[
        list[Turn],
        Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True),
        BeforeValidator(check_num_parts),
    ]
    system: TextOrParts[TextBlock] | None = None
    tools: (
        Annotated[list[ToolDefinition], Field(max_length=limits.MAX_TOOLS, fail_fast=True)] | None
    ) = None
    tool_choice: ToolChoiceOption | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(
        default=None, description="Older name of output_config.format."
    )
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = inert("cache_control")

    @model_validator(mode="after")
    def _check_conversation(self) -> Self:
        check_calls(self.messages)
        return self

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        newer = self.output_config.format if self.output_config else None
        if newer and self.output_format and newer != self.output_format:
            raise InvalidRequest(
                "output_format and output_config.format are the same field and differ: send only"
                " the latter.",
                param="output_format",
            )
        return self


class CountTokensRequest(ConversationFields):
    """Body of `/v1/messages/count_tokens`."""


class MessagesRequest(ConversationFields):
    """Body of `/v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, le=SAMPLING_RANGES["max_tokens"][1])] = Field(
        description="Max tokens of the answer; it ends earlier at the end of the context."
    )
    temperature: float | None = within("temperature", "0 is greedy.")
    top_p: float | None = within("top_p", "Nucleus sampling; 1 is off.")
    top_k: int | None = within("top_k", "Sample from the k likeliest tokens; 0 is off.")
    stop_sequences: (
        Annotated[list[StopString], Field(max_length=limits.MAX_STOP_STRINGS, fail_fast=True)]
        | None
    ) = None
    stream: bool | None = Field(default=None, description="Answer with server-sent events.")
    metadata: RequestLabels | None = inert("metadata")
    service_tier: Literal["auto", "standard_only"] | None = inert("service_tier")
    diagnostics: Diagnosis | None = inert("diagnostics")

    @property
    def shown_reasoning(self) -> ShownReasoning:
        """How reasoning is shown: hidden unless requested."""
        if self.thinking is None or self.thinking.type == "disabled":
            return "hidden"
        return "omitted" if self.thinking.display == "omitted" else "whole"

    @model_validator(mode="after")
    def _check_reasoning(self) -> Self:
        budget = self.thinking.budget_tokens if self.thinking else None
        if budget is not None and budget >= self.max_tokens:
            raise InvalidRequest(
                "thinking.budget_tokens must be less than max_tokens.",
                param="thinking.budget_tokens",
            )
        return self
