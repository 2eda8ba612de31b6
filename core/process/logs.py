"""Log lines, as text for people or as JSON for programs.

Owns the format. A line is a fixed message and named fields (`extra=fields(...)`), so that no user
input can be mistaken for log text. Prompts and answers are ordinary fields, logged only with
`log_prompts`.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Protocol, TextIO


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """`extra` of a log call: the named values of the line."""
    return {"fields": values}


class LogOptions(Protocol):
    """The options of a log: its level, and `json` or `text`."""

    @property
    def log_level(self) -> str:
        """The lowest level to log."""
        ...

    @property
    def log_format(self) -> str:
        """`json` or `text`."""
        ...


def configure(options: LogOptions, *, stream: TextIO = sys.stderr) -> None:
    """Send every log line of this process to `stream`, in the level and format of `options`."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if options.log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(options.log_level.upper())


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Render `record`; a traceback is one field of it."""
        line = {
            "time": datetime.fromtimestamp(record.created, tz=UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """`12:30:01 info triptych.core.http.access: request status=200 ...`."""

    def format(self, record: logging.LogRecord) -> str:
        """Render `record`; values with spaces or unprintable characters are quoted."""
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        named = getattr(record, "fields", {})
        parts = [f"{time} {record.levelname.lower()} {record.name}: {record.getMessage()}"]
        parts += [f"{name}={_plain(value)}" for name, value in named.items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _plain(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)
