"""The request of `/v1/embeddings`, and the fields shared by all requests about texts.

Owns the type of each field, by the rules of `core.http.fields`. Other embedding APIs have their own
modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from triptych.core import limits
from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.http.fields import (
    IgnoresHints,
    InputText,
    Label,
    NamesModel,
    NullIsAbsent,
    RefusedField,
    Refusing,
    Strict,
    inert,
)
from triptych.modalities.embedding.api.service import TextOrIds
from triptych.modalities.llm.api.messages import TemplateOptions, TextPart
from triptych.modalities.llm.api.protocol import Messages, TokenIds

_Batch = Field(min_length=1, max_length=limits.MAX_EMBEDDING_INPUTS, fail_fast=True)


class TextParts(Strict):
    """A text in parts, as sent by clients of Cohere and llama.cpp."""

    content: Annotated[
        list[TextPart], Field(min_length=1, max_length=limits.MAX_CONTENT_PARTS, fail_fast=True)
    ]

    @model_validator(mode="before")
    @classmethod
    def _only_texts(cls, value: Any) -> Any:
        content = value.get("content") if isinstance(value, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type", "text") != "text":
                raise UnsupportedOption(
                    "Only texts can be embedded: send only parts of type 'text'.",
                    param="content",
                )
        return value

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        if not self.text:
            raise InvalidRequest("A text is empty: omit it.", param="content")
        return self

    @property
    def text(self) -> str:
        """The parts joined to one text."""
        return "".join(part.text for part in self.content)


def _entry_kind(value: Any) -> str:
    if isinstance(value, list):
        return ":tokens"
    return ":parts" if isinstance(value, dict) else ":text"


def _input_kind(value: Any) -> str:
    if isinstance(value, list) and not (value and isinstance(value[0], int)):
        return ":list"
    return _entry_kind(value)


_Entry = Annotated[
    Annotated[InputText, Tag(":text")]
    | Annotated[TokenIds, Tag(":tokens")]
    | Annotated[TextParts, Tag(":parts")],
    Discriminator(_entry_kind),
]
Input = Annotated[
    Annotated[InputText, Tag(":text")]
    | Annotated[TokenIds, Tag(":tokens")]
    | Annotated[TextParts, Tag(":parts")]
    | Annotated[list[_Entry], _Batch, Tag(":list")],
    Discriminator(_input_kind),
]
"""A text, its token ids, or a list of such."""


def inputs_of(given: str | TextParts | list[Any]) -> list[TextOrIds]:
    """The texts, or their ids, of an `Input`."""
    is_one = not isinstance(given, list) or isinstance(given[0], int)
    entries: list[Any] = [given] if is_one else list(given)
    return [each.text if isinstance(each, TextParts) else each for each in entries]


EMBEDS = ("embedding", "chat")
"""Tasks of the default model for requests without a model, in order of preference."""
SCORES = ("rerank", "embedding")
"""The same for requests that rank texts."""


_PIXELS = "vectors are made of texts here."
OF_TEXTS: Mapping[str, RefusedField] = MappingProxyType(
    {
        "add_special_tokens": RefusedField("send token ids.", (True,)),
        "cache_salt": RefusedField("leave it out; each text is read by itself."),
        "media_io_kwargs": RefusedField(_PIXELS, ({},)),
        "mm_processor_kwargs": RefusedField(_PIXELS, ({},)),
        "padding": RefusedField("leave it out; each text keeps its length.", (False,)),
        "priority": RefusedField("texts are read as they come.", (0,)),
    }
)
"""vLLM's fields that are not offered in requests about texts."""
OF_VECTORS: Mapping[str, RefusedField] = MappingProxyType(
    {
        **OF_TEXTS,
        "chat_template": RefusedField("the operator sets it with --chat-template."),
        "embd_normalize": RefusedField("divide the vectors yourself.", (2,)),
        "embed_dtype": RefusedField("numbers are float32.", ("float32",)),
        "endianness": RefusedField("base64 is little-endian.", ("native", "little")),
        "use_activation": RefusedField("the model says whether vectors have length 1.", (True,)),
    }
)


class TextFields(NamesModel, IgnoresHints, NullIsAbsent):
    """The fields shared by requests about texts."""

    ignored = MappingProxyType({"request_id": "the header X-Request-Id names requests"})

    truncate_prompt_tokens: int = Field(
        default=0,
        ge=-1,
        le=limits.MAX_PROMPT_TOKENS,
        description="Truncate longer texts to this many tokens, a cross-encoder's pairs together;"
        " -1: to the model's limit, 0: refuse them.",
    )
    truncation_side: Literal["left", "right"] = Field(
        default="right", description="The end at which texts are truncated."
    )
    user: Label | None = inert("user")


class EmbeddingsRequest(TextFields, Refusing):
    """Texts to embed, or a conversation."""

    refused = OF_VECTORS
    tasks = EMBEDS

    input: Input | None = Field(
        default=None, description="A text, texts, token ids, or lists of token ids."
    )
    messages: Messages | None = Field(
        default=None, description="A conversation in place of input, for a chat model."
    )
    chat_template_kwargs: TemplateOptions | None = Field(
        default=None, description="Options of the model's chat template."
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="Make the chat template open an answer."
    )
    continue_final_message: bool | None = Field(
        default=None, description="Leave the last message open."
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1, le=limits.MAX_DIMENSIONS)
    prompt_name: Label = Field(default="", description="The name of one of the model's prompts.")

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise InvalidRequest("Send either input or messages.", param="input")
        are_texts = self.messages is None and all(isinstance(each, str) for each in self.inputs)
        if not are_texts and (self.truncate_prompt_tokens or self.prompt_name):
            raise UnsupportedOption(
                "prompt_name and truncate_prompt_tokens are for texts, not for token ids or"
                " messages.",
                param="messages" if self.input is None else "input",
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequest(
                "continue_final_message continues the last message, add_generation_prompt opens a"
                " new one: send only one of them.",
                param="continue_final_message",
            )
        if self.messages is None and self._template_fields:
            raise UnsupportedOption(
                f"{self._template_fields[0]} is for messages.", param=self._template_fields[0]
            )
        return self

    @property
    def inputs(self) -> list[TextOrIds]:
        """The texts or their ids; empty for a conversation."""
        return [] if self.input is None else inputs_of(self.input)

    def template_options(self) -> dict[str, Any]:
        """The chat template's arguments other than the messages."""
        continues = {"continue_final_message": True} if self.continue_final_message else {}
        return {
            **{str(name): value for name, value in (self.chat_template_kwargs or {}).items()},
            **continues,
            "add_generation_prompt": bool(self.add_generation_prompt),
        }

    @property
    def _template_fields(self) -> list[str]:
        """The given fields that are only for conversations."""
        names = ("add_generation_prompt", "chat_template_kwargs", "continue_final_message")
        return [name for name in names if getattr(self, name)]
