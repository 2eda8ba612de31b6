"""A JSON schema as a document: checking keywords and resolving references.

Owns the limit on visits, which references could multiply. Knows no library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

from triptych.core.errors import InvalidRequest

_MAX_REFERENCES: Final = 16
_MAX_VISITS: Final = 20_000
_ALONE: Final = frozenset({"$ref", "description", "title"})
_LISTS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NAMED: Final = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)
_SINGLE: Final = frozenset(
    {"additionalItems", "additionalProperties", "contains", "else", "if", "not", "propertyNames"}
    | {"then", "unevaluatedItems", "unevaluatedProperties"}
)
_NAMING: Final = ("$anchor", "$id", "id")
_NUMBERS: Final = frozenset(
    {"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf", "maxItems"}
    | {"maxLength", "maxProperties", "minItems", "minLength", "minProperties"}
)
_KINDS: Final[Sequence[tuple[frozenset[str], tuple[type, ...], str]]] = (
    (_LISTS, (list,), "a list of schemas"),
    (_NAMED, (dict,), "an object of schemas"),
    (_SINGLE, (bool, dict), "a schema"),
    (frozenset({"items"}), (bool, dict, list), "a schema, or a list of schemas"),
    (_NUMBERS, (int, float), "a number"),
    (frozenset({"$ref", "format", "pattern"}), (str,), "a text"),
    (frozenset({"enum", "required"}), (list,), "a list"),
    (frozenset({"type"}), (str, list), "a text or a list of texts"),
)
Path = tuple[str | int, ...]
"""Keywords, property names and list indices, from the root."""


class SchemaDocument:
    """A schema with resolvable references. Raises `InvalidRequest` if it is malformed.

    `visit` counts steps, so that mutual references end in an error.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_visits = 0
        self._checked: set[str] = set()
        _check(root, "#")
        self._has_names = _has_names(root)

    def visit(self) -> None:
        """Count one step."""
        self._num_visits += 1
        if self._num_visits > _MAX_VISITS:
            raise InvalidRequest(
                "The JSON schema takes too many steps to follow, references written out and"
                " branches of oneOf compared with each other: simplify it."
            )

    def target(self, node: Any) -> Any:
        """The target of a schema that is only a reference; any other schema itself.

        `None` if the target is not in the document.
        """
        for _ in range(_MAX_REFERENCES):
            self.visit()
            reference = node.get("$ref") if isinstance(node, dict) else None
            if reference is None or not node.keys() <= _ALONE or not reference.startswith("#"):
                return node
            node = self._at(reference)
            if reference not in self._checked:
                self._checked.add(reference)
                _check(node, reference)
        return None

    def check_reference(self, reference: str, at: str) -> None:
        """Raise `InvalidRequest` for a reference without a target.

        In a document with `$id` or `$anchor` the library resolves references.
        """
        if not self._has_names and self._at(reference) is None:
            raise InvalidRequest(
                f"The JSON schema is not well-formed: {at} is {reference[:80]}, which is not in the"
                " schema; other documents are not read."
            )

    def _at(self, reference: str) -> Any:
        found = path_of(self._root, reference)
        return None if found is None else part_at(self._root, found)


def path_of(root: Any, reference: str) -> Path | None:
    """The path of a reference's target within a document; `None` if no path leads there."""
    steps = unquote(reference[1:]) if reference.startswith("#") else reference
    if steps and not steps.startswith("/"):
        return None
    node, path = root, []
    for step in steps.split("/")[1:]:
        name: str | int = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and step.isdecimal() and int(step) < len(node):
            name = int(step)
        elif not isinstance(node, dict) or name not in node:
            return None
        node = node[name]
        path.append(name)
    return tuple(path)


def part_at(root: Any, path: Path) -> Any:
    """The part of a document at `path`, which must exist."""
    for step in path:
        root = root[step]
    return root


def pointer(path: Path) -> str:
    """A path as a JSON pointer fragment."""
    return "/".join(["#", *(escaped(str(step)) for step in path)])


def escaped(name: str) -> str:
    """A name escaped for a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _has_names(node: Any) -> bool:
    """Whether a schema, or a part of it, has a name that references may use."""
    if isinstance(node, dict):
        is_named = any(isinstance(node.get(word), str) for word in _NAMING)
        return is_named or any(map(_has_names, node.values()))
    return isinstance(node, list) and any(map(_has_names, node))


def _check(node: Any, at: str) -> None:
    """Raise `InvalidRequest` for a keyword with a value of the wrong type."""
    if isinstance(node, dict):
        for word, value in node.items():
            place = f"{at}/{word}"
            _check_value(word, value, place)
            for name, part in parts_of(word, value):
                _check(part, f"{place}{name}")


def parts_of(word: str, value: Any) -> Iterable[tuple[str, Any]]:
    """The schemas in a keyword, with the pointer of each; none if the value has another type."""
    if isinstance(value, list) and (word in _LISTS or word == "items"):
        return ((f"/{index}", part) for index, part in enumerate(value))
    if isinstance(value, dict) and word in _NAMED:
        return ((f"/{escaped(name)}", part) for name, part in value.items())
    return [("", value)] if word in _SINGLE or word == "items" else []


def _check_value(word: str, value: Any, at: str) -> None:
    for words, kinds, named in _KINDS:
        if word in words:
            _check_is(value, kinds, named, at)
    if word in _NUMBERS and isinstance(value, bool):
        _check_is(value, (), "a number", at)
    if word == "required" or (word == "type" and isinstance(value, list)):
        for each in value:
            _check_is(each, (str,), "a list of texts", at)


def _check_is(value: Any, kinds: tuple[type, ...], named: str, at: str) -> None:
    if not isinstance(value, kinds):
        raise InvalidRequest(f"The JSON schema is not well-formed: {at} is {named}.")
