"""The declaration of an option: type, range, and the kinds of models that read it.

Knows no options: those are in `core.options.config`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from typing import Any, ParamSpec

ENVIRONMENT_PREFIX = "TRIPTYCH_"
DECLARED = "option"
"""Key of a field's `Option` in its metadata."""

Details = ParamSpec("Details")

Role = str
"""The kind of a model, by its modality: `chat`, `vision`, ... Options name their readers by it."""

ROLES: tuple[Role, ...] = ("chat", "vision", "embedding", "speech", "asr", "image")
"""All kinds of models. A vision model is a chat model that also takes images."""
TEXT: tuple[Role, ...] = ("chat", "vision", "embedding")
"""Text models; embedding models may also be decoders."""
GENERATIVE: tuple[Role, ...] = ("chat", "vision", "speech")
"""Models that sample one token after another."""
TOKENS: tuple[Role, ...] = ("chat", "vision", "embedding", "speech")
"""Token models with a paged cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Valid numbers: `low` (excluded if `is_open`) to `high`, or only powers of two among them."""

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

    A switch with the default `None` (`bool | None`) is chosen by the engine unless the user sets
    it.

    Only models of `roles` read it. Without `roles`, those of its section's `ROLES` read it; without
    these, all models or the server. An option that `is_for_server` configures how requests arrive
    and has no meaning for a model in this process. Short help lists those that are `is_common`.
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
    is_common: bool = False
    name: str = ""
    section: str = ""
    type: Any = None

    @property
    def flag(self) -> str:
        """The main spelling, `--kv-cache-page-size`."""
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """All spellings, the main one first."""
        return (self.flag, *self.aliases)

    @property
    def variable(self) -> str:
        """The environment variable, `TRIPTYCH_KV_CACHE_PAGE_SIZE`."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def readers(self) -> str:
        """The models that read it, in words: `chat and vision models`."""
        *firsts, last = self.roles or ("all",)
        return " and ".join(filter(None, (", ".join(firsts), last))) + " models"

    @property
    def is_switch(self) -> bool:
        """Whether it is a boolean, `--x` or `--no-x`."""
        return self.type in (bool, bool | None)

    @property
    def is_repeatable(self) -> bool:
        """Whether the flag may be given several times."""
        return bool(self.type == tuple[str, ...])

    @property
    def is_numbers(self) -> bool:
        """Whether it is a list of numbers such as `1,2,4`."""
        return self.type in (tuple[int, ...], tuple[float, ...])

    def is_for(self, roles: Collection[Role]) -> bool:
        """Whether a model of one of `roles`, or the server, reads it."""
        return not self.roles or not set(self.roles).isdisjoint(roles)


def _as_field(make: Callable[Details, Option]) -> Callable[Details, Any]:
    def declare(*args: Details.args, **kwargs: Details.kwargs) -> Any:
        declared = make(*args, **kwargs)
        if isinstance(declared.default, list | dict):
            raise TypeError("use a tuple or None as default")
        return dataclasses.field(default=declared.default, metadata={DECLARED: declared})

    return declare


option = _as_field(Option)
"""Declares a field of a section as an option. Name, section and type come from the field."""
