"""What commands read, write and show: lines of a file or stdin, output files, a progress bar.

Owns the words of the errors and the look of the bar. Knows no command.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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


def count_bar(*, is_hidden: bool = False, is_transient: bool = False) -> Progress:
    """How many are done of how many, on stderr, and how long the rest may take."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=is_hidden,
        transient=is_transient,
    )


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """A context for writing a file of `--output`. Raises `ConfigError` where writing fails."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or "it takes no bytes"
        raise ConfigError(f"--output {path}: cannot be written ({reason}).") from error
