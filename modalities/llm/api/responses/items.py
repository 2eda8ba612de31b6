"""The items of conversations in the Responses API.

Owns the values that each field may have: honoured, accepted as inert, or refused by name with the
alternative; and how an item is stored and shown. Knows no route and no translation.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationInfo, model_validator

from triptych.core import limits
from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.http.fields import (
    Label,
    Name,
    NullIsAbsent,
    Strict,
    Text,
    inert,
    type_of,
    without_refused,
)
from triptych.modalities.llm.api.messages import TextOrParts
from triptych.modalities.llm.api.responses import unsupported
from triptych.modalities.llm.api.responses.names import FunctionPlace, Namespace
from triptych.modalities.llm.api.tools.schema import ToolName

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
KEPT_PLACE: Final = "kept-picture:"
"""The prefix of the URLs of stored images, which no client may send."""
_ID_BYTES = 24
_KNOWN = frozenset({"message", "input_text", "output_text", "text"})
"""The types that are not refused as unknown."""


def new_id(prefix: str) -> str:
    """A new unique id."""
    return f"{prefix}_{secrets.token_hex(_ID_BYTES)}"


def is_kept_image(url: str | None) -> bool:
    """Whether a URL is that of a stored image."""
    return url is not None and url.startswith(KEPT_PLACE)


def _without(fields: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: field for name, field in fields.items() if name not in names}


class Entry(NullIsAbsent):
    """An item or a part of one, as clients write it or send it back."""

    refused: ClassVar[unsupported.Table] = MappingProxyType({})
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields of answers that are dropped from prompts."""
    alternative: ClassVar[Callable[[str], str] | None] = None
    """The alternative to an unknown type; set in the classes that get entries of unknown types."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        """Check each entry only once, since there may be a hundred thousand of them."""
        if not isinstance(value, dict):
            return value
        kind = value.get("type", "")
        if cls.alternative is not None and kind and isinstance(kind, str) and kind not in _KNOWN:
            raise UnsupportedOption(f"{kind[:40]!a} is not offered here: {cls.alternative(kind)}")
        is_plain = cls.refused.keys().isdisjoint(value) and cls.ignored.isdisjoint(value)
        if is_plain and None not in value.values():
            return value
        given = {name: field for name, field in value.items() if field is not None}
        return without_refused(_without(given, cls.ignored), cls.refused)


class CacheBreakpoint(Strict):
    """A client's mark for caching the prompt up to here."""

    mode: Literal["explicit"]
    ttl: Label | None = None


class TextContent(Entry):
    """Text of a user or the system (`input_text`), or of an earlier answer (`output_text`)."""

    ignored = frozenset({"annotations", "logprobs"})
    alternative = unsupported.instead_of_part

    type: Literal["input_text", "output_text", "text"]
    text: Text
    prompt_cache_breakpoint: CacheBreakpoint | None = inert("prompt_cache_breakpoint")


class RefusalContent(Entry):
    """An earlier answer by which a request was refused."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """The text of the refusal."""
        return self.refusal


class ImageContent(Entry):
    """An image: PNG, JPEG or WebP as `data:image/png;base64,...`, or its URL.

    A `file_id` is that of an upload to `/v1/files`.
    """

    type: Literal["input_image"]
    image_url: Text | None = None
    file_id: Name | None = None
    detail: Literal["auto", "low", "high", "original"] | None = Field(
        default=None, description="`low`: scaled down to 512 x 512 pixels; else unchanged."
    )
    prompt_cache_breakpoint: CacheBreakpoint | None = inert("prompt_cache_breakpoint")

    @model_validator(mode="after")
    def _check_place(self, info: ValidationInfo) -> Self:
        if (self.image_url is None) == (self.file_id is None):
            raise InvalidRequest("An image has either an image_url or a file_id.", param="input")
        if is_kept_image(self.image_url) and info.context is not _KEPT:
            raise InvalidRequest("image_url is not the URL of an image.", param="input")
        return self


def _part_kind(value: Any) -> str:
    kind = type_of(value)
    return f":{kind}" if kind in ("input_image", "refusal") else ":text"


Content: TypeAlias = Annotated[
    Annotated[TextContent, Tag(":text")]
    | Annotated[ImageContent, Tag(":input_image")]
    | Annotated[RefusalContent, Tag(":refusal")],
    Discriminator(_part_kind),
]
Contents: TypeAlias = TextOrParts[Content]


class Item(Entry):
    """The common fields of items. An `id` is stored as given; a duplicate gets a new one."""

    prefix: ClassVar[str]

    id: Name | None = None
    status: ItemStatus | None = Field(default=None, description="As it was returned.")

    def shown(self) -> dict[str, Any]:
        """The item as it is stored and returned."""
        own = {"id": self.id or new_id(self.prefix), "status": self.status or "completed"}
        return {**self.model_dump(exclude_none=True), **own}


class MessageItem(Item):
    """A message. One of the assistant's is an earlier answer."""

    prefix = "msg"
    alternative = unsupported.instead_of_item

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Contents
    phase: Literal["commentary", "final_answer"] | None = inert("phase")

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        if self.role != "user" and not isinstance(self.content, str) and self.images:
            raise InvalidRequest("Only a user's message has images.", param="input")
        return self

    @property
    def parts(self) -> list[Content]:
        """The parts of the content."""
        if not isinstance(self.content, str):
            return self.content
        kind: Literal["input_text", "output_text"] = (
            "output_text" if self.role == "assistant" else "input_text"
        )
        return [TextContent(type=kind, text=self.content)]

    @property
    def images(self) -> list[ImageContent]:
        """The images in it."""
        return [part for part in self.parts if isinstance(part, ImageContent)]

    @property
    def text(self) -> str:
        """The text of the message."""
        return "".join(part.text for part in self.parts if not isinstance(part, ImageContent))

    def shown(self) -> dict[str, Any]:
        """The item as it is stored and returned, with a text as one part."""
        parts = [part.model_dump(exclude_none=True) for part in self.parts]
        for part in parts:
            if part["type"] == "output_text":
                part.setdefault("annotations", [])
        return {**super().shown(), "content": parts}


