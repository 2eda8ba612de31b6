"""Locating the cause of a refusal in a caller's schema.

Owns the search: it removes parts of the schema while the library still refuses the rest for the
same reason. The search is bounded; if it ends early, its result still contains the cause. Of
keywords it knows only which hold schemas of the same value and which of parts of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from triptych.core.errors import RequestError
from triptych.core.grammar.compiler import GrammarCompiler
from triptych.core.grammar.document import Path, part_at, path_of, pointer
from triptych.core.grammar.refusals import is_about_size, refusal, sort_of
from triptych.core.grammar.source import to_grammar

_MAX_SEARCH_S: Final = 0.25
_MAX_TRIES: Final = 400
_MAX_CHARS: Final = 32_768
"""The longest schema that is searched: in larger ones a single try may take seconds."""
_MAX_PLACE_CHARS: Final = 200
_KEPT: Final = frozenset(
    {"$anchor", "$defs", "$id", "$schema", "definitions", "discriminator", "id"}
)
"""Keywords that references and choices depend on; they are never removed."""
_CHOICES: Final = ("anyOf", "oneOf")
_COMBINING: Final = ("$ref", "allOf", *_CHOICES)
"""Keywords for schemas of the same value."""
_NAMED: Final = ("patternProperties", "properties")
_LISTED: Final = ("allOf", "items", "prefixItems")
_SINGLE: Final = ("additionalItems", "additionalProperties", "items")

Complaint = Callable[[Mapping[str, Any]], str]
"""Returns the library's error for a schema, or an empty string."""


def locate_cause(compiler: GrammarCompiler, text: str, cost_s: float) -> RequestError | None:
    """The refusal of a schema with its place; `None` if the schema is not the cause.

    Also `None` if it is too large to be searched; `cost_s` is the processor time of its refusal.
    """

    def complaint(schema: Mapping[str, Any]) -> str:
        try:
            return compiler.complaint(to_grammar("json_schema", json.dumps(schema)))
        except RequestError:  # refused before the library, with its own place
            return ""

    if len(text) > _MAX_CHARS or cost_s > _MAX_SEARCH_S:
        return None
    schema = json.loads(text)
    if not isinstance(schema, dict):
        return None
    reason = complaint(schema)
    if not reason or is_about_size(reason):
        return None
    return _Search(schema, reason, complaint, cost_s).refusal()


class _Search:
    """Descends from the root while a single part suffices for the same refusal."""

    def __init__(
        self, schema: Mapping[str, Any], reason: str, complaint: Complaint, cost_s: float
    ) -> None:
        self._schema, self._reason = schema, reason
        self._complaint = complaint
        self._path: Path = ()
        self._seen: set[Path] = set()
        self._longest_s = cost_s
        self._ends_s = time.thread_time() + _MAX_SEARCH_S
        self._num_tries = 0

    def refusal(self) -> RequestError:
        """The refusal, located at the smallest part found."""
        while self._path not in self._seen and not self._is_spent():
            self._seen.add(self._path)
            self._path = self._next()
        place = pointer(self._path)
        is_long = len(place) > _MAX_PLACE_CHARS
        return refusal(self._best_reason(), f"{place[:_MAX_PLACE_CHARS]}..." if is_long else place)

    def _best_reason(self) -> str:
        """The library's error for the part alone if of the same kind, otherwise for the whole."""
        part = part_at(self._schema, self._path)
        if not isinstance(part, dict) or self._is_spent():
            return self._reason
        root = {word: value for word, value in self._schema.items() if word in _KEPT}
        reason = self._complaint({**root, **part})
        return reason if sort_of(reason) == sort_of(self._reason) else self._reason

    def _next(self) -> Path:
        """The path of the part that contains the cause; the current path if there is none."""
        node = part_at(self._schema, self._path)
        if isinstance(node, str):
            return self._target(node)
        for parts, left in _part_groups(node):
            if self._is_refused(left(())):
                break
            if parts and self._is_refused(left(parts)):
                return (*self._path, *self._single(parts, left))
        return self._path

    def _target(self, reference: str) -> Path:
        target = path_of(self._schema, reference)
        if target is None or target in self._seen or self._is_refused({}, target):
            return self._path
        return target

    def _single(self, parts: Sequence[Path], left: Callable[[Collection[Path]], Any]) -> Path:
        """The one part that suffices; an empty path if several are needed."""
        while len(parts) > 1:
            middle = len(parts) // 2
            halves = (parts[:middle], parts[middle:])
            enough = next((half for half in halves if self._is_refused(left(half))), None)
            if enough is None:
                return ()
            parts = enough
        return parts[0]

    def _is_refused(self, part: Any, path: Path | None = None) -> bool:
        """Whether the schema with `part` at `path` is refused for the same reason.

        If so, the search continues in that schema.
        """
        path = self._path if path is None else path
        if part == part_at(self._schema, path):
            return True
        if self._is_spent():
            return False
        self._num_tries += 1
        schema = _replace(self._schema, path, part)
        started_s = time.thread_time()
        reason = self._complaint(schema)
        self._longest_s = max(self._longest_s, time.thread_time() - started_s)
        if not reason or sort_of(reason) != sort_of(self._reason):
            return False
        self._schema, self._reason = schema, reason
        return True

    def _is_spent(self) -> bool:
        is_late = time.thread_time() + self._longest_s > self._ends_s
        return is_late or self._num_tries >= _MAX_TRIES


