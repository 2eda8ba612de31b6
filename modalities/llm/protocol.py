"""The requests of the OpenAI text API, field by field.

Owns what each field may be. A field is honoured, accepted as inert (it asks for nothing that
could change an answer here), or refused by name with the alternative; any other name is an
unknown field. Every number is bounded and finite, every string and array has a longest length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Discriminator, Field, StringConstraints, Tag, model_validator

from triptych.core import limits
from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.http.fields import Label, Name, Strict, Text, inert, without_refused
from triptych.core.limits import SAMPLING_RANGES
from triptych.core.media.fetch import Fetched
from triptych.modalities.llm.eyes import PictureSource
from triptych.modalities.llm.unsupported import CHAT, COMMON, COMPLETION, MESSAGE


def _within(name: str, description: str) -> Any:
    low, high = SAMPLING_RANGES[name]
    return Field(default=None, ge=low, le=high, description=description)


FindFile = Callable[[str], Fetched | None]
"""The file that a body had in a URL, where it was taken out of it."""
StopString = Annotated[str, StringConstraints(min_length=1, max_length=limits.MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=limits.MAX_TOKEN_ID)]
TokenIds = Annotated[
    list[TokenId], Field(min_length=1, max_length=limits.MAX_PROMPT_TOKENS, fail_fast=True)
]
Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=limits.MAX_METADATA_KEY_CHARS)],
        Annotated[str, StringConstraints(max_length=limits.MAX_METADATA_VALUE_CHARS)],
    ],
    Field(max_length=limits.MAX_METADATA_ENTRIES),
]
LogitBias = Annotated[
    dict[
        Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$", max_length=10)],
        Annotated[float, Field(ge=-limits.MAX_ABS_LOGIT_BIAS, le=limits.MAX_ABS_LOGIT_BIAS)],
    ],
    Field(max_length=limits.MAX_LOGIT_BIAS),
]
# No angle brackets or bars: a string here must never spell a special token.
TemplateText = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9 _.,:+-]*$", max_length=64)]
TemplateOption = Literal["enable_thinking", "thinking", "reasoning_effort", "date_string"]
TemplateOptions = Annotated[
    dict[
        TemplateOption,
        bool | Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | TemplateText,
    ],
    Field(max_length=limits.MAX_TEMPLATE_OPTIONS),
]


def _is_list(value: Any) -> str:
    return ":list" if isinstance(value, list) else ":text"


def prompt_kind(value: Any) -> str:
    """Which of the four forms a prompt has, judged by its first entry."""
    if not isinstance(value, list):
        return ":text"
    first = value[0] if value else ""
    if isinstance(first, list):
        return ":token-lists"
    return ":tokens" if isinstance(first, int) else ":texts"


Stop = Annotated[
    Annotated[StopString, Tag(":text")]
    | Annotated[
        list[StopString], Field(max_length=limits.MAX_STOP_STRINGS, fail_fast=True), Tag(":list")
    ],
    Discriminator(_is_list),
]
_Batch = Field(min_length=1, max_length=limits.MAX_PROMPTS, fail_fast=True)
Prompt = Annotated[
    Annotated[Text, Tag(":text")]
    | Annotated[list[Text], _Batch, Tag(":texts")]
    | Annotated[TokenIds, Tag(":tokens")]
    | Annotated[list[TokenIds], _Batch, Tag(":token-lists")],
    Discriminator(prompt_kind),
]


class TextPart(Strict):
    """A part of a message's content that is text."""

    type: Literal["text"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise UnsupportedOption(
                f"A message takes parts of type 'text' and 'image_url', not {kind[:40]!a}: send a"
                " picture as a data URL in image_url; there is no files API, and no sound is read"
                " here."
            )
        return value


class ImageUrl(Strict):
    """A picture: PNG, JPEG or WebP as `data:image/png;base64,...`, or where it can be fetched."""

    url: Text
    detail: Literal["auto", "low", "high"] | None = Field(
        default=None, description="`low`: scaled down to 512 x 512 pixels' worth; else as it is."
    )


class ImagePart(Strict):
    """A part of a message's content that is a picture."""

    type: Literal["image_url"]
    image_url: ImageUrl

    def source(self, find: FindFile) -> PictureSource:
        """The picture, with what `find` knows of its URL."""
        url = self.image_url.url
        file = find(url)
        is_coarse = self.image_url.detail == "low"
        return PictureSource("" if file else url, file, is_coarse)


def _part_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return ":image" if kind == "image_url" else ":text"


Part = Annotated[
    Annotated[TextPart, Tag(":text")] | Annotated[ImagePart, Tag(":image")],
    Discriminator(_part_kind),
]


class Message(Strict):
    """One message of a conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[Text, Tag(":text")]
        | Annotated[
            list[Part],
            Field(min_length=1, max_length=limits.MAX_CONTENT_PARTS, fail_fast=True),
            Tag(":list"),
        ],
        Discriminator(_is_list),
    ]
    name: Annotated[
        str | None, Field(default=None, pattern=r"^[A-Za-z0-9_.-]+$", max_length=64)
    ] = None
    tool_call_id: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        return without_refused(value, MESSAGE)

    @model_validator(mode="after")
    def _check(self) -> Self:
        parts = () if isinstance(self.content, str) else self.content
        if self.role != "user" and any(isinstance(part, ImagePart) for part in parts):
            raise InvalidRequest("Pictures are read in messages of the user.", param="messages")
        return self

    def for_template(self, find: FindFile = lambda url: None) -> dict[str, Any]:
        """The message as chat templates know it: they have no developers.

        What URLs of pictures hold is asked of `find`.
        """
        fields = self.model_dump(exclude_none=True)
        if not isinstance(self.content, str):
            fields["content"] = [
                part.source(find).part() if isinstance(part, ImagePart) else part.model_dump()
                for part in self.content
            ]
        return {**fields, "role": "system" if self.role == "developer" else self.role}


class StreamOptions(Strict):
    """What a stream carries besides text."""

    include_usage: bool | None = Field(default=None, description="End with a usage chunk.")
    include_obfuscation: bool | None = inert()


class SamplingFields(Strict):
    """What chat and text completion share."""

    model: Name
    temperature: float | None = _within("temperature", "0 is greedy.")
    top_p: float | None = _within("top_p", "Nucleus sampling; 1 is off.")
    top_k: int | None = _within("top_k", "Draw from the k likeliest tokens; 0 is off.")
    min_p: float | None = _within("min_p", "Drop tokens below this share of the likeliest.")
    repetition_penalty: float | None = _within("repetition_penalty", "Above 0; 1 is off.")
    frequency_penalty: float | None = _within("frequency_penalty", "Per repetition; 0 is off.")
    presence_penalty: float | None = _within("presence_penalty", "Once; 0 is off.")
    logit_bias: LogitBias | None = Field(default=None, description="Token id to added logit.")
    max_tokens: int | None = _within("max_tokens", "Most tokens of one answer.")
    min_tokens: int | None = _within("min_tokens", "Fewest tokens before an end is allowed.")
    seed: int | None = _within("seed", "Same seed, same answer.")
    n: Annotated[int, Field(ge=1, le=limits.MAX_SAMPLES)] | None = Field(
        default=None, description="Answers per prompt."
    )
    stop: Stop | None = Field(default=None, description="Text that ends an answer.")
    stop_token_ids: (
        Annotated[list[TokenId], Field(max_length=limits.MAX_STOP_TOKEN_IDS, fail_fast=True)] | None
    ) = Field(default=None, description="Tokens that end an answer.")
    ignore_eos: bool | None = Field(default=None, description="Go on past the model's own end.")
    priority: Annotated[int, Field(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)] | None = Field(
        default=None, description="Lower goes first, under `--schedule-policy priority`."
    )
    stream: bool | None = Field(default=None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = None
    user: Label | None = inert()

    @model_validator(mode="before")
    @classmethod
    def _refuse_common(cls, value: Any) -> Any:
        return without_refused(value, COMMON)

    @model_validator(mode="after")
    def _check_common(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream.", param="stream_options")
        if self.repetition_penalty == 0:
            raise InvalidRequest("repetition_penalty must be above 0.", param="repetition_penalty")
        most = self.sampling()["max_tokens"]
        if most is not None and (self.min_tokens or 0) > most:
            raise InvalidRequest("min_tokens is over max_tokens.", param="min_tokens")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def has_usage_chunk(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self) -> dict[str, Any]:
        """The fields of `SamplingParams` this request gives; absent ones are `None`."""
        names = sorted(SAMPLING_RANGES.keys() & set(SamplingFields.model_fields) - {"seed"})
        bias = tuple((int(token), value) for token, value in (self.logit_bias or {}).items())
        return {
            **{name: getattr(self, name) for name in names},
            "logit_bias": bias,
            "stop_token_ids": tuple(self.stop_token_ids or ()),
        }


class ChatRequest(SamplingFields):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[
        list[Message], Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True)
    ]
    max_completion_tokens: int | None = _within("max_tokens", "As max_tokens, its newer name.")
    logprobs: bool | None = Field(default=None, description="Report log-probabilities.")
    top_logprobs: int | None = _within("top_logprobs", "Alternatives reported per token.")
    chat_template_kwargs: TemplateOptions | None = Field(
        default=None, description="Switches of the model's chat template."
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="Let the template open the answer (the default)."
    )
    store: bool | None = inert()
    metadata: Metadata | None = inert()
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = inert()
    safety_identifier: Label | None = inert()
    prompt_cache_key: Label | None = inert()
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = inert()
    parallel_tool_calls: bool | None = inert()

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        return without_refused(value, CHAT)

    @model_validator(mode="after")
    def _check(self) -> Self:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens differ: send the latter alone.",
                param="max_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs.", param="top_logprobs")
        return self

    def sampling(self) -> dict[str, Any]:
        """As for every request, with chat's names for length and log-probabilities."""
        return {
            **super().sampling(),
            "max_tokens": self.max_completion_tokens or self.max_tokens,
            "top_logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }

    def template_options(self) -> dict[str, Any]:
        """What the chat template is given besides the messages."""
        add = self.add_generation_prompt
        return {
            **{str(name): value for name, value in (self.chat_template_kwargs or {}).items()},
            "add_generation_prompt": True if add is None else add,
        }


class CompletionRequest(SamplingFields):
    """Body of `/v1/completions`."""

    prompt: Prompt
    logprobs: int | None = _within("top_logprobs", "Alternatives reported per token.")
    echo: bool | None = Field(default=None, description="Begin each answer with its prompt.")
    best_of: Annotated[int, Field(ge=1, le=limits.MAX_SAMPLES)] | None = Field(
        default=None, description="Only as many as n."
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
        if len(self.prompts) * (self.n or 1) > limits.MAX_ROWS:
            raise InvalidRequest(
                f"Prompts times n must be at most {limits.MAX_ROWS}.", param="prompt"
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several, each as text or as token ids."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("list[str | list[int]]", [self.prompt] if is_one else self.prompt)

    def sampling(self) -> dict[str, Any]:
        """As for every request; echoed prompts report their log-probabilities, too."""
        return {
            **super().sampling(),
            "top_logprobs": self.logprobs,
            "prompt_logprobs": bool(self.echo) and self.logprobs is not None,
        }


class TokenizeRequest(Strict):
    """Body of `/tokenize`: either a prompt or messages."""

    model: Name
    prompt: Text | None = None
    messages: (
        Annotated[
            list[Message], Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True)
        ]
        | None
    ) = None
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("Send either prompt or messages.", param="prompt")
        return self


class DetokenizeRequest(Strict):
    """Body of `/detokenize`."""

    model: Name
    tokens: Annotated[list[TokenId], Field(max_length=limits.MAX_PROMPT_TOKENS, fail_fast=True)]
