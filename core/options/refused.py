"""Options of other servers: refused by name, accepted with fixed values, or translated.

Owns the meaning of the tables in `refused.toml`, so that no flag of MAX, SGLang, vLLM or llama.cpp
is ever accepted and ignored. A *refused* option raises an error that names the alternative. A
*fixed* option describes behavior that Triptych has anyway: its values that say so are accepted, all
others are refused. A *translated* option has the same meaning as an option of Triptych. Supported
options are declared in `core/options/config.py`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from triptych.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Fixed:
    """An option whose value is fixed here. Switches accept `true` (`--x`) or `false` (`--no-x`)."""

    flags: tuple[str, ...]
    accepts: tuple[str, ...]
    reason: str

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value on the command line."""
        return self.accepts in (("true",), ("false",))

    def check(self, flag: str, value: Any) -> None:
        """Raise ConfigError unless `value` is accepted."""
        # YAML's null, true and 1 arrive as objects.
        if ("null" if value is None else str(value).lower()) not in self.accepts:
            given = flag if self.is_switch else f"{flag} {value}"
            raise ConfigError(f"{given} is not offered: {self.reason}")


def _flags(entry: Mapping[str, str]) -> tuple[str, ...]:
    return _names(entry["flags"])


def _names(flags: str) -> tuple[str, ...]:
    return tuple(name if name.startswith("-") else f"--{name}" for name in flags.split())


def _reason(entry: Mapping[str, str]) -> str:
    return REASONS.get(entry["reason"], entry["reason"])


_TABLES = tomllib.loads(Path(__file__).with_name("refused.toml").read_text("utf-8"))
REASONS: Mapping[str, str] = MappingProxyType(_TABLES["reasons"])
"""Reasons that several entries share, by name."""
FIXED = tuple(
    Fixed(_flags(entry), tuple(entry["accepts"]), _reason(entry)) for entry in _TABLES["fixed"]
)
"""Options that are accepted with the values that name existing behavior."""
FIXED_BY_FLAG = MappingProxyType({flag: entry for entry in FIXED for flag in entry.flags})
TRANSLATED = MappingProxyType(
    {flag: ours for name, ours in _TABLES["translated"].items() for flag in _names(name)}
)
"""Flags with the same meaning as an option of Triptych."""
REFUSED = MappingProxyType(
    {flag: _reason(entry) for entry in _TABLES["refused"] for flag in _flags(entry)}
)
"""Reason (with the alternative) of each refused flag, without the fixed ones."""
_VALUES = MappingProxyType(
    {
        (option, value): instead
        for option, entries in _TABLES["values"].items()
        for values, instead in entries.items()
        for value in values.split()
    }
)


def reason(flag: str) -> str | None:
    """Return why `flag` (`--x` or `--no-x`) is refused and its alternative; None if it is not."""
    positive = flag.replace("--no-", "--", 1)
    if positive in TRANSLATED:
        return f"write {TRANSLATED[positive]}."
    return REFUSED.get(positive)


def value_reason(name: str, value: str) -> str | None:
    """Return the replacement of another server's `value` for the option `name`."""
    return _VALUES.get((name, value))


def is_fixed(flag: str, value: Any) -> bool:
    """Whether `flag` is a fixed option; raises ConfigError if it does not accept `value`."""
    entry = FIXED_BY_FLAG.get(flag)
    if entry is not None:
        entry.check(flag, value)
    return entry is not None
