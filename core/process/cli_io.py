"""Input and output of commands: lines of a file or stdin, output files, a progress bar.

Owns the error messages and the layout of the bar. Knows no command.
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
    """The text of the file `path`; `-` reads stdin.

    Raises `ConfigError`, naming `flag`, the option that gave `path`.
    """
    try:
        return sys.stdin.read() if path == STDIN else Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{flag} {path}: cannot be read ({reason}).") from error


def read_file(path: str | Path, what: str) -> bytes:
    """The bytes of a file; `what` names its kind in the `ConfigError` if it cannot be read."""
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        name = Path(path).name
        raise ConfigError(f"The {what} {name} cannot be read ({error.strerror}).") from error


def read_lines(flag: str, path: str) -> list[tuple[int, str]]:
    """The non-blank lines of a file or stdin, each with its number from 1."""
    # Not splitlines: it also splits at characters that JSON allows inside strings.
    lines = enumerate(read_text(flag, path).split("\n"), start=1)
    return [(number, line.strip()) for number, line in lines if line.strip()]


def show(text: str) -> None:
    """Print a piece of text immediately."""
    sys.stdout.write(text)
    sys.stdout.flush()


def count_bar(*, is_hidden: bool = False, is_transient: bool = False) -> Progress:
    """A progress bar on stderr with the count done, the total and the time remaining."""
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
def report_write_errors(path: str | Path) -> Iterator[None]:
    """Turn an `OSError` of the block, which writes `--output`, into `ConfigError`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or "write failed"
        raise ConfigError(f"--output {path}: cannot be written ({reason}).") from error
