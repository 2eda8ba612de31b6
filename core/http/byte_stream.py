"""Streaming of a file while it is produced.

Owns the start and end of such a response, including failure: a file cannot contain an error. Knows
no format: the bytes come from the route.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triptych.core.http.disconnect import DisconnectWatcher
from triptych.core.http.sse import log_broken


class ByteStream(Response):
    """Streams `chunks`, none of them empty, as they arrive.

    The response starts with the first chunk: an earlier error is sent with its HTTP status. A later
    error closes the connection, so that no client takes a partial file for the whole. `describe`
    returns headers that are known by then. The chunks are always closed, which cancels their jobs.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        media_type: str,
        describe: Callable[[], Awaitable[Mapping[str, str]]],
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(media_type=media_type, headers=headers)
        del self.headers["content-length"]
        self._chunks = chunks
        self._describe = describe
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    await self._send(send, chunk, is_last=False)
            await self._send(send, b"", is_last=True)
        except asyncio.CancelledError:
            watcher: DisconnectWatcher = scope["state"]["watcher"]
            reason = watcher.take_reason() if self._has_started else None
            if reason is None:
                raise
            await _cut(reason, scope)
        except Exception as error:  # headers are sent: only a closed connection shows the failure
            if not self._has_started:
                raise
            await _cut(error, scope)

    async def _send(self, send: Send, chunk: bytes, *, is_last: bool) -> None:
        if not self._has_started:
            self.headers.update(await self._describe())
            self._has_started = True
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
        await send({"type": "http.response.body", "body": chunk, "more_body": not is_last})


async def _cut(error: BaseException, scope: Scope) -> None:
    log_broken(error, scope)
    watcher: DisconnectWatcher = scope["state"]["watcher"]
    if not await watcher.abort():
        raise error  # there is no connection to close