def _part_groups(node: Any) -> Iterator[tuple[Sequence[Path], Callable[[Collection[Path]], Any]]]:
    """Groups of parts to search, each with a function that reduces the schema to some of them.

    First the parts for parts of a value, with the schema's own keywords; then those for the same
    value, without them. If the conflict is between both, the schema itself is the cause.
    """
    if isinstance(node, list):
        branches: Sequence[Path] = [(index,) for index in range(len(node))]
        yield branches, lambda kept: [(n,) in kept and part for n, part in enumerate(node)]
    if isinstance(node, dict):
        paths = [path for word, value in node.items() for path in _paths(word, value)]
        inner = [path for path in paths if path[0] not in _COMBINING]
        combined = [path for path in paths if path[0] in _COMBINING]
        own = {word: value for word, value in node.items() if word not in _COMBINING}
        bare = {word: node[word] for word in node if word in _KEPT or word in _COMBINING}
        yield inner, lambda kept: _reduce(own, kept)
        yield combined, lambda kept: _reduce(bare, kept)


def _paths(word: str, value: Any) -> Iterator[Path]:
    """The paths of the schemas in a keyword; a choice or a reference counts as one."""
    if word in _NAMED and isinstance(value, dict):
        yield from ((word, name) for name in value)
    elif word in _LISTED and isinstance(value, list):
        yield from ((word, index) for index in range(len(value)))
    elif word in ("$ref", *_CHOICES) or (word in _SINGLE and isinstance(value, dict)):
        yield (word,)


def _reduce(node: Mapping[str, Any], kept: Collection[Path]) -> dict[str, Any]:
    """A copy of a schema in which all parts except `kept` allow everything."""
    kept = frozenset(kept)
    left: dict[str, Any] = {}
    for word, value in node.items():
        paths = [*_paths(word, value)]
        if not paths or (word,) in kept:
            left[word] = value
        elif isinstance(value, dict) and word in _NAMED:
            left[word] = {
                name: part if (word, name) in kept else {} for name, part in value.items()
            }
        elif isinstance(value, list) and word in _LISTED:
            left[word] = [part if (word, n) in kept else {} for n, part in enumerate(value)]
        elif word in _SINGLE:
            left[word] = {}
    return left


def _replace(node: Any, path: Path, part: Any) -> Any:
    if not path:
        return part
    copy: Any = [*node] if isinstance(node, list) else {**node}
    copy[path[0]] = _replace(node[path[0]], path[1:], part)
    return copy
