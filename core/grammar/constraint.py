"""Constraints that a caller may set on an answer.

Owns the forms (a JSON schema, a regular expression, a list of strings, a grammar in Lark's or
GBNF's syntax) and their size limit. `core.grammar.source` translates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from triptych.core.errors import PayloadTooLarge
from triptych.core.limits import MAX_GRAMMAR_BYTES

ConstraintKind = Literal["json_schema", "regex", "choice", "grammar"]

ANY_OBJECT: Final = '{"type":"object"}'


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on an answer. `param` is its request field, which errors name.

    `text` is a JSON schema, a regular expression, a JSON list of strings, or a grammar. If it
    covers only a part of the answer, `around` is a Lark grammar of the whole, where `@form` stands
    for that part. There, or in a grammar without `around`, `%json @0` is the first of `schemas`.
    """

    kind: ConstraintKind
    text: str
    param: str
    around: str = ""
    schemas: Sequence[str] = ()

    @property
    def parts(self) -> Sequence[str]:
        """All texts of the constraint."""
        return (self.text, self.around, *self.schemas)

    def check_size(self) -> None:
        """Raise `PayloadTooLarge` above the size limit, before anything is parsed."""
        num_chars = sum(map(len, self.parts))
        num_bytes = num_chars if num_chars > MAX_GRAMMAR_BYTES else _num_bytes(self.parts)
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise PayloadTooLarge(
                f"{self.param} takes at most {MAX_GRAMMAR_BYTES} bytes.", param=self.param
            )


def _num_bytes(texts: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in texts)
