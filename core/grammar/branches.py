"""Proving that JSON schemas are disjoint: no value satisfies two of them.

Owns the proof, which follows references within the document. Without a proof they may overlap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Final

from triptych.core.grammar.document import SchemaDocument

_MAX_DEPTH: Final = 8
_TYPES: Final = frozenset({"array", "boolean", "null", "number", "object", "string"})
_NAMES: Final[Mapping[type, str]] = {
    bool: "boolean",
    dict: "object",
    float: "number",
    int: "number",
    list: "array",
    str: "string",
    type(None): "null",
}
_RANGES: Final[Sequence[tuple[str, tuple[str, str, str, str]]]] = (
    ("number", ("maximum", "minimum", "exclusiveMaximum", "exclusiveMinimum")),
    ("string", ("maxLength", "minLength", "", "")),
    ("array", ("maxItems", "minItems", "", "")),
)
"""Keywords for the ends of ranges: maximum, minimum, and their exclusive forms."""


def are_all_disjoint(document: SchemaDocument, branches: Sequence[Any]) -> bool:
    """Whether no value can satisfy two of these schemas; `False` also if unknown."""
    targets = [document.target(branch) for branch in branches]
    return _are_tagged(document, targets) or all(
        are_disjoint(document, one, other) for one, other in combinations(targets, 2)
    )


def _are_tagged(document: SchemaDocument, branches: Sequence[Any]) -> bool:
    """Whether all are objects that require a property whose values differ between them."""
    objects = [each for each in branches if isinstance(each, dict) and _types(each) == {"object"}]
    if len(objects) < len(branches) or not objects:
        return False
    for name in set.intersection(*(set(each.get("required", ())) for each in objects)):
        tags = [document.target(each.get("properties", {}).get(name)) for each in objects]
        listed = [_values(tag) if isinstance(tag, dict) else None for tag in tags]
        values = [value for each in listed if each is not None for value in each]
        if None not in listed and len(set(values)) == len(values):
            return True
    return False


def are_disjoint(document: SchemaDocument, one: Any, other: Any, depth: int = 0) -> bool:
    """Whether no value can satisfy both schemas; `False` also if unknown."""
    one, other = document.target(one), document.target(other)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or depth > _MAX_DEPTH:
        return False
    values, others = _values(one), _values(other)
    is_listed = values is not None and others is not None
    types = _types(one) & _types(other)
    return (
        not types
        or (is_listed and not (values or set()) & (others or set()))
        or any(types == {kind} and _are_apart(one, other, *words) for kind, words in _RANGES)
        or (types == {"object"} and _differ(document, one, other, depth))
        or _has_disjoint_parts(document, one, other, depth + 1)
        or _has_disjoint_parts(document, other, one, depth + 1)
    )


def _has_disjoint_parts(
    document: SchemaDocument, schema: Mapping[str, Any], other: Any, depth: int
) -> bool:
    """Whether a combination within `schema` is disjoint from `other`."""
    choices = [schema[word] for word in ("anyOf", "oneOf") if isinstance(schema.get(word), list)]
    return any(
        all(are_disjoint(document, branch, other, depth) for branch in branches)
        for branches in choices
    ) or any(are_disjoint(document, part, other, depth) for part in schema.get("allOf", ()))


def _differ(
    document: SchemaDocument, one: Mapping[str, Any], other: Mapping[str, Any], depth: int
) -> bool:
    """Whether a property that both require has disjoint schemas."""
    required = set(one.get("required", ())) & set(other.get("required", ()))
    return any(
        are_disjoint(document, one["properties"][name], other["properties"][name], depth + 1)
        for name in required & set(one.get("properties", {})) & set(other.get("properties", {}))
    )


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    """The values that a schema lists, as JSON texts."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return {_key(value) for value in listed} if isinstance(listed, list) else None


def _key(value: Any) -> str:
    is_whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if is_whole else value, sort_keys=True)


def _types(schema: Mapping[str, Any]) -> set[str]:
    named = schema.get("type")
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list):
        return {_NAMES[type(value)] for value in listed}
    if named is None:
        return set(_TYPES)
    names = {named} if isinstance(named, str) else set(named)
    return {"number" if name == "integer" else name for name in names}


def _are_apart(one: Mapping[str, Any], other: Mapping[str, Any], *words: str) -> bool:
    """Whether one range lies entirely below the other."""
    for low, high in ((one, other), (other, one)):
        most, is_open = _end(low, words[0], words[2], math.inf)
        least, is_also_open = _end(high, words[1], words[3], -math.inf)
        if most < least or (most == least and (is_open or is_also_open)):
            return True
    return False


def _end(
    schema: Mapping[str, Any], closed: str, opened: str, without: float
) -> tuple[int | float, bool]:
    """The end of a range, and whether it is exclusive."""
    bound, excluded = schema.get(closed, without), schema.get(opened, without)
    is_nearer = excluded <= bound if without > 0 else excluded >= bound
    return (excluded, opened in schema) if is_nearer else (bound, False)
