"""The items of a conversation: their order, what was heard of them, and the messages they are.

Owns the list and its changes. Knows neither events nor sound: of what was said it keeps the text
and how long each sentence lasted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Any, Literal

from triptych.core.errors import InvalidRequest, NotFound
from triptych.modalities.talk.realtime.events import (
    ClientCall,
    ClientCallOutput,
    ClientMessage,
    InputImage,
    Item,
    UserSound,
)
from triptych.modalities.talk.realtime.holding import HeldBytes, unlimited

MAX_ITEMS = 1024
MAX_CHARS = 2**25
"""Characters of text, images and sound without words that a client may add to a conversation."""
Role = Literal["system", "user", "assistant"]
Status = Literal["completed", "incomplete", "in_progress"]


@dataclass(slots=True)
class Sentence:
    """A text, and the milliseconds of sound that say it so far."""

    text: str
    sound_ms: float = 0.0


@dataclass(slots=True)
class Spoken:
    """The sentences that were said in one part, in order."""

    sentences: list[Sentence] = field(default_factory=list)
    is_cut: bool = False
    """Whether it was truncated: what is said later is not heard."""

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(each.text for each in self.sentences)

    @property
    def sound_ms(self) -> float:
        """How long it lasts."""
        return sum(each.sound_ms for each in self.sentences)

    def add(self, text: str, sound_ms: float) -> None:
        """Add sound; a `text` begins a sentence."""
        if text or not self.sentences:
            self.sentences.append(Sentence(text))
        self.sentences[-1].sound_ms += sound_ms

    def until(self, end_ms: float) -> str:
        """Return the text that was said by `end_ms`, whole words of it."""
        said = ""
        for each in self.sentences:
            if end_ms >= each.sound_ms:
                said += each.text
                end_ms -= each.sound_ms
                continue
            begun = each.text[: int(len(each.text) * max(0.0, end_ms) / each.sound_ms)]
            return said + begun[: begun.rfind(" ") + 1]
        return said


@dataclass(slots=True, kw_only=True)
class Part:
    """A part of a message's content; `spoken` is all that was said, `text` what was heard of it."""

    type: str
    text: str = ""
    image_url: str = ""
    detail: str | None = None
    spoken: Spoken | None = None
    is_pending: bool = False
    """Whether its transcription is not known yet."""
    num_sound_chars: int = 0
    """The size of sound that a client has added, in base64; it is held while it is pending."""

    def shown(self) -> dict[str, Any]:
        """The part as events show it."""
        if self.type in ("input_audio", "output_audio"):
            return {"type": self.type, "transcript": None if self.is_pending else self.text}
        if self.type == "input_image":
            return {"type": self.type, "image_url": self.image_url}
        return {"type": self.type, "text": self.text}

    def for_chat(self) -> dict[str, Any]:
        """The part as chat takes it."""
        if self.type == "input_image":
            detail = {"detail": self.detail} if self.detail else {}
            return {"type": "image_url", "image_url": {"url": self.image_url, **detail}}
        return {"type": "text", "text": self.text}


@dataclass(slots=True, kw_only=True)
class ConversationItem:
    """An item. A message has a role and parts, a call a name and arguments, a result an output."""

    id: str
    type: Literal["message", "function_call", "function_call_output"]
    role: Role | None = None
    parts: list[Part] = field(default_factory=list)
    name: str = ""
    call_id: str = ""
    arguments: str = ""
    output: str = ""
    status: Status = "completed"

    def truncate(self, end_ms: int) -> dict[str, Any]:
        """Keep of a spoken message what was said until `end_ms`; returns the event."""
        part = self.parts[0]
        assert part.spoken is not None
        part.text, part.spoken.is_cut = part.spoken.until(end_ms), True
        return {
            "type": "conversation.item.truncated",
            "item_id": self.id,
            "content_index": 0,
            "audio_end_ms": end_ms,
        }

    def check_cut(self, content_index: int, end_ms: int) -> None:
        """Raise `InvalidRequest` if a part cannot be truncated there."""
        spoken = self.parts[0].spoken if self.parts and content_index == 0 else None
        if spoken is None:
            raise InvalidRequest("Only what was said can be truncated.", param="item_id")
        if end_ms > spoken.sound_ms:
            raise InvalidRequest(
                f"The sound of this item is {int(spoken.sound_ms)} ms long, shorter than"
                f" {end_ms} ms.",
                param="audio_end_ms",
            )

    @classmethod
    def of(cls, item: Item, item_id: str, call_id: str) -> ConversationItem:
        """The entry of a client's item, with ids for what has none."""
        match item:
            case ClientMessage():
                parts = list(map(_part_of, item.content))
                return cls(id=item_id, type="message", role=item.role, parts=parts)
            case ClientCall():
                return cls(
                    id=item_id,
                    type="function_call",
                    name=item.name,
                    arguments=item.arguments,
                    call_id=item.call_id or call_id,
                )
            case ClientCallOutput():
                return cls(
                    id=item_id,
                    type="function_call_output",
                    call_id=item.call_id,
                    output=item.output,
                )

    @property
    def num_chars(self) -> int:
        """The size of its texts and images."""
        parts = sum(len(part.text) + len(part.image_url) for part in self.parts)
        parts += sum(part.num_sound_chars for part in self.parts if part.is_pending)
        return parts + len(self.arguments) + len(self.output)

    @property
    def num_bytes(self) -> int:
        """The memory of its texts and images, and of sound that waits for its words."""
        texts = [self.arguments, self.output]
        texts += [text for part in self.parts for text in (part.text, part.image_url)]
        sounds = (part.num_sound_chars for part in self.parts if part.is_pending)
        return sum(map(getsizeof, texts)) + sum(sounds)

    @property
    def is_pending(self) -> bool:
        """Whether a transcription is awaited."""
        return any(part.is_pending for part in self.parts)

    def shown(self) -> dict[str, Any]:
        """The item as events show it."""
        head = {"id": self.id, "object": "realtime.item", "type": self.type, "status": self.status}
        if self.type == "message":
            return {**head, "role": self.role, "content": [part.shown() for part in self.parts]}
        if self.type == "function_call":
            call = {"name": self.name, "call_id": self.call_id, "arguments": self.arguments}
            return {**head, **call}
        return {**head, "call_id": self.call_id, "output": self.output}


