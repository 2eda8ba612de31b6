"""The news of a session's parts, and the effects that it asks of them: plain data.

Owns the types between the state of a session (`session`) and what acts for it (`conductor`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from triptych.modalities.talk.ports import TurnEvent, TurnOptions
from triptych.modalities.talk.realtime.settings import Conversation

# -- learned ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TranscriptPiece:
    """More text of a turn."""

    item_id: str
    text: str


@dataclass(frozen=True, slots=True)
class TurnExpected:
    """The whole text of the present turn if nothing more is said; empty: speech goes on."""

    item_id: str
    text: str


@dataclass(frozen=True, slots=True)
class TranscriptEnded:
    """The text of a turn that lasted `seconds`."""

    item_id: str
    text: str
    seconds: float


@dataclass(frozen=True, slots=True)
class TranscriptFailed:
    """A turn could not be transcribed."""

    item_id: str
    error: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerText:
    """More text of an answer that is not spoken."""

    response_id: str
    text: str


@dataclass(frozen=True, slots=True)
class AnswerSpeech:
    """More sound of an answer, `data` in the session's format; a `text` begins with it."""

    response_id: str
    text: str
    data: bytes
    sound_ms: float


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """A whole call of a function."""

    response_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """The model has ended its answer; `is_cut`: at the limit of tokens."""

    response_id: str
    is_cut: bool
    usage: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerFailed:
    """An answer cannot go on."""

    response_id: str
    error: Mapping[str, Any]


LearnedAnswer: TypeAlias = AnswerText | AnswerSpeech | AnswerCall | AnswerEnded | AnswerFailed
Learned: TypeAlias = (
    TurnEvent | TranscriptPiece | TurnExpected | TranscriptEnded | TranscriptFailed | LearnedAnswer
)

# -- asked -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listen:
    """Detect turns with these options from now on; `None`: detect none."""

    options: TurnOptions | None


@dataclass(frozen=True, slots=True)
class BeginTurn:
    """Transcribe the sound from `at_ms` on (`None`: from the next on), as it comes."""

    item_id: str
    at_ms: int | None


@dataclass(frozen=True, slots=True)
class EndTurn:
    """The turn is over, and the item awaits its transcript."""

    item_id: str


@dataclass(frozen=True, slots=True)
class DropTurn:
    """Forget the sound that is not part of an item."""


@dataclass(frozen=True, slots=True)
class TranscribeItem:
    """Transcribe the sound of a client's item."""

    item_id: str
    data: bytes


@dataclass(frozen=True, slots=True)
class StartAnswer:
    """Answer the messages with these settings."""

    response_id: str
    settings: Conversation
    messages: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class PrepareAnswer:
    """Begin to answer the messages, and keep the answer until a response asks for it."""

    settings: Conversation
    messages: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class DropAnswer:
    """End the prepared answer: other words follow."""


@dataclass(frozen=True, slots=True)
class CancelAnswer:
    """End the work for a response at once."""

    response_id: str


@dataclass(frozen=True, slots=True)
class RestDetector:
    """Count silence from `after_ms` on, when the answer will have been played."""

    after_ms: float


Effect: TypeAlias = (
    Listen
    | BeginTurn
    | EndTurn
    | DropTurn
    | TranscribeItem
    | StartAnswer
    | PrepareAnswer
    | DropAnswer
    | CancelAnswer
    | RestDetector
)
