"""One response: its items as they are generated, and the events that tell them.

Owns the order of the events of a response. Pure: no clock, no ids of its own, no sound but what is
passed through.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from triptych.modalities.talk.realtime.items import ConversationItem, Items, Part, Spoken
from triptych.modalities.talk.realtime.settings import Conversation, shown

Event = dict[str, Any]
NewId = Callable[[str], str]
"""Makes an id with a prefix."""
End = Literal["completed", "cancelled", "incomplete", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a response ends; `usage` are the counts of its tokens."""

    status: End
    reason: str | None = None
    error: Mapping[str, Any] | None = None
    usage: Mapping[str, Any] | None = None


class Responding:
    """A response in progress. `items` is the conversation that it is part of, if any."""

    def __init__(
        self,
        new_id: NewId,
        settings: Conversation,
        *,
        items: Items | None,
        conversation_id: str,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.id = new_id("resp")
        self.settings = settings
        self.items = items
        self.input: list[ConversationItem] | None = None
        self.is_started = False
        """Whether the model answers: it first waits for transcriptions."""
        self._new_id = new_id
        self._conversation_id = conversation_id if items is not None else None
        self._metadata = metadata
        self._entries: list[ConversationItem] = []
        self._open: ConversationItem | None = None

    def created(self) -> list[Event]:
        """The first events."""
        return [
            {"type": "response.created", "response": self.shown("in_progress")},
            {"type": "rate_limits.updated", "rate_limits": []},  # none are counted in tokens
        ]

    @property
    def spoken_item(self) -> ConversationItem | None:
        """The message that was last spoken, if any."""
        said = (each for each in reversed(self._entries) if each.parts and each.parts[0].spoken)
        return next(said, None)

    def text(self, delta: str) -> list[Event]:
        """More text of an answer that is not spoken."""
        events = self._open_message("output_text")
        self._part.text += delta
        return [*events, self._of_part("response.output_text.delta", delta=delta)]

    def sound(self, text: str, data: bytes, sound_ms: float) -> list[Event]:
        """More sound; a `text` begins with it."""
        events = self._open_message("output_audio")
        spoken = self._part.spoken
        assert spoken is not None
        spoken.add(text, sound_ms)
        if not spoken.is_cut:
            self._part.text += text
        if text:
            events.append(self._of_part("response.output_audio_transcript.delta", delta=text))
        if data:
            delta = base64.b64encode(data).decode()
            events.append(self._of_part("response.output_audio.delta", delta=delta))
        return events

    def call(self, name: str) -> list[Event]:
        """A call of a function begins."""
        entry = ConversationItem(
            id=self._new_id("item"),
            type="function_call",
            name=name,
            call_id=self._new_id("call"),
            status="in_progress",
        )
        return [*self._close("completed"), *self._begin(entry)]

    def arguments(self, delta: str) -> list[Event]:
        """More arguments of the call."""
        assert self._open is not None
        self._open.arguments += delta
        event = self._of_item("response.function_call_arguments.delta", delta=delta)
        return [{**event, "call_id": self._open.call_id}]

    def end(self, ending: Ending) -> list[Event]:
        """The last events."""
        is_whole = ending.status == "completed"
        events = self._close("completed" if is_whole else "incomplete")
        details: dict[str, Any] = {"type": ending.status}
        if ending.reason:
            details["reason"] = ending.reason
        if ending.error:
            details["error"] = dict(ending.error)
        response = self.shown(ending.status)
        response["status_details"] = None if is_whole else details
        response["usage"] = ending.usage
        return [*events, {"type": "response.done", "response": response}]

    def shown(self, status: str) -> Event:
        """The response as events show it."""
        fields = shown(self.settings)
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": None,
            "output": [entry.shown() for entry in self._entries],
            "conversation_id": self._conversation_id,
            "output_modalities": fields["output_modalities"],
            "max_output_tokens": fields["max_output_tokens"],
            "audio": {
                "output": {name: fields["audio"]["output"][name] for name in ("format", "voice")}
            },
            "usage": None,
            "metadata": None if self._metadata is None else dict(self._metadata),
        }

    # -- items and parts -------------------------------------------------------------------------

    @property
    def _part(self) -> Part:
        assert self._open is not None
        return self._open.parts[0]

    def _open_message(self, kind: Literal["output_text", "output_audio"]) -> list[Event]:
        if self._open is not None and self._open.type == "message":
            return []
        spoken = Spoken() if kind == "output_audio" else None
        entry = ConversationItem(
            id=self._new_id("item"),
            type="message",
            role="assistant",
            parts=[Part(type=kind, spoken=spoken)],
            status="in_progress",
        )
        events = [*self._close("completed"), *self._begin(entry)]
        return [*events, self._of_part("response.content_part.added", part=self._shown_part())]

    def _begin(self, entry: ConversationItem) -> list[Event]:
        self._open = entry
        self._entries.append(entry)
        shown_entry = {**entry.shown(), **({"content": []} if entry.type == "message" else {})}
        added = self._of_response("response.output_item.added", item=shown_entry)
        if self.items is None:
            return [added]
        previous = self.items.add(entry)
        in_list = {"type": "conversation.item.added", "previous_item_id": previous}
        return [added, {**in_list, "item": shown_entry}]

    def _close(self, status: Literal["completed", "incomplete"]) -> list[Event]:
        entry = self._open
        if entry is None:
            return []
        entry.status = status
        events = (
            self._ends_of_call(entry) if entry.type == "function_call" else self._ends_of_part()
        )
        events.append(self._of_response("response.output_item.done", item=entry.shown()))
        if self.items is not None:
            previous = self.items.before(entry.id)
            in_list = {"type": "conversation.item.done", "previous_item_id": previous}
            events.append({**in_list, "item": entry.shown()})
        self._open = None
        return events

    def _ends_of_call(self, entry: ConversationItem) -> list[Event]:
        event = self._of_item("response.function_call_arguments.done", arguments=entry.arguments)
        return [{**event, "call_id": entry.call_id, "name": entry.name}]

    def _ends_of_part(self) -> list[Event]:
        part, text = self._part, self._part.text
        if part.spoken is None:
            ends = [self._of_part("response.output_text.done", text=text)]
        else:
            ends = [
                self._of_part("response.output_audio.done"),
                self._of_part("response.output_audio_transcript.done", transcript=text),
            ]
        return [*ends, self._of_part("response.content_part.done", part=self._shown_part())]

    def _shown_part(self) -> Event:
        part = self._part
        if part.spoken is None:
            return {"type": "text", "text": part.text}
        return {"type": "audio", "transcript": part.text}

    def _of_response(self, kind: str, **fields: Any) -> Event:
        index = len(self._entries) - 1
        return {"type": kind, "response_id": self.id, "output_index": index, **fields}

    def _of_item(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        return self._of_response(kind, item_id=self._open.id, **fields)

    def _of_part(self, kind: str, **fields: Any) -> Event:
        return self._of_item(kind, content_index=0, **fields)
