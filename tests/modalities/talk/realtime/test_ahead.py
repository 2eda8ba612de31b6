"""Answers that are prepared: handed over to the question that they are for, or ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from triptych.core.errors import Overloaded
from triptych.modalities.talk.realtime.ahead import MAX_KEPT, AnswersAhead
from triptych.modalities.talk.realtime.inputs import (
    AnswerEnded,
    AnswerText,
    LearnedAnswer,
    PrepareAnswer,
    StartAnswer,
)
from triptych.modalities.talk.realtime.settings import Conversation

SETTINGS = Conversation(model="tiny")


class Counting:
    """Answers that count: how far each has come, and whether it was ended."""

    def __init__(self, num_words: int = 3) -> None:
        self.num_words = num_words
        self.words: list[str] = []
        self.num_begun = self.num_closed = self.most_open = 0
        self.failures = 0
        self.names: dict[str, str] = {}

    def rename(self, answer_id: str, response_id: str) -> None:
        self.names[answer_id] = response_id

    async def answer(self, start: StartAnswer) -> AsyncGenerator[LearnedAnswer, None]:
        self.num_begun += 1
        self.most_open = max(self.most_open, self.num_begun - self.num_closed)
        try:
            if self.failures:
                self.failures -= 1
                raise Overloaded("Come back later.")
            for number in range(self.num_words):
                await asyncio.sleep(0)
                self.words.append(f"{start.messages[-1]['content']}{number}")
                yield AnswerText(start.response_id, self.words[-1])
            yield AnswerEnded(start.response_id, False, {})
        finally:
            self.num_closed += 1


def asked(text: str) -> PrepareAnswer:
    return PrepareAnswer(SETTINGS, [{"role": "user", "content": text}])


def opened(source: Counting) -> AnswersAhead:
    return AnswersAhead(source, lambda kind: kind, asyncio.create_task)


async def heard(ahead: AnswersAhead, text: str) -> list[str]:
    start = StartAnswer("resp_1", SETTINGS, [{"role": "user", "content": text}])
    news = [each async for each in ahead.answer(start)]
    assert {each.response_id for each in news} == {"resp_1"}
    assert isinstance(news[-1], AnswerEnded)
    return [each.text for each in news if isinstance(each, AnswerText)]


async def settle() -> None:
    for _ in range(2 * MAX_KEPT):
        await asyncio.sleep(0)


async def test_the_question_that_was_expected_finds_its_answer() -> None:
    source = Counting()
    ahead = opened(source)
    ahead.prepare(asked("why"))
    await settle()
    assert source.words == ["why0", "why1", "why2"]
    assert await heard(ahead, "why") == source.words
    assert source.names == {"ahead": "resp_1"}
    assert (source.num_begun, source.num_closed) == (1, 1)
    assert await heard(ahead, "why") == ["why0", "why1", "why2"], "which is another answer"
    assert source.num_begun == 2


async def test_other_words_get_their_own() -> None:
    source = Counting(num_words=2 * MAX_KEPT)
    ahead = opened(source)
    ahead.prepare(asked("why"))
    await settle()
    assert (await heard(ahead, "why not"))[:2] == ["why not0", "why not1"]
    assert (source.num_begun, source.num_closed) == (2, 2)
    assert source.most_open == 1, "limits hold for one answer at a time"


async def test_what_is_dropped_or_replaced_ends() -> None:
    source = Counting(num_words=1000)
    ahead = opened(source)
    for text in ("a", "b"):
        ahead.prepare(asked(text))
        await settle()
    assert len(source.words) <= 2 * (MAX_KEPT + 1), "it does not run away"
    ahead.drop()
    await settle()
    assert (source.num_begun, source.num_closed) == (2, 2)


async def test_one_that_could_not_begin_is_begun_again() -> None:
    source = Counting()
    source.failures = 1
    ahead = opened(source)
    ahead.prepare(asked("why"))
    await settle()
    assert await heard(ahead, "why") == ["why0", "why1", "why2"]
    source.failures = 2
    ahead.prepare(asked("why"))
    await settle()
    with pytest.raises(Overloaded):
        await heard(ahead, "why")


async def test_an_answer_that_is_cancelled_ends_its_work() -> None:
    source = Counting(num_words=1000)
    ahead = opened(source)
    ahead.prepare(asked("why"))
    task = asyncio.create_task(heard(ahead, "why"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (source.num_begun, source.num_closed) == (1, 1)
