"""Conversations with images in them, as far as text knows of those.

Owns what a message may hold, and what makes a prompt of a conversation. Knows neither pixels nor
encoders of images: the encoder of a vision model is opened elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.media.fetch import Fetched

Message = Mapping[str, Any]
"""A `role`, a `content`, and what else a chat template may know. The content is a text, a list of
texts and `ImageSource`s, or `None`."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Where an image comes from: its `file`, or else a URL. `is_coarse`: a small one will do."""

    url: str = ""
    file: Fetched | None = None
    is_coarse: bool = False


class PromptEncoder(Protocol):
    """Makes prompts for one model."""

    async def encode_messages(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tenant: str = "",
        **template_kwargs: Any,
    ) -> TokenRequest:
        """A conversation as the model takes it, yet without sampling parameters.

        `tools` are those that its chat template shall tell it of.

        Its content is found in caches by requests of the same `tenant` alone. Raises errors of
        `core.errors.RequestError`.
        """
        ...


def words_of(content: str | Sequence[str] | None) -> str:
    """A content without images, as one text."""
    return content if isinstance(content, str) else "".join(content or ())


def images_of(messages: Sequence[Message]) -> list[ImageSource]:
    """The images of a conversation, in order."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part for part in parts if isinstance(part, ImageSource)]
