"""The items that conversations are made of in the Responses API.

Owns what each of their fields may be: honoured, accepted as inert, or refused by name with the
alternative; and how an item is kept and shown. Knows no route, and not what becomes of an item.
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
"""What an image's URL begins with where the image is kept here; no client's does."""
_ID_BYTES = 24
_KNOWN = frozenset({"message", "input_text", "output_text", "text"})
"""Types of what would otherwise be an unknown one."""


def new_id(prefix: str) -> str:
    """An id that comes once."""
    return f"{prefix}_{secrets.token_hex(_ID_BYTES)}"


def is_kept_image(url: str | None) -> bool:
    """Whether a URL is a place of ours."""
    return url is not None and url.startswith(KEPT_PLACE)


def _without(fields: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: field for name, field in fields.items() if name not in names}


class Entry(NullIsAbsent):
    """An item or a part of one, as clients write it or send it back."""

    refused: ClassVar[unsupported.Table] = MappingProxyType({})
    ignored: ClassVar[frozenset[str]] = frozenset()
    """What answers have and prompts do not show."""
    others: ClassVar[Callable[[str], str] | None] = None
    """What to do in place of another type; set where entries of unknown types end up."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        """One look at each entry, since there may be a hundred thousand of them."""
        if not isinstance(value, dict):
            return value
        kind = value.get("type", "")
        if cls.others is not None and kind and isinstance(kind, str) and kind not in _KNOWN:
            raise UnsupportedOption(f"{kind[:40]!a} is not offered here: {cls.others(kind)}")
        is_plain = cls.refused.keys().isdisjoint(value) and cls.ignored.isdisjoint(value)
        if is_plain and None not in value.values():
            return value
        given = {name: field for name, field in value.items() if field is not None}
        return without_refused(_without(given, cls.ignored), cls.refused)


class CacheBreakpoint(Strict):
    """Where a prompt's beginning ends that shall be cached, as some clients mark it."""

    mode: Literal["explicit"]
    ttl: Label | None = None


class TextContent(Entry):
    """Text, of the user or the operator (`input_text`), or of an earlier answer (`output_text`)."""

    ignored = frozenset({"annotations", "logprobs"})
    others = unsupported.instead_of_part

    type: Literal["input_text", "output_text", "text"]
    text: Text
    prompt_cache_breakpoint: CacheBreakpoint | None = inert("prompt_cache_breakpoint")


class RefusalContent(Entry):
    """An earlier answer by which a request was refused."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """What was said."""
        return self.refusal


class ImageContent(Entry):
    """An image: PNG, JPEG or WebP as `data:image/png;base64,...`, or where it can be found.

    A `file_id` is of an upload to `/v1/files`.
    """

    type: Literal["input_image"]
    image_url: Text | None = None
    file_id: Name | None = None
    detail: Literal["auto", "low", "high", "original"] | None = Field(
        default=None, description="`low`: scaled down to 512 x 512 pixels' worth; else as it is."
    )
    prompt_cache_breakpoint: CacheBreakpoint | None = inert("prompt_cache_breakpoint")

    @model_validator(mode="after")
    def _check_place(self, info: ValidationInfo) -> Self:
        if (self.image_url is None) == (self.file_id is None):
            raise InvalidRequest("An image has either an image_url or a file_id.", param="input")
        if is_kept_image(self.image_url) and info.context is not _KEPT:
            raise InvalidRequest("That is no image's URL.", param="input")
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
    """What all items have. An `id` is kept as it is given; of two that are the same one is new."""

    prefix: ClassVar[str]

    id: Name | None = None
    status: ItemStatus | None = Field(default=None, description="As it was returned.")

    def shown(self) -> dict[str, Any]:
        """The item as it is kept and returned."""
        own = {"id": self.id or new_id(self.prefix), "status": self.status or "completed"}
        return {**self.model_dump(exclude_none=True), **own}


class MessageItem(Item):
    """A message. One of the assistant's is an earlier answer."""

    prefix = "msg"
    others = unsupported.instead_of_item

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Contents
    phase: Literal["commentary", "final_answer"] | None = inert("phase")

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        if self.role != "user" and not isinstance(self.content, str) and self.images:
            raise InvalidRequest("Images are read in messages of the user.", param="input")
        return self

    @property
    def parts(self) -> list[Content]:
        """What it says."""
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
        """Its words."""
        return "".join(part.text for part in self.parts if not isinstance(part, ImageContent))

    def shown(self) -> dict[str, Any]:
        """As for every item; a text is a part of its own."""
        parts = [part.model_dump(exclude_none=True) for part in self.parts]
        for part in parts:
            if part["type"] == "output_text":
                part.setdefault("annotations", [])
        return {**super().shown(), "content": parts}


class FunctionCallItem(Item):
    """A call of a function of the client's, in an earlier answer."""

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
    """What a call came to: a text, or texts and images."""

    prefix = "fco"
    refused = unsupported.CALL

    type: Literal["function_call_output"]
    call_id: Name
    output: Contents
    name: ToolName | None = Field(default=None, description="The function that was called.")
    namespace: Namespace | None = Field(default=None, description="That of the function.")

    @property
    def images(self) -> list[ImageContent]:
        """The images in it: a model sees them with what its user says next."""
        parts = () if isinstance(self.output, str) else self.output
        return [part for part in parts if isinstance(part, ImageContent)]

    @property
    def text(self) -> str:
        """What is said."""
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
        default=None, description="Another server's: it is left out of the prompt."
    )

    @property
    def text(self) -> str:
        """The reasoning, or else their summary."""
        return "\n\n".join(part.text for part in self.content or self.summary or ())

    def shown(self) -> dict[str, Any]:
        """As for every item; a summary is always there."""
        return {"summary": [], **super().shown()}


class ItemReference(Entry):
    """An item of an answer that is kept, by its id."""

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
    """The field of an item, as it is shown, that may have parts, and the parts."""
    field = "output" if shown.get("type") == "function_call_output" else "content"
    parts = shown.get(field)
    return field, parts if isinstance(parts, list) else []


def kept_items(bodies: Iterable[bytes]) -> list[KeptItem]:
    """Items as they were kept."""
    return [KEPT_ITEM.validate_json(body, context=_KEPT) for body in bodies]
