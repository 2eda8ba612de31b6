"""Conversations that may contain images, and the interface that makes prompts of them.

Owns the types of messages and the protocol of prompt encoders. Knows neither pixels nor image
encoders: the encoder of a vision model is opened elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.media.fetch import Fetched

Message = Mapping[str, Any]
"""A `role`, a `content`, and other fields that a chat template reads. The content is a text, a list
of texts and `ImageSource`s, or `None`."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """The `file` of an image, or else its URL. `is_coarse`: low resolution is enough."""

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
        """The prompt of a conversation, without sampling parameters.

        `tools` are passed to the chat template. Only requests of the same `tenant` find the
        prompt's content in caches. Raises a `RequestError`.
        """
        ...


def words_of(content: str | Sequence[str] | None) -> str:
    """The text of a content without images."""
    return content if isinstance(content, str) else "".join(content or ())


def images_of(messages: Sequence[Message]) -> list[ImageSource]:
    """The images of a conversation, in order."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part for part in parts if isinstance(part, ImageSource)]
