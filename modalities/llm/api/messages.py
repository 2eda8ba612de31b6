"""Messages and template options in the OpenAI API.

Owns the values that each field may have: honoured, accepted as inert, or refused by name with the
alternative. Knows no route and no template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import Discriminator, Field, StringConstraints, Tag, model_validator

from triptych.core import limits
from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.http.fields import (
    IgnoresHints,
    JsonObject,
    JsonValue,
    Label,
    Name,
    Place,
    Strict,
    Text,
    inert,
    type_of,
    unknown_type,
    without_refused,
)
from triptych.core.media.fetch import Fetched
from triptych.modalities.llm.api.audio_fields import AudioPart, SpokenReference
from triptych.modalities.llm.api.multimodal import ImageSource
from triptych.modalities.llm.api.tools.schema import ToolCall
from triptych.modalities.llm.api.unsupported import IGNORED_IN_MESSAGE, MESSAGE

FindFile = Callable[[str], Fetched | None]
"""The file of a data URL that was taken out of the body."""
# No angle brackets or bars: a string here must never spell a special token.
TemplateText = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9 _.,:+-]*$", max_length=64)]
TemplateOption = Literal[
    "enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "date_string"
]
ThinkingBudget = Annotated[int, Field(ge=-1, le=limits.SAMPLING_RANGES["max_tokens"][1])]
TemplateOptions = Annotated[
    dict[
        TemplateOption,
        bool | Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | TemplateText,
    ],
    Field(max_length=limits.MAX_TEMPLATE_OPTIONS),
]
_SWITCHES = ("enable_thinking", "thinking")
_THINKING = (
    *("enable_thinking", "reasoning_effort"),
    *("thinking_budget", "thinking_token_budget", "thinking_budget_tokens"),
)
_FILE_URL = "triptych-file:\n"
_PARTS = ("content", "output", "summary", "images", "tool_calls")
"""Fields of messages, items and parts that are lists, in all APIs."""
_OWN = {
    *("role", "content", "cache_control", "provider_specific_fields", "reasoning", "tool_calls"),
    *("index", "parsed"),
}
"""Fields of a message that templates read in another form, or do not read."""


def is_list(value: Any) -> str:
    """The tag of a union of a list and a text."""
    return ":list" if isinstance(value, list) else ":text"


PartT = TypeVar("PartT")
TextOrParts: TypeAlias = Annotated[
    Annotated[Text, Tag(":text")]
    | Annotated[
        list[PartT], Field(max_length=limits.MAX_CONTENT_PARTS, fail_fast=True), Tag(":list")
    ],
    Discriminator(is_list),
]
"""The content type of other APIs."""


def check_num_parts(value: Any) -> Any:
    """Pass on unvalidated messages or items. Raises `InvalidRequest` for too many parts."""
    if not isinstance(value, list):
        return value
    if _num_parts(value) > limits.MAX_CONVERSATION_PARTS:
        raise InvalidRequest(f"A conversation has at most {limits.MAX_CONVERSATION_PARTS} parts.")
    return value


def _num_parts(entries: Sequence[Any]) -> int:
    """How many parts these have, including nested parts of results and documents."""
    given = [each for each in entries if isinstance(each, dict)]
    given += [each["source"] for each in given if isinstance(each.get("source"), dict)]
    fields = (each.get(name) for each in given for name in _PARTS)
    return sum(len(each) + _num_parts(each) for each in fields if isinstance(each, list))


class CacheControl(Strict):
    """A client's mark for caching the beginning of a prompt."""

    type: Literal["ephemeral"]
    ttl: Label | None = None
    scope: Label | None = None


class TextPart(Strict):
    """A text part of a message's content."""

    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = inert("cache_control")

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        if kind := unknown_type(value, "text"):
            raise UnsupportedOption(
                "A message takes parts of type 'text', 'image_url', 'image_file' and 'input_audio',"
                f" not {kind}: send an image as a data URL in image_url, sound in input_audio."
            )
        return value


class ImageUrl(Strict):
    """An image: PNG, JPEG or WebP as `data:image/png;base64,...`, or where it can be fetched."""

    url: Text
    detail: Literal["auto", "low", "high", "original"] | None = Field(
        default=None, description="`low`: scaled down to 512 x 512 pixels; else unchanged."
    )


class ImagePart(Strict):
    """An image part of a message's content."""

    type: Literal["image_url"]
    image_url: ImageUrl
    cache_control: CacheControl | None = inert("cache_control")

    @property
    def url(self) -> str:
        """The image's URL, or its stand-in in the body."""
        return self.image_url.url

    def source(self, find: FindFile) -> ImageSource:
        """The image, with the file that `find` has for its URL."""
        file = find(self.url)
        is_coarse = self.image_url.detail == "low"
        return ImageSource("" if file else self.url, file, is_coarse)


class UploadedImage(Strict):
    """An image that was uploaded to `/v1/files`."""

    file_id: Name
    detail: Literal["auto", "low", "high", "original"] | None = Field(
        default=None, description="As detail of image_url."
    )


