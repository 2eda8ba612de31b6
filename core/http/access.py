"""The outermost layer: request ids, the access log, and answers to uncaught errors.

Logs the route's template, status, duration, ids, model, token counts and the client's address;
never a path, header or body that a caller sent. Knows no route.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.core.engine_api.caller import AccessRecord, Principal
from triptych.core.http.dialects import Dialect, dialect_of
from triptych.core.http.disconnect import recorded_status
from triptych.core.http.errors import OPENAI, error_answer
from triptych.core.http.metrics import HttpMetrics
from triptych.core.http.recent_requests import RecentRequest
from triptych.core.limits import MAX_REQUEST_ID_CHARS
from triptych.core.process.logs import fields

_SANE_ID = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_REQUEST_ID_CHARS}}}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

_logger = logging.getLogger(__name__)


class Access:
    """ASGI middleware: names, logs and counts every request, and answers uncaught errors.

    A caller's `X-Request-Id` is kept if it is well-formed. `scope["state"]["call_id"]` is always
    unique, since two callers may send the same id. `dialects` are the APIs other than OpenAI's.
    Without `is_logged` requests are only counted.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: HttpMetrics,
        dialects: Sequence[Dialect] = (),
        *,
        is_logged: bool = True,
    ) -> None:
        self._is_logged = is_logged
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
        state["principal"], state["record"] = Principal(), AccessRecord()
        state["dialect"] = dialect_of(scope, self._dialects, OPENAI)
        answer = _StampedResponse(send, state["dialect"].id_headers(state["request_id"]))
        started_s = time.perf_counter()
        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:  # the boundary of the process: the details stay in the log
            ids = log_ids(state["request_id"], state["call_id"])
            _logger.error("request failed", exc_info=error, extra=fields(**ids))
            if answer.status:
                raise
            await error_answer(error, scope)(scope, receive, answer.send)
        finally:
            elapsed_s = time.perf_counter() - started_s
            self._record(scope, recorded_status(scope, answer.status), elapsed_s)

    def _record(self, scope: Scope, status: int, elapsed_s: float) -> None:
        state = scope["state"]
        route = getattr(scope.get("route"), "path", "unmatched")
        recent: RecentRequest | None = state.get("recent_request")
        if recent is not None:
            recent.end(route, status)
        model = state["record"].model
        self._metrics.observe_request(route=route, status=status, elapsed_s=elapsed_s, model=model)
        if not self._is_logged:
            return
        is_public = state.get("is_public", False)  # probes, and the page's files
        noted = asdict(state["record"])
        _logger.log(
            logging.DEBUG if is_public else logging.INFO,
            "request",
            extra=fields(
                **log_ids(state["request_id"], state["call_id"]),
                method=scope["method"] if scope["method"] in _METHODS else "-",
                route=route,
                status=status,
                elapsed_ms=round(elapsed_s * 1000, 1),
                **{name: value for name, value in noted.items() if value is not None},
                client=(scope.get("client") or ("-",))[0],
                key=state["principal"].key or "-",
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


def log_ids(request_id: str, call_id: str) -> dict[str, str]:
    """The ids of a request as fields of a log line: `call_id` only if `request_id` lacks it."""
    ids = {"request_id": request_id}
    return ids if call_id in request_id else {**ids, "call_id": call_id}
