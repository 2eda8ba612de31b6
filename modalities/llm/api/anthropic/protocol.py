"""The requests of Anthropic's API, field by field.

Owns what each field may be: honoured, accepted as inert (it asks for nothing that could change an
answer here), or refused by name with the alternative; any other name is an unknown field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from triptych.core import limits
from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.http.fields import Label, Name, Strict, Text, inert, without_refused
from triptych.core.limits import SAMPLING_RANGES
from triptych.modalities.llm.api.anthropic import unsupported
from triptych.modalities.llm.api.anthropic.blocks import Block, TextBlock
from triptych.modalities.llm.api.constraints import JsonSchema
from triptych.modalities.llm.api.messages import CacheControl, is_list
from triptych.modalities.llm.api.protocol import StopString, within
from triptych.modalities.llm.api.tools.schema import ToolName

_OF_ROLE = {
    "user": {"text", "image", "tool_result"},
    "assistant": {"text", "thinking", "redacted_thinking", "tool_use"},
    "system": {"text"},
}
"""The blocks that messages of each role are made of."""


class Turn(Strict):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[Text, Tag(":text")]
        | Annotated[
            list[Block],
            Field(max_length=limits.MAX_CONTENT_PARTS, fail_fast=True),
            Tag(":list"),
        ],
        Discriminator(is_list),
    ]

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        wrong = {block.type for block in self.blocks} - _OF_ROLE[self.role]
        if wrong:
            raise InvalidRequest(f"The {self.role} says no {min(wrong)}.", param="messages")
        return self

    @property
    def blocks(self) -> list[Block]:
        """What it says."""
        return blocks_of(self.content)


def blocks_of(content: str | list[Any] | None) -> list[Any]:
    """A content in blocks: a text is one of them."""
    if isinstance(content, str):
        return [TextBlock(type="text", text=content)]
    return content or []


class ToolDefinition(Strict):
    """A tool of the client's. `input_schema` is a JSON schema of an object."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Text | None = None
    input_schema: JsonSchema
    strict: bool | None = Field(
        default=None,
        description="Follow the schema under `auto`, too; calls that are forced always do.",
    )
    eager_input_streaming: bool | None = inert("eager_input_streaming")
    cache_control: CacheControl | None = inert("cache_control")

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise UnsupportedOption(
                f"A tool of type {kind[:40]!a} is not offered: {unsupported.IN_CLIENT}",
                param="tools",
            )
        return without_refused(value, unsupported.TOOL)


class ToolChoiceOption(Strict):
    """Whether the model calls a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = Field(
        default=None, description="An answer ends with its first call."
    )

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise InvalidRequest("A name goes with the type tool, and with no other.", param="name")
        return self


class ThinkingConfig(Strict):
    """Whether the model thinks first, and what is shown of it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=SAMPLING_RANGES["max_tokens"][1])] | None = Field(
        default=None, description="Most tokens of thoughts."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description="`omitted`: thoughts are counted, and not shown."
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


class OutputFormat(Strict):
    """The form of an answer."""

    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")


class OutputConfig(Strict):
    """How an answer is made."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="How much to think, where the template can say so."
    )
    format: OutputFormat | None = Field(default=None, description="JSON by a schema.")

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        return without_refused(value, unsupported.OUTPUT)


class ContextEdit(Strict):
    """A way to shorten a conversation; only the one that leaves it as it is."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        wanted = {"type": "clear_thinking_20251015", "keep": "all"}
        if isinstance(value, dict) and value != wanted:
            raise UnsupportedOption(
                "Nothing is cleared from a conversation here: shorten it in the client. Of"
                " context_management only clear_thinking_20251015 with keep 'all' is taken.",
                param="context_management",
            )
        return value


class ContextManagement(Strict):
    """How a conversation is shortened before it is answered."""

    edits: Annotated[list[ContextEdit], Field(max_length=16, fail_fast=True)] | None = None


class Diagnosis(Strict):
    """What clients ask of caches."""

    previous_message_id: Label | None = None


class RequestLabels(Strict):
    """Who asks, as the client calls them."""

    user_id: Label | None = None


class ConversationFields(Strict):
    """What counting tokens and answering share."""

    model: Name
    messages: Annotated[
        list[Turn], Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True)
    ]
    system: (
        Annotated[
            Annotated[Text, Tag(":text")]
            | Annotated[
                list[TextBlock],
                Field(max_length=limits.MAX_CONTENT_PARTS, fail_fast=True),
                Tag(":list"),
            ],
            Discriminator(is_list),
        ]
        | None
    ) = None
    tools: (
        Annotated[list[ToolDefinition], Field(max_length=limits.MAX_TOOLS, fail_fast=True)] | None
    ) = None
    tool_choice: ToolChoiceOption | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(
        default=None, description="As output_config.format, its older name."
    )
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = inert("cache_control")

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        return without_refused(value, unsupported.BODY)

    @model_validator(mode="after")
    def _check_end(self) -> Self:
        last = self.messages[-1]
        if last.role == "assistant" and any(block.type == "tool_use" for block in last.blocks):
            raise InvalidRequest(
                "The conversation ends with tool_use: send a tool_result for each.",
                param="messages",
            )
        return self


class CountTokensRequest(ConversationFields):
    """Body of `/v1/messages/count_tokens`."""


class MessagesRequest(ConversationFields):
    """Body of `/v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, le=SAMPLING_RANGES["max_tokens"][1])] = Field(
        description="Most tokens of the answer; it ends earlier where the context does."
    )
    temperature: float | None = within("temperature", "0 is greedy.")
    top_p: float | None = within("top_p", "Nucleus sampling; 1 is off.")
    top_k: int | None = within("top_k", "Draw from the k likeliest tokens; 0 is off.")
    stop_sequences: (
        Annotated[list[StopString], Field(max_length=limits.MAX_STOP_STRINGS, fail_fast=True)]
        | None
    ) = None
    stream: bool | None = Field(default=None, description="Answer with server-sent events.")
    metadata: RequestLabels | None = inert("metadata")
    service_tier: Literal["auto", "standard_only"] | None = inert("service_tier")
    diagnostics: Diagnosis | None = inert("diagnostics")
