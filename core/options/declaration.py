"""How an option is declared, what a number in it may be, and which models read it.

Owns the declaration alone: the options themselves are in `core.options.config`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from typing import Any, ParamSpec

ENVIRONMENT_PREFIX = "TRIPTYCH_"
DECLARED = "option"
"""Where a field's metadata has its `Option`."""

Details = ParamSpec("Details")

Role = str
"""What a model is for, by its modality: `chat`, `vision`, ... Options name their readers by it."""

ROLES: tuple[Role, ...] = ("chat", "vision", "embedding", "speech", "asr", "image")
"""Those that read any option. One for vision is one for chat that takes images, too."""
TEXT: tuple[Role, ...] = ("chat", "vision", "embedding")
"""Models of text; those that embed may be decoders, too."""
ANSWERS: tuple[Role, ...] = ("chat", "vision", "speech")
"""Models that draw token after token."""
TOKENS: tuple[Role, ...] = ("chat", "vision", "embedding", "speech")
"""Models of tokens over a paged cache."""


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


@dataclass(frozen=True, slots=True)
class Option:
    """One declared option. `type` is str, int, float, bool, or a tuple of str, int or float.

    A switch that is `None` by default (`bool | None`) is set by what runs, unless it is given.

    Models of `roles` alone read it; with none: those of its section's `ROLES`, or else all do, or
    none (the server itself reads it). One that `is_for_server` says how requests come in, and means
    nothing to a model in this process.
    """

    default: Any
    description: str
    _: KW_ONLY
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    devices: str = "cpu,gpu"
    within: Range | None = None
    roles: tuple[Role, ...] = ()
    is_for_server: bool = False
    name: str = ""
    section: str = ""
    type: Any = None

    @property
    def flag(self) -> str:
        """The flag's own spelling, `--kv-cache-page-size`."""
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """Every spelling, its own first."""
        return (self.flag, *self.aliases)

    @property
    def variable(self) -> str:
        """The environment variable, `TRIPTYCH_KV_CACHE_PAGE_SIZE`."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def readers(self) -> str:
        """What it is for, in words: `chat and vision models`."""
        *firsts, last = self.roles or ("all",)
        return " and ".join(filter(None, (", ".join(firsts), last))) + " models"

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off, as `--x` and `--no-x`."""
        return self.type in (bool, bool | None)

    @property
    def is_repeatable(self) -> bool:
        """Whether the flag may be given several times."""
        return bool(self.type == tuple[str, ...])

    @property
    def is_numbers(self) -> bool:
        """Whether it is a list of numbers, as `1,2,4`."""
        return self.type in (tuple[int, ...], tuple[float, ...])

    def is_for(self, roles: Collection[Role]) -> bool:
        """Whether a model of one of `roles`, or what is around any model, reads it."""
        return not self.roles or not set(self.roles).isdisjoint(roles)


def _as_field(make: Callable[Details, Option]) -> Callable[Details, Any]:
    def declare(*args: Details.args, **kwargs: Details.kwargs) -> Any:
        declared = make(*args, **kwargs)
        if isinstance(declared.default, list | dict):
            raise TypeError("use a tuple or None as default")
        return dataclasses.field(default=declared.default, metadata={DECLARED: declared})

    return declare


option = _as_field(Option)
"""Declares a field of a section as an option. Name, section and type are the field's own."""
