"""The requests of the OpenAI text API, field by field.

Owns the values that each field may have. A field is honoured, accepted as inert (it cannot change
an answer here), or refused by name with the alternative; any other name is an unknown field. Every
number is bounded and finite, every string and array has a maximum length.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from triptych.core import limits
from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.http.fields import (
    IgnoresHints,
    Label,
    Metadata,
    Name,
    NamesModel,
    Refusing,
    Strict,
    Text,
    inert,
    without_refused,
)
from triptych.core.limits import SAMPLING_RANGES
from triptych.modalities.llm.api.audio_fields import MAX_SPOKEN_TOKENS, AudioFields
from triptych.modalities.llm.api.constraints import ConstraintFields
from triptych.modalities.llm.api.messages import (
    Message,
    TemplateFields,
    check_num_parts,
    check_tool_messages,
)
from triptych.modalities.llm.api.sampling_fields import (
    InertLabels,
    SamplingFields,
    TokenId,
    stop_strings,
    within,
)
from triptych.modalities.llm.api.tools.schema import ToolChoice, Tools, ToolSet
from triptych.modalities.llm.api.unsupported import (
    CHAT,
    CHOSEN_AWAY,
    COMMON,
    COMPLETION,
    IGNORED,
    REFUSED_VALUES,
)

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


def _not_zero(length: int) -> int:
    if length == 0:
        raise InvalidRequest("A length is at least one token; -1 means as many as fit.")
    return length


Length = Annotated[
    int,
    Field(ge=-1, le=SAMPLING_RANGES["max_tokens"][1], json_schema_extra={"not": {"const": 0}}),
    AfterValidator(_not_zero),
]
CutLength = Annotated[
    int,
    Field(ge=-1, le=limits.MAX_PROMPT_TOKENS, json_schema_extra={"not": {"const": 0}}),
    AfterValidator(_not_zero),
]
AnyNumber = Annotated[float, Field(ge=-1e9, le=1e9)]
TokenIds = Annotated[
    list[TokenId], Field(min_length=1, max_length=limits.MAX_PROMPT_TOKENS, fail_fast=True)
]


def prompt_kind(value: Any) -> str:
    """The form of a prompt (text, texts, tokens, token lists), from its first entry."""
    if not isinstance(value, list):
        return ":text"
    first = value[0] if value else ""
    if isinstance(first, list):
        return ":token-lists"
    return ":tokens" if isinstance(first, int) else ":texts"


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True),
    BeforeValidator(check_num_parts),
    AfterValidator(check_tool_messages),
]
_Batch = Field(min_length=1, max_length=limits.MAX_PROMPTS, fail_fast=True)
Prompt = Annotated[
    Annotated[Text, Tag(":text")]
    | Annotated[list[Text], _Batch, Tag(":texts")]
    | Annotated[TokenIds, Tag(":tokens")]
    | Annotated[list[TokenIds], _Batch, Tag(":token-lists")],
    Discriminator(prompt_kind),
]


class StreamOptions(Strict):
    """Additional content of a stream."""

    include_usage: bool | None = Field(default=None, description="End with a usage chunk.")
    continuous_usage_stats: bool | None = Field(
        default=None, description="Token counts so far in every chunk."
    )
    include_obfuscation: bool | None = inert("include_obfuscation")


class UsageOption(Strict):
    """Token counts as OpenRouter's clients request them."""

    include: bool | None = Field(default=None, description="As stream_options.include_usage.")


