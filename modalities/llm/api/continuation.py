"""Going on with the last message of a conversation, in place of an answer to it.

Owns the mark behind that message's words, at which a rendered conversation is cut; as transformers
does it. Knows no template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triptych.core.errors import InvalidRequest

_MARK = "\ue000continue\ue001"
"""What no caller can write: stand-ins for a caller's private use characters hold a number."""


def marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, the last of them with the mark. Raises `InvalidRequest` if it ends in none."""
    *before, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*before, {**last, "content": f"{content}{_MARK} "}]
    *parts, end = content or [{}]
    if end.get("type") != "text":
        raise InvalidRequest(
            "continue_final_message needs a last message that ends with text.", param="messages"
        )
    return [*before, {**last, "content": [*parts, {**end, "text": f"{end['text']}{_MARK} "}]}]


def cut(rendered: str) -> str:
    """The rendered conversation up to the mark.

    Spaces before it are those of the message, unless the template trims messages: then it would
    have trimmed these, too. Raises `InvalidRequest` where the mark is not to be found.
    """
    before, mark, after = rendered.rpartition(_MARK)
    if not mark:
        raise InvalidRequest(
            "The chat template does not show the last message, so it cannot be continued.",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()
