"""Log lines, as text for people or as JSON for programs.

Owns the format and the levels. A line is a fixed message and named fields (`extra=fields(...)`), so
that no user input can be mistaken for log text. Prompts and answers are ordinary fields, logged
only with `log_prompts`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Protocol, TextIO

from triptych.core.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
_OWN = "triptych."
_RED, _YELLOW = "\x1b[31m", "\x1b[33m"
_COLORS = MappingProxyType({"WARNING": _YELLOW, "ERROR": _RED, "CRITICAL": _RED})
_PLAIN = "\x1b[0m"


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """`extra` of a log call: the named values of the line."""
    return {"fields": values}


class LogOptions(Protocol):
    """The options of a log: its levels, and `json` or `text`."""

    @property
    def log_level(self) -> str:
        """The lowest level to log."""
        ...

    @property
    def log_module_level(self) -> tuple[str, ...]:
        """Other levels for modules, as `MODULE=LEVEL`."""
        ...

    @property
    def log_format(self) -> str:
        """`json` or `text`."""
        ...


def configure(
    options: LogOptions, *, stream: TextIO | None = None, has_color: bool | None = None
) -> None:
    """Send every log line of this process to `stream`, in the levels and format of `options`.

    Without a `stream`, each line goes to `sys.stderr` of that moment. Text is colored on a
    terminal; `has_color` overrides that.
    """
    handler = logging.StreamHandler(stream) if stream else _StderrHandler()
    is_colored = can_color(stream or sys.stderr) if has_color is None else has_color
    is_json = options.log_format == "json"
    handler.setFormatter(JsonFormatter() if is_json else TextFormatter(has_color=is_colored))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(options.log_level.upper())
    if root.level > logging.DEBUG:
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every URL
    for module, level in module_levels(options.log_module_level):
        logging.getLogger(module).setLevel(level.upper())


def current_level() -> str:
    """The lowest level that Triptych's loggers pass in this process."""
    level = logging.getLogger(_OWN.rstrip(".")).getEffectiveLevel()
    return next((name for name in LEVELS if getattr(logging, name.upper()) >= level), LEVELS[-1])


def can_color(stream: TextIO) -> bool:
    """Whether `stream` is a terminal, and the user does not refuse colors with `NO_COLOR`."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def module_levels(entries: Iterable[str]) -> list[tuple[str, str]]:
    """Split entries `MODULE=LEVEL`. Raises `ConfigError`."""
    levels = []
    for entry in entries:
        module, _, level = entry.partition("=")
        if not module or level not in LEVELS:
            raise ConfigError(
                f"--log-module-level {entry}: write MODULE=LEVEL, such as triptych.core.http=debug;"
                f" levels are {', '.join(LEVELS)}."
            )
        levels.append((module, level))
    return levels


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which a table on the terminal replaces for a while."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write `record`; the caller holds the lock of this handler."""
        self.stream = sys.stderr
        super().emit(record)


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
    """`2026-11-28 12:30:01 info access: request status=200 ...`, in local time.

    Of Triptych's own loggers only the last part of the name is shown.
    """

    def __init__(self, *, has_color: bool = False) -> None:
        super().__init__()
        self._has_color = has_color

    def format(self, record: logging.LogRecord) -> str:
        """Render `record`; values with spaces or unprintable characters are quoted."""
        time = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S")
        named = getattr(record, "fields", {})
        head = f"{record.levelname.lower()} {_short(record.name)}: {record.getMessage()}"
        color = _COLORS.get(record.levelname) if self._has_color else None
        head = f"{color}{head}{_PLAIN}" if color else head
        line = " ".join((time, head, *(f"{name}={_plain(value)}" for name, value in named.items())))
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _short(name: str) -> str:
    return name.rpartition(".")[2] if name.startswith(_OWN) else name


def _plain(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)
