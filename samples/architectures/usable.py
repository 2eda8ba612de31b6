"""The fields that make some default configurations usable, from `usable_fields.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("usable_fields.toml")


@cache
def usable_fields() -> Mapping[str, Any]:
    """The fields of each type."""
    return tomllib.loads(FILE.read_text("utf-8"))


def completed(model_type: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A default configuration with the fields that it lacks."""
    return _merged(fields, usable_fields().get(model_type, {}))


def _merged(fields: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with some fields added, also in its parts."""
    parts = {
        name: _merged(fields[name], part)
        for name, part in added.items()
        if isinstance(part, dict) and isinstance(fields.get(name), dict)
    }
    return {**fields, **added, **parts}
