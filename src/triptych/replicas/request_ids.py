"""Request ids behind Ray Serve's proxy, which stamps its own on every request and response.

Owns that a response has one `X-Request-Id`: the proxy passes its id to the app as the request's
own, and appends it to the response once more. Imports nothing of Ray.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ProxyRequestIds:
    """ASGI middleware: leaves `X-Request-Id` of responses to the proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request without the header."""

        async def send_bare(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if "x-request-id" in headers:
                    del headers["x-request-id"]
            await send(message)

        await self._app(scope, receive, send_bare)
