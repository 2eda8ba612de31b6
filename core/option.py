"""How an option is declared, and what a number in it may be.

Owns the declaration alone: the options themselves are in `core.config`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """What a number may be: `low` (left out where `is_open`) to `high`, or powers of two only."""

    low: float
    high: float = float("inf")
    is_open: bool = False
    is_power_of_two: bool = False

    def __contains__(self, value: float) -> bool:
        if self.is_power_of_two and (int(value) != value or int(value).bit_count() != 1):
            return False
        return (self.low < value if self.is_open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        kind = "a power of two " if self.is_power_of_two else ""
        lower = f"above {self.low:g}" if self.is_open else f"at least {self.low:g}"
        return kind + lower + (f" and at most {self.high:g}" if self.high != float("inf") else "")


COUNT = Range(low=1)
BOUND = Range(low=0)
SHARE = Range(low=0, high=1, is_open=True)
DURATION = Range(low=0, is_open=True)


def option(
    default: Any,
    description: str,
    *,
    flags: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    devices: str = "cpu,gpu",
    within: Range | None = None,
) -> Any:
    """Declare one option: `flags` are other spellings of `--field-name` (aliases of peers)."""
    metadata = {
        "description": description,
        "flags": flags,
        "choices": choices,
        "devices": devices,
        "within": within,
    }
    if isinstance(default, list | dict):
        raise TypeError("use a tuple or None as default")
    return dataclasses.field(default=default, metadata=metadata)
