"""Translating callers' JSON schemas for the grammar library.

Owns the keywords whose meaning in the standard differs from the library's: numbers beyond its
range, keywords without effect, formats, `oneOf` and additional properties. Knows no grammars.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote, unquote

from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.grammar.branches import are_all_disjoint
from triptych.core.grammar.document import SchemaDocument, escaped
from triptych.core.grammar.formats import ENFORCED
from triptych.core.grammar.patterns import FORMATS, looks_around, other_names, portable_pattern

_ANNOTATIONS: Final = frozenset(
    {"$comment", "default", "description", "deprecated", "examples", "example", "readOnly"}
    | {"title", "writeOnly", "contentEncoding", "contentMediaType", "contentSchema"}
)
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE: Final = ("additionalProperties", "items")
_NAMED: Final = ("properties", "patternProperties")
_DEFINITIONS: Final = ("$defs", "definitions")
_COMBINING: Final = ("$ref", "allOf", "anyOf", "oneOf")
_OPENING: Final = frozenset({"additionalProperties", "minProperties", "patternProperties"})
_REST: Final = frozenset({"additionalProperties"})
_COUNTS: Final = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
    | {"minContains", "maxContains"}
)
_UNENFORCED: Final = (
    *("$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "contains"),
    *("dependencies", "dependentRequired", "dependentSchemas", "if", "then", "else"),
    *("not", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
)
_NEUTRAL_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "not": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
_INTEGER_END: Final = 2**63
"""The exclusive upper bound of the library's integers."""
_MAX_DOUBLE: Final = 9223372036854774784
"""The largest number below `_INTEGER_END` that a double holds."""
_MAX_HOSTNAME: Final = 253
_DIALECTS: Final = re.compile(r"https?://json-schema\.org/(?:draft[-/][0-9-]+/)?schema#?")


def plain_schema(root: Mapping[str, Any]) -> dict[str, Any]:
    """Translate `root`, and exclude properties that it allows but does not name.

    Unnamed properties would validate, but a small model never stops adding them. Where schemas are
    combined, the names of all of them are allowed. Raises `UnsupportedOption`, with the place, for
    keywords that cannot be enforced, and `InvalidRequest` for malformed schemas.
    """
    dialect = root.get("$schema")
    if isinstance(dialect, str) and not _DIALECTS.fullmatch(dialect):
        raise UnsupportedOption(
            f"$schema at #/$schema is {dialect[:80]}, which is not a draft of json-schema.org:"
            " omit it."
        )
    try:
        found = _SchemaWriter(root).schema(root, "#", is_part=False)
    except RecursionError as error:
        raise InvalidRequest("The JSON schema is nested too deeply.") from error
    return found if isinstance(found, dict) else {"enum": []}