class TextRequest(NamesModel, SamplingFields, ConstraintFields, IgnoresHints, Refusing):
    """The fields of both chat and text completion."""

    refused = COMMON
    ignored = IGNORED
    refused_values = REFUSED_VALUES
    tasks = ("chat",)

    max_tokens: Length | None = Field(
        default=None, description="Max tokens of one answer; -1: as many as fit."
    )
    lora_path: Name | None = Field(
        default=None, description="An adapter of the model, by its name; as model does by itself."
    )
    n: Annotated[int, Field(ge=1, le=limits.MAX_SAMPLES)] | None = Field(
        default=None, description="Answers per prompt."
    )
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=limits.MAX_LOGPROBS,
        description="Log-probabilities of the prompt, with this number of alternatives per token.",
    )
    return_token_ids: bool | None = Field(
        default=None, description="Also return the token ids of prompt and answer."
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="Name tokens as `token_id:ID` in log-probabilities."
    )
    stream: bool | None = Field(default=None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = Field(
        default=None, description="Without effect unless the answer is streamed."
    )
    usage: UsageOption | None = None
    cache_prompt: bool | None = inert("cache_prompt")
    chat_id: Label | None = inert("chat_id")
    mirostat_eta: AnyNumber | None = inert("mirostat_eta")
    mirostat_tau: AnyNumber | None = inert("mirostat_tau")
    user: Label | None = inert("user")

    @model_validator(mode="after")
    def _check_common(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise UnsupportedOption(
                "prompt_logprobs is not offered in streams: leave stream out.",
                param="prompt_logprobs",
            )
        most = self.sampling()["max_tokens"]
        if most is not None and (self.min_tokens or 0) > most:
            raise InvalidRequest("min_tokens is over max_tokens.", param="min_tokens")
        return self

    @property
    def default_tokens(self) -> int | None:
        """The default of `max_tokens`; `None`: as many as fit."""
        return None

    @property
    def has_answer(self) -> bool:
        """Whether the reply contains more than the prompt."""
        return True

    @property
    def num_top_logprobs(self) -> int | None:
        """Alternatives reported per token of an answer; `None`: no log-probabilities."""
        return None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return stop_strings(self.stop)

    @property
    def has_usage_chunk(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        asked = self.stream_options and self.stream_options.include_usage
        return bool(asked or (self.usage and self.usage.include))

    @property
    def has_running_usage(self) -> bool:
        """Whether every chunk of a stream has the token counts so far."""
        asked = self.stream_options
        return bool(asked and asked.continuous_usage_stats and asked.include_usage is not False)

    def sampling(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that this request sets; the others are `None`."""
        names = sorted(SAMPLING_RANGES.keys() & set(TextRequest.model_fields) - {"seed"})
        bias = tuple((int(token), value) for token, value in (self.logit_bias or {}).items())
        return {
            **{name: getattr(self, name) for name in names},
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "repetition_penalty": self.repetition_penalty or self.repeat_penalty,
            "max_tokens": smallest(self.max_tokens),
            "top_logprobs": _largest(self.num_top_logprobs, self.prompt_logprobs),
            "prompt_logprobs": self.prompt_logprobs is not None,
            "logit_bias": bias,
            "stop_token_ids": tuple(self.stop_token_ids or ()),
        }


def smallest(*lengths: int | None) -> int | None:
    """The least of several positive limits; `None` if there is none."""
    return min((length for length in lengths if length is not None and length > 0), default=None)


def _largest(*numbers: int | None) -> int | None:
    """The greatest of several numbers; `None` if there is none."""
    return max((number for number in numbers if number is not None), default=None)


class ChatRequest(TextRequest, TemplateFields, AudioFields, InertLabels):
    """Body of `/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Length | None = Field(
        default=None, description="Newer name of max_tokens; the smaller of both applies."
    )
    logprobs: bool | None = Field(default=None, description="Report log-probabilities.")
    top_logprobs: int | None = within("top_logprobs", "Alternatives reported per token.")
    echo: bool | None = Field(
        default=None,
        description="Begin each answer with the last message if it is the assistant's.",
    )
    store: bool | None = inert("store")
    metadata: Metadata | None = inert("metadata")
    tools: Tools | None = None
    tool_choice: ToolChoice | None = Field(
        default=None, description="`none`: no tool is offered. `auto` is the default."
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="`false`: an answer ends with its first call."
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        if isinstance(value, dict):
            unused = {name for name, choice in CHOSEN_AWAY.items() if value.get(choice) == "none"}
            value = {name: field for name, field in value.items() if name not in unused}
        return without_refused(value, CHAT)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs.", param="top_logprobs")
        ToolSet.of(self.tools or (), self.tool_choice)  # raises where the choice is not there
        self._check_spoken()
        return self

    def _check_spoken(self) -> None:
        """Raise `UnsupportedOption` for fields that a spoken answer does not follow."""
        if not self.is_spoken:
            return
        given = {
            "n": self.n not in (None, 1),
            "echo": bool(self.echo),
            "response_format": self.constraint() is not None,
        }
        for name, is_given in given.items():
            if is_given:
                raise UnsupportedOption(
                    f"{name} is not offered in a spoken answer: leave it or modalities out.",
                    param=name,
                )

    @property
    def tool_set(self) -> ToolSet:
        """The tools that the model may or must call. Raises `InvalidRequest`."""
        is_parallel = self.parallel_tool_calls is not False
        return ToolSet.of(self.tools or (), self.tool_choice, is_parallel=is_parallel)

    @property
    def echoed(self) -> str:
        """The text that each answer begins with."""
        last = self.messages[-1]
        return last.text if self.echo and last.role == "assistant" else ""

    @property
    def default_tokens(self) -> int | None:
        """The property of `TextRequest`: a spoken answer is short."""
        return MAX_SPOKEN_TOKENS if self.is_spoken and not self.tools else None

    @property
    def num_top_logprobs(self) -> int | None:
        """The property of `TextRequest`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def sampling(self) -> dict[str, Any]:
        """The fields of `TextRequest.sampling`, with chat's names of the length."""
        return {
            **super().sampling(),
            "max_tokens": smallest(self.max_tokens, self.max_completion_tokens),
        }


ADDS_SPECIAL = Field(
    default=None, description="Begin texts with the model's initial tokens (the default)."
)
PARSES_SPECIAL = Field(
    default=None, description="Read special tokens spelled in texts as tokens, not as characters."
)


def encoding_options(adds_special: bool | None, parses_special: bool | None) -> dict[str, bool]:
    """The options of `TextModel.encode_text`."""
    return {
        "add_special_tokens": adds_special is not False,
        "parse_special": bool(parses_special),
    }


class CompletionRequest(TextRequest):
    """Body of `/v1/completions`."""

    prompt: Prompt
    suffix: Text | None = Field(
        default=None, description="The text after the answer, for models that fill gaps."
    )
    max_tokens: Annotated[int, Field(ge=-1, le=SAMPLING_RANGES["max_tokens"][1])] | None = Field(
        default=None,
        description="Max tokens of one answer; -1: as many as fit; 0, with echo: none.",
    )
    add_special_tokens: bool | None = ADDS_SPECIAL
    parse_special: bool | None = PARSES_SPECIAL
    logprobs: int | None = within("top_logprobs", "Alternatives reported per token.")
    echo: bool | None = Field(default=None, description="Begin each answer with its prompt.")
    truncate_prompt_tokens: CutLength | None = Field(
        default=None,
        description="Read only this number of a prompt's last tokens; -1: as many as fit.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description="The side of prompts that is cut off; left by default."
    )
    best_of: Annotated[int, Field(ge=1, le=limits.MAX_SAMPLES)] | None = Field(
        default=None, description="Must be equal to n."
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        return without_refused(value, COMPLETION)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise UnsupportedOption(
                "best_of other than n is not offered: ask for n answers with logprobs and choose.",
                param="best_of",
            )
        if self.suffix and (self.echo or self.truncate_prompt_tokens is not None):
            raise InvalidRequest(
                "A prompt with a suffix is neither echoed nor cut: leave echo and"
                " truncate_prompt_tokens out.",
                param="suffix",
            )
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise InvalidRequest("With a suffix the prompt is a text.", param="prompt")
        if not self.has_answer and not self.echo:
            raise InvalidRequest(
                "max_tokens is at least one token, or 0 with echo; -1 means as many as fit.",
                param="max_tokens",
            )
        if len(self.prompts) * (self.n or 1) > limits.MAX_ROWS:
            raise InvalidRequest(
                f"Prompts times n must be at most {limits.MAX_ROWS}.", param="prompt"
            )
        return self

    @property
    def default_tokens(self) -> int | None:
        """OpenAI's default, unless -1 asks for as many as fit."""
        return None if self.max_tokens == -1 else _DEFAULT_COMPLETION_TOKENS

    @property
    def has_answer(self) -> bool:
        """The property of `TextRequest`."""
        return self.max_tokens != 0

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or as token ids."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("list[str | list[int]]", [self.prompt] if is_one else self.prompt)

    @property
    def encoding_options(self) -> dict[str, bool]:
        """How text prompts are tokenized."""
        return encoding_options(self.add_special_tokens, self.parse_special)

    @property
    def num_top_logprobs(self) -> int | None:
        """The property of `TextRequest`."""
        return self.logprobs

    def sampling(self) -> dict[str, Any]:
        """The fields of `TextRequest.sampling`; echoed prompts also report log-probabilities."""
        sampling = super().sampling()
        sampling["prompt_logprobs"] |= bool(self.echo) and self.logprobs is not None
        if not self.has_answer:
            sampling["max_tokens"] = 1  # a prompt is scored by the step that samples a token
        return sampling
