"""JSON schemas in the words that the grammar library can enforce.

Owns the rewriting: what says nothing is dropped, combined objects are merged, bounds and formats
are narrowed to what can be kept exactly. Every answer to the result is one to the schema. What has
no such result is refused by its place. Compiles nothing.

Keywords are those of JSON Schema, draft 2020-12.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any, Final
from urllib.parse import unquote

from triptych.core.errors import UnsupportedOption

Node = dict[str, Any]

_FORMATS: Final = frozenset(
    {
        *("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6"),
        *("uri", "uuid", "unknown"),
    }
)
_ANNOTATIONS: Final = frozenset(
    {
        *("$comment", "default", "deprecated", "description", "examples", "readOnly", "title"),
        *("contentEncoding", "contentMediaType", "writeOnly"),
    }
)
_EMPTY: Final[Mapping[str, tuple[Any, ...]]] = {
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "minContains": (0,),
    "not": (False,),
    "propertyNames": ({}, True, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
"""Values with which a keyword says nothing."""
_NEEDED: Final[Mapping[str, str]] = {
    "then": "if",
    "else": "if",
    "minContains": "contains",
    "maxContains": "contains",
}
"""Keywords that say nothing without another one."""
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS: Final = tuple(
    f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Properties")
)
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTED: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE: Final = ("items", "additionalProperties", "not", "contains", "propertyNames")
_MERGED: Final = frozenset({"type", "properties", "required", "anyOf", "oneOf"})
"""Keywords of objects that can be merged with each other."""
_SHARED: Final = frozenset({"$defs", "$schema", "definitions"})
"""Keywords of a whole schema, to which its parts refer."""
_MAX_NODES: Final = 20_000
"""Beyond so many, references are not looked into any more: a few can stand for millions."""
_MAX_REFERENCES: Final = 16
_MAX_INTEGER: Final = 2**63 - 1024
"""The greatest that the library takes and a double holds."""
_MAX_EXACT: Final = 2**53
_MAX_NUMBER: Final = 2**53 - 1
_LOOK_AROUND: Final = re.compile(r"\(\?(?:[=!]|<[=!])")
_LEAP: Final = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR: Final = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DATE: Final = (
    f"(?:{_LEAP}-02-29|{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])))"
)
_CALENDAR: Final = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}[Tt]"}
_MAX_HOSTNAME_CHARS: Final = 253


def rewritten(schema: Node) -> Node:
    """`schema` in words that can be enforced. Raises `UnsupportedOption` for what has none."""
    result: Node = _Rewriting(schema).node(schema, "#")
    return result


class _Rewriting:
    """One schema, whose references may be looked up."""

    def __init__(self, root: Node) -> None:
        self._root = root
        self._num_nodes = 0
        self._expanding: set[str] = set()

    def node(self, node: Any, place: str) -> Any:
        """A schema, with all that is in it."""
        if not isinstance(node, dict):
            return node
        self._num_nodes += 1
        node = {word: value for word, value in node.items() if word not in _ANNOTATIONS}
        node = _without_empty(node)
        if node.get("not") in ({}, True):
            return False
        node = self._parts(_named_by_rule(node), place)
        node = self._merged(node)
        for change in (_exact_literals, _narrow_bounds, _known_format, _whole_counts):
            node = change(node, place)
        return self._disjoint(node)

    def _parts(self, node: Node, place: str) -> Node:
        node = dict(node)
        for word in _NAMED:
            if isinstance(node.get(word), dict):
                node[word] = {
                    name: self.node(part, f"{place}/{word}/{name}")
                    for name, part in node[word].items()
                }
        for word in _LISTED:
            if isinstance(node.get(word), list):
                node[word] = [
                    self.node(part, f"{place}/{word}/{at}") for at, part in enumerate(node[word])
                ]
        for word in _SINGLE:
            if word in node:
                node[word] = self.node(node[word], f"{place}/{word}")
        return node

    def _merged(self, node: Node) -> Node:
        """An object that is combined of several, as one; or as one for each of its branches."""
        parts = [*_parts_of(node, "allOf")]
        if "$ref" in node and not node.keys().isdisjoint({"properties", "required"}):
            parts.append({"$ref": node["$ref"]})
        own = {word: value for word, value in node.items() if word not in ("allOf", "$ref")}
        merged: Node | None = {"type": "object", **own} if parts else node
        for part in parts:
            merged = None if merged is None else _both(merged, self._expanded(part))
        return node if merged is None else self._branches_merged(merged)

    def _branches_merged(self, node: Node) -> Node:
        for word in ("anyOf", "oneOf"):
            branches = _parts_of(node, word)
            if not branches or "properties" not in node:
                continue
            shared = {name: node[name] for name in _SHARED & node.keys()}
            base = {name: part for name, part in node.items() if name not in {word, *_SHARED}}
            whole = [_both(base, self._expanded(branch)) for branch in branches]
            if None not in whole:
                node = {**shared, word: whole}
        return node

    def _expanded(self, node: Any) -> Any:
        """What a local reference stands for, rewritten; `None` within itself."""
        reference = _reference(node)
        if reference is None:
            return node
        if reference in self._expanding or self._num_nodes > _MAX_NODES:
            return None
        self._expanding.add(reference)
        found = self.node(_at(self._root, reference), reference)
        self._expanding.discard(reference)
        return found

    def _disjoint(self, node: Node) -> Node:
        """`oneOf` of branches that exclude each other is `anyOf`, which is easier to follow."""
        branches = _parts_of(node, "oneOf")
        if len(branches) < 2 or "anyOf" in node:
            return node
        tag = node.get("discriminator")
        if isinstance(tag, dict) and isinstance(tag.get("propertyName"), str):
            branches = [self._tagged(branch, tag["propertyName"]) for branch in branches]
        pairs = combinations([self._target(branch) for branch in branches], 2)
        if not all(_exclude(one, other, self._target) for one, other in pairs):
            return node
        other_words = {word: value for word, value in node.items() if word != "oneOf"}
        return {**other_words, "anyOf": branches}

    def _tagged(self, branch: Any, tag: str) -> Any:
        """A branch that has its tag: with a default it need not, and then is no other's either."""
        whole = self._expanded(branch)
        if not isinstance(whole, dict) or tag not in whole.get("properties", {}):
            return branch
        return {**whole, "required": list(dict.fromkeys([*whole.get("required", []), tag]))}

    def _target(self, node: Any) -> Any:
        """What a local reference stands for, as it is; anything else is itself."""
        for _ in range(_MAX_REFERENCES):
            reference = _reference(node)
            if reference is None:
                break
            node = _at(self._root, reference)
        return node


