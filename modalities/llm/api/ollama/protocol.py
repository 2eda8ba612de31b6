"""The requests of Ollama's API, field by field.

Owns the values that each field may have, by the rules of `core.http.fields`.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)

from triptych.core import limits
from triptych.core.errors import InvalidRequest
from triptych.core.http.fields import (
    IgnoresHints,
    JsonObject,
    Label,
    Name,
    NamesModel,
    Refusing,
    Strict,
    Text,
    inert,
    without_refused,
)
from triptych.core.limits import SAMPLING_RANGES
from triptych.modalities.llm.api.constraints import JsonSchema
from triptych.modalities.llm.api.messages import check_num_parts
from triptych.modalities.llm.api.ollama import unsupported
from triptych.modalities.llm.api.protocol import AnyNumber
from triptych.modalities.llm.api.sampling_fields import Stop, TokenId, penalty, within
from triptych.modalities.llm.api.tools.schema import ToolName, Tools
from triptych.modalities.llm.api.unsupported import IGNORED_IN_MESSAGE

_MOST = SAMPLING_RANGES["max_tokens"][1]
_Count = Annotated[int, Field(ge=-1, le=_MOST)]
Images = Annotated[list[Text], Field(max_length=limits.MAX_CONTENT_PARTS, fail_fast=True)]


def _whole(options: Any) -> Any:
    """`options` with whole floats as integers: in Ollama's JSON a number has no type."""
    if not isinstance(options, dict):
        return options
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in options.items()
    }


class OllamaOptions(IgnoresHints):
    """Sampling options, and options of a model's placement, which the operator sets."""

    ignored = unsupported.IGNORED_OPTIONS
    refused_values = unsupported.REFUSED_VALUES

    num_predict: Annotated[int, Field(ge=-2, le=_MOST)] | None = Field(
        default=None, description="Max tokens of an answer; -1 and -2: as many as fit."
    )
    num_ctx: Annotated[int, Field(ge=1, le=_MOST)] | None = Field(
        default=None,
        description="Max tokens of prompt and answer, up to the model's own context.",
    )
    temperature: float | None = within("temperature", "0 is greedy.")
    top_k: int | None = within("top_k", "Sample from the k likeliest tokens; 0 is off.")
    top_p: float | None = within("top_p", "Nucleus sampling; 1 is off.")
    min_p: float | None = within("min_p", "Drop tokens below this share of the likeliest.")
    seed: int | None = within("seed", "Same seed, same answer.")
    stop: Stop | None = Field(default=None, description="Text that ends an answer.")
    repeat_penalty: float | None = penalty("1 is off.")
    presence_penalty: float | None = within("presence_penalty", "Once; 0 is off.")
    frequency_penalty: float | None = within("frequency_penalty", "Per repetition; 0 is off.")
    mirostat_eta: AnyNumber | None = inert("mirostat_eta")
    mirostat_tau: AnyNumber | None = inert("mirostat_tau")
    num_keep: _Count | None = inert("num_keep")
    num_batch: _Count | None = inert("num_batch")
    num_gpu: _Count | None = inert("num_gpu")
    main_gpu: _Count | None = inert("main_gpu")
    num_thread: _Count | None = inert("num_thread")
    numa: bool | None = inert("numa")
    low_vram: bool | None = inert("low_vram")
    f16_kv: bool | None = inert("f16_kv")
    use_mmap: bool | None = inert("use_mmap")
    use_mlock: bool | None = inert("use_mlock")

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        return without_refused(_whole(value), unsupported.OPTIONS)

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.num_predict == 0:
            raise InvalidRequest(
                "num_predict is at least one token; -1 means as many as fit.", param="num_predict"
            )
        return self

    @property
    def max_tokens(self) -> int | None:
        """Max tokens of an answer; `None`: as many as fit."""
        return self.num_predict if self.num_predict and self.num_predict > 0 else None


class CalledTool(Strict):
    """A tool and the arguments of its call."""

    name: ToolName
    arguments: JsonObject | None = None
    index: _Count | None = None
    description: Text | None = None


class OllamaCall(Strict):
    """A call in an earlier answer."""

    id: Label | None = None
    type: Literal["function"] | None = None
    function: CalledTool


class OllamaMessage(IgnoresHints):
    """One message of a conversation."""

    ignored = IGNORED_IN_MESSAGE

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = Field(
        default=None, description="Reasoning before the answer; the template may render it."
    )
    images: Images | None = Field(default=None, description="Images in base64.")
    tool_calls: (
        Annotated[list[OllamaCall], Field(max_length=limits.MAX_TOOL_CALLS, fail_fast=True)] | None
    ) = None
    tool_name: ToolName | None = Field(default=None, description="The tool of this result.")
    tool_call_id: Label | None = Field(default=None, description="The id of its call, if any.")

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.images and self.role not in ("user", "tool"):
            raise InvalidRequest("Only messages of users and tools have images.", param="messages")
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest("Only an assistant's message has tool_calls.", param="messages")
        return self


