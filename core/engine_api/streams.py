"""Streams of job outputs for engine clients: one bounded buffer per job, on one asyncio loop.

Owns what all engine clients share, in process or across a socket: buffering outputs, pausing a job
whose reader is slow, ending streams, and cancelling jobs without a reader. Knows nothing of
threads, sockets or the meaning of outputs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from copy import copy

from triptych.core.engine_api.job import Output
from triptych.core.engine_api.journal import JobJournal
from triptych.core.errors import SlowReader, TriptychError, from_info

HIGH_WATER = 256
LOW_WATER = 64


class StreamTable:
    """The open streams of one client, by job id.

    `open` creates a job's stream, `deliver` feeds it, `fail` and `fail_all` end streams with an
    error. The table calls `on_cancel(job_ids)` when a reader leaves before the final output, and
    `on_pause(job_ids, is_paused)` when a buffer rises to `high_water` outputs and when it has
    fallen to `low_water` again. A reader that reads nothing for `stream_timeout_s` while its job is
    paused gets `SlowReader`, and its job is cancelled. `journal` has the recent jobs. All methods
    belong to the asyncio loop.

    A paused job still sends outputs in flight, so a buffer may exceed `high_water` by the outputs
    of a few steps.
    """

    def __init__(
        self,
        *,
        on_cancel: Callable[[tuple[str, ...]], None],
        on_pause: Callable[[tuple[str, ...], bool], None],
        stream_timeout_s: float,
        high_water: int = HIGH_WATER,
        low_water: int = LOW_WATER,
    ) -> None:
        assert 0 <= low_water < high_water
        self.on_cancel = on_cancel
        self.on_pause = on_pause
        self.stream_timeout_s = stream_timeout_s
        self.high_water = high_water
        self.low_water = low_water
        self.journal = JobJournal()
        self._streams: dict[str, JobStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._streams

    def open(self, job_id: str, model: str = "") -> JobStream:
        """Open the stream of `job_id`, which must not have one already."""
        assert job_id not in self._streams, f"job id {job_id!r} is already in use"
        self.journal.open(job_id, model)
        stream = self._streams[job_id] = JobStream(self, job_id)
        return stream

    def deliver(self, output: Output) -> None:
        """Pass an output to its stream; outputs of jobs without a stream are dropped."""
        if output.is_final:
            self.journal.end(output.job_id, output.error.code if output.error else "")
            if output.report is not None:
                self.journal.add_report(output.job_id, output.report)
        stream = self._streams.get(output.job_id)
        if stream is None:
            return
        if output.is_final:
            del self._streams[output.job_id]
        stream.push(output)

    def fail(self, job_id: str, error: TriptychError) -> None:
        """End one stream: its reader gets the buffered outputs, then `error`."""
        stream = self._streams.pop(job_id, None)
        if stream is not None:
            self.journal.end(job_id, error.code)
            stream.finish(error)

    def fail_all(self, error: TriptychError) -> None:
        """End every stream with `error`, for instance when the engine is gone.

        Each reader gets its own copy: a shared error would collect all their tracebacks.
        """
        for job_id in tuple(self._streams):
            self.fail(job_id, copy(error))

    def abandon(self, job_id: str) -> None:
        """Remove a job whose reader left, and cancel it if it still runs."""
        if self._streams.pop(job_id, None) is not None:
            self.journal.end(job_id)
            self.on_cancel((job_id,))


class JobStream:
    """A job's outputs, in order (`core.engine_api.client.OutputStream`). For one reader.

    Ends after the final output, or raises the error that ended the job. Closing it earlier cancels
    the job.
    """

    def __init__(self, table: StreamTable, job_id: str) -> None:
        self.job_id = job_id
        self._table = table
        self._buffer: deque[Output] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: TriptychError | None = None
        self._is_ended = False
        self._slow_timer: asyncio.TimerHandle | None = None
        self._last_read_s = 0.0

    def __aiter__(self) -> JobStream:
        return self

    async def __anext__(self) -> Output:
        while not self._buffer:
            if self._is_ended:
                error, self._error = self._error, None
                raise error or StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        output = self._buffer.popleft()
        if self._slow_timer is not None:
            self._last_read_s = asyncio.get_running_loop().time()
            if len(self._buffer) <= self._table.low_water:
                self._set_paused(False)
        return output

    async def aclose(self) -> None:
        """Stop following the job, and cancel it if it still runs."""
        self._buffer.clear()
        self.finish(None)
        self._table.abandon(self.job_id)

    def push(self, output: Output) -> None:
        """Buffer an output; called by the table."""
        if output.error is None:
            self._buffer.append(output)
        if output.is_final or output.error is not None:
            self.finish(from_info(output.error) if output.error is not None else None)
        elif len(self._buffer) >= self._table.high_water and self._slow_timer is None:
            self._set_paused(True)
        self._wake()

    def finish(self, error: TriptychError | None) -> None:
        """End the stream after the buffered outputs; called by the table."""
        self._is_ended, self._error = True, error
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _set_paused(self, is_paused: bool) -> None:
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None
        if is_paused:
            self._last_read_s = asyncio.get_running_loop().time()
            self._arm(self._table.stream_timeout_s)
        self._table.on_pause((self.job_id,), is_paused)

    def _arm(self, delay_s: float) -> None:
        self._slow_timer = asyncio.get_running_loop().call_later(delay_s, self._check_reader)

    def _check_reader(self) -> None:
        idle_s = asyncio.get_running_loop().time() - self._last_read_s
        left_s = self._table.stream_timeout_s - idle_s
        if left_s > 0:
            self._arm(left_s)
            return
        self._buffer.clear()
        self.finish(
            SlowReader("The stream was ended because its reader read nothing for too long.")
        )
        self._table.abandon(self.job_id)