def _reference(node: Any) -> str | None:
    """The pointer of a schema that is a local reference and nothing else."""
    reference = node.get("$ref") if isinstance(node, dict) and len(node) == 1 else None
    return reference if isinstance(reference, str) and reference.startswith("#/") else None


def _at(root: Any, reference: str) -> Any:
    """The value of a JSON pointer (RFC 6901); `None` where there is none."""
    for part in reference[2:].split("/"):
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and key.isdecimal() and int(key) < len(root):
            root = root[int(key)]
        elif isinstance(root, dict) and key in root:
            root = root[key]
        else:
            return None
    return root


def _without_empty(node: Node) -> Node:
    """Without keywords that say nothing as they stand."""
    kept = {
        word: value
        for word, value in node.items()
        if not any(value == empty and type(value) is type(empty) for empty in _EMPTY.get(word, ()))
        and _NEEDED.get(word, word) in node
    }
    if (
        kept.get("contains") is not None
        and node.get("minContains") == 0
        and "maxContains" not in node
    ):
        del kept["contains"]
    most = node.get("maxItems")
    if kept.get("uniqueItems") is True and isinstance(most, int | float) and most <= 1:
        del kept["uniqueItems"]
    return kept


def _named_by_rule(node: Node) -> Node:
    """Names that a list or a pattern allows, as properties."""
    rule, values = node.get("propertyNames"), node.get("additionalProperties", True)
    if not isinstance(rule, dict) or {"properties", "patternProperties"} & node.keys():
        return node
    names = rule.get("enum")
    rest = {word: value for word, value in node.items() if word != "propertyNames"}
    closed = {**rest, "additionalProperties": False}
    if rule.keys() <= {"type", "enum"} and isinstance(names, list):
        return {**closed, "properties": {name: values for name in names if isinstance(name, str)}}
    if rule.keys() <= {"type", "pattern"} and isinstance(rule.get("pattern"), str):
        return {**closed, "patternProperties": {rule["pattern"]: values}}
    return node


def _parts_of(node: Node, word: str) -> list[Any]:
    value = node.get(word)
    return value if isinstance(value, list) else []


def _both(one: Any, other: Any) -> Node | None:
    """The object that is both of two; `None` where they have other keywords than objects'."""
    for each in (one, other):
        if not isinstance(each, dict) or not each.keys() <= _MERGED | _SHARED:
            return None
        if each.get("type", "object") != "object":
            return None
        if not {"type", "properties", "required", "anyOf", "oneOf"} & each.keys():
            return None
    if any(word in one and word in other for word in ("anyOf", "oneOf")):
        return None
    properties = dict(one.get("properties", {}))
    for name, part in other.get("properties", {}).items():
        is_new = name not in properties or properties[name] == part
        properties[name] = part if is_new else {"allOf": [properties[name], part]}
    required = [*one.get("required", []), *other.get("required", [])]
    merged = {**one, **other, "type": "object", "properties": properties}
    return {**merged, **({"required": list(dict.fromkeys(required))} if required else {})}


def _exclude(one: Any, other: Any, target: Callable[[Any], Any], depth: int = 4) -> bool:
    """Whether no value can be of both schemas, as far as this is easily seen."""
    one, other = target(one), target(other)
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one is False or other is False
    if not _types(one) & _types(other):
        return True
    if depth and _literals(one) is not None and _literals(other) is not None:
        return not any(_same(a, b) for a in _literals(one) or () for b in _literals(other) or ())
    if _types(one) | _types(other) <= {"integer", "number"} and _are_apart(one, other):
        return True
    if not depth or _types(one) | _types(other) != {"object"}:
        return False
    shared = set(one.get("required", ())) & set(other.get("required", ()))
    parts = (each.get("properties", {}) for each in (one, other))
    ours, theirs = parts
    return any(
        name in ours and name in theirs and _exclude(ours[name], theirs[name], target, depth - 1)
        for name in shared
    )


