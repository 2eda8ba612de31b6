"""The blocks of messages in Anthropic's API.

Owns the values that each field may have: honoured, accepted as inert, or refused by name with the
alternative. Knows no route and no translation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from triptych.core.errors import UnsupportedOption
from triptych.core.http.fields import (
    JsonObject,
    Name,
    Refusing,
    Strict,
    Text,
    inert,
    type_of,
    unknown_type,
    without_refused,
)
from triptych.modalities.llm.api.anthropic import unsupported
from triptych.modalities.llm.api.messages import CacheControl, TextOrParts
from triptych.modalities.llm.api.tools.schema import ToolName

BETWEEN_BLOCKS = "\n\n"
"""Separates two blocks of text that become one text of the prompt."""
CALL_PREFIX = "toolu_"
"""The beginning of a call's id. Prompts have the rest: Mistral's templates take nine characters."""


class TextBlock(Strict):
    """A block of text."""

    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = inert("cache_control")

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        if kind := unknown_type(value, "text"):
            instead = unsupported.instead_of_block(type_of(value))
            raise UnsupportedOption(f"Blocks of type {kind} are not offered here: {instead}")
        return without_refused(value, unsupported.TEXT)


class Base64Source(Strict):
    """An image, in base64."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: Text

    @property
    def address(self) -> str:
        """The image as a data URL."""
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(Strict):
    """The URL of an image, whose host the operator must allow."""

    type: Literal["url"]
    url: Text

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        if type_of(value) == "file":
            raise UnsupportedOption("Images by file id are not offered: send base64 or a URL.")
        return value

    @property
    def address(self) -> str:
        """The image's URL."""
        return self.url


def _source_kind(value: Any) -> str:
    return ":base64" if type_of(value) == "base64" else ":url"


class ImageBlock(Refusing):
    """A block with an image."""

    refused = unsupported.IMAGE

    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag(":base64")] | Annotated[UrlSource, Tag(":url")],
        Discriminator(_source_kind),
    ]
    cache_control: CacheControl | None = inert("cache_control")


class PlainTextSource(Strict):
    """A plain text document."""

    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: Text

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        if kind := unknown_type(value, "text"):
            raise UnsupportedOption(
                f"A document with a source of type {kind} is not offered: {unsupported.AS_TEXT}"
            )
        return value

    @property
    def text(self) -> str:
        """The text of the document."""
        return self.data


class ContentSource(Strict):
    """A document in blocks of text."""

    type: Literal["content"]
    content: TextOrParts[TextBlock]

    @property
    def text(self) -> str:
        """The text of the document."""
        if isinstance(self.content, str):
            return self.content
        return BETWEEN_BLOCKS.join(block.text for block in self.content)


class Citations(Refusing):
    """Whether an answer cites its sources, which is not supported here."""

    refused = unsupported.CITATIONS

    enabled: Literal[False] | None = None


def _document_kind(value: Any) -> str:
    return ":content" if type_of(value) == "content" else ":text"


class DocumentBlock(Strict):
    """A text with a title and a context: the model reads title, context and text."""

    type: Literal["document"]
    source: Annotated[
        Annotated[PlainTextSource, Tag(":text")] | Annotated[ContentSource, Tag(":content")],
        Discriminator(_document_kind),
    ]
    title: Text | None = None
    context: Text | None = None
    citations: Citations | None = None
    cache_control: CacheControl | None = inert("cache_control")

    @property
    def text(self) -> str:
        """Title, context and text of the document."""
        return BETWEEN_BLOCKS.join(filter(None, (self.title, self.context, self.source.text)))


class ThinkingBlock(Strict):
    """Reasoning in an earlier answer; the template may render it. No signature is checked."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class RedactedThinkingBlock(Strict):
    """Encrypted reasoning, which is left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: Text


class ToolUseBlock(Refusing):
    """A call in an earlier answer."""

    refused = unsupported.CALL

    type: Literal["tool_use"]
    id: Name
    name: ToolName
    input: JsonObject
    cache_control: CacheControl | None = inert("cache_control")


def _result_kind(value: Any) -> str:
    kind = type_of(value)
    return f":{kind}" if kind in ("image", "document") else ":text"


ResultBlock: TypeAlias = Annotated[
    Annotated[TextBlock, Tag(":text")]
    | Annotated[ImageBlock, Tag(":image")]
    | Annotated[DocumentBlock, Tag(":document")],
    Discriminator(_result_kind),
]


class ToolResultBlock(Refusing):
    """The result of a call."""

    refused = unsupported.CALL

    type: Literal["tool_result"]
    tool_use_id: Name
    content: TextOrParts[ResultBlock] | None = None
    is_error: bool | None = Field(default=None, description="Begin the text with `Error:`.")
    cache_control: CacheControl | None = inert("cache_control")


_KINDS = ("image", "document", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _block_kind(value: Any) -> str:
    kind = type_of(value)
    return f":{kind}" if kind in _KINDS else ":text"


Block: TypeAlias = Annotated[
    Annotated[TextBlock, Tag(":text")]
    | Annotated[ImageBlock, Tag(":image")]
    | Annotated[DocumentBlock, Tag(":document")]
    | Annotated[ThinkingBlock, Tag(":thinking")]
    | Annotated[RedactedThinkingBlock, Tag(":redacted_thinking")]
    | Annotated[ToolUseBlock, Tag(":tool_use")]
    | Annotated[ToolResultBlock, Tag(":tool_result")],
    Discriminator(_block_kind),
]
