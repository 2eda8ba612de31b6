"""Answers that are made while nobody waits.

Owns their tasks: a client that leaves does not end one, its cancellation does, and so does a drain,
which waits for them as for requests. What has happened so far can be followed from any place. How
an answer is made, and where it is kept, is said by whoever starts one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from triptych.core.errors import Draining, TriptychError
from triptych.core.http.disconnect import InFlight
from triptych.core.http.errors import to_public
from triptych.modalities.llm.api.responses.builder import ResponseBuilder
from triptych.modalities.llm.api.responses.conversation import renamed
from triptych.modalities.llm.api.responses.events import ResponseEvent

_log = logging.getLogger(__name__)


class BackgroundRun:
    """One answer of `builder`, made of `making`'s events; `keep` is called once it has ended."""

    is_asking = True

    def __init__(
        self,
        builder: ResponseBuilder,
        making: AsyncGenerator[ResponseEvent, None],
        keep: Callable[[list[ResponseEvent]], Awaitable[None]],
    ) -> None:
        self.builder = builder
        self._making = making
        self._keep = keep
        self._events: list[ResponseEvent] = list(builder.begin(is_queued=True))
        self._news = asyncio.Event()
        self._reason: TriptychError | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_ending = self._is_over = False

    def start(self, on_end: Callable[[], None]) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda task: on_end())

    def cut(self, reason: TriptychError | None) -> None:
        """End it, as failed for that reason, or else as cancelled."""
        if self._task is not None and not self._is_ending:
            self._reason = reason
            self._task.cancel()

    async def ended(self) -> None:
        """Wait for the end."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def follow(self, after: int = -1) -> AsyncGenerator[ResponseEvent, None]:
        """The events that come after that number, as they come, to the last."""
        place = after + 1
        while True:
            for event in self._events[place:]:
                place += 1
                yield event
            if self._is_over:
                return
            if place == len(self._events):
                await self._news.wait()

    async def _run(self) -> None:
        try:
            async with aclosing(self._making) as events:
                async for event in events:
                    self._add(event)
        except asyncio.CancelledError:
            if self._reason is None:
                self.builder.cancel()
            else:
                self.builder.fail(self._reason)
        except Exception as error:  # nobody waits: the answer itself says why there is none
            public = renamed(to_public(error))
            _log.warning("a background response failed", exc_info=error)
            self.builder.fail(public)
        self._is_ending = True
        last = self.builder.last()
        try:
            await self._keep([*self._events, last])
        except TriptychError as error:
            _log.warning("a background response was not kept: %s", error.message)
        self._is_over = True
        self._add(last)

    def _add(self, event: ResponseEvent) -> None:
        self._events.append(event)
        news, self._news = self._news, asyncio.Event()
        news.set()


class BackgroundRuns:
    """The answers that are being made, by owner and id."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], BackgroundRun] = {}

    def start(self, owner: str, run: BackgroundRun, in_flight: InFlight) -> None:
        """Begin one, which a drain of `in_flight` waits for."""
        key = (owner, run.builder.response.id)

        def end() -> None:
            del self._runs[key]
            in_flight.remove(run)

        self._runs[key] = run
        in_flight.add(run)
        run.start(end)

    def find(self, owner: str, response_id: str) -> BackgroundRun | None:
        """The one of that id, while it is being made."""
        return self._runs.get((owner, response_id))

    async def cancel(self, owner: str, response_id: str) -> None:
        """End the one of that id, if it is being made."""
        run = self.find(owner, response_id)
        if run is not None:
            run.cut(None)
            await run.ended()

    async def close(self) -> None:
        """End those that a drain has left."""
        runs = list(self._runs.values())
        for run in runs:
            run.cut(Draining("The server shut down before this answer was complete."))
        for run in runs:
            await run.ended()
