"""One batch, from its first line to its last.

Owns the order: lines are counted, answered a few at a time, and what came of each is kept at once,
so that a batch goes on where a stopped server left it. Knows no route.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final

import msgspec

from triptych.core.errors import InvalidRequest, RequestTimeout, StoreFull
from triptych.core.http.batches import record as records
from triptych.core.http.batches.gate import LineGate
from triptych.core.http.batches.lines import (
    LineAnswer,
    LineRequest,
    LineResult,
    LineSplitter,
    answered,
    read_line,
    refused,
)
from triptych.core.http.batches.record import BatchFault, BatchRecord
from triptych.core.http.files.shelf import FileAbout, FileShelf
from triptych.core.limits import MAX_BATCH_LINES
from triptych.core.store.documents import Key
from triptych.core.text.threads import on_text_thread

_WRITTEN_TOGETHER: Final = 256
_MAX_RESULT_BYTES: Final = 2**30

Ask = Callable[[bytes], Awaitable[LineAnswer]]
"""Posts a body to the endpoint of the batch, in its owner's name."""
Line = tuple[int, bytes | None]
"""A line and its number, from 1; nothing is one that is too long."""


class BatchExpired(RequestTimeout):
    """The batch was over before this line was answered."""

    code = "batch_expired"


class BatchWork:
    """A batch under way. Lines of over `max_line_bytes` are refused."""

    def __init__(
        self, shelf: FileShelf, key: Key, record: BatchRecord, *, max_line_bytes: int
    ) -> None:
        self.record = record
        self._shelf = shelf
        self._key = key
        self._max_line_bytes = max_line_bytes
        self._custom_ids: set[str] = set()
        self._window: asyncio.Timeout | None = None

    async def run(self, ask: Ask, gate: LineGate) -> None:
        """Do all that is left. Cancelling it leaves the rest for another run."""
        try:
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
        """End it before its time, with what there is."""
        if not self.record.is_over:
            self.record.enter("cancelling")
            if self._window is not None and not self._window.expired():
                self._window.reschedule(asyncio.get_running_loop().time())
            await self._save()

    async def fail(self, fault: BatchFault) -> None:
        """End it, with what there is and the reason."""
        self.record.faults.append(fault)
        await self._shelf.store.call(records.end, self._key, self.record, "failed")

    async def _prepare(self) -> bool:
        """Count the lines, and open the files; whether there is something to do."""
        num_lines = 0
        async with aclosing(self._lines(self.record.input_file_id, self._max_line_bytes)) as lines:
            async for _ in lines:
                num_lines += 1
        if not 0 < num_lines <= MAX_BATCH_LINES:
            message = f"The file has {num_lines} lines; a batch has 1 to {MAX_BATCH_LINES}."
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
        """The id of a new file for results of that kind."""
        about = FileAbout(f"{self.record.id}_{kind}.jsonl", "batch_output")
        expires_s = self.record.files_expire_s
        made = await self._shelf.add(self._key.owner, about, expires_s=expires_s, is_growing=True)
        return made.id

    async def _done(self) -> set[int]:
        """The lines that an earlier run of the server has answered."""
        done: set[int] = set()
        for file_id in self.record.growing:
            async with aclosing(self._lines(file_id, _MAX_RESULT_BYTES)) as lines:
                async for _, line in lines:
                    result = msgspec.json.decode(line or b"", type=LineResult)
                    done.add(result.number)
                    self._custom_ids.add(result.custom_id or "")  # of a line that has none
        return done

    async def _answer_all(self, done: set[int], ask: Ask, gate: LineGate) -> None:
        """Raises `TimeoutError` where the time is over, or the batch was cancelled."""
        is_cancelled = self.record.status == "cancelling"
        rest_s = 0.0 if is_cancelled else self.record.ends_s - time.time()
        try:
            async with asyncio.timeout(rest_s) as self._window, asyncio.TaskGroup() as group:
                async for number, line in self._lines(
                    self.record.input_file_id, self._max_line_bytes
                ):
                    if number not in done:
                        await gate.enter()
                        group.create_task(self._answer(number, line, ask, gate))
        except BaseExceptionGroup as errors:  # one line's fault is the store's, or ours
            raise errors.exceptions[0] from None
        finally:
            self._window = None

    async def _answer(self, number: int, line: bytes | None, ask: Ask, gate: LineGate) -> None:
        """Answer one line, and keep what came of it."""
        try:
            request = await on_text_thread(len(line or b""), read_line, line, self.record.endpoint)
            error = request.error or self._check_id(request)
            if error is not None:
                await self._write(bad=refused(self._line_id(number), request.custom_id, error))
                return
            answer = await ask(request.body)
            while (wait_s := answer.retry_after_s) is not None:
                await asyncio.sleep(wait_s)
                answer = await ask(request.body)
        finally:
            gate.leave()
        text = answered(self._line_id(number), request.custom_id or "", answer)
        await (self._write(good=text) if answer.is_good else self._write(bad=text))

    async def _finish(self, *, is_late: bool) -> None:
        """Tell of lines that were not answered, unless they were cancelled; show the files."""
        is_cancelled = self.record.status == "cancelling"
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
        await self._shelf.store.call(records.end, self._key, self.record, status)

    async def _expire(self) -> None:
        """Write an error for each line that was not answered."""
        done = await self._done()
        error = BatchExpired("The completion window was over before this request was answered.")
        late: list[bytes] = []
        async with aclosing(self._lines(self.record.input_file_id, self._max_line_bytes)) as lines:
            async for number, line in lines:
                if number in done:
                    continue
                request = await on_text_thread(
                    len(line or b""), read_line, line, self.record.endpoint
                )
                late.append(refused(self._line_id(number), request.custom_id, error))
                if len(late) == _WRITTEN_TOGETHER:
                    await self._write_late(late)
                    late = []
        await self._write_late(late)

    async def _write_late(self, lines: list[bytes]) -> None:
        self.record.num_bad += len(lines)
        await self._store(b"", b"".join(lines))

    async def _write(self, *, good: bytes = b"", bad: bytes = b"") -> None:
        self.record.num_good += bool(good)
        self.record.num_bad += bool(bad)
        await self._store(good, bad)

    async def _store(self, good: bytes, bad: bytes) -> None:
        """Keep results; those of a batch that is stopped just now, too."""
        write = self._shelf.store.call(records.write, self._key, self.record, good=good, bad=bad)
        await asyncio.shield(write)

    async def _save(self) -> None:
        await self._shelf.store.call(records.save, self._key, self.record)

    async def _lines(self, file_id: str, max_bytes: int) -> AsyncGenerator[Line, None]:
        """The lines of a file that are not empty."""
        splitter, number = LineSplitter(max_bytes), 0
        async with aclosing(self._shelf.content(self._key.owner, file_id)) as pieces:
            async for piece in pieces:
                for line in splitter.push(piece):
                    number += 1
                    if line != b"":
                        yield number, line
        for line in splitter.finish():
            if line != b"":
                yield number + 1, line

    def _check_id(self, request: LineRequest) -> InvalidRequest | None:
        custom_id = request.custom_id or ""
        if custom_id in self._custom_ids:
            return InvalidRequest("An earlier line has this custom_id.", param="custom_id")
        self._custom_ids.add(custom_id)
        return None

    def _line_id(self, number: int) -> str:
        return f"batch_req_{self.record.id.removeprefix('batch_')}_{number}"

    @property
    def _num_done(self) -> int:
        return self.record.num_good + self.record.num_bad