class _SchemaWriter:
    """Translates one document. A schema that `is_part` of a combination is not closed."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._document = SchemaDocument(root)
        self._refs = frozenset(_refs(root))

    def schema(self, node: Any, at: str, *, is_part: bool, above: tuple[str, ...] = ()) -> Any:
        """Translate the schema at `at`. `above` are the references followed for the same value."""
        if not isinstance(node, dict):
            return node
        self._document.visit()
        kept = {word: value for word, value in node.items() if word not in _ANNOTATIONS}
        if kept.get("not") in (True, {}) and "not" in kept:
            return False
        if isinstance(kept.get("items"), list):  # drafts before 2020-12
            kept["prefixItems"] = kept.pop("items")
            kept["items"] = kept.pop("additionalItems", True)
        self._drop_neutral(kept)
        _write_counts(kept, at)
        _write_names(kept)
        _refuse(kept, at)
        _write_literals(kept, at)
        _write_bounds(kept, at)
        _write_texts(kept, at)
        self._write_reference(kept, at)
        self._check_one_of(kept, at)
        is_whole = not is_part and _combines(kept)
        names = self._names(kept, ()) if is_whole else None
        self._write_parts(kept, at, is_part=is_part or is_whole, above=above)
        _write_one_of(kept)
        self._inline(kept, is_part=is_part or is_whole, above=above)
        if names:
            own = kept.get("properties", {})
            kept["properties"] = {name: own.get(name, {}) for name in names}
            kept["additionalProperties"] = False
        elif not is_whole and not is_part:
            if _is_closable(kept):
                kept["additionalProperties"] = False
            _write_other_names(kept)
        return kept

    def _drop_neutral(self, kept: dict[str, Any]) -> None:
        for word, values in _NEUTRAL_VALUES.items():
            if word in kept and any(
                type(kept[word]) is type(value) and kept[word] == value for value in values
            ):
                del kept[word]
        most = kept.get("maxItems")
        if kept.get("uniqueItems") is True and isinstance(most, int | float) and most <= 1:
            del kept["uniqueItems"]
        if kept.get("minContains") == 0 and "maxContains" not in kept:
            kept.pop("contains", None)
        if "contains" not in kept:
            kept.pop("minContains", None)
            kept.pop("maxContains", None)
        if "if" not in kept or not {"then", "else"} & kept.keys():
            for word in ("if", "then", "else"):
                kept.pop(word, None)

    def _write_reference(self, kept: dict[str, Any], at: str) -> None:
        reference = kept.get("$ref")
        if isinstance(reference, str):
            self._document.check_reference(reference, f"{at}/$ref")
            kept["$ref"] = quote(unquote(reference), safe="/#~!$&'()*+,;=:@?")

    def _check_one_of(self, kept: dict[str, Any], at: str) -> None:
        branches = kept.get("oneOf")
        if not isinstance(branches, list) or not branches:
            return
        tag = kept.pop("discriminator", None)
        if isinstance(tag, dict) and isinstance(name := tag.get("propertyName"), str):
            branches = self._require_tag(branches, name)
        if not are_all_disjoint(self._document, branches):
            raise UnsupportedOption(
                f"oneOf at {at}/oneOf cannot be enforced, since an answer may be of two of its"
                " branches: use anyOf."
            )
        kept["oneOf"] = branches

    def _require_tag(self, branches: Sequence[Any], name: str) -> list[Any]:
        """Branches that all require the property `name`, the discriminator."""
        found = []
        for branch in branches:
            target = self._document.target(branch)
            if not isinstance(target, dict) or name not in target.get("properties", {}):
                return list(branches)
            required = target.get("required", [])
            is_named = name in required
            found.append(branch if is_named else {**target, "required": [*required, name]})
        return found

    def _inline(self, kept: dict[str, Any], *, is_part: bool, above: tuple[str, ...]) -> None:
        """Replace a part's reference by its target, which elsewhere may be a closed schema."""
        reference = kept.get("$ref")
        if not is_part or not isinstance(reference, str) or reference in above:
            return
        target = self._document.target({"$ref": reference})
        if isinstance(target, dict):
            del kept["$ref"]
            part = self.schema(target, reference, is_part=True, above=(*above, reference))
            kept["allOf"] = [*kept.get("allOf", []), part]

    def _write_parts(
        self, kept: dict[str, Any], at: str, *, is_part: bool, above: tuple[str, ...]
    ) -> None:
        for word in _LISTS:
            if isinstance(kept.get(word), list):
                combines = word != "prefixItems"
                kept[word] = [
                    self.schema(
                        part,
                        f"{at}/{word}/{index}",
                        is_part=is_part and combines,
                        above=above if combines else (),
                    )
                    for index, part in enumerate(kept[word])
                ]
        for word in _SINGLE:
            if word in kept:
                kept[word] = self.schema(kept[word], f"{at}/{word}", is_part=False)
        for word in (*_NAMED, *_DEFINITIONS):
            if isinstance(kept.get(word), dict):
                kept[word] = {
                    name: self.schema(part, f"{at}/{word}/{escaped(name)}", is_part=False)
                    for name, part in kept[word].items()
                    if word not in _DEFINITIONS or self._is_used(f"{at}/{word}/{escaped(name)}")
                }

    def _is_used(self, at: str) -> bool:
        return any(not each.startswith("#/") or each.startswith(at) for each in self._refs)

    def _names(self, node: Any, above: tuple[str, ...]) -> list[str] | None:
        """The properties that a combination names; `None` if a part of it allows others."""
        if not isinstance(node, dict):
            return []
        self._document.visit()
        names: list[str] = []
        reference = node.get("$ref")
        if isinstance(reference, str):
            target = self._document.target({"$ref": reference})
            is_known = reference not in above and isinstance(target, dict)
            named = self._names(target, (*above, reference)) if is_known else None
            if named is None:
                return None
            names += named
        is_any = node.get("type") == "object" and not {"properties", *_COMBINING} & node.keys()
        if is_any or not _OPENING.isdisjoint(node):
            return None
        for word, parts in node.items():
            if word == "properties":
                names += parts
            elif word in ("allOf", "anyOf", "oneOf"):
                found = [self._names(part, above) for part in parts]
                if None in found:
                    return None
                names += [name for each in found for name in each or ()]
        is_closable = all(name in names for name in node.get("required", ()))
        return list(dict.fromkeys(names)) if is_closable else None


