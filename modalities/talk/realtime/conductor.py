"""Acts for one session: reads events, does what its state asks for, and writes what follows.

Owns the tasks of a session (answers, transcriptions, the writer) and their end. The rules are in
`session`, which this calls on one event loop; knows neither models nor HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

import msgspec

from triptych.core.errors import Draining, UnsupportedOption
from triptych.core.http.errors import to_public
from triptych.core.media.audio.resampling import Pcm
from triptych.core.process.logs import fields
from triptych.core.text.threads import on_text_thread_if_long
from triptych.modalities.talk.hearing.sound_input import SoundFormat, SoundInput, milliseconds
from triptych.modalities.talk.ports import HEARING_RATE, Hearing, LiveTranscriber
from triptych.modalities.talk.realtime.ahead import Answers, AnswersAhead
from triptych.modalities.talk.realtime.ear import Ear
from triptych.modalities.talk.realtime.events import (
    EXPECTED,
    AppendSound,
    ClearSound,
    ClientEvent,
    CommitSound,
    error_event,
    error_fields,
    event_id_of,
    parse_event,
    parse_message,
)
from triptych.modalities.talk.realtime.inputs import (
    AnswerFailed,
    BeginTurn,
    CancelAnswer,
    DropAnswer,
    DropTurn,
    Effect,
    EndTurn,
    Learned,
    Listen,
    PrepareAnswer,
    RestDetector,
    StartAnswer,
    TranscribeItem,
    TranscriptEnded,
    TranscriptFailed,
    TranscriptPiece,
    TurnExpected,
)
from triptych.modalities.talk.realtime.responding import Event, NewId
from triptych.modalities.talk.realtime.session import Out, Session

MAX_WAITING = 256
"""Events that wait to be sent: then answers wait, and the client's events are not read."""
LONG_SAMPLES = HEARING_RATE // 5
LONG_CHARS = 12_800
"""Longer pieces of sound are heard on a thread, from more base64 on also decoded."""
MAX_WHOLE = 4
"""Items with sound of their own that are transcribed at once."""
_log = logging.getLogger(__name__)


class Socket(Protocol):
    """The client's messages."""

    async def receive(self) -> str | bytes:
        """Return the next one. Raises when there is none."""
        ...

    async def send(self, text: str) -> None:
        """Send one message."""
        ...


class Ears(Protocol):
    """The source of transcribers, with the settings of a session."""

    @property
    def hearing(self) -> Hearing:
        """The source of detectors."""
        ...

    def open_transcriber(self, session: Session, call_id: str) -> LiveTranscriber:
        """Open the transcriber of a turn. Raises `RequestError`s."""
        ...


