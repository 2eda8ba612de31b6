"""The state of a session: events of the client and of its parts in, events and effects out.

Owns all rules of a session: turns, responses, what interrupts what, and the order of events. Pure:
it has no clock, no ids of its own and no sockets, and keeps no sound; `conductor` acts for it. An
error of an event leaves the state as it was.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from triptych.core.errors import (
    Conflict,
    EmptyBuffer,
    InvalidRequest,
    TriptychError,
    UnsupportedOption,
)
from triptych.modalities.talk.ports import (
    IdleTimedOut,
    SpeechDismissed,
    SpeechStarted,
    SpeechStopped,
    SpeechSuspected,
    TurnEvent,
)
from triptych.modalities.talk.realtime import events as client
from triptych.modalities.talk.realtime.heard import buffer_event, transcript_event
from triptych.modalities.talk.realtime.holding import HeldBytes
from triptych.modalities.talk.realtime.inputs import (
    AnswerCall,
    AnswerEnded,
    AnswerFailed,
    AnswerSpeech,
    AnswerText,
    BeginTurn,
    CancelAnswer,
    DropAnswer,
    DropTurn,
    Effect,
    EndTurn,
    Learned,
    LearnedAnswer,
    Listen,
    PrepareAnswer,
    RestDetector,
    TranscribeItem,
    TranscriptEnded,
    TranscriptFailed,
    TranscriptPiece,
    TurnExpected,
)
from triptych.modalities.talk.realtime.items import ConversationItem, Items, Part, messages_of
from triptych.modalities.talk.realtime.playback import SpeechPlayback
from triptych.modalities.talk.realtime.responding import Ending, Event, NewId, Responding
from triptych.modalities.talk.realtime.responses import Responses
from triptych.modalities.talk.realtime.settings import (
    CheckSettings,
    Conversation,
    Settings,
    accept,
    shown,
    updated,
    with_overrides,
)

MIN_COMMIT_MS = 100
MAX_TURN_MS = 600_000
Out: TypeAlias = Event | Effect


class Session:
    """One session. `take` and `learn` return what follows, in order.

    `check` is asked before settings apply. `held` counts the memory of the items.
    """

    def __init__(
        self,
        settings: Settings,
        new_id: NewId,
        check: CheckSettings = accept,
        held: HeldBytes | None = None,
    ) -> None:
        self.settings = settings
        self._check = check
        self.id = new_id("sess")
        self._new_id = new_id
        self._conversation_id = new_id("conv")
        self._items = Items(held)
        self.playback = SpeechPlayback()
        self._responses = Responses()
        self._turn_id: str | None = None  # of the item that the present speech will be
        self._answered: set[str] = set()  # items whose transcript an answer waits for
        self._unsettled: dict[str, ConversationItem] = {}  # items without their transcript
        self._buffered_ms = self._heard_ms = 0.0
        self._has_spoken = False
        self._owes_answer = False  # to a turn after which the user went on speaking

    def open(self) -> list[Out]:
        """Return the first events."""
        return [{"type": "session.created", "session": self._shown()}, self._listen()]

    @property
    def is_answering(self) -> bool:
        """Whether a response is in progress."""
        return bool(self._responses)

    def hear(self, sound_ms: float) -> list[Out]:
        """Count sound of the user that was appended; it begins a turn if none are detected.

        Raises `InvalidRequest` for a turn that is too long; one that was detected ends then.
        """
        is_manual = self.settings.audio.input.turn_detection is None
        is_full = self._turn_id is not None and self._buffered_ms + sound_ms > MAX_TURN_MS
        if is_full and is_manual:
            raise InvalidRequest(
                f"A turn has at most {MAX_TURN_MS // 1000} s of sound: commit or clear it.",
                param="audio",
            )
        self._buffered_ms += sound_ms
        self._heard_ms += sound_ms
        if is_full:
            return self._end_speech(int(self._heard_ms))
        if is_manual and self._turn_id is None:
            self._turn_id = self._new_id("item")
            return [BeginTurn(self._turn_id, None)]
        return []

    # -- the client ------------------------------------------------------------------------------

    def take(self, event: client.ClientEvent, now_ms: float) -> list[Out]:
        """Answer an event of the client, except appended sound. Raises `RequestError`s."""
        match event:
            case client.CreateItem():
                return self._create_item(event)
            case client.RetrieveItem():
                entry = self._items.find(event.item_id)
                return [{"type": "conversation.item.retrieved", "item": entry.shown()}]
            case client.DeleteItem():
                self._items.remove(event.item_id)
                return [{"type": "conversation.item.deleted", "item_id": event.item_id}]
            case client.TruncateItem():
                return self._truncate_by_client(event, now_ms)
            case client.SessionUpdate():
                return self._update(event.session, now_ms)
            case _:
                return self._take_signal(event, now_ms)

    def _take_signal(self, event: client.ClientEvent, now_ms: float) -> list[Out]:
        match event:
            case client.CommitSound():
                return self._commit_by_client()
            case client.ClearSound():
                return self._clear(now_ms)
            case client.CreateResponse():
                return self._create_response(event.response or client.ResponseFields())
            case client.CancelResponse():
                return self._cancel_by_client(event.response_id, now_ms)
            case client.ClearOutput():
                return self._clear_output(now_ms)
            case _:
                raise AssertionError("the conductor decodes sound, and calls hear")

    def _update(self, given: dict[str, Any], now_ms: float) -> list[Out]:
        new = self._check(updated(self.settings, given))
        old = self.settings
        if isinstance(old, Conversation) and isinstance(new, Conversation):
            if new.model != old.model:
                raise InvalidRequest("The model of a session cannot change.", param="model")
            if self._has_spoken and new.audio.output.voice != old.audio.output.voice:
                raise InvalidRequest(
                    "The voice of a session cannot change once it has been heard.", param="voice"
                )
        has_new_turns = new.audio.input.turn_detection != old.audio.input.turn_detection
        self.settings = new
        outs: list[Out] = [{"type": "session.updated", "session": self._shown()}]
        if has_new_turns:
            outs += [*self._dismiss(self._heard_ms, now_ms), *self._forget_turn(), self._listen()]
        return outs

    def _forget_turn(self) -> list[Out]:
        self._buffered_ms, self._turn_id = 0.0, None
        return [DropTurn()]

    def _shown(self) -> Event:
        is_talk = isinstance(self.settings, Conversation)
        kind = "realtime.session" if is_talk else "realtime.transcription_session"
        return {"id": self.id, "object": kind, **shown(self.settings)}

    def _listen(self) -> Listen:
        turns = self.settings.audio.input.turn_detection
        return Listen(None if turns is None else turns.options)

    def _create_item(self, event: client.CreateItem) -> list[Out]:
        item_id = event.item.id or self._new_id("item")
        entry = ConversationItem.of(event.item, item_id, self._new_id("call"))
        self._items.check_room(entry)
        effects = [TranscribeItem(entry.id, each) for each in client.unheard(event.item)]
        previous = self._items.add(entry, event.previous_item_id)
        self._unsettled |= {entry.id: entry} if entry.is_pending else {}
        head: Event = {"previous_item_id": previous, "item": entry.shown()}
        added = {"type": "conversation.item.added", **head}
        return [added, {"type": "conversation.item.done", **head}, *effects]

    def _truncate_by_client(self, event: client.TruncateItem, now_ms: float) -> list[Out]:
        entry = self._items.find(event.item_id)
        entry.check_cut(event.content_index, event.audio_end_ms)
        if entry is self.playback.entry:  # the client has stopped playing it
            self.playback.interrupt(now_ms)
        return [entry.truncate(event.audio_end_ms)]

    # -- turns of the user -----------------------------------------------------------------------

    def _commit_by_client(self) -> list[Out]:
        if self._buffered_ms < MIN_COMMIT_MS:
            raise EmptyBuffer(
                f"The buffer has {int(self._buffered_ms)} ms of sound; a turn needs at least"
                f" {MIN_COMMIT_MS} ms."
            )
        if self._turn_id is None:
            raise EmptyBuffer(
                "No speech has been detected in the buffer: append sound with speech, or set"
                " turn_detection to null to commit any sound."
            )
        self._items.check_room()
        item_id, self._turn_id = self._turn_id, None
        return self._commit(item_id)

    def _commit(self, item_id: str) -> list[Out]:
        self._buffered_ms = 0.0
        part = Part(type="input_audio", is_pending=True)
        entry = ConversationItem(id=item_id, type="message", role="user", parts=[part])
        previous = self._items.add(entry)
        self._unsettled[item_id] = entry
        head: Event = {"previous_item_id": previous, "item": entry.shown()}
        return [
            buffer_event("committed", previous_item_id=previous, item_id=item_id),
            {"type": "conversation.item.added", **head},
            {"type": "conversation.item.done", **head},
            EndTurn(item_id),
        ]

    def _full(self) -> list[Out]:
        """The error of a turn or an answer for which the conversation has no room, if so."""
        try:
            self._items.check_room()
        except TriptychError as error:
            return [client.error_event(client.error_fields(error))]
        return []

    def _clear(self, now_ms: float) -> list[Out]:
        dismissed, forgotten = self._dismiss(self._heard_ms, now_ms), self._forget_turn()
        return [*dismissed, *forgotten, buffer_event("cleared"), *self._answer_if_owed()]

    def _begin_speech(self, at_ms: int, now_ms: float) -> list[Out]:
        self.playback.resume(now_ms)
        self._turn_id = self._new_id("item")
        self._buffered_ms = 0.0
        started = buffer_event("speech_started", audio_start_ms=at_ms, item_id=self._turn_id)
        outs: list[Out] = [started, BeginTurn(self._turn_id, at_ms)]
        return [*outs, *(self._interrupt(now_ms) if self.settings.audio.input.interrupts else [])]

    def _suspect(self, at_ms: int, now_ms: float) -> list[Out]:
        """Speech may have begun: a client that asked for this holds the answer's sound."""
        self.playback.hold(now_ms)
        return [buffer_event("speech_suspected", audio_start_ms=at_ms)]

    def _dismiss(self, at_ms: float, now_ms: float) -> list[Out]:
        """End a suspicion, if there is one: the client goes on playing."""
        if not self.playback.resume(now_ms):
            return []
        dismissed = buffer_event("speech_dismissed", audio_end_ms=int(at_ms))
        is_last = self.playback.remaining_ms(now_ms) > 0 and not self.is_answering
        return [dismissed, *(self._rest(now_ms) if is_last else [])]

    def _end_speech(self, at_ms: int) -> list[Out]:
        if self._turn_id is None:  # the client has committed or cleared it
            return []
        item_id = self._turn_id
        stopped = buffer_event("speech_stopped", audio_end_ms=at_ms, item_id=item_id)
        if full := self._full():
            return [stopped, *full, *self._forget_turn(), *self._answer_if_owed()]
        self._turn_id = None
        turns = self.settings.audio.input.turn_detection
        if isinstance(self.settings, Conversation) and turns is not None and turns.create_response:
            self._answered.add(item_id)
        return [stopped, *self._commit(item_id)]

    def _expect(self, turn: TurnExpected) -> list[Out]:
        """The present turn says this if it ends now: prepare its answer, if it will have one."""
        turns = self.settings.audio.input.turn_detection
        is_answered = turns is not None and turns.create_response
        is_next = turn.item_id == self._turn_id and not (self._unsettled or self._responses)
        if not (isinstance(self.settings, Conversation) and is_answered and is_next):
            return []
        if not turn.text.strip():
            return [DropAnswer()]
        try:
            settings = self._check(with_overrides(self.settings, {}))
        except client.EXPECTED:  # its response will say so
            return []
        part = Part(type="input_audio", text=turn.text)
        question = ConversationItem(id=turn.item_id, type="message", role="user", parts=[part])
        messages = messages_of([*self._items, question], settings.instructions)
        return [PrepareAnswer(settings, messages)]

    def _time_out(self, event: IdleTimedOut) -> list[Out]:
        if self.is_answering or self._turn_id is not None:
            return []
        if full := self._full():
            return full
        item_id = self._new_id("item")
        triggered = buffer_event(
            "timeout_triggered",
            audio_start_ms=event.start_ms,
            audio_end_ms=event.end_ms,
            item_id=item_id,
        )
        outs: list[Out] = [triggered, BeginTurn(item_id, event.end_ms), *self._commit(item_id)]
        if isinstance(self.settings, Conversation):
            outs += self._full() or self._create_response(client.ResponseFields())
        return outs

    def _interrupt(self, now_ms: float) -> list[Out]:
        """The user speaks: end the answer, and keep of it what was heard."""
        response, ended = self._responses.of_conversation, list[Out]()
        if response is not None:
            ended = self._end(response, Ending(status="cancelled", reason="turn_detected"))
        return [*ended, *self._cut_playback(now_ms)]

    def _cut_playback(self, now_ms: float) -> list[Out]:
        heard_ms = self.playback.interrupt(now_ms)
        entry = self.playback.entry
        if heard_ms is None or entry is None:
            return []
        return [entry.truncate(heard_ms)]

    # -- responses -------------------------------------------------------------------------------

    def _create_response(self, given: client.ResponseFields) -> list[Out]:
        if not isinstance(self.settings, Conversation):
            raise InvalidRequest("A transcription session has no responses.", param="type")
        is_part = given.conversation == "auto"
        self._responses.check_room(in_conversation=is_part)
        if is_part:
            self._items.check_room()
        settings = self._check(with_overrides(self.settings, given.overrides()))
        response = Responding(
            self._new_id,
            settings,
            items=self._items if is_part else None,
            conversation_id=self._conversation_id,
            metadata=given.metadata,
        )
        if given.input is not None:
            response.input = [self._input_entry(item) for item in given.input]
        self._responses.add(response)
        self._owes_answer &= not is_part
        return [*response.created(), *self._responses.start_ready(self._items)]

    def _input_entry(self, item: Any) -> ConversationItem:
        if isinstance(item, client.InputReference):
            return self._items.find(item.id)
        entry = ConversationItem.of(item, item.id or self._new_id("item"), self._new_id("call"))
        if entry.is_pending:
            raise UnsupportedOption(
                "Sound in the input of a response is not heard: add it as an item before.",
                param="response.input",
            )
        return entry

    def _cancel_by_client(self, response_id: str | None, now_ms: float) -> list[Out]:
        found = self._responses.to_cancel(response_id)
        outs = self._end(found, Ending(status="cancelled", reason="client_cancelled"))
        return outs if found.items is None else [*outs, *self._rest(now_ms)]

    def _clear_output(self, now_ms: float) -> list[Out]:
        cut = self._cut_playback(now_ms)
        cleared = {"type": "output_audio_buffer.cleared", "response_id": self.playback.response_id}
        return [*cut, cleared]

    def _end(self, response: Responding, ending: Ending) -> list[Out]:
        self._responses.remove(response)
        return [*response.end(ending), CancelAnswer(response.id)]

    def _rest(self, now_ms: float) -> list[Out]:
        return [RestDetector(self.playback.remaining_ms(now_ms))]

    # -- the parts -------------------------------------------------------------------------------

    def learn(self, news: Learned, now_ms: float) -> list[Out]:
        """Return what follows from the parts of the session."""
        match news:
            case TurnExpected():
                return self._expect(news)
            case TranscriptPiece() | TranscriptEnded() | TranscriptFailed():
                return self._learn_transcript(news)
            case AnswerText() | AnswerSpeech() | AnswerCall() | AnswerEnded() | AnswerFailed():
                return self._learn_answer(news, now_ms)
            case _:
                return self._learn_speech(news, now_ms)

    def _learn_speech(self, news: TurnEvent, now_ms: float) -> list[Out]:
        match news:
            case SpeechStarted(at_ms):
                return self._begin_speech(at_ms, now_ms)
            case SpeechStopped(at_ms):
                return self._end_speech(at_ms)
            case SpeechSuspected(at_ms):
                return self._suspect(at_ms, now_ms)
            case SpeechDismissed(at_ms):
                return self._dismiss(at_ms, now_ms)
            case IdleTimedOut():
                return self._time_out(news)

    def _learn_transcript(
        self, news: TranscriptPiece | TranscriptEnded | TranscriptFailed
    ) -> list[Out]:
        is_wanted = self.settings.audio.input.transcription is not None
        is_wanted |= not isinstance(self.settings, Conversation)
        is_wanted |= isinstance(news, TranscriptFailed)
        outs: list[Out] = [transcript_event(news)] if is_wanted else []
        if isinstance(news, TranscriptPiece):
            return outs
        text = news.text if isinstance(news, TranscriptEnded) else ""
        return [*outs, *self._settle(news.item_id, text)]

    def _settle(self, item_id: str, text: str) -> list[Out]:
        """An item has its text: what waits for it goes on. A turn without words is no question."""
        entry = self._unsettled.pop(item_id, None)
        for part in entry.parts if entry is not None else ():
            if part.is_pending:
                part.text, part.is_pending = text, False
        outs: list[Out] = [*self._responses.start_ready(self._items)]
        if item_id in self._answered:
            self._answered.discard(item_id)
            self._owes_answer |= bool(text.strip())
            outs += self._answer_if_owed()
        return outs

    def _answer_if_owed(self) -> list[Out]:
        if not self._owes_answer or self._turn_id is not None or self._answered:
            return []
        self._owes_answer = False
        if full := self._full():
            return full
        if self._responses.of_conversation is not None:
            message = "A response is in progress, so that none was created for this turn."
            return [client.error_event(client.error_fields(Conflict(message)))]
        return self._create_response(client.ResponseFields())

    def _learn_answer(self, news: LearnedAnswer, now_ms: float) -> list[Out]:
        response = self._responses.find(news.response_id)
        if response is None:  # it was cancelled
            return []
        match news:
            case AnswerText(text=text):
                return [*response.text(text)]
            case AnswerSpeech(text=text, data=data, sound_ms=sound_ms):
                self._has_spoken = True
                events = response.sound(text, data, sound_ms)
                entry = response.spoken_item
                if entry is not None and response.items is not None:
                    self.playback.add(response.id, entry, now_ms, sound_ms)
                return [*events]
            case AnswerCall(name=name, arguments=arguments):
                return [*response.call(name), *response.arguments(arguments)]
            case AnswerFailed(error=error):
                ending = Ending(status="failed", error=error)
            case AnswerEnded(is_cut=is_cut, usage=usage):
                ending = Ending(
                    status="incomplete" if is_cut else "completed",
                    reason="max_output_tokens" if is_cut else None,
                    usage=usage,
                )
        self._responses.remove(response)
        return [*response.end(ending), *self._rest(now_ms)]
