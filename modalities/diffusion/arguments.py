"""Parsing of arguments that the image commands share. Knows no command."""

from __future__ import annotations

import re

from triptych.core.errors import ConfigError

UNUSED = frozenset({"idle_unload_s", "load", "served_model_name"})
"""Server options that commands do not have."""
_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")


def parse_size(text: str) -> tuple[int, int]:
    """Width and height of `WIDTHxHEIGHT`. Raises `ConfigError`."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"--size {text}: write WIDTHxHEIGHT in pixels, as in 512x768.")
    return int(match[1]), int(match[2])


def parse_adapter(text: str) -> tuple[str, float]:
    """Name and scale of `NAME[=SCALE]`. Raises `ConfigError`."""
    name, _, scale = text.partition("=")
    try:
        return name, float(scale or 1.0)
    except ValueError as error:
        raise ConfigError(
            f"--adapter {text}: the scale must be a number, as in ink=0.8."
        ) from error
