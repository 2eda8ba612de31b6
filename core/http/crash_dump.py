"""The requests of the last minutes, written to `--crash-dump-folder` if the engine crashes.

Owns how long and how many requests are kept, and the form of a dump: JSON lines, the first of which
has the reason, the version and the options, and each other one a request with its body. Dumps are
for the operator who looks for the cause: they have prompts, no answers, no headers and no
credentials; only the user of the server can read them. Knows nothing of the engine.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from starlette.requests import Request

from triptych.core.errors import ConfigError
from triptych.core.http.recent_requests import RecentRequest
from triptych.core.http.request_log import masked
from triptych.core.process.atomic_files import remove_partial, write_whole
from triptych.core.process.logs import fields

WINDOW_S = 300.0
MAX_BODY_BYTES = 2**20
"""A larger body is left out of a dump; its size is in it."""
MAX_BYTES = 2**25
"""The bodies that are kept in all; the oldest go first."""
MAX_REQUESTS = 8192
MAX_DUMPS = 8
"""The dumps that a folder keeps; older ones are deleted."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A request and its body, `None` where that is too large."""

    request_id: str
    call_id: str
    key: str
    route: str
    body: bytes | None
    num_bytes: int
    recent: RecentRequest | None
    arrived_s: float = field(default_factory=time.time)

    @property
    def status(self) -> int | None:
        """The status of the response; `None` until it has been sent."""
        is_over = self.recent is not None and self.recent.ended_s is not None
        return self.recent.status if self.recent is not None and is_over else None

    def line(self, status: int | None) -> dict[str, Any]:
        """The line of a dump, with the status at the crash."""
        return {
            "request_id": self.request_id,
            "call_id": self.call_id,
            "key": self.key,
            "arrived": _iso(self.arrived_s),
            "route": self.route,
            "status": status,
            "num_bytes": self.num_bytes,
            "body": None if self.body is None else masked(json.loads(self.body)),
        }


_AtCrash: TypeAlias = list[tuple[_Kept, int | None]]
"""Requests, and their statuses when the engine crashed."""


class KeptRequests:
    """The requests of the last five minutes, and the folder for dumps of them.

    Called from any thread. Raises `ConfigError` for a folder that cannot be made, or to which
    another user may write.
    """

    def __init__(self, folder: str, facts: Mapping[str, Any]) -> None:
        self._folder = _open_folder(folder)
        self._facts = facts
        self._lock = threading.Lock()
        self._kept: deque[_Kept] = deque()
        self._num_bytes = 0

    def __call__(self, request: Request, raw: bytes, value: Any) -> None:
        """Keep a request with its body, and forget those that are too old or too many."""
        state = request.scope["state"]
        kept = _Kept(
            request_id=state["request_id"],
            call_id=state["call_id"],
            key=state["principal"].key,
            recent=state.get("recent_request"),
            route=getattr(request.scope.get("route"), "path", "unmatched"),
            body=raw if len(raw) <= MAX_BODY_BYTES else None,
            num_bytes=len(raw),
        )
        with self._lock:
            self._kept.append(kept)
            self._num_bytes += len(kept.body or b"")
            while (
                self._num_bytes > MAX_BYTES
                or len(self._kept) > MAX_REQUESTS
                or self._kept[0].arrived_s < kept.arrived_s - WINDOW_S
            ):
                self._num_bytes -= len(self._kept.popleft().body or b"")

    def dump(self, reason: str) -> threading.Thread | None:
        """Write the kept requests, if there are any, to a new file. A failure is logged.

        Returns at once: a thread of its own masks and writes megabytes of bodies.
        """
        now_s = time.time()
        with self._lock:
            kept = [each for each in self._kept if each.arrived_s >= now_s - WINDOW_S]
        if not kept:  # as when a model fails to load
            return None
        at_crash = [(each, each.status) for each in kept]  # before jobs end with errors
        writer = threading.Thread(
            target=self._write, args=(at_crash, reason, now_s), name="crash-dump"
        )
        writer.start()
        return writer

    def _write(self, kept: _AtCrash, reason: str, now_s: float) -> None:
        stamp = datetime.fromtimestamp(now_s, UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        path = self._folder / f"crash-{stamp}.jsonl"
        try:
            write_whole(path, self._lines(kept, reason, now_s), mode=0o600)
            self._delete_old()
        except (OSError, ValueError) as error:  # ValueError: a body that is no JSON
            _logger.error("crash dump failed", extra=fields(reason=type(error).__name__))
        else:
            _logger.warning("crash dump", extra=fields(file=path.name, num_requests=len(kept)))

    def _lines(self, kept: _AtCrash, reason: str, now_s: float) -> Iterator[bytes]:
        head = {"reason": reason, "time": _iso(now_s), **self._facts}
        for line in chain((head,), (each.line(status) for each, status in kept)):
            yield json.dumps(line).encode() + b"\n"  # also integers of any size

    def _delete_old(self) -> None:
        for old in sorted(self._folder.glob("crash-*.jsonl"))[:-MAX_DUMPS]:
            old.unlink(missing_ok=True)


def _open_folder(folder: str) -> Path:
    path = Path(folder).expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        remove_partial(path)
    except OSError as error:
        raise ConfigError(f"--crash-dump-folder {folder}: {error.strerror}.") from error
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"--crash-dump-folder {folder}: other users may write to it; name a folder of your own."
        )
    return path


def _iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat()
