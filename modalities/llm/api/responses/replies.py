"""The answers of the Responses API.

Owns their fields. A field is sent if it was set: OpenAI sends some fields as null and omits others.
Knows nothing of HTTP and of how an answer is generated.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field

from triptych.core.errors import (
    RateLimited,
    RequestError,
    RequestTimeout,
    StoreFull,
    TriptychError,
)
from triptych.modalities.llm.api.replies import ChatLogprob, UsageReply
from triptych.modalities.llm.api.responses.items import ItemStatus
from triptych.modalities.llm.api.responses.protocol import ResponseRequest

ResponseStatus: TypeAlias = Literal[
    "queued", "in_progress", "completed", "incomplete", "failed", "cancelled"
]
WHOLE: tuple[ResponseStatus, ...] = ("completed", "incomplete")
UNFINISHED: tuple[ResponseStatus, ...] = ("queued", "in_progress")


class OutputText(BaseModel):
    """Text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] = []


class ReasoningText(BaseModel):
    """Text of reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class MessageOutput(BaseModel):
    """The text of an answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class ReasoningOutput(BaseModel):
    """The reasoning before an answer, without a summary."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]


class FunctionCallOutput(BaseModel):
    """A call of a client's function; its `arguments` are JSON text."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


OutputItem: TypeAlias = Annotated[
    MessageOutput | ReasoningOutput | FunctionCallOutput, Field(discriminator="type")
]


class InputDetails(BaseModel):
    """Kinds of input tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ReasoningDetails(BaseModel):
    """Kinds of output tokens."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Token counts of an answer."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ReasoningDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: UsageReply) -> ResponseUsage:
        """The counts of chat under this API's names."""
        num_reasoning = usage.completion_tokens_details.reasoning_tokens
        cached = usage.prompt_tokens_details.cached_tokens
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=cached, cache_write_tokens=0),
            output_tokens=usage.completion_tokens,
            output_tokens_details=ReasoningDetails(reasoning_tokens=num_reasoning),
            total_tokens=usage.total_tokens,
        )


class ResponseFailure(BaseModel):
    """Why there is no answer. `type` is the stable code of the error."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str
    param: str | None = None
    type: str

    @classmethod
    def of(cls, error: TriptychError) -> ResponseFailure:
        """The error under this API's codes."""
        kinds = (
            (RateLimited, "rate_limit_exceeded"),
            ((RequestTimeout, StoreFull), "server_error"),
            (RequestError, "invalid_prompt"),
        )
        code: Any = next((code for kind, code in kinds if isinstance(error, kind)), "server_error")
        return cls(code=code, message=error.message, param=error.param, type=error.code)


class IncompleteDetails(BaseModel):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"]


class ConversationRef(BaseModel):
    """The conversation that an answer belongs to."""

    id: str


class ResponseReply(BaseModel):
    """Answer of `/v1/responses`."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: bool
    conversation: ConversationRef | None = None
    frequency_penalty: float
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


_ECHOED = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "safety_identifier",
    "user",
)


def first_fields(
    body: ResponseRequest, response_id: str, sampling: Mapping[str, float], *, is_kept: bool
) -> dict[str, Any]:
    """The first fields of a `ResponseReply`; `sampling` are the model's default parameters."""
    form = body.text and body.text.format
    effort = body.reasoning and body.reasoning.effort
    choice = "auto" if body.tool_choice is None else body.tool_choice
    return {
        **{name: getattr(body, name) for name in _ECHOED},
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "background": bool(body.background),
        "conversation": body.conversation_id and {"id": body.conversation_id},
        "error": None,
        "frequency_penalty": _number(
            body.frequency_penalty, sampling.get("frequency_penalty", 0.0)
        ),
        "incomplete_details": None,
        "metadata": body.metadata or {},
        "model": body.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": _number(body.presence_penalty, sampling.get("presence_penalty", 0.0)),
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default",
        "store": is_kept,
        "temperature": _number(body.temperature, sampling.get("temperature", 1.0)),
        "text": {"format": {"type": "text"} if form is None else _plain(form)},
        "tool_choice": choice if isinstance(choice, str) else _plain(choice),
        "tools": body.tool_set.shown(),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": _number(body.top_p, sampling.get("top_p", 1.0)),
        "truncation": "disabled",
    }


def _number(given: float | None, default: float) -> float:
    return default if given is None else given


def _plain(part: BaseModel) -> dict[str, Any]:
    return part.model_dump(exclude_none=True, by_alias=True)


class ResponseDeleted(BaseModel):
    """Answer to the deletion of a response."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(BaseModel):
    """Answer of `/v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ItemList(BaseModel):
    """A page of items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ConversationReply(BaseModel):
    """Answer of `/v1/conversations`."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(BaseModel):
    """Answer to the deletion of a conversation."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True