def _format_kind(value: Any) -> str:
    return ":schema" if isinstance(value, dict) else ":word"


def _think_kind(value: Any) -> str:
    return ":switch" if isinstance(value, bool) else ":word"


def _time_kind(value: Any) -> str:
    return ":text" if isinstance(value, str) else ":seconds"


Duration = Annotated[
    str,
    StringConstraints(
        pattern=r"^[-+]?(0|(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h))+)$", max_length=64
    ),
]
KeepAlive = Annotated[
    Annotated[Duration, Tag(":text")] | Annotated[AnyNumber, Tag(":seconds")],
    Discriminator(_time_kind),
]


_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def _seconds(duration: str | float) -> float:
    """A duration as Go's clients write it, or a number of seconds; infinite if it is negative."""
    if isinstance(duration, str):
        parts = re.findall(r"([0-9.]+)(ns|us|µs|ms|s|m|h)", duration)
        total_s = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
        duration = -total_s if duration.startswith("-") else total_s
    return math.inf if duration < 0 else float(duration)


class OllamaRequest(Strict):
    """The common fields of all requests about one model."""

    model: Name
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = Field(
        default=None,
        description="How long the model stays in memory when idle; 0: not at all, below 0: as long"
        " as there is room. With API keys it needs an admin key, and is ignored without.",
    )

    @property
    def keep_s(self) -> float | None:
        """`keep_alive` in seconds; infinite below 0."""
        return None if self.keep_alive is None else _seconds(self.keep_alive)


class AnswerFields(NamesModel, OllamaRequest, IgnoresHints):
    """The common fields of chat and generate."""

    ignored = unsupported.IGNORED
    tasks = ("chat",)

    stream: bool | None = Field(default=None, description="Answer in lines; `true` by default.")
    format: (
        Annotated[
            Annotated[Literal["", "json"], Tag(":word")] | Annotated[JsonSchema, Tag(":schema")],
            Discriminator(_format_kind),
        ]
        | None
    ) = Field(default=None, description="JSON of any kind, or by a schema.")
    think: (
        Annotated[
            Annotated[bool, Tag(":switch")]
            | Annotated[Literal["low", "medium", "high"], Tag(":word")],
            Discriminator(_think_kind),
        ]
        | None
    ) = Field(default=None, description="Whether to think first, and how much.")
    logprobs: bool | None = Field(default=None, description="Report log-probabilities.")
    top_logprobs: int | None = within("top_logprobs", "Alternatives reported per token.")

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is streamed as lines, which is the default."""
        return self.stream is not False


class OllamaChatRequest(AnswerFields):
    """Body of `/api/chat`. Without messages the model is loaded."""

    messages: (
        Annotated[
            list[OllamaMessage],
            Field(max_length=limits.MAX_MESSAGES, fail_fast=True),
            BeforeValidator(check_num_parts),
        ]
        | None
    ) = None
    tools: Tools | None = None


class GenerateRequest(AnswerFields, Refusing):
    """Body of `/api/generate`. Without a prompt the model is loaded."""

    refused = unsupported.GENERATE

    prompt: Text | None = None
    suffix: Text | None = Field(
        default=None, description="The text after the answer, for models that fill gaps."
    )
    system: Text | None = None
    raw: bool | None = Field(default=None, description="Use the prompt without the chat template.")
    images: Images | None = Field(default=None, description="Images in base64.")
    context: (
        Annotated[list[TokenId], Field(max_length=limits.MAX_PROMPT_TOKENS, fail_fast=True)] | None
    ) = Field(default=None, description="The tokens before the prompt, from an earlier answer.")

    @model_validator(mode="after")
    def _check_whole(self) -> Self:
        if self.raw and (self.system or self.images or self.context):
            raise InvalidRequest(
                "A raw prompt is the whole prompt: leave system, images and context out.",
                param="raw",
            )
        if self.suffix and (self.raw or self.system or self.images or self.context):
            raise InvalidRequest(
                "With a suffix the prompt is the text before the answer: leave raw, system, images"
                " and context out.",
                param="suffix",
            )
        if self.context and self.images:
            raise InvalidRequest(
                "context cannot be combined with images: use /api/chat.", param="context"
            )
        return self


class ModelRequest(Strict):
    """A model under either of two field names."""

    model: Name | None = None
    name: Name | None = Field(default=None, description="Older name of model.")

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.model or self.name) is None:
            raise InvalidRequest("model is required.", param="model")
        if self.model and self.name and self.model != self.name:
            raise InvalidRequest(
                "model and name are the same field and differ: send model.", param="name"
            )
        return self

    @property
    def requested_name(self) -> str:
        """The client's name of the model."""
        return self.model or self.name or ""


class ShowRequest(ModelRequest, Refusing):
    """Body of `/api/show`."""

    refused = unsupported.SHOW


class PullRequest(ModelRequest):
    """Body of `/api/pull`."""

    stream: bool | None = Field(default=None, description="Report in lines; `true` by default.")
    insecure: bool | None = inert("insecure")


class DeleteRequest(ModelRequest):
    """Body of `/api/delete`."""