def _combines(node: Mapping[str, Any]) -> bool:
    """Whether a value must satisfy several schemas at once."""
    words = [word for word in _COMBINING if word in node]
    return (
        "allOf" in words
        or len(words) > 1
        or (bool(words) and "properties" in node)
        or (bool(words) and "required" in node)
    )


def _is_closable(node: Mapping[str, Any]) -> bool:
    named, required = node.get("properties"), node.get("required", [])
    is_plain = isinstance(named, dict) and isinstance(required, list)
    opens = _OPENING | frozenset(_COMBINING)
    return is_plain and opens.isdisjoint(node) and set(required) <= set(named or ())


def _refs(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for word, part in node.items():
            if word == "$ref" and isinstance(part, str):
                yield unquote(part)
            yield from _refs(part)
    elif isinstance(node, list):
        for part in node:
            yield from _refs(part)


def _refuse(kept: Mapping[str, Any], at: str) -> None:
    if words := [word for word in _UNENFORCED if word in kept]:
        raise UnsupportedOption(
            f"This keyword of JSON schemas cannot be enforced: {', '.join(words)} at {at}."
        )


def _write_counts(kept: dict[str, Any], at: str) -> None:
    for word in _COUNTS & kept.keys():
        if isinstance(kept[word], float) and kept[word].is_integer():
            kept[word] = int(kept[word])
        if not isinstance(kept[word], int) or kept[word] < _INTEGER_END:
            continue
        if word.startswith("min"):
            raise UnsupportedOption(f"{word} at {at}/{word} is too large to be enforced.")
        del kept[word]  # no answer is that long


def _write_names(kept: dict[str, Any]) -> None:
    """Replace `propertyNames` by properties or a pattern of properties, if equivalent."""
    names = kept.get("propertyNames")
    if not isinstance(names, dict) or not names.keys() <= {"type", "enum", "pattern"}:
        return
    if names.get("type", "string") != "string" or "patternProperties" in kept:
        return
    rest = kept.get("additionalProperties", {})
    own, required = kept.get("properties", {}), kept.get("required", [])
    if "enum" in names and "pattern" not in names:
        listed = [name for name in names["enum"] if isinstance(name, str)]
        kept["properties"] = {name: own.get(name, rest) for name in listed}
        kept["properties"] |= {name: False for name in required if name not in listed}
    elif "pattern" in names and "enum" not in names and not own and not required:
        kept["patternProperties"] = {names["pattern"]: rest}
    else:
        return
    kept["additionalProperties"] = False
    del kept["propertyNames"]


def _write_other_names(kept: dict[str, Any]) -> None:
    """Replace additional properties by a pattern that excludes the named ones.

    The library lets names be written with escapes, which it does not compare.
    """
    rest, own = kept.get("additionalProperties", False), kept.get("properties")
    if rest is False or not isinstance(own, dict) or _OPENING & kept.keys() != _REST:
        return
    if own and (pattern := other_names(own)) is not None:
        kept["patternProperties"] = {pattern: rest}
        kept["additionalProperties"] = False


def _write_literals(kept: Mapping[str, Any], at: str) -> None:
    """Raise `UnsupportedOption` for literals that the library would round."""
    for word in ("const", "enum"):
        if word in kept and (number := next(_inexact(kept[word]), None)) is not None:
            raise UnsupportedOption(
                f"{word} at {at}/{word} holds {str(number)[:40]}, which is not exact as a double"
                " and would be rounded: use a text."
            )


def _inexact(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _inexact(part)
    elif isinstance(value, int | float) and (
        abs(value) >= _INTEGER_END or (isinstance(value, int) and int(float(value)) != value)
    ):
        yield value


def _write_one_of(kept: dict[str, Any]) -> None:
    """Replace `oneOf`, whose branches are disjoint here, by `anyOf`."""
    if branches := kept.pop("oneOf", None):
        if "anyOf" in kept:
            kept["allOf"] = [*kept.get("allOf", []), {"anyOf": branches}]
        else:
            kept["anyOf"] = branches


def _write_bounds(kept: dict[str, Any], at: str) -> None:
    """Clip bounds to the library's range, which only narrows the schema.

    For types other than integer the library rounds bounds to doubles.
    """
    is_integer = kept.get("type") == "integer"
    most, farthest = (_INTEGER_END, _MAX_DOUBLE) if is_integer else (2**53, 2**53 - 1)
    for word, sign in (
        ("minimum", -1),
        ("exclusiveMinimum", -1),
        ("maximum", 1),
        ("exclusiveMaximum", 1),
    ):
        bound = kept.get(word)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            continue
        if sign * bound >= most - 1:
            is_last = bound == most - 1 and is_integer and word == "maximum"
            kept[word] = bound if is_last else sign * farthest
        elif abs(bound) < most:
            kept[word] = _round_inward(bound, -sign * math.inf)
        if abs(kept[word]) >= most:
            raise UnsupportedOption(
                f"{word} at {at}/{word} is {str(bound)[:40]}, which cannot be enforced: answers lie"
                f" between -2^{most.bit_length() - 1} and 2^{most.bit_length() - 1}."
            )


def _round_inward(bound: int | float, inward: float) -> int | float:
    """The bound if exact as a double, otherwise the next double inward."""
    held = float(bound)
    if held == bound:
        return bound
    is_outward = held < bound if inward > 0 else held > bound
    return int(math.nextafter(held, inward)) if is_outward else int(held)


def _write_texts(kept: dict[str, Any], at: str) -> None:
    """Drop unknown formats, which are annotations; replace some known formats by exact patterns."""
    name, pattern = kept.get("format"), kept.get("pattern")
    if isinstance(pattern, str):
        if name in ("duration", "hostname") and looks_around(pattern):
            del kept["pattern"]  # written by zod; equivalent to the format
        else:
            kept["pattern"] = portable_pattern(pattern, f"{at}/pattern")
    if isinstance(kept.get("patternProperties"), dict):
        kept["patternProperties"] = {
            portable_pattern(each, f"{at}/patternProperties"): part
            for each, part in kept["patternProperties"].items()
        }
    if not isinstance(name, str):
        return
    if name == "hostname":
        kept["maxLength"] = min(kept.get("maxLength", _MAX_HOSTNAME), _MAX_HOSTNAME)
    if name not in ENFORCED:
        del kept["format"]
    elif name in FORMATS:
        del kept["format"]
        if "pattern" in kept:
            kept["allOf"] = [*kept.get("allOf", []), {"pattern": FORMATS[name]}]
        else:
            kept["pattern"] = FORMATS[name]
