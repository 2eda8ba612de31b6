"""Answers in the background, for which no client waits.

Owns their tasks and their order: a run takes its turn as lines of batches do, between the requests
that clients wait for, unless it is streamed from its beginning. A disconnect does not end a run; a
cancellation does, and so does a drain, which first waits for runs as for requests. The events of a
run can be followed from any event on. A run is stored at its beginning, and its end is shown once
it is stored. Callers define how an answer is generated and stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from triptych.core.errors import Draining, RateLimited, TriptychError
from triptych.core.http.batches.gate import LineGate, LinePlace
from triptych.core.http.disconnect import InFlight
from triptych.core.http.errors import to_public
from triptych.modalities.llm.api.responses.builder import ResponseBuilder
from triptych.modalities.llm.api.responses.conversation import CHAT_NAMES
from triptych.modalities.llm.api.responses.events import ResponseEvent, ResponseState
from triptych.modalities.llm.api.translation import rename_error

_MAX_RUNS = 1024
_MAX_LOST = 16
_log = logging.getLogger(__name__)


class BackgroundRun:
    """One background answer of `builder`, with the events of `making`.

    `begin` stores the beginning of the answer, `keep` its end and all events.
    """

    is_asking = False

    def __init__(
        self,
        builder: ResponseBuilder,
        making: AsyncGenerator[ResponseEvent, None],
        begin: Callable[[], Awaitable[None]],
        keep: Callable[[list[ResponseEvent]], Awaitable[None]],
    ) -> None:
        self._builder = builder
        self._making = making
        self._begin = begin
        self._keep = keep
        self._events: list[ResponseEvent] = []
        self._news = asyncio.Event()
        self._begun = asyncio.Event()
        self._refusal: Exception | None = None
        self._place: LinePlace | None = None
        self._reason: TriptychError | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_making = self._is_cut = self._is_over = False
        self.is_lost = False
        """Whether the end could not be stored and exists only here."""
        for event in builder.begin(is_queued=True):
            self._add(event)
        self.response = builder.response

    def start(self, on_end: Callable[[], None], place: LinePlace | None = None) -> None:
        """Start the run, which generates once its `place` has a turn."""
        self._place = place
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda task: on_end())

    async def wait_begun(self) -> None:
        """Wait until the beginning is stored. Raises the error of storing it."""
        await self._begun.wait()
        if self._refusal is not None:
            raise self._refusal

    def cut(self, reason: TriptychError | None) -> None:
        """End the run as failed for `reason`, or as cancelled without one."""
        if self._is_cut or self._task is None:
            return
        self._is_cut, self._reason = True, reason
        if self._is_making:
            self._task.cancel()

    async def wait_ended(self) -> None:
        """Wait for the end of the run."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def follow(self, after: int = -1) -> AsyncGenerator[ResponseEvent, None]:
        """The events with a number over `after`, as they happen, up to the last."""
        place = after + 1
        while True:
            for event in self._events[place:]:
                place += 1
                yield event
            if self._is_over:
                return
            if place >= len(self._events):
                await self._news.wait()

    async def _run(self) -> None:
        try:
            await self._begin()
        except Exception as error:  # raised by `wait_begun`, for which the client waits
            self._refusal = error
        finally:
            self._begun.set()
        if self._refusal is None:
            await self._make()
            last = await self._end()
            self._is_over = True
            self._add(last)

    async def _make(self) -> None:
        try:
            self._is_making = True
            if self._is_cut:
                raise asyncio.CancelledError
            if self._place is not None:
                await self._place.enter()
            async with aclosing(self._making) as events:
                async for event in events:
                    self._add(event)
        except asyncio.CancelledError:
            if self._reason is None:
                self._builder.cancel()
            else:
                self._builder.fail(self._reason)
        except Exception as error:  # no client waits: the answer itself has the error
            public = to_public(error)
            _log.warning(
                "a background response failed with %s",
                type(error).__name__,
                exc_info=None if public is error else error,
            )
            self._builder.fail(rename_error(public, CHAT_NAMES))
        finally:
            self._is_making = False
            if self._place is not None:
                self._place.leave()

    async def _end(self) -> ResponseEvent:
        """Store the end, or the failure to store it; return the last event."""
        last = self._builder.last()
        try:
            await self._keep([*self._events, last])
        except Exception as error:  # a bug must also leave an answer that has ended
            _log.warning("a background response was not stored", exc_info=error)
            self._builder.lose(rename_error(to_public(error), CHAT_NAMES))
            last = self._builder.last()
            try:
                await self._keep([])
            except Exception:
                _log.exception("the end of a background response was not stored")
                self.is_lost = True
        return last

    def _add(self, event: ResponseEvent) -> None:
        self._events.append(event)
        if isinstance(event, ResponseState):
            self.response = event.response
        news, self._news = self._news, asyncio.Event()
        news.set()


class BackgroundRuns:
    """The background answers in progress, by owner and id, and recent ones that were not stored."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], BackgroundRun] = {}
        self._lost: deque[tuple[str, str]] = deque()

    def check(self, owner: str) -> None:
        """Raise `RateLimited` if an owner has the maximum number of runs."""
        if sum(other == owner for other, _ in self._runs) >= _MAX_RUNS:
            raise RateLimited(
                f"You have {_MAX_RUNS} background responses in progress, the most there may be;"
                " wait for some, or cancel them.",
                retry_after_s=10.0,
            )

    def start(
        self,
        owner: str,
        run: BackgroundRun,
        in_flight: InFlight,
        gate: LineGate | None = None,
    ) -> None:
        """Start a run, for which a drain of `in_flight` waits, and which takes turns at `gate`."""
        key = (owner, run.response.id)

        def end() -> None:
            in_flight.remove(run)
            if run.is_lost:
                self._remember(key)
            else:
                del self._runs[key]

        self._runs[key] = run
        in_flight.add(run)
        run.start(end, None if gate is None else LinePlace(gate, owner))

    def find(self, owner: str, response_id: str) -> BackgroundRun | None:
        """The run of that id, if it is in progress or could not be stored."""
        return self._runs.get((owner, response_id))

    async def cancel(self, owner: str, response_id: str) -> None:
        """Cancel the run of that id, if it is in progress."""
        run = self.find(owner, response_id)
        if run is not None:
            run.cut(None)
            await run.wait_ended()

    async def forget(self, owner: str, response_id: str) -> None:
        """Cancel and remove the run of that id."""
        await self.cancel(owner, response_id)
        self._runs.pop((owner, response_id), None)

    def _remember(self, key: tuple[str, str]) -> None:
        self._lost.append(key)
        if len(self._lost) > _MAX_LOST:
            self._runs.pop(self._lost.popleft(), None)

    async def close(self) -> None:
        """End the runs that are left after a drain."""
        runs = list(self._runs.values())
        for run in runs:
            run.cut(Draining("The server shut down before this answer was complete."))
        for run in runs:
            await run.wait_ended()
