"""The outermost layer: request ids, the access log, and answers to uncaught errors.

Logs the route's template, status, duration and ids; never a path, header or body that a caller
sent. Knows no route.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.core.engine_api.caller import Principal
from triptych.core.http.dialects import Dialect, dialect_of
from triptych.core.http.errors import OPENAI, error_answer
from triptych.core.http.metrics import HttpMetrics
from triptych.core.limits import MAX_REQUEST_ID_CHARS
from triptych.core.process.logs import fields

_SANE_ID = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_REQUEST_ID_CHARS}}}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_CLIENT_GONE = 499  # as nginx logs it; never sent

_logger = logging.getLogger(__name__)


class Access:
    """ASGI middleware: names, logs and counts every request, and answers uncaught errors.

    A caller's `X-Request-Id` is kept if it is well-formed. `scope["state"]["call_id"]` is always
    unique, since two callers may send the same id. `dialects` are the APIs other than OpenAI's.
    """

    def __init__(
        self, app: ASGIApp, metrics: HttpMetrics, dialects: Sequence[Dialect] = ()
    ) -> None:
        self._app = app
        self._dialects = dialects
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; messages other than HTTP are passed through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["call_id"] = uuid.uuid4().hex
        given = Headers(scope=scope).get("x-request-id", "")
        state["request_id"] = given if _SANE_ID.fullmatch(given) else f"req-{state['call_id']}"
        state["principal"] = Principal()
        state["dialect"] = dialect_of(scope, self._dialects, OPENAI)
        answer = _StampedResponse(send, state["dialect"].id_headers(state["request_id"]))
        started_s = time.perf_counter()
        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:  # the boundary of the process: the details stay in the log
            _logger.error("request failed", exc_info=error, extra=fields(**_ids(state)))
            if answer.status:
                raise
            await error_answer(error, scope)(scope, receive, answer.send)
        finally:
            status = _CLIENT_GONE if state.get("is_gone") else answer.status
            self._record(scope, status, time.perf_counter() - started_s)

    def _record(self, scope: Scope, status: int, elapsed_s: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        self._metrics.observe_request(route=route, status=status, elapsed_s=elapsed_s)
        is_public = scope["state"].get("is_public", False)  # probes, and the page's files
        _logger.log(
            logging.DEBUG if is_public else logging.INFO,
            "request",
            extra=fields(
                **_ids(scope["state"]),
                method=scope["method"] if scope["method"] in _METHODS else "-",
                route=route,
                status=status,
                elapsed_ms=round(elapsed_s * 1000, 1),
                key=scope["state"]["principal"].key or "-",
            ),
        )


class _StampedResponse:
    """Adds the request id to a response and records its status."""

    def __init__(self, send: Send, id_headers: Mapping[str, str]) -> None:
        self._send = send
        self._id_headers = id_headers
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message).update(self._id_headers)
        await self._send(message)


def _ids(state: dict[str, Any]) -> dict[str, str]:
    return {name: state[name] for name in ("request_id", "call_id")}
