"""Pictures in conversations, as far as text knows of them.

Owns what a picture in a message is, and what a model that sees must be able to do. Knows neither
pixels nor encoders: whoever plugs the parts together gives each model its eyes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from triptych.core.media.fetch import Fetched
from triptych.core.prompt_content import PromptContent

PICTURE = "image"
"""The `type` of a message's part that is a picture, as chat templates know it."""


@dataclass(frozen=True, slots=True)
class PictureSource:
    """Where a picture comes from: its `file`, or else a URL. `is_coarse`: a small one will do."""

    url: str = ""
    file: Fetched | None = None
    is_coarse: bool = False

    def part(self) -> dict[str, Any]:
        """The picture as a part of a message."""
        return {"type": PICTURE, PICTURE: self}


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as its model takes it: ids, and the pictures that fill some of them."""

    ids: tuple[int, ...]
    pictures: tuple[PromptContent, ...] = ()


class MultimodalEncoder(Protocol):
    """What one model sees with."""

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tenant: str = "", **template_kwargs: Any
    ) -> ChatPrompt:
        """A conversation with pictures in it, which no other tenant's are found among.

        Raises errors of `core.errors.RequestError`.
        """
        ...


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[PictureSource]:
    """The pictures of a conversation, in order."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            if part.get("type") == PICTURE:
                yield part[PICTURE]
