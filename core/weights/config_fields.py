"""The fields of a `config.json` that a configuration class of transformers reads.

Owns finding them: those that the class declares, and older ones that its own code takes as
arguments. The rest of a file never reaches the class. Needs no torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Self

_ARGUMENT = re.compile(r'kwargs\.(?:pop|get)\("(\w+)"')
_PREFIX = re.compile(r'kwargs\.(?:pop|get)\(f"(\w+)\{')


@dataclass(frozen=True, slots=True)
class KnownFields:
    """The `names` of fields, and the `prefixes` of others."""

    names: frozenset[str]
    prefixes: tuple[str, ...] = ()

    @classmethod
    def of(cls, kind: Any) -> Self:
        """The fields of a configuration class."""
        own = takewhile(lambda each: each.__name__ != "PreTrainedConfig", kind.__mro__)
        made = [each.__post_init__ for each in own if "__post_init__" in vars(each)]
        code = "".join(map(inspect.getsource, made))
        other_names = kind.attribute_map
        declared = {*kind.__dataclass_fields__, *other_names, *other_names.values()}
        names = frozenset(declared | set(_ARGUMENT.findall(code)))
        return cls(names, tuple(_PREFIX.findall(code)))

    def __or__(self, other: KnownFields) -> KnownFields:
        return KnownFields(self.names | other.names, self.prefixes + other.prefixes)

    def of_file(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a file that are known."""
        return {name: value for name, value in fields.items() if self._knows(name)}

    def _knows(self, name: str) -> bool:
        return name[:1] != "_" and (name in self.names or name.startswith(self.prefixes))


LEGACY = KnownFields(
    frozenset(
        (
            *("rope_theta", "rope_scaling", "partial_rotary_factor"),
            *("original_max_position_embeddings", "per_layer_config"),
        )
    )
)
"""Fields that the common class of all language models takes."""