class Conductor:
    """Runs one session until the client leaves, the server drains, or an error ends it."""

    def __init__(
        self, socket: Socket, session: Session, answers: Answers, ears: Ears, new_id: NewId
    ) -> None:
        self._socket = socket
        self._session = session
        self._answers = AnswersAhead(answers, new_id, self._start)
        self._ears = ears
        self._new_id = new_id
        self._ear = Ear(ears.hearing, self._open_transcriber)
        self._sound: SoundInput | None = None
        self._form: SoundFormat | None = None
        self._waiting: deque[Event] = deque()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._answering: dict[str, asyncio.Task[None]] = {}
        self._telling: dict[LiveTranscriber, asyncio.Task[None]] = {}
        self._resting: asyncio.TimerHandle | None = None
        self._whole = asyncio.Semaphore(MAX_WHOLE)

    async def run(self, draining: asyncio.Event) -> None:
        """Serve the session. Raises the errors of the socket, and `Draining`."""
        self._apply(self._session.open())
        ends = [
            asyncio.create_task(each)
            for each in (self._write(), self._read(), self._await_drain(draining))
        ]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await self._close(ends)

    async def _close(self, ends: Iterable[asyncio.Task[None]]) -> None:
        if self._resting is not None:
            self._resting.cancel()
        await _end([*ends, *self._tasks])
        self._sound = None  # its filter has threads, which must not wait for the garbage collector
        for transcriber in self._telling:  # also of a task that was cancelled before it began
            await transcriber.close()
        await _end([*self._tasks])  # an answer that a transcriber has expected meanwhile

    async def _await_drain(self, draining: asyncio.Event) -> None:
        """Let what is being answered end, then leave."""
        await draining.wait()
        while self._session.is_answering or self._waiting:
            self._changed.clear()
            await self._changed.wait()
        raise Draining("The server is shutting down: open a new session elsewhere.")

    # -- the client ------------------------------------------------------------------------------

    async def _read(self) -> None:
        while True:
            message = await self._socket.receive()
            value: Any = None
            try:
                value = await on_text_thread_if_long(len(message), partial(parse_message, message))
                await self._take(parse_event(value))
            except EXPECTED as error:
                self._apply([error_event(error_fields(error), event_id_of(value))])
            await self._room()
            await asyncio.sleep(0)  # other sessions go on, however much has arrived of this one

    async def _take(self, event: ClientEvent) -> None:
        if isinstance(event, AppendSound):
            await self._hear(event)
            return
        self._apply(self._session.take(event, _now_ms()))
        if isinstance(event, CommitSound | ClearSound) and self._sound is not None:
            self._sound.align()

    async def _hear(self, sound: AppendSound) -> None:
        """Take sound of the client: it may begin a turn, or end one."""
        form = self._session.settings.audio.input.format.form
        if form != self._form:
            self._form, self._sound = form, SoundInput(form)
        assert self._sound is not None
        pcm_S, sound_ms = await _decoded(self._sound, form, sound)
        self._apply(self._session.hear(sound_ms))
        is_long = len(pcm_S) > LONG_SAMPLES
        size = LONG_SAMPLES if self._ear.detects else max(1, len(pcm_S))
        for at in range(0, len(pcm_S), size):  # a turn hears nothing of the next one
            piece_S = pcm_S[at : at + size]
            self._ear.push(piece_S)
            is_answering = self._session.playback.may_echo(_now_ms())
            detect = partial(self._ear.detect, piece_S, is_answering=is_answering)
            events = await asyncio.to_thread(detect) if is_long else detect()
            for event in events:
                self._apply(self._session.learn(event, _now_ms()))
            self._ear.forget()

    # -- what follows ----------------------------------------------------------------------------

    def _apply(self, outs: Iterable[Out]) -> None:
        """Queue the events, and do what is asked, in order."""
        for out in outs:
            if isinstance(out, dict):
                self._waiting.append({**out, "event_id": self._new_id("event")})
            else:
                self._act(out)
        self._changed.set()

    def _learn(self, news: Learned) -> None:
        self._apply(self._session.learn(news, _now_ms()))

    def _act(self, effect: Effect) -> None:
        match effect:
            case StartAnswer():
                self._answering[effect.response_id] = self._start(self._answer(effect))
            case PrepareAnswer():
                self._answers.prepare(effect)
            case DropAnswer():
                self._answers.drop()
            case CancelAnswer(response_id):
                if task := self._answering.pop(response_id, None):
                    task.cancel()
            case RestDetector(after_ms):
                self._rest_in(after_ms)
            case Listen(options):
                self._ear.listen(options)
            case _:
                self._act_on_turn(effect)

    def _act_on_turn(self, effect: BeginTurn | EndTurn | DropTurn | TranscribeItem) -> None:
        match effect:
            case BeginTurn(item_id, at_ms):
                self._begin_turn(item_id, at_ms)
            case EndTurn(item_id):
                seconds = self._ear.turn_s
                self._start(self._transcribe(item_id, self._ear.take(), seconds))
            case TranscribeItem(item_id, data):
                self._start(self._transcribe_whole(item_id, data))
            case DropTurn():
                self._answers.drop()
                self._ear.reset()
                if transcriber := self._ear.take():
                    self._start(self._drop(transcriber))

    def _rest_in(self, after_ms: float) -> None:
        if self._resting is not None:
            self._resting.cancel()
        loop = asyncio.get_running_loop()
        self._resting = loop.call_later(after_ms / 1000, self._ear.rest)

    # -- transcriptions --------------------------------------------------------------------------

    def _open_transcriber(self) -> LiveTranscriber:
        return self._ears.open_transcriber(self._session, self._new_id("turn"))

    def _begin_turn(self, item_id: str, at_ms: int | None) -> None:
        self._answers.drop()
        if (before := self._ear.take()) is not None:
            self._start(self._drop(before))
        try:
            transcriber = self._ear.begin(at_ms)
            transcriber.on_expected(lambda text: self._learn(TurnExpected(item_id, text)))
        except EXPECTED as error:  # the turn has no text, and its end says so again
            self._apply([error_event(error_fields(error))])
            return
        self._telling[transcriber] = self._start(self._tell(item_id, transcriber))

    async def _tell(self, item_id: str, transcriber: LiveTranscriber) -> None:
        async with aclosing(transcriber.deltas()) as deltas:
            async for text in deltas:
                await self._room()
                self._learn(TranscriptPiece(item_id, text))

    async def _transcribe(
        self, item_id: str, transcriber: LiveTranscriber | None, seconds: float
    ) -> None:
        """Finish a turn, and tell its text after all pieces of it."""
        try:
            if transcriber is None:
                raise UnsupportedOption("The sound of this turn could not be transcribed.")
            text = await transcriber.finish()
            if telling := self._telling.pop(transcriber, None):
                await telling
            self._learn(TranscriptEnded(item_id, text, round(seconds, 3)))
        except Exception as error:  # a session outlives a failed transcription
            _note(error)
            self._learn(TranscriptFailed(item_id, error_fields(error)))
        finally:
            if transcriber is not None:
                await self._drop(transcriber)

    async def _transcribe_whole(self, item_id: str, data: bytes) -> None:
        """Transcribe the sound of an item, which did not come through the buffer."""
        form = self._session.settings.audio.input.format.form
        sound = SoundInput(form)
        async with self._whole:
            pcm_S = await asyncio.to_thread(sound.push, data)
            try:
                transcriber = self._open_transcriber()
            except EXPECTED as error:
                self._learn(TranscriptFailed(item_id, error_fields(error)))
                return
            self._telling[transcriber] = self._start(self._tell(item_id, transcriber))
            transcriber.push(pcm_S)
            await self._transcribe(item_id, transcriber, milliseconds(form, data) / 1000)

    async def _drop(self, transcriber: LiveTranscriber) -> None:
        if telling := self._telling.pop(transcriber, None):
            telling.cancel()
        await transcriber.close()

    # -- answers ---------------------------------------------------------------------------------

    async def _answer(self, start: StartAnswer) -> None:
        try:
            async with aclosing(self._answers.answer(start)) as news:
                async for each in news:
                    await self._room()
                    self._learn(each)
        except Exception as error:  # a session outlives a failed answer
            _note(error)
            self._learn(AnswerFailed(start.response_id, error_fields(error)))
        finally:
            self._answering.pop(start.response_id, None)

    # -- the writer, and tasks -------------------------------------------------------------------

    async def _write(self) -> None:
        while True:
            while self._waiting:
                await self._socket.send(msgspec.json.encode(self._waiting[0]).decode())
                self._waiting.popleft()
                self._changed.set()
            self._changed.clear()
            await self._changed.wait()

    async def _room(self) -> None:
        """Wait until not too many events wait to be sent."""
        while len(self._waiting) >= MAX_WAITING:
            self._changed.clear()
            await self._changed.wait()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _decoded(sound: SoundInput, form: SoundFormat, event: AppendSound) -> tuple[Pcm, float]:
    """Return the samples of an event, and how many milliseconds it adds: the filter keeps a few.

    Raises `InvalidRequest`.
    """

    def work() -> tuple[Pcm, float]:
        data = event.data()
        return sound.push(data), milliseconds(form, data)

    return await asyncio.to_thread(work) if len(event.audio) > LONG_CHARS else work()


def _note(error: Exception) -> None:
    """Log an internal error of a part; its client learns that there was one."""
    if to_public(error) is not error and not isinstance(error, EXPECTED):
        _log.error("a part of a session failed", exc_info=error, extra=fields())


def _now_ms() -> float:
    return time.monotonic() * 1000
