"""The requests of the Responses API, field by field.

Owns the values that each field may have, by the rules of `core.http.fields`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from triptych.core import limits
from triptych.core.errors import InvalidRequest
from triptych.core.http.fields import (
    IgnoresHints,
    Label,
    Metadata,
    Name,
    NamesModel,
    NullIsAbsent,
    Refusing,
    Text,
    inert,
)
from triptych.core.limits import SAMPLING_RANGES
from triptych.modalities.llm.api.constraints import JsonSchema, StructuredOutputs
from triptych.modalities.llm.api.messages import TemplateOptions, check_num_parts, is_list
from triptych.modalities.llm.api.responses import unsupported
from triptych.modalities.llm.api.responses.items import InputItem, KeptItem
from triptych.modalities.llm.api.responses.tools import ResponseTools, ResponseToolSet, ToolChoices
from triptych.modalities.llm.api.sampling_fields import InertLabels, SamplingFields, within
from triptych.modalities.llm.api.unsupported import REFUSED_VALUES

_MAX_NEW_ITEMS = 20
"""Of a conversation at once, as OpenAI's."""

Include: TypeAlias = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
Includes = Annotated[list[Include], Field(max_length=64, fail_fast=True)]


class TextFormat(NullIsAbsent):
    """The format of the text: any text, any JSON, or JSON by a schema with an optional name."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Text | None = None
    schema_: JsonSchema | None = Field(default=None, alias="schema")
    strict: bool | None = Field(
        default=None, description="Schemas are enforced either way, or refused."
    )

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        given = (self.name, self.description, self.schema_, self.strict)
        is_schema = self.type == "json_schema"
        if self.schema_ is None if is_schema else any(part is not None for part in given):
            raise InvalidRequest(
                "A schema goes with the type json_schema, and with no other.", param="text.format"
            )
        return self

    def for_chat(self) -> dict[str, Any]:
        """The format as a chat request has it."""
        if self.type != "json_schema":
            return {"type": self.type}
        schema = self.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        return {"type": self.type, "json_schema": schema}


class TextOptions(NullIsAbsent, Refusing):
    """Options of the text."""

    refused = unsupported.TEXT

    format: TextFormat | None = None


class ReasoningOptions(NullIsAbsent, Refusing):
    """Options of the model's reasoning."""

    refused = unsupported.REASONING

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        default=None,
        description="Amount of reasoning, if the template supports it; `none`: no reasoning.",
    )
    summary: Literal["auto", "concise", "detailed"] | None = inert("summary")
    generate_summary: Literal["auto", "concise", "detailed"] | None = inert("generate_summary")


class ConversationName(NullIsAbsent):
    """A conversation by its id."""

    id: Name


def _conversation_kind(value: Any) -> str:
    return ":id" if isinstance(value, str) else ":object"


def _not_empty(value: Any) -> Any:
    if not value:
        raise InvalidRequest("The input is empty.", param="input")
    return value


class ResponseInput(NamesModel, IgnoresHints, NullIsAbsent, Refusing):
    """The parts of a prompt, for answering and counting tokens."""

    refused = unsupported.REQUEST
    ignored = unsupported.IGNORED
    refused_values = REFUSED_VALUES
    tasks = ("chat",)

    input: (
        Annotated[
            Annotated[Text, Tag(":text")]
            | Annotated[
                list[InputItem], Field(max_length=limits.MAX_MESSAGES, fail_fast=True), Tag(":list")
            ],
            Discriminator(is_list),
            AfterValidator(_not_empty),
            BeforeValidator(check_num_parts),
        ]
        | None
    ) = Field(default=None, description="A user's text, or items.")
    instructions: Text | None = Field(
        default=None, description="A system message, for this answer only."
    )
    previous_response_id: Name | None = Field(
        default=None, description="The answer that this one continues, with all before it."
    )
    conversation: (
        Annotated[
            Annotated[Name, Tag(":id")] | Annotated[ConversationName, Tag(":object")],
            Discriminator(_conversation_kind),
        ]
        | None
    ) = Field(
        default=None,
        description="Its items precede the input; input and answer are added to it.",
    )
    tools: ResponseTools | None = Field(
        default=None,
        description="Functions; the model sees functions of namespaces as a flat list.",
    )
    tool_choice: ToolChoices | None = Field(
        default=None, description="`none`: no tool is offered. `auto` is the default."
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="`false`: an answer ends with its first call."
    )
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: TemplateOptions | None = Field(
        default=None, description="Switches of the model's chat template, as in chat."
    )
    text: TextOptions | None = None

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if self.previous_response_id is not None and self.conversation is not None:
            raise InvalidRequest(
                "previous_response_id and conversation both name earlier items: send one.",
                param="conversation",
            )
        if self.input is None and self.previous_response_id is None and self.conversation is None:
            raise InvalidRequest("input is required.", param="input")
        return self

    @property
    def thinking_fields(self) -> list[str]:
        """The fields that ask for reasoning."""
        effort = self.reasoning and self.reasoning.effort
        return [] if effort in (None, "none") else ["reasoning.effort"]

    @property
    def tool_set(self) -> ResponseToolSet:
        """The functions that may be called."""
        return ResponseToolSet(self.tools or ())

    @property
    def conversation_id(self) -> str | None:
        """The conversation, if there is one."""
        if isinstance(self.conversation, ConversationName):
            return self.conversation.id
        return self.conversation


class ResponseStreamOptions(NullIsAbsent):
    """Additional content of a stream."""

    include_obfuscation: bool | None = inert("include_obfuscation")


class ResponseRequest(ResponseInput, SamplingFields, InertLabels):
    """Body of `/v1/responses`."""

    max_output_tokens: Annotated[int, Field(ge=1, le=SAMPLING_RANGES["max_tokens"][1])] | None = (
        Field(default=None, description="Max tokens of the answer, reasoning included.")
    )
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="The format of the text, as in chat; or use text.format."
    )
    top_logprobs: int | None = within("top_logprobs", "Alternatives reported per token.")
    include: Includes | None = Field(
        default=None,
        description="`message.output_text.logprobs`; the other values change nothing.",
    )
    metadata: Metadata | None = Field(default=None, description="Labels, stored with the answer.")
    store: bool | None = Field(
        default=None, description="Store the answer (the default), if the server stores answers."
    )
    background: bool | None = Field(
        default=None, description="Return immediately, and answer in the background."
    )
    stream: bool | None = Field(default=None, description="Answer with server-sent events.")
    stream_options: ResponseStreamOptions | None = None
    max_tool_calls: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = inert("max_tool_calls")
    user: Label | None = inert("user")

    @model_validator(mode="after")
    def _check_background(self) -> Self:
        if self.background and self.store is False:
            raise InvalidRequest("background needs store.", param="background")
        return self

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())


NewItems = Annotated[list[KeptItem], Field(max_length=_MAX_NEW_ITEMS, fail_fast=True)]


class ConversationRequest(NullIsAbsent):
    """Body of `/v1/conversations`."""

    items: NewItems | None = Field(default=None, description="The first items.")
    metadata: Metadata | None = None


class ConversationChange(NullIsAbsent):
    """Body of `/v1/conversations/{conversation_id}`."""

    metadata: Metadata


class ItemsRequest(NullIsAbsent):
    """Body of `/v1/conversations/{conversation_id}/items`."""

    items: Annotated[NewItems, Field(min_length=1)]
