"""The request bodies of `/tokenize`, `/detokenize` and `/apply-template`, field by field.

Owns the values that each field may have, by the rules of `core.http.fields`, and which fields
exclude each other: vLLM's `prompt` and `messages`, llama.cpp's `content`. Tokenizes nothing, and
knows no reply.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from triptych.core import limits
from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.http.fields import Name, TakesModel, Text, without_refused
from triptych.modalities.llm.api.messages import TemplateFields
from triptych.modalities.llm.api.protocol import (
    ADDS_SPECIAL,
    PARSES_SPECIAL,
    Messages,
    encoding_options,
)
from triptych.modalities.llm.api.sampling_fields import TokenId
from triptych.modalities.llm.api.tools.schema import Tools, ToolSet
from triptych.modalities.llm.api.unsupported import CHAT


class _PromptFields(TemplateFields, TakesModel):
    """The parts of a prompt in addition to messages."""

    tasks = ("chat",)

    model: Name | None = Field(default=None, description="The first that writes text, if absent.")
    tools: Tools | None = None

    @property
    def tool_set(self) -> ToolSet:
        """The tools that the prompt names."""
        return ToolSet.of(self.tools or (), None)


class TemplateRequest(_PromptFields):
    """Body of `/apply-template`."""

    messages: Messages


class TokenizeRequest(_PromptFields):
    """Body of `/tokenize`: a prompt, llama.cpp's `content`, or messages."""

    prompt: Text | None = None
    content: Text | None = Field(
        default=None,
        description="llama.cpp's prompt: special tokens spelled in it are read as tokens, and none"
        " is added.",
    )
    messages: Messages | None = None
    add_special_tokens: bool | None = ADDS_SPECIAL
    add_special: bool | None = Field(
        default=None, description="As add_special_tokens, for content; false by default."
    )
    parse_special: bool | None = PARSES_SPECIAL
    return_token_strs: bool | None = Field(
        default=None, description="Also return each token's text."
    )
    with_pieces: bool | None = Field(
        default=None, description="Return tokens of a content as objects with their text."
    )

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if sum(each is not None for each in (self.prompt, self.content, self.messages)) != 1:
            raise InvalidRequest("Send either prompt, content or messages.", param="prompt")
        others = (
            ("add_special_tokens", "return_token_strs")
            if self.content is not None
            else ("add_special", "with_pieces")
        )
        for name in others:
            if getattr(self, name) is not None:
                kind = "prompt and messages" if self.content is not None else "content"
                raise UnsupportedOption(f"{name} is for {kind}.", param=name)
        if self.messages is not None:
            asked = self.model_dump(include={"add_special_tokens", "parse_special"})
            without_refused({name: value for name, value in asked.items() if value}, CHAT)
        return self

    @property
    def encoding_options(self) -> dict[str, bool]:
        """How the text is tokenized: as a prompt, or as llama.cpp tokenizes `content`."""
        if self.content is None:
            return encoding_options(self.add_special_tokens, self.parse_special)
        return encoding_options(bool(self.add_special), self.parse_special is not False)


class DetokenizeRequest(TakesModel):
    """Body of `/detokenize`."""

    tasks = ("chat",)

    model: Name | None = Field(default=None, description="The first that writes text, if absent.")
    tokens: Annotated[list[TokenId], Field(max_length=limits.MAX_PROMPT_TOKENS, fail_fast=True)]
    skip_special_tokens: bool | None = Field(
        default=None, description="Leave special tokens out (the default)."
    )
