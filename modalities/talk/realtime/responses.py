"""The responses of a session that are in progress.

Owns their number, which of them is part of the conversation, and when they start. Pure, as a
response is.
"""

from __future__ import annotations

from collections.abc import Iterable

from triptych.core.errors import Conflict, NotFound
from triptych.modalities.talk.realtime.inputs import StartAnswer
from triptych.modalities.talk.realtime.items import ConversationItem, messages_of
from triptych.modalities.talk.realtime.responding import Responding

MAX_RESPONSES = 8
"""Responses at once, of which one is part of the conversation."""


class Responses:
    """Responses by their ids."""

    def __init__(self) -> None:
        self._by_id: dict[str, Responding] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def of_conversation(self) -> Responding | None:
        """The response that is part of the conversation, if there is one."""
        return next((each for each in self._by_id.values() if each.items is not None), None)

    def find(self, response_id: str) -> Responding | None:
        """The response of this id, if it is in progress."""
        return self._by_id.get(response_id)

    def to_cancel(self, response_id: str | None) -> Responding:
        """The response of this id, or that of the conversation. Raises `NotFound`."""
        found = self.find(response_id) if response_id else self.of_conversation
        if found is None:
            raise NotFound("No response is in progress.", param="response_id")
        return found

    def check_room(self, *, in_conversation: bool) -> None:
        """Raise `Conflict` if another response cannot be created now."""
        if in_conversation and self.of_conversation is not None:
            raise Conflict("A response is in progress: cancel it, or wait for response.done.")
        if len(self) >= MAX_RESPONSES:
            raise Conflict(f"There are {MAX_RESPONSES} responses in progress; wait for one.")

    def add(self, response: Responding) -> None:
        """Add a response that was created."""
        self._by_id[response.id] = response

    def remove(self, response: Responding) -> None:
        """Remove a response that ends."""
        del self._by_id[response.id]

    def start_ready(self, items: Iterable[ConversationItem]) -> list[StartAnswer]:
        """Start those whose input, or else the conversation's `items`, has all its transcripts."""
        started = []
        for response in self._by_id.values():
            entries = list(items if response.input is None else response.input)
            if response.is_started or any(entry.is_pending for entry in entries):
                continue
            response.is_started = True
            messages = messages_of(entries, response.settings.instructions)
            started.append(StartAnswer(response.id, response.settings, messages))
        return started
