"""Files that a command is given: text read from a path or stdin, and errors of writing.

Owns the words of these errors. Knows not what stands in the files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from triptych.core.errors import ConfigError

STDIN = "-"


def read_text(flag: str, path: str) -> str:
    """The text of a file; `-` reads stdin.

    Raises `ConfigError`, naming the flag that `path` was given with.
    """
    try:
        return sys.stdin.read() if path == STDIN else Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{flag} {path}: cannot be read ({reason}).") from error


def read_lines(flag: str, path: str) -> list[tuple[int, str]]:
    """The lines of a text that are not blank, each with its number from 1."""
    # Not splitlines: it takes some characters that JSON leaves alone for ends of lines.
    lines = enumerate(read_text(flag, path).split("\n"), start=1)
    return [(number, line.strip()) for number, line in lines if line.strip()]


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Around what writes a file of `--output`. Raises `ConfigError` where that does not work."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or "it takes no bytes"
        raise ConfigError(f"--output {path}: cannot be written ({reason}).") from error