class FunctionCallItem(Item):
    """A call of a client's function in an earlier answer."""

    prefix = "fc"
    refused = unsupported.CALL

    type: Literal["function_call"]
    call_id: Name
    name: ToolName
    namespace: Namespace | None = Field(default=None, description="That of the function.")
    arguments: Text = Field(description="A JSON object, as text.")

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.namespace:
            self.place.check("input")
        return self

    @property
    def place(self) -> FunctionPlace:
        """The function that was called."""
        return FunctionPlace(self.name, self.namespace)


class FunctionOutputItem(Item):
    """The result of a call: a text, or texts and images."""

    prefix = "fco"
    refused = unsupported.CALL

    type: Literal["function_call_output"]
    call_id: Name
    output: Contents
    name: ToolName | None = Field(default=None, description="The function that was called.")
    namespace: Namespace | None = Field(default=None, description="That of the function.")

    @property
    def images(self) -> list[ImageContent]:
        """The images in the result, which the prompt has in the user's next message."""
        parts = () if isinstance(self.output, str) else self.output
        return [part for part in parts if isinstance(part, ImageContent)]

    @property
    def text(self) -> str:
        """The text of the result."""
        if isinstance(self.output, str):
            return self.output
        return "".join(part.text for part in self.output if not isinstance(part, ImageContent))


class SummaryContent(Entry):
    """A part of the summary of reasoning."""

    type: Literal["summary_text"]
    text: Text


class ReasoningContent(Entry):
    """A part of reasoning."""

    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(Item):
    """Reasoning before an earlier answer; the template may render it."""

    prefix = "rs"

    type: Literal["reasoning"]
    summary: (
        Annotated[list[SummaryContent], Field(max_length=limits.MAX_CONTENT_PARTS, fail_fast=True)]
        | None
    ) = None
    content: (
        Annotated[
            list[ReasoningContent], Field(max_length=limits.MAX_CONTENT_PARTS, fail_fast=True)
        ]
        | None
    ) = None
    encrypted_content: Text | None = Field(
        default=None, description="Of another server; left out of the prompt."
    )

    @property
    def text(self) -> str:
        """The reasoning, or else its summary."""
        return "\n\n".join(part.text for part in self.content or self.summary or ())

    def shown(self) -> dict[str, Any]:
        """The item as it is stored and returned, always with a summary."""
        return {"summary": [], **super().shown()}


class ItemReference(Entry):
    """A reference to an item of a stored answer, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: Name


_KINDS = ("function_call", "function_call_output", "reasoning", "item_reference")


def _item_kind(value: Any) -> str:
    kind = type_of(value)
    if isinstance(value, dict) and value.keys() - {"type"} == {"id"} and value.get("type") is None:
        kind = "item_reference"
    return f":{kind}" if kind in _KINDS else ":message"


KeptItem: TypeAlias = Annotated[
    Annotated[MessageItem, Tag(":message")]
    | Annotated[FunctionCallItem, Tag(":function_call")]
    | Annotated[FunctionOutputItem, Tag(":function_call_output")]
    | Annotated[ReasoningItem, Tag(":reasoning")],
    Discriminator(_item_kind),
]
InputItem: TypeAlias = Annotated[
    Annotated[MessageItem, Tag(":message")]
    | Annotated[FunctionCallItem, Tag(":function_call")]
    | Annotated[FunctionOutputItem, Tag(":function_call_output")]
    | Annotated[ReasoningItem, Tag(":reasoning")]
    | Annotated[ItemReference, Tag(":item_reference")],
    Discriminator(_item_kind),
]
KEPT_ITEM: TypeAdapter[KeptItem] = TypeAdapter(KeptItem)
_KEPT = {"is_kept": True}


def shown_parts(shown: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """The field of a shown item that may have parts, and the parts."""
    field = "output" if shown.get("type") == "function_call_output" else "content"
    parts = shown.get(field)
    return field, parts if isinstance(parts, list) else []


def kept_items(bodies: Iterable[bytes]) -> list[KeptItem]:
    """Read stored items."""
    return [KEPT_ITEM.validate_json(body, context=_KEPT) for body in bodies]
