"""A session's tasks: what they leave to others, and that each ends with it."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import numpy as np
import pytest

from support.http import until
from support.talk import FakeEars, KnowingTranscriber
from triptych.modalities.asr.api.service import TranscribeCall
from triptych.modalities.talk.hearing import sound_input
from triptych.modalities.talk.realtime.conductor import MAX_WHOLE, Conductor
from triptych.modalities.talk.realtime.inputs import AnswerText, StartAnswer
from triptych.modalities.talk.realtime.items import ConversationItem
from triptych.modalities.talk.realtime.routes import new_id
from triptych.modalities.talk.realtime.session import Session
from triptych.modalities.talk.realtime.settings import Conversation


class Scripted:
    """A client that has sent all its messages at once, and then leaves or stays."""

    def __init__(self, *messages: str, leaves: bool = True) -> None:
        self.messages = list(messages)
        self.leaves = leaves
        self.sent: list[str] = []

    async def receive(self) -> str:
        if self.messages:
            return self.messages.pop(0)
        if not self.leaves:
            await asyncio.Event().wait()
        raise EOFError

    async def send(self, text: str) -> None:
        self.sent.append(text)


class Ears:
    """Ears without settings."""

    def __init__(self) -> None:
        self.hearing = FakeEars()

    def open_transcriber(self, session: Session, call_id: str) -> KnowingTranscriber:
        return self.hearing.open_transcriber(TranscribeCall(model="ears"))


class NoAnswers:
    """Answers that are not asked for."""

    def rename(self, answer_id: str, response_id: str) -> None: ...

    async def answer(self, start: StartAnswer) -> AsyncGenerator[AnswerText, None]:
        yield AnswerText(start.response_id, "")


def conductor(socket: Scripted, ears: Ears) -> Conductor:
    settings: dict[str, Any] = {"model": "tiny", "audio": {"input": {"turn_detection": None}}}
    session = Session(Conversation.model_validate(settings), new_id)
    return Conductor(socket, session, NoAnswers(), ears, new_id)


def append(num_bytes: int, high: int = 0) -> str:
    samples = bytes([0, high]) * (num_bytes // 2) + bytes(num_bytes % 2)
    data = base64.b64encode(samples).decode()
    return f'{{"type": "input_audio_buffer.append", "audio": "{data}"}}'


def whole_item(num_bytes: int) -> str:
    part = f'{{"type": "input_audio", "audio": "{base64.b64encode(bytes(num_bytes)).decode()}"}}'
    item = f'{{"type": "message", "role": "user", "content": [{part}]}}'
    return f'{{"type": "conversation.item.create", "item": {item}}}'


COMMIT = '{"type": "input_audio_buffer.commit"}'


async def test_what_waits_of_one_session_leaves_time_to_others() -> None:
    num_turns = 0

    async def others() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    other = asyncio.create_task(others())
    with pytest.raises(EOFError):
        await conductor(Scripted(*[append(480)] * 64), Ears()).run(asyncio.Event())
    other.cancel()
    assert num_turns >= 64


async def test_long_sound_is_decoded_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    push = sound_input.SoundInput.push

    def noted(self: sound_input.SoundInput, data: bytes) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return push(self, data)

    monkeypatch.setattr(sound_input.SoundInput, "push", noted)
    socket = Scripted(append(480), append(48_000), whole_item(9600), leaves=False)
    running = asyncio.create_task(conductor(socket, Ears()).run(asyncio.Event()))
    await asyncio.to_thread(until, lambda: len(threads) == 3)
    running.cancel()
    assert threads == [True, False, False]


async def test_a_turn_that_is_cut_off_before_its_task_began_is_closed() -> None:
    ears = Ears()
    socket = Scripted(append(9600), COMMIT, leaves=False)
    session = asyncio.create_task(conductor(socket, ears).run(asyncio.Event()))
    receive = socket.receive

    async def cut_off() -> str:
        if len(socket.messages) == 1:
            session.cancel()
        return await receive()

    socket.receive = cut_off  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await session
    assert [each.is_closed for each in ears.hearing.opened] == [True]


@pytest.mark.parametrize(("sound_ms", "is_heard"), [(0.0, False), (900.0, True), (60_000.0, True)])
async def test_the_detector_knows_whether_an_answer_is_or_was_just_played(
    sound_ms: float, is_heard: bool
) -> None:
    ears = Ears()
    session = Session(Conversation(model="tiny"), new_id)
    entry = ConversationItem(id="answer", type="message", role="assistant")
    session.playback.add("resp", entry, time.monotonic() * 1000 - 1000, sound_ms)
    with pytest.raises(EOFError):
        await Conductor(Scripted(append(480)), session, NoAnswers(), ears, new_id).run(
            asyncio.Event()
        )
    (detector,) = ears.hearing.detectors
    assert detector.was_answering == [is_heard]


async def test_turns_in_one_piece_of_sound_are_heard_apart() -> None:
    ears = Ears()
    second = np.repeat([0x4000, 0], 12_000)  # half a second of sound, and of silence
    data = base64.b64encode(np.tile(second, 2).astype("<i2").tobytes()).decode()
    socket = Scripted(f'{{"type": "input_audio_buffer.append", "audio": "{data}"}}', leaves=False)
    session = Session(Conversation(model="tiny"), new_id)
    running = Conductor(socket, session, NoAnswers(), ears, new_id).run(asyncio.Event())
    task = asyncio.create_task(running)
    committed = "input_audio_buffer.committed"
    await asyncio.to_thread(until, lambda: sum(committed in each for each in socket.sent) == 2)
    task.cancel()
    assert [each.num_heard < 13_000 for each in ears.hearing.opened] == [True, True]


async def test_an_answer_is_begun_in_the_pause_and_told_once_the_turn_is_over() -> None:
    begun: list[str] = []

    class Noted(NoAnswers):
        async def answer(self, start: StartAnswer) -> AsyncGenerator[AnswerText, None]:
            begun.append(start.response_id)
            yield AnswerText(start.response_id, "Because.")

    class Quick(KnowingTranscriber):
        def on_expected(self, tell: Callable[[str], None]) -> None:
            asyncio.get_running_loop().call_soon(tell, self.words)

    ears = Ears()
    ears.hearing.open_transcriber = lambda call: Quick("Why?")  # type: ignore[method-assign]
    socket = Scripted(*[append(24_000, 0x40)] * 2, *[append(24_000)] * 3, leaves=False)
    session = Session(Conversation(model="tiny"), new_id)
    running = Conductor(socket, session, Noted(), ears, new_id).run(asyncio.Event())
    task = asyncio.create_task(running)
    await asyncio.to_thread(until, lambda: any("Because." in each for each in socket.sent))
    task.cancel()
    assert [each.split("_")[0] for each in begun] == ["ahead"]
    committed = [n for n, each in enumerate(socket.sent) if "buffer.committed" in each]
    assert committed < [n for n, each in enumerate(socket.sent) if '"response.' in each]


async def test_no_answer_outlives_the_session() -> None:
    """One is under way when the client leaves; one is expected of a pass that ends just then."""
    begun: list[str] = []

    class Endless(NoAnswers):
        async def answer(self, start: StartAnswer) -> AsyncGenerator[AnswerText, None]:
            begun.append(start.messages[-1]["content"])
            yield AnswerText(start.response_id, "")
            await asyncio.Event().wait()

    class Late(KnowingTranscriber):
        def on_expected(self, tell: Callable[[str], None]) -> None:
            self.tell = tell
            asyncio.get_running_loop().call_soon(tell, self.words)

        async def close(self) -> None:
            assert self.tell is not None
            self.tell("Why not?")
            await asyncio.sleep(0)
            await super().close()

    ears = Ears()
    ears.hearing.open_transcriber = lambda call: Late("Why?")  # type: ignore[method-assign]
    socket = Scripted(*[append(24_000, 0x40)] * 2, leaves=False)
    session = Session(Conversation(model="tiny"), new_id)
    running = Conductor(socket, session, Endless(), ears, new_id).run(asyncio.Event())
    task = asyncio.create_task(running)
    await asyncio.to_thread(until, lambda: begun)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert begun == ["Why?", "Why not?"]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_few_items_are_transcribed_at_once() -> None:
    ears, released = Ears(), asyncio.Event()

    class Slow(KnowingTranscriber):
        async def finish(self) -> str:
            await released.wait()
            return await super().finish()

    def open_slow(session: Session, call_id: str) -> Slow:
        ears.hearing.opened.append(slow := Slow("Hi."))
        return slow

    ears.open_transcriber = open_slow  # type: ignore[method-assign]
    socket = Scripted(*[whole_item(960)] * 6, leaves=False)
    running = asyncio.create_task(conductor(socket, ears).run(asyncio.Event()))
    await asyncio.to_thread(until, lambda: len(ears.hearing.opened) >= MAX_WHOLE)
    await asyncio.sleep(0.05)
    assert len(ears.hearing.opened) == MAX_WHOLE
    released.set()
    await asyncio.to_thread(until, lambda: len(ears.hearing.opened) == 6)
    running.cancel()


@pytest.mark.parametrize("num_odd", [0, 1])
async def test_a_tenth_of_a_second_is_a_turn_and_the_next_begins_a_sample(num_odd: int) -> None:
    ears = Ears()
    heard: list[Any] = []
    socket = Scripted(append(4800 + num_odd), COMMIT, append(4800, 0x40), COMMIT, leaves=False)
    session = conductor(socket, ears)

    def note(session: Session, call_id: str) -> KnowingTranscriber:
        opened = ears.hearing.open_transcriber(TranscribeCall(model="ears"))
        opened.push = heard.append  # type: ignore[method-assign]
        return opened

    ears.open_transcriber = note  # type: ignore[method-assign]
    running = asyncio.create_task(session.run(asyncio.Event()))
    committed = "input_audio_buffer.committed"
    await asyncio.to_thread(until, lambda: sum(committed in each for each in socket.sent) == 2)
    running.cancel()
    assert not any("error" in each for each in socket.sent)
    assert max(heard[-1]) == pytest.approx(0x40 / 256 * 2, abs=0.1)
