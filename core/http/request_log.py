"""The log lines of `--log-requests`: what a request asked for, and what it was answered.

Owns SGLang's levels, and what each shows of a body:

    0   the arrival: route and size (the end is a line of `core.http.access`)
    1   also numbers and switches of the body; texts, lists and objects by their size
    2   also texts, cut to `PARTIAL_CHARS`, and answers
    3   all of them, whole

Fields that may hold a credential are masked at every level. Headers are never logged.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from triptych.core.http.access import log_ids
from triptych.core.options.server import ServerOptions
from triptych.core.options.values import MASK
from triptych.core.process.logs import fields

PARTIAL_CHARS = 2048
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_CREDENTIALS = frozenset({"api_key", "authorization", "headers", "hf_token", "password", "token"})
_logger = logging.getLogger(__name__)


class RequestLog:
    """Logs the body of each request, as it arrives. Called from any thread."""

    def __init__(self, level: int) -> None:
        self._level = level

    def __call__(self, request: Request, raw: bytes, value: Any) -> None:
        """Log a request whose body is `raw`, and `value` once it is parsed."""
        state = request.state
        shown = self._shown(value) if self._level >= 1 and isinstance(value, dict) else None
        _logger.info(
            "request received",
            extra=fields(
                **log_ids(state.request_id, state.call_id),
                route=getattr(request.scope.get("route"), "path", "unmatched"),
                num_bytes=len(raw),
                **({} if shown is None else {"body": shown}),
            ),
        )

    def _shown(self, body: Mapping[str, Any]) -> dict[str, Any]:
        named = {name: value for name, value in body.items() if _NAME.fullmatch(name)}
        show = _outline if self._level == 1 else self._text
        return {name: show(value) for name, value in masked(named).items()}

    def _text(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return text if self._level >= 3 else text[:PARTIAL_CHARS]


def answer_chars(options: ServerOptions) -> int | None:
    """How many characters of an answer are logged: 0 for none, `None` for all."""
    level = options.log_requests_level if options.log_requests else 0
    if options.log_prompts or level >= 3:
        return None
    return PARTIAL_CHARS if level == 2 else 0


def masked(value: Any) -> Any:
    """A JSON value with a mask in place of all that may be a credential."""
    if isinstance(value, list):
        return list(map(masked, value))
    if not isinstance(value, dict):
        return value
    return {
        name: MASK if name.lower() in _CREDENTIALS else masked(inner)
        for name, inner in value.items()
    }


def _outline(value: Any) -> Any:
    """A value without its texts: a number or a switch, or else a size."""
    kinds: dict[type, str] = {str: "characters", list: "items", dict: "fields"}
    kind = kinds.get(type(value))
    return value if kind is None else f"{len(value)} {kind}"
