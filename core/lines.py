"""Lines of text that a command is given: in a file, or piped in.

Owns their reading and the words of its errors. Knows not what stands in them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from triptych.core.errors import ConfigError

STDIN = "-"


def read_lines(flag: str, path: str) -> list[tuple[int, str]]:
    """The lines that are not blank, each with its number from 1; `-` reads stdin.

    Raises `ConfigError`, naming the flag that `path` was given with.
    """
    try:
        whole = sys.stdin.read() if path == STDIN else Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{flag} {path}: cannot be read ({reason}).") from error
    # Not splitlines: it takes some characters that JSON leaves alone for ends of lines.
    lines = enumerate(whole.split("\n"), start=1)
    return [(number, line.strip()) for number, line in lines if line.strip()]
