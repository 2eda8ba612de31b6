"""An answer that is begun in a pause, before it is certain that the turn has ended.

Owns the answer to what the user has said if nothing more follows. It is kept back until the session
asks for an answer to just these messages, and dropped where other words follow. Knows no turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

from triptych.modalities.talk.realtime.inputs import LearnedAnswer, PrepareAnswer, StartAnswer
from triptych.modalities.talk.realtime.responding import NewId

MAX_KEPT = 64
"""Pieces of an answer that are kept back; then it waits."""
Begin: TypeAlias = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Answers(Protocol):
    """The source of answers."""

    def answer(self, start: StartAnswer) -> AsyncGenerator[LearnedAnswer, None]:
        """Yield what the session learns of an answer."""
        ...

    def rename(self, answer_id: str, response_id: str) -> None:
        """Note that an answer begun under `answer_id` is that of a response."""
        ...


class AnswersAhead:
    """The answers of one session, of which the next may be prepared. Implements `Answers`.

    `begin` starts tasks that end with the session.
    """

    def __init__(self, answers: Answers, new_id: NewId, begin: Begin) -> None:
        self._answers = answers
        self._new_id = new_id
        self._begin = begin
        self._next: _Prepared | None = None

    def prepare(self, asked: PrepareAnswer) -> None:
        """Begin to answer, in place of what was prepared before."""
        self.drop()
        start = StartAnswer(self._new_id("ahead"), asked.settings, asked.messages)
        self._next = _Prepared(start, self._answers, self._begin)

    def drop(self) -> None:
        """End what was prepared, if anything was."""
        if self._next is not None:
            self._next.task.cancel()
            self._next = None

    async def answer(self, start: StartAnswer) -> AsyncGenerator[LearnedAnswer, None]:
        """Yield the prepared answer, if it is one to these messages and has not failed."""
        prepared, self._next = self._next, None
        if prepared is not None and prepared.answers(start):
            self._answers.rename(prepared.answer_id, start.response_id)
            source = prepared.news(start.response_id)
        else:
            if prepared is not None:  # it must not count against limits that hold for this one
                await prepared.end()
            source = self._answers.answer(start)
        async with aclosing(source) as news:
            async for each in news:
                yield each


class _Prepared:
    """An answer under way whose pieces are kept back."""

    def __init__(self, start: StartAnswer, answers: Answers, begin: Begin) -> None:
        self._start = start
        self._kept: asyncio.Queue[LearnedAnswer | Exception | None] = asyncio.Queue(MAX_KEPT)
        self._has_failed = False
        self.task = begin(self._keep(answers))

    @property
    def answer_id(self) -> str:
        """The id under which it was begun."""
        return self._start.response_id

    def answers(self, start: StartAnswer) -> bool:
        """Whether it is the answer that is asked for."""
        own = self._start
        is_same = (own.settings, own.messages) == (start.settings, start.messages)
        return is_same and not self._has_failed

    async def _keep(self, answers: Answers) -> None:
        try:
            async with aclosing(answers.answer(self._start)) as news:
                async for each in news:
                    await self._kept.put(each)
            await self._kept.put(None)
        except Exception as error:  # raised where the answer is asked for, else it is begun again
            self._has_failed = True
            await self._kept.put(error)

    async def news(self, response_id: str) -> AsyncGenerator[LearnedAnswer, None]:
        """Yield the answer as that of a response. Closing it ends the work."""
        try:
            while (each := await self._kept.get()) is not None:
                if isinstance(each, Exception):
                    raise each
                yield replace(each, response_id=response_id)
        finally:
            await self.end()

    async def end(self) -> None:
        """End the work, and wait until it has ended."""
        self.task.cancel()
        await asyncio.wait([self.task])