_ALL_TYPES: Final = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})


def _types(node: Node) -> frozenset[str]:
    """Which types of values a schema may have; an integer is a number, too."""
    literals = _literals(node)
    if literals is not None:
        return frozenset(name for value in literals for name in _types_of(value))
    given = node.get("type", _ALL_TYPES)
    types = frozenset([given] if isinstance(given, str) else given)
    return types | {"integer"} if "number" in types else types


def _types_of(value: Any) -> Iterator[str]:
    match value:
        case None:
            yield "null"
        case bool():
            yield "boolean"
        case int() | float():
            yield from ("integer", "number")
        case str():
            yield "string"
        case list():
            yield "array"
        case _:
            yield "object"


def _literals(node: Node) -> list[Any] | None:
    if "const" in node:
        return [node["const"]]
    values = node.get("enum")
    return values if isinstance(values, list) else None


def _same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: `1` and `true` are not."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _are_apart(one: Node, other: Node) -> bool:
    """Whether two ranges of numbers have none in common."""
    for low, high in ((one, other), (other, one)):
        for most, is_open in (("maximum", False), ("exclusiveMaximum", True)):
            for least, is_open_too in (("minimum", False), ("exclusiveMinimum", True)):
                if most in low and least in high:
                    end, start = low[most], high[least]
                    if end < start or (end == start and (is_open or is_open_too)):
                        return True
    return False


def _exact_literals(node: Node, place: str) -> Node:
    """Raises `UnsupportedOption` for a number that the library would round."""
    for word, values in (("const", [node.get("const")]), ("enum", node.get("enum"))):
        for number in _numbers(values):
            if abs(number) > _MAX_EXACT and not _is_exact(number):
                raise UnsupportedOption(
                    f"{word} at {place}: {number} has more digits than can be enforced: use a"
                    " string, or a pattern of one."
                )
    return node


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            yield from _numbers(entry)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def _is_exact(number: int) -> bool:
    try:
        return int(float(number)) == number
    except OverflowError:
        return False


def _narrow_bounds(node: Node, place: str) -> Node:
    """Bounds that the library rounds or does not take, moved inward to the next that it does."""
    node = dict(node)
    is_integer = node.get("type") == "integer"
    most = _MAX_INTEGER if is_integer else _MAX_NUMBER
    for word in _BOUNDS:
        bound = node.get(word)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            continue
        if abs(bound) <= _MAX_NUMBER:
            continue
        is_lower = "inimum" in word
        if abs(bound) > most and (bound > 0) == is_lower:
            raise UnsupportedOption(
                f"{word} at {place}: a bound of {bound} cannot be enforced: numbers are held to"
                f" {most} here."
            )
        del node[word]
        edge, side = _inward(word, bound, most), "minimum" if is_lower else "maximum"
        node[side] = (max if is_lower else min)(edge, node.get(side, edge))
    return node


def _inward(word: str, bound: float, most: int) -> int:
    """The bound that includes its own number, within `most` and exact as a double."""
    is_lower = "inimum" in word
    step = 1 if is_lower else -1
    number = math.ceil(bound) if is_lower else math.floor(bound)
    if word.startswith("exclusive") and number == bound:
        number += step
    number = max(-most, min(most, number))
    spacing = 1 << max(0, abs(number).bit_length() - 53)
    return -(-number // spacing) * spacing if is_lower else number // spacing * spacing


def _known_format(node: Node, place: str) -> Node:
    """Formats that are enforced; any other is an annotation, as the standard has it."""
    name, pattern = node.get("format"), node.get("pattern")
    if name is not None and name not in _FORMATS:
        node = {word: value for word, value in node.items() if word != "format"}
    if isinstance(pattern, str) and _LOOK_AROUND.search(pattern):
        if name not in ("duration", "hostname"):  # of which generators write such patterns
            raise UnsupportedOption(
                f"pattern at {place}: look-ahead and look-behind cannot be enforced: write a"
                " pattern without."
            )
        node = {word: value for word, value in node.items() if word != "pattern"}
    if name == "hostname":
        most = node.get("maxLength", _MAX_HOSTNAME_CHARS)
        node = {**node, "maxLength": min(most, _MAX_HOSTNAME_CHARS)}
    if name not in _CALENDAR:
        return node
    if "pattern" not in node:
        return {**node, "pattern": _CALENDAR[name]}
    return {**node, "allOf": [*_parts_of(node, "allOf"), {"pattern": _CALENDAR[name]}]}


def _whole_counts(node: Node, place: str) -> Node:
    """`2.0` is an integer in JSON Schema."""
    whole = {
        word: int(node[word])
        for word in _COUNTS
        if isinstance(node.get(word), float) and node[word].is_integer()
    }
    return {**node, **whole}
