"""Requests that the server sends to itself on behalf of a caller.

Owns the call of the app without a socket. Ids, log, metrics, limits and errors are as for any
request.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message

from triptych.core.engine_api.caller import Principal
from triptych.core.http.auth import OWN_PRINCIPAL
from triptych.core.http.batches.lines import LineAnswer


async def post(app: ASGIApp, path: str, body: bytes, principal: Principal) -> LineAnswer:
    """Post a JSON body and return the answer. Cancelling the call cancels the request."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": None,
        "state": {},
        OWN_PRINCIPAL: principal,
    }
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    answer = _Collected()

    async def receive() -> Message:
        """Return the body once, then wait forever: this client never disconnects."""
        if not parts:
            await asyncio.get_running_loop().create_future()
        return parts.pop()

    await app(scope, receive, answer.send)
    return answer.whole()


class _Collected:
    """Collects a response from its ASGI messages."""

    def __init__(self) -> None:
        self._start: Message = {"status": 500, "headers": []}
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        else:
            self._body += message.get("body", b"")

    def whole(self) -> LineAnswer:
        headers = {name.decode(): value.decode() for name, value in self._start["headers"]}
        request_id = headers.get("x-request-id", "")
        return LineAnswer(self._start["status"], bytes(self._body), request_id, headers)
