"""The words of spoken answers, which later requests refer to by the id of their sound.

Owns how long they are kept, and for whom. They are in the memory of this process: after a restart,
or on another replica, an id is unknown.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from typing import NamedTuple

from triptych.core.errors import NotFound

KEPT_S = 3600
MAX_ANSWERS = 4096
MAX_CHARACTERS = 8_000_000
"""Bounds of what is kept of all callers together; the oldest go first."""


class SpokenId(NamedTuple):
    """The id of a spoken answer, and when it is forgotten (seconds since 1970)."""

    id: str
    expires_at: int


class SpokenAnswers:
    """The words of answers by their ids, each for its owner."""

    def __init__(self) -> None:
        self._words: OrderedDict[str, tuple[str, int, str]] = OrderedDict()
        self._num_characters = 0

    def new_id(self) -> SpokenId:
        """An id for an answer that begins now."""
        return SpokenId(f"audio_{secrets.token_hex(12)}", int(time.time()) + KEPT_S)

    def keep(self, answer: SpokenId, owner: str, words: str) -> None:
        """Keep the words of a finished answer."""
        self._words[answer.id] = (owner, answer.expires_at, words)
        self._num_characters += len(words)
        while len(self._words) > MAX_ANSWERS or self._num_characters > MAX_CHARACTERS:
            self._num_characters -= len(self._words.popitem(last=False)[1][2])

    def find(self, answer_id: str, owner: str) -> str:
        """Return the words of an answer. Raises `NotFound`."""
        kept_for, expires_at, words = self._words.get(answer_id, ("", 0, ""))
        if expires_at <= time.time() or kept_for != owner:
            raise NotFound(
                f"You have no spoken answer {answer_id[:60]!a}, or it has expired: send its"
                " transcript as content.",
                param="messages",
            )
        return words
