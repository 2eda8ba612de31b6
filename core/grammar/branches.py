"""Whether a value can satisfy two schemas at once.

Owns the proof that it cannot, through references of the same document. Where none is found, it may.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
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


def are_disjoint(document: SchemaDocument, one: Any, other: Any, depth: int = 0) -> bool:
    """Whether no value can satisfy both schemas; `False` also where that is not known."""
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
        or (types == {"number"} and (_are_apart(one, other) or _are_apart(other, one)))
        or (types == {"object"} and _differ(document, one, other, depth))
        or _has_disjoint_parts(document, one, other, depth + 1)
        or _has_disjoint_parts(document, other, one, depth + 1)
    )


def _has_disjoint_parts(
    document: SchemaDocument, schema: Mapping[str, Any], other: Any, depth: int
) -> bool:
    """Whether a combination within `schema` leaves nothing that `other` allows."""
    choices = [schema[word] for word in ("anyOf", "oneOf") if isinstance(schema.get(word), list)]
    return any(
        all(are_disjoint(document, branch, other, depth) for branch in branches)
        for branches in choices
    ) or any(are_disjoint(document, part, other, depth) for part in schema.get("allOf", ()))


def _differ(
    document: SchemaDocument, one: Mapping[str, Any], other: Mapping[str, Any], depth: int
) -> bool:
    """Whether a property that both require has no value for both."""
    required = set(one.get("required", ())) & set(other.get("required", ()))
    return any(
        are_disjoint(document, one["properties"][name], other["properties"][name], depth + 1)
        for name in required & set(one.get("properties", {})) & set(other.get("properties", {}))
    )


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    """The values that a schema lists, as texts."""
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


def _are_apart(low: Mapping[str, Any], high: Mapping[str, Any]) -> bool:
    """Whether all numbers of `low` are below those of `high`."""
    most, is_open = _end(low, "maximum", "exclusiveMaximum", math.inf)
    least, is_also_open = _end(high, "minimum", "exclusiveMinimum", -math.inf)
    return most < least or (most == least and (is_open or is_also_open))


def _end(
    schema: Mapping[str, Any], closed: str, opened: str, without: float
) -> tuple[int | float, bool]:
    """The end of a range, and whether it is left out of it."""
    bound, excluded = schema.get(closed, without), schema.get(opened, without)
    is_nearer = excluded <= bound if without > 0 else excluded >= bound
    return (excluded, opened in schema) if is_nearer else (bound, False)
