"""What the commands about pictures have alike: sizes, files of text, options they have no use for.

Owns the words of their errors. Knows no command.
"""

from __future__ import annotations

import re
from pathlib import Path

from triptych.core.errors import ConfigError

UNUSED = frozenset(
    {"chat_template", "idle_unload_s", "load", "max_length", "model_impl", "pool_embeddings"}
    | {"served_model_name"}
)
"""Options of models that say nothing to one that draws once and ends: such flags are unknown."""
_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")


def parse_size(text: str) -> tuple[int, int]:
    """Width and height of `WIDTHxHEIGHT`. Raises `ConfigError`."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"--size {text}: write WIDTHxHEIGHT in pixels, as in 512x768.")
    return int(match[1]), int(match[2])


def read_lines(flag: str, path: str) -> list[str]:
    """The lines of a text file that are not empty. Raises `ConfigError`."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{flag} {path}: cannot be read ({reason}).") from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{flag} {path}: is empty.")
    return lines