def _part_of(part: Any) -> Part:
    match part:
        case InputImage():
            return Part(type=part.type, image_url=part.image_url, detail=part.detail)
        case UserSound():
            return Part(
                type=part.type,
                text=part.transcript or "",
                is_pending=part.transcript is None,
                num_sound_chars=len(part.audio or ""),
            )
        case _:
            text = getattr(part, "text", None) or getattr(part, "transcript", None) or ""
            kinds = {"text": "output_text", "audio": "output_audio"}
            return Part(type=kinds.get(part.type, part.type), text=text)


class Items:
    """The items of a conversation, in order."""

    def __init__(self, held: HeldBytes | None = None) -> None:
        self._entries: list[ConversationItem] = []
        self._held = held or unlimited()

    def __iter__(self) -> Iterator[ConversationItem]:
        return iter(self._entries)

    @property
    def last_id(self) -> str | None:
        """The id of the last item."""
        return self._entries[-1].id if self._entries else None

    def check_room(self, new: ConversationItem | None = None) -> None:
        """Raise `InvalidRequest` if `new`, or any item, would be too much for the conversation.

        Raises `Overloaded` if it would be too much for all sessions together.
        """
        if len(self._entries) >= MAX_ITEMS:
            raise InvalidRequest(f"A conversation has at most {MAX_ITEMS} items; delete some.")
        entries = [*self._entries, *([] if new is None else [new])]
        if sum(each.num_chars for each in entries) > MAX_CHARS:
            raise InvalidRequest(
                f"The items of a conversation have at most {MAX_CHARS} characters; delete some."
            )
        self._held.resize(sum(each.num_bytes for each in entries))

    def find(self, item_id: str) -> ConversationItem:
        """Return an item. Raises `NotFound`."""
        return self._entries[self._index(item_id)]

    def add(self, entry: ConversationItem, after: str | None = None) -> str | None:
        """Add an item at the end, or `after` another ("root": first); returns the one before.

        Raises `InvalidRequest` for an id that is taken, `NotFound`.
        """
        if any(each.id == entry.id for each in self._entries):
            raise InvalidRequest(f"There is already an item {entry.id!a}.", param="item.id")
        at = len(self._entries)
        if after is not None:
            at = 0 if after == "root" else self._index(after) + 1
        self._entries.insert(at, entry)
        return self._entries[at - 1].id if at else None

    def before(self, item_id: str) -> str | None:
        """Return the id of the item before another, if both are there."""
        ids = [None, *(each.id for each in self._entries)]
        return ids[ids.index(item_id) - 1] if item_id in ids else None

    def remove(self, item_id: str) -> None:
        """Remove an item. Raises `NotFound`."""
        del self._entries[self._index(item_id)]
        self._held.shrink(sum(each.num_bytes for each in self._entries))

    def _index(self, item_id: str) -> int:
        ids = [each.id for each in self._entries]
        if item_id not in ids:
            raise NotFound(f"There is no item {item_id[:60]!a} here.", param="item_id")
        return ids.index(item_id)


def messages_of(entries: Iterable[ConversationItem], instructions: str) -> list[dict[str, Any]]:
    """Return a conversation as chat takes it. Turns without words are left out."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for entry in entries:
        match entry.type:
            case "message":
                content = _content(entry.parts)
                if content:
                    messages.append({"role": entry.role, "content": content})
            case "function_call":
                _add_call(messages, entry)
            case "function_call_output":
                messages.append(
                    {"role": "tool", "tool_call_id": entry.call_id, "content": entry.output}
                )
    return messages


def _content(parts: Sequence[Part]) -> str | list[dict[str, Any]]:
    known = [part for part in parts if part.text.strip() or part.image_url]
    if any(part.image_url for part in known):
        return [part.for_chat() for part in known]
    return "\n".join(part.text for part in known)


def _add_call(messages: list[dict[str, Any]], entry: ConversationItem) -> None:
    """Add a call to the assistant's message before it, or as a message of its own."""
    function = {"name": entry.name, "arguments": entry.arguments}
    call = {"id": entry.call_id, "type": "function", "function": function}
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
