"""The work of one batch, from its first line to its last.

Owns the order: lines are counted, then answered a few at a time, and each result is stored at once,
so that a batch resumes where a stopped server left it. Knows no route.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from triptych.core.errors import InvalidRequest, RequestTimeout, StoreFull
from triptych.core.http.batches import record as records
from triptych.core.http.batches.gate import LineGate, LinePlace
from triptych.core.http.batches.lines import (
    Line,
    LineAnswer,
    LineRequest,
    LineSplitter,
    answer_result,
    error_result,
    read_line,
    result_numbers,
)
from triptych.core.http.batches.record import BatchFault, BatchRecord
from triptych.core.http.files.user_files import FileAbout, UserFiles
from triptych.core.limits import MAX_BATCH_LINES
from triptych.core.store.documents import DocumentTable, Key
from triptych.core.text.threads import on_text_thread

_WRITTEN_TOGETHER: Final = 256
_MAX_RESULT_BYTES: Final = 2**30
MAX_TRIES_DOWN: Final = 100
"""Retries of a line while the server cannot answer, for more than an hour in total."""
_MAX_PAUSE_S: Final = 60.0

Ask = Callable[[bytes], Awaitable[LineAnswer]]
"""Posts a body to the endpoint of the batch on behalf of its owner."""


class BatchExpired(RequestTimeout):
    """The batch expired before this line was answered."""

    code = "batch_expired"


class BatchWork:
    """A running batch. Lines over `max_line_bytes` are refused."""

    def __init__(
        self, user_files: UserFiles, key: Key, record: BatchRecord, *, max_line_bytes: int
    ) -> None:
        self.record = record
        self._user_files = user_files
        self._key = key
        self._max_line_bytes = max_line_bytes
        self._window: asyncio.Timeout | None = None

    async def run(self, ask: Ask, gate: LineGate) -> None:
        """Answer all remaining lines. Cancelling it leaves the rest for another run.

        Raises `Unavailable` if the store fails; it can be run again.
        """
        try:
            if self.record.faults:  # only the end is missing
                await self._end("failed")
                return
            if self.record.status == "validating" and not await self._prepare():
                return
            done = await self._done()
            try:
                await self._answer_all(done, ask, gate)
                is_late = False
            except TimeoutError:
                is_late = True
            await self._finish(is_late=is_late)
        except StoreFull as error:
            await self.fail(BatchFault("store_full", error.message))

    async def cancel(self) -> None:
        """Cancel the batch with the results so far."""
        if not self.record.is_over:
            self.record.enter("cancelling")
            if self._window is not None and not self._window.expired():
                self._window.reschedule(asyncio.get_running_loop().time())
            await self._save()

    async def fail(self, fault: BatchFault) -> None:
        """End the batch with the results so far and the reason."""
        self.record.faults.append(fault)
        await self._end("failed")

    async def _prepare(self) -> bool:
        """Count the lines and create the files; returns whether the batch can run."""
        num_lines = 0
        async with aclosing(self._parts(self.record.input_file_id, self._max_line_bytes)) as parts:
            async for lines in parts:
                num_lines += len(lines)
                if num_lines > MAX_BATCH_LINES:
                    break
        if not 0 < num_lines <= MAX_BATCH_LINES:
            found = f"over {MAX_BATCH_LINES}" if num_lines else "no"
            message = f"The file has {found} lines; a batch has 1 to {MAX_BATCH_LINES}."
            await self.fail(BatchFault("invalid_input_file", message))
            return False
        self.record.num_lines = num_lines
        self.record.growing = (await self._grow("output"), "")
        self.record.growing = (self.record.growing[0], await self._grow("error"))
        if self.record.status == "validating":  # and not cancelled meanwhile
            self.record.enter("in_progress")
        await self._save()
        return True

    async def _grow(self, kind: str) -> str:
        """Create a file for results of this kind, and return its id."""
        about = FileAbout(f"{self.record.id}_{kind}.jsonl", "batch_output")
        expires_s = self.record.files_expire_s
        made = await self._user_files.add(
            self._key.owner, about, expires_s=expires_s, is_growing=True
        )
        return made.id

    async def _done(self) -> set[int]:
        """Return the answered lines, from the files: the record may be out of date."""
        good, bad = [await self._numbers(file_id) for file_id in self.record.growing]
        self.record.num_good, self.record.num_bad = len(good), len(bad)
        return good | bad

    async def _numbers(self, file_id: str) -> set[int]:
        """Return the numbers of the lines with results in a file."""
        numbers: set[int] = set()
        async with aclosing(self._parts(file_id, _MAX_RESULT_BYTES)) as parts:
            async for lines in parts:
                length = sum(len(line or b"") for _, line in lines)
                numbers |= await on_text_thread(length, result_numbers, [line for _, line in lines])
        return numbers

    async def _answer_all(self, done: set[int], ask: Ask, gate: LineGate) -> None:
        """Answer all lines. Raises `TimeoutError` if the window ends or the batch is cancelled."""
        now_s = await self._user_files.store.call(DocumentTable.now_s)  # immune to clock changes
        rest_s = 0.0 if self.record.is_cancelled else self.record.ends_s - now_s
        own_places = asyncio.Semaphore(gate.num_places)  # also held by lines that pause
        try:
            async with asyncio.timeout(rest_s) as self._window, asyncio.TaskGroup() as group:
                async for number, request in self._requests():
                    if number in done:
                        continue
                    await own_places.acquire()
                    place = LinePlace(gate, self._key.owner)
                    await place.enter()
                    task = group.create_task(self._answer(number, request, ask, place))
                    # A task that is cancelled before its first step runs no `finally`.
                    task.add_done_callback(partial(_give_up, place, own_places))
        except BaseExceptionGroup as errors:  # a fault of the store, or a bug
            raise errors.exceptions[0] from None
        finally:
            self._window = None

    async def _answer(self, number: int, request: LineRequest, ask: Ask, place: LinePlace) -> None:
        """Answer one line, and store its result."""
        line_id = self._line_id(number)
        if request.error is not None:
            await self._write(bad=error_result(line_id, request.custom_id, request.error))
            return
        answer = await ask(request.body)
        num_down = 0
        while (wait_s := answer.retry_after_s) is not None and num_down < MAX_TRIES_DOWN:
            if answer.status != HTTPStatus.TOO_MANY_REQUESTS:  # it may be down permanently
                num_down += 1
                wait_s = max(wait_s, min(num_down, _MAX_PAUSE_S))
            place.leave()
            await asyncio.sleep(wait_s)
            await place.enter()
            answer = await ask(request.body)
        place.leave()
        text = answer_result(line_id, request.custom_id or "", answer)
        await (self._write(good=text) if answer.is_good else self._write(bad=text))

    async def _finish(self, *, is_late: bool) -> None:
        """Write errors for unanswered lines, unless cancelled, and publish the files."""
        is_cancelled = self.record.is_cancelled
        if not is_cancelled:
            self.record.enter("finalizing")
            await self._save()
        if not is_cancelled and not is_late and self.record.num_lines > self._num_done:
            message = "The input file was deleted before all of its lines were read."
            await self.fail(BatchFault("input_file_deleted", message))
            return
        if is_late and not is_cancelled:
            await self._expire()
        status: records.Status = "expired" if is_late else "completed"
        status = "cancelled" if is_cancelled else status
        await self._end(status)

    async def _end(self, status: records.Status) -> None:
        await self._user_files.store.call(records.end, self._key, self.record, status)

    async def _expire(self) -> None:
        """Write an error for each line that was not answered."""
        done = await self._done()
        error = BatchExpired("The completion window ended before this request was answered.")
        late: list[bytes] = []
        async with aclosing(self._requests()) as requests:
            async for number, request in requests:
                if number in done:
                    continue
                late.append(error_result(self._line_id(number), request.custom_id, error))
                if len(late) == _WRITTEN_TOGETHER:
                    await self._write(bad=b"".join(late))
                    late = []
        await self._write(bad=b"".join(late))

    async def _write(self, *, good: bytes = b"", bad: bytes = b"") -> None:
        """Store results, even if the batch is being stopped."""
        await asyncio.shield(self._keep(good, bad))

    async def _keep(self, good: bytes, bad: bytes) -> None:
        await self._user_files.store.call(records.write, self._key, self.record, good=good, bad=bad)
        self.record.count(good, bad)

    async def _save(self) -> None:
        await self._user_files.store.call(records.save, self._key, self.record)

    async def _requests(self) -> AsyncGenerator[tuple[int, LineRequest], None]:
        """Yield line numbers and requests; only the first of several equal ids is valid."""
        custom_ids: set[str] = set()
        async with aclosing(self._parts(self.record.input_file_id, self._max_line_bytes)) as parts:
            async for lines in parts:
                for number, line in lines:
                    request = await on_text_thread(
                        len(line or b""), read_line, line, self.record.endpoint
                    )
                    if request.error is None and request.custom_id in custom_ids:
                        error = InvalidRequest(
                            "An earlier line has this custom_id.", param="custom_id"
                        )
                        request = replace(request, error=error)
                    if request.error is None:
                        custom_ids.add(request.custom_id or "")
                    yield number, request

    async def _parts(self, file_id: str, max_bytes: int) -> AsyncGenerator[list[Line], None]:
        """Yield the non-empty lines of a file, some at a time."""
        splitter = LineSplitter(max_bytes)
        async with aclosing(self._user_files.content(self._key.owner, file_id)) as pieces:
            async for piece in pieces:
                yield await on_text_thread(0, splitter.push, piece)
        yield splitter.finish()

    def _line_id(self, number: int) -> str:
        return f"batch_req_{self.record.id.removeprefix('batch_')}_{number}"

    @property
    def _num_done(self) -> int:
        return self.record.num_good + self.record.num_bad


def _give_up(place: LinePlace, own_places: asyncio.Semaphore, _: asyncio.Task[Any]) -> None:
    place.leave()
    own_places.release()