class ImageFilePart(Strict):
    """An image part of a message's content, stored in `/v1/files`."""

    type: Literal["image_file"]
    image_file: UploadedImage
    cache_control: CacheControl | None = inert("cache_control")

    @property
    def url(self) -> str:
        """The key of the image for `find`; no caller can send it as a URL."""
        return f"{_FILE_URL}{self.image_file.file_id}"

    def source(self, find: FindFile) -> ImageSource:
        """The image, with the file that `find` has for it."""
        return ImageSource("", find(self.url), self.image_file.detail == "low")


_PART_KINDS = {"image_url": ":image", "image_file": ":file", "input_audio": ":sound"}


def _part_kind(value: Any) -> str:
    return _PART_KINDS.get(type_of(value), ":text")


Part = Annotated[
    Annotated[TextPart, Tag(":text")]
    | Annotated[ImagePart, Tag(":image")]
    | Annotated[ImageFilePart, Tag(":file")]
    | Annotated[AudioPart, Tag(":sound")],
    Discriminator(_part_kind),
]


class Message(IgnoresHints):
    """One message of a conversation.

    With `tool_calls` or `audio` an assistant's `content` may be absent.
    """

    ignored = IGNORED_IN_MESSAGE

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[Text, Tag(":text")]
        | Annotated[
            list[Part],
            Field(min_length=1, max_length=limits.MAX_CONTENT_PARTS, fail_fast=True),
            Tag(":list"),
        ],
        Discriminator(is_list),
    ] = ""
    name: Annotated[
        str | None, Field(default=None, pattern=r"^[A-Za-z0-9_.-]+$", max_length=128)
    ] = None
    tool_call_id: Name | None = None
    tool_calls: (
        Annotated[list[ToolCall], Field(max_length=limits.MAX_TOOL_CALLS, fail_fast=True)] | None
    ) = Field(default=None, description="Calls in an earlier answer.")
    reasoning_content: Text | None = Field(
        default=None, description="Reasoning before the answer; the template may render it."
    )
    reasoning: Text | None = Field(default=None, description="As reasoning_content.")
    audio: SpokenReference | None = Field(
        default=None, description="The sound of an earlier answer; its words are the content."
    )
    cache_control: CacheControl | None = inert("cache_control")
    provider_specific_fields: JsonObject | None = inert("provider_specific_fields")
    index: Place | None = inert("index")
    parsed: JsonValue = inert("parsed")

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        has_other = isinstance(value, dict) and (value.get("tool_calls") or value.get("audio"))
        if has_other and value.get("content") is None:
            value = {**value, "content": ""}
        elif isinstance(value, dict) and "content" not in value:
            raise InvalidRequest("A message needs a content.", param="messages")
        return without_refused(value, MESSAGE)

    @model_validator(mode="after")
    def _check(self) -> Self:
        parts = () if isinstance(self.content, str) else self.content
        if self.role != "user" and any(not isinstance(part, TextPart) for part in parts):
            raise InvalidRequest("Only a user's message has images or sound.", param="messages")
        if self.audio and self.role != "assistant":
            raise InvalidRequest("Only an assistant's message has audio.", param="messages")
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest("Only an assistant's message has tool_calls.", param="messages")
        if len({self.reasoning, self.reasoning_content} - {None}) > 1:
            raise InvalidRequest(
                "reasoning and reasoning_content are the same field and differ: send only the"
                " latter.",
                param="messages",
            )
        return self

    @property
    def text(self) -> str:
        """The text of the content."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def images(self) -> list[ImagePart | ImageFilePart]:
        """The images of the content."""
        parts = () if isinstance(self.content, str) else self.content
        return [part for part in parts if isinstance(part, ImagePart | ImageFilePart)]

    @property
    def sounds(self) -> list[AudioPart]:
        """The recordings of the content."""
        parts = () if isinstance(self.content, str) else self.content
        return [part for part in parts if isinstance(part, AudioPart)]

    def with_words(self, words: Sequence[str], spoken: str) -> Message:
        """The message with `words` in place of its recordings, and of its audio what was `spoken`.

        A content that is given stands for the audio.
        """
        heard = iter(words)
        content = self.content if self.audio is None or self.text else spoken
        if not isinstance(content, str):
            content = [
                TextPart(type="text", text=next(heard)) if isinstance(part, AudioPart) else part
                for part in content
            ]
        return self.model_copy(update={"content": content, "audio": None})

    def for_template(self, find: FindFile = lambda url: None) -> dict[str, Any]:
        """The message as prompt encoders take it; `developer` becomes `system`.

        `find` returns the files of image URLs. Raises `UnsupportedOption` for sound, whose words
        are not known.
        """
        if self.sounds or self.audio:
            raise UnsupportedOption(
                "Sound in messages is read by /v1/chat/completions alone: send its words.",
                param="messages",
            )
        fields = self.model_dump(exclude_none=True, exclude=_OWN)
        if self.reasoning is not None:
            fields["reasoning_content"] = self.reasoning
        if self.tool_calls:
            fields["tool_calls"] = [call.for_template() for call in self.tool_calls]
        content: str | list[str | ImageSource]
        if isinstance(self.content, str):
            content = self.content
        else:
            content = [
                part.text if isinstance(part, TextPart) else part.source(find)
                for part in self.content
                if not isinstance(part, AudioPart)
            ]
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content, **fields}


def check_tool_messages(messages: list[Message]) -> list[Message]:
    """Raise `InvalidRequest` for a tool's message without an earlier call."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        called.update(call.id for call in message.tool_calls or ())
        if message.role != "tool" or message.tool_call_id in called:
            continue
        given = "has none" if message.tool_call_id is None else f"has {message.tool_call_id[:80]!a}"
        raise InvalidRequest(
            "A message of role tool has the tool_call_id of a call in an earlier message of the"
            f" assistant; messages[{index}] {given}.",
            param=f"messages[{index}].tool_call_id",
        )
    return messages


