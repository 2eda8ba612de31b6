"""Grammars over a vocabulary, compiled once.

Owns the bounds of what a grammar may take, the cache of compiled ones, and what the library's
complaints mean to a caller. Where a grammar was checked in a child process under these bounds,
compiling it elsewhere is as quick. Knows no rows.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from llguidance import LLMatcher, LLParserLimits

from triptych.core.errors import InvalidRequest, RequestError, UnsupportedOption
from triptych.core.grammar.vocabulary import GrammarVocabulary
from triptych.core.process.logs import fields

_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
_log = logging.getLogger(__name__)
_MAX_COMPILED: Final = 64
_MAX_REASON_CHARS: Final = 240
_OUR_PLACE: Final = re.compile(r"^at [0-9]+\([0-9]+\): failed to compile JSON schema: ")
_EXCERPT: Final = re.compile(r"\n\s*[0-9]+ \| ")
_MEANINGS: Final[Sequence[tuple[re.Pattern[str], type[RequestError], str]]] = (
    (
        re.compile(r"Unimplemented keys: \[(.*)\]"),
        UnsupportedOption,
        "This keyword of JSON schemas cannot be enforced: {}.",
    ),
    (
        re.compile("oneOf constraints"),
        UnsupportedOption,
        "This oneOf cannot be enforced, since an answer may be of two of its branches: use anyOf.",
    ),
    (
        re.compile("patternProperty regexes (.{1,100}) are not disjoint"),
        UnsupportedOption,
        "These patternProperties cannot be enforced, since a name may match two: {}.",
    ),
    (
        re.compile(r"(?:Resource|Pointer|Anchor) '(?:json-schema:///)?([^']{1,80})"),
        InvalidRequest,
        "The JSON schema has a $ref to {}, which is not in it; other documents are not read.",
    ),
    (re.compile("recursion limit"), InvalidRequest, "The JSON schema is nested too deeply."),
    (
        re.compile("NoExtension|Regex is empty|anyOf is empty|schema is false"),
        InvalidRequest,
        "The grammar, or schema, allows no answer at all.",
    ),
)
"""What the library says, and what it means to a caller."""


class GrammarCompiler:
    """Compiled grammars of one vocabulary, those used last. Safe to share between threads.

    None may take longer than `max_compile_s` of processor time, its first mask included.
    """

    def __init__(self, vocabulary: GrammarVocabulary, *, max_compile_s: float = 2.0) -> None:
        self.vocabulary = vocabulary
        self._max_compile_s = max_compile_s
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def holds(self, grammar: str) -> bool:
        """Whether `grammar` is compiled already."""
        return grammar in self._compiled

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of `grammar`. Raises `RequestError` where there is none."""
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
                return matcher.deep_copy()
        started_s = time.thread_time()
        matcher = LLMatcher(self.vocabulary.library, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # copies have what it learns of the vocabulary
        if matcher.is_error():
            raise refusal(matcher)
        if time.thread_time() - started_s > self._max_compile_s:
            raise InvalidRequest("The grammar, or schema, takes too long to compile: simplify it.")
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
            return matcher.deep_copy()


def refusal(matcher: LLMatcher) -> RequestError:
    """Why a grammar cannot be followed, or not any further."""
    reason = matcher.get_error()
    for pattern, kind, message in _MEANINGS:
        if found := pattern.search(reason):
            return kind(message.format(*(part.replace('"', "") for part in found.groups())))
    if "panic" in reason:
        _log.error("the grammar library failed", extra=fields(detail=reason))
        return InvalidRequest("The grammar, or schema, cannot be followed: the library failed.")
    reason = _OUR_PLACE.sub("", reason.replace("<non-verbose/>", "").strip())
    lines = [line.strip() for line in _EXCERPT.split(reason)[0].splitlines() if line.strip()]
    text = " ".join(lines or ["it is not valid"])[:_MAX_REASON_CHARS].rstrip(".")
    return InvalidRequest(f"The grammar, or schema, cannot be followed: {text}.")
