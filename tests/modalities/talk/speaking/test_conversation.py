"""`Engine.talk` on the embedded models: a question is heard, and its answer is understood."""

from __future__ import annotations

import asyncio
import re
import runpy
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import triptych
from triptych import Engine
from triptych.core.errors import ConfigError, InvalidRequest, Overloaded, RequestError
from triptych.modalities.talk.speaking.conversation import SpokenConversation
from triptych.modalities.talk.speaking.events import (
    HeardWords,
    SpokenSound,
    TalkEvent,
    WrittenWords,
)
from triptych.modalities.tts.api.service import SpeechCall

pytestmark = pytest.mark.embedded
SAMPLE = Path(__file__).parents[4] / "samples" / "talk.py"
MODELS = ["embedded", "triptych-voice", "whisper-tiny.en"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(MODELS, max_length=1024, max_batch_size=4, progress=False) as engine:
        yield engine


def plain(text: str) -> str:
    return re.sub(r"[^a-z ]", "", text.lower()).strip()


def test_a_spoken_question_gets_a_spoken_answer(engine: Engine) -> None:
    question = engine.speak("What is the capital of France?", seed=1)
    talk = engine.talk(temperature=0, max_tokens=24)
    events = list(talk((question.audio, question.sample_rate)))
    assert isinstance(events[0], HeardWords)
    assert plain(events[0].text) == "what is the capital of france"
    written = "".join(event.text for event in events if isinstance(event, WrittenWords))
    sounds = [event for event in events if isinstance(event, SpokenSound)]
    assert "".join(sound.text for sound in sounds) == written
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
    assert talk.messages[-1]["content"] == written
    answer = asyncio.run(engine.talk(temperature=0, max_tokens=24).aanswer(events[0].text))
    heard = engine.transcribe((answer.audio, answer.sample_rate))
    assert "paris" in plain(heard.text)


def test_leaving_a_turn_keeps_what_was_spoken(engine: Engine) -> None:
    talk = engine.talk(system="You are kind.", temperature=0, max_tokens=200)
    for event in talk("Tell me a long story about a lighthouse."):
        if isinstance(event, SpokenSound):
            break
    for _ in talk("Go on."):
        break
    roles = [message["role"] for message in talk.messages[:4]]
    assert roles[:3] == ["system", "user", "assistant"]
    assert len(talk.messages[2]["content"]) < 200


def test_words_that_got_no_answer_are_part_of_the_next_turn() -> None:
    async def heard(sound: bytes) -> SimpleNamespace:
        return SimpleNamespace(text=sound.decode())

    async def answer(*texts: str) -> AsyncGenerator[TalkEvent, None]:
        for text in texts:
            yield WrittenWords(text)
            yield SpokenSound(np.zeros(1, np.float32), 16_000, text)
        raise Overloaded("Come back later.")

    async def turn(said: str | bytes, num_events: int) -> None:
        async with aclosing(talk._one_turn(said)) as events:
            for _ in range(num_events):
                await anext(events)

    models: Any = SimpleNamespace(recognizer=SimpleNamespace(acall=heard), speech=None)
    talk = SpokenConversation(models, system="", call=SpeechCall(model="", text=""), options={})
    talk._answer = lambda: answer("Yes.", "It is.")  # type: ignore[method-assign]
    asyncio.run(turn(b"Is it", 1))  # interrupted once it was heard
    asyncio.run(turn(b"really", 2))  # once a word was written
    asyncio.run(turn("true?", 2))  # once a word was spoken
    assert [message["content"] for message in talk.messages] == ["Is it really true?", "Yes."]
    talk._answer = answer  # type: ignore[method-assign]
    with pytest.raises(Overloaded):
        asyncio.run(turn("Why?", 1))
    assert len(talk.messages) == 2


def test_sound_without_words_is_not_answered(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = engine.talk()

    async def nothing(sound: object) -> SimpleNamespace:
        return SimpleNamespace(text=" ")

    monkeypatch.setattr(talk._models.recognizer, "acall", nothing)
    assert list(talk(b"a cough")) == [HeardWords("")]
    assert [message["role"] for message in talk.messages] == ["system"]
    assert not len(talk.answer(b"a cough").audio)


def test_the_sample_runs(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(triptych, "Engine", lambda *_, **__: nullcontext(engine))
    runpy.run_path(str(SAMPLE), run_name="__main__")
    assert "-- heard: What is the capital of Italy?" in capsys.readouterr().out
    assert Path("answer.wav").stat().st_size > 10_000


def test_what_cannot_be_said_or_heard_is_an_error(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="voice"):
        engine.talk(voice="nobody")
    with pytest.raises(RequestError):
        engine.talk().answer(b"no sound")
    deaf = engine.talk()
    object.__setattr__(deaf._models, "recognizer", None)
    with pytest.raises(ConfigError, match=r"whisper-tiny\.en"):
        deaf.answer(b"sound")
