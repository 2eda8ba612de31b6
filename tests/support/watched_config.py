"""A configuration that remembers which of its options were read."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from triptych.core.options.config import Config

_GENERIC = (dataclasses.__file__, "<string>")  # the latter is what dataclasses generate


def watched(config: Config) -> tuple[Config, set[str]]:
    """A copy of `config`, and the names of the options that are read off it from now on.

    What the methods of a dataclass and `dataclasses.replace` read does not count: that is all.
    """
    seen: set[str] = set()
    sections = {
        field.name: _watched_section(getattr(config, field.name), seen)
        for field in dataclasses.fields(config)
    }
    return Config(**sections), seen


def _watched_section(section: Any, seen: set[str]) -> Any:
    names = {field.name for field in dataclasses.fields(section)}

    def read(self: Any, name: str) -> Any:
        if name in names and sys._getframe(1).f_code.co_filename not in _GENERIC:
            seen.add(name)
        return object.__getattribute__(self, name)

    kind = type(section)
    spy = type(kind.__name__, (kind,), {"__slots__": (), "__getattribute__": read})
    copy = object.__new__(spy)
    for name in names:
        object.__setattr__(copy, name, getattr(section, name))
    return copy