class ThinkingOption(Strict):
    """Whether and how much the model reasons, as other APIs write it."""

    type: Literal["enabled", "disabled"]
    budget_tokens: ThinkingBudget | None = Field(default=None, description="As thinking_budget.")


def _thinking_kind(value: Any) -> str:
    return ":switch" if isinstance(value, bool) else ":object"


class TemplateFields(Strict):
    """Options of the chat template."""

    chat_template_kwargs: TemplateOptions | None = Field(
        default=None, description="Switches of the model's chat template."
    )
    enable_thinking: bool | None = Field(default=None, description="As in chat_template_kwargs.")
    thinking: (
        Annotated[
            Annotated[bool, Tag(":switch")] | Annotated[ThinkingOption, Tag(":object")],
            Discriminator(_thinking_kind),
        ]
        | None
    ) = Field(default=None, description="Both switches: enable_thinking and thinking.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        default=None,
        description="Amount of reasoning, if the template supports it; `none`: no reasoning.",
    )
    thinking_budget: ThinkingBudget | None = Field(
        default=None,
        description="Max reasoning tokens, after which reasoning ends; -1: no limit.",
    )
    thinking_token_budget: ThinkingBudget | None = Field(
        default=None, description="As thinking_budget, its name in vLLM."
    )
    thinking_budget_tokens: ThinkingBudget | None = Field(
        default=None, description="As thinking_budget, its name in llama.cpp."
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="Let the template begin the answer (the default)."
    )
    continue_final_message: bool | None = Field(
        default=None, description="Continue the last message instead of answering it."
    )

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message continues the last message, add_generation_prompt begins a"
                " new one: send one of them.",
                param="continue_final_message",
            )
        said = {self.enable_thinking, self._thinks} - {None}
        if said and len(said | {self._kwargs.get(name) for name in _SWITCHES} - {None}) > 1:
            raise InvalidRequest(
                "enable_thinking, thinking and chat_template_kwargs differ: send one of them.",
                param="enable_thinking",
            )
        self._check_budget()
        return self

    def _check_budget(self) -> None:
        budgets = self._budgets
        if len(budgets) > 1:
            raise InvalidRequest(
                "thinking_budget and its other names differ: send only thinking_budget.",
                param="thinking_budget",
            )
        if any(type(budget) is not int or budget < -1 for budget in budgets):
            raise InvalidRequest(
                "thinking_budget is a number of tokens; -1 means no limit.",
                param="chat_template_kwargs",
            )

    @property
    def _budgets(self) -> set[Any]:
        """The different budgets that are set under any of their names."""
        thinking = self.thinking if isinstance(self.thinking, ThinkingOption) else None
        named = {self.thinking_budget, self.thinking_token_budget, self.thinking_budget_tokens}
        own = self._kwargs.get("thinking_budget")
        return {*named, own, thinking and thinking.budget_tokens} - {None}

    @property
    def max_reasoning_tokens(self) -> int | None:
        """Max reasoning tokens; -1 for no limit, `None` for the operator's."""
        return next(iter(self._budgets), None)

    @property
    def _kwargs(self) -> dict[str, Any]:
        return {str(name): value for name, value in (self.chat_template_kwargs or {}).items()}

    @property
    def _thinks(self) -> bool | None:
        if isinstance(self.thinking, ThinkingOption):
            return self.thinking.type == "enabled"
        return self.thinking

    @property
    def thinking_fields(self) -> list[str]:
        """The fields that ask for reasoning or limit it."""
        given = {name: getattr(self, name) for name in _THINKING}
        given["thinking"] = self._thinks
        return [name for name, value in given.items() if value not in (None, False, "none")]

    def template_options(self) -> dict[str, Any]:
        """The arguments of the chat template in addition to the messages."""
        thinks = False if self._thinks is None and self.reasoning_effort == "none" else self._thinks
        switches: dict[str, Any] = dict.fromkeys(_SWITCHES, thinks)
        switches["reasoning_effort"] = self.reasoning_effort
        switches["thinking_budget"] = self.max_reasoning_tokens
        if self.enable_thinking is not None:
            switches["enable_thinking"] = self.enable_thinking
        opens = self.add_generation_prompt
        continues = {"continue_final_message": True} if self.continue_final_message else {}
        return {
            **{name: value for name, value in switches.items() if value is not None},
            **self._kwargs,
            **continues,
            "add_generation_prompt": not continues if opens is None else opens,
        }
