"""The log lines of `--log-requests`: what a request asked for, and what it was answered.

Owns SGLang's levels, and what each shows of a body:

    0   the arrival: route and size (the end is a line of `core.http.access`)
    1   also numbers and switches of the body; texts, lists and objects by their size
    2   also texts, cut to `PARTIAL_CHARS`, and answers
    3   all of them, whole

Fields that may hold a credential are masked at every level, also in the arguments of tool calls, as
are passwords and queries of URLs that are a value on their own. Headers are never logged.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

from starlette.requests import Request

from triptych.core.http.access import log_ids
from triptych.core.options.server import ServerOptions
from triptych.core.options.values import MASK
from triptych.core.process.logs import fields

PARTIAL_CHARS = 2048
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_MAX_FIELDS = 64
"""Fields of a body that are shown: a body may have more that are unknown."""
_CREDENTIAL = re.compile(
    r"token|.*(authorization|bearer|cookies?|credentials?|headers|api_?key|access_?key|private_?key|pass_?word"
    r"|passphrase|secret|(access|auth|client|hf|id|refresh|security|session)_?token)"
)
"""Names of fields that may hold a credential, in lower case with underscores."""
_SECRET_OF_URL = re.compile(r"(?<=://)[^/?#\s]*@|(?<=\?)[^#\s]*")
_IS_URL = re.compile(r"[a-z][a-z0-9+.-]*://\S*", re.IGNORECASE)
_MAX_URL_CHARS = 8192
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
        fields = (name for name in body if _NAME.fullmatch(name))
        named = {name: body[name] for name in islice(fields, _MAX_FIELDS)}
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


def masked(value: Any, name: str = "") -> Any:
    """A JSON value with a mask in place of all that may be a credential.

    `name` is that of the field which holds it.
    """
    if isinstance(value, list):
        return [masked(each, name) for each in value]
    if isinstance(value, dict):
        return {name: _masked_field(name, inner) for name, inner in value.items()}
    if not isinstance(value, str):
        return value
    if name == "arguments" and value.lstrip().startswith("{"):  # of a tool call
        with suppress(ValueError, RecursionError):
            return json.dumps(masked(json.loads(value)), ensure_ascii=False)
    is_url = len(value) <= _MAX_URL_CHARS and _IS_URL.fullmatch(value)
    return _SECRET_OF_URL.sub(_mask_of_url, value) if is_url else value


def _masked_field(name: str, value: Any) -> Any:
    is_credential = _CREDENTIAL.fullmatch(name.lower().replace("-", "_"))
    return MASK if is_credential else masked(value, name)


def _mask_of_url(found: re.Match[str]) -> str:
    return f"{MASK}@" if found[0].endswith("@") and found.string[found.start() - 1] == "/" else MASK


def _outline(value: Any) -> Any:
    """A value without its texts: a number or a switch, or else a size."""
    kinds: dict[type, str] = {str: "characters", list: "items", dict: "fields"}
    kind = kinds.get(type(value))
    return value if kind is None else f"{len(value)} {kind}"
