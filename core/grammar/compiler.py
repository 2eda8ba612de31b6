"""Compiling grammars for a vocabulary, with a cache.

Owns the resource limits of a grammar, and the cache of compiled grammars. After a check in a child
process under these limits, compiling it in another process is as quick. Knows no rows.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Final

from llguidance import LLMatcher, LLParserLimits

from triptych.core.errors import InvalidRequest
from triptych.core.grammar.refusals import refusal
from triptych.core.grammar.vocabulary import GrammarVocabulary

_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
_MAX_COMPILED: Final = 64


class GrammarCompiler:
    """The most recently used compiled grammars of one vocabulary. Thread-safe.

    A grammar may take at most `max_compile_s` of processor time, its first mask included.
    """

    def __init__(self, vocabulary: GrammarVocabulary, *, max_compile_s: float = 2.0) -> None:
        self.vocabulary = vocabulary
        self._max_compile_s = max_compile_s
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def holds(self, grammar: str) -> bool:
        """Whether `grammar` is in the cache."""
        return grammar in self._compiled

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher at the start of `grammar`. Raises `RequestError` if it cannot be compiled."""
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
                return matcher.deep_copy()
        started_s = time.thread_time()
        matcher = self._build(grammar)
        if matcher.is_error():
            raise refusal(matcher.get_error())
        if time.thread_time() - started_s > self._max_compile_s:
            raise InvalidRequest("The grammar, or schema, takes too long to compile: simplify it.")
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
            return matcher.deep_copy()

    def complaint(self, grammar: str) -> str:
        """The library's error for `grammar`; empty if it can be compiled."""
        return self._build(grammar).get_error()

    def _build(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self.vocabulary.library, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # copies inherit the states that this computes
        return matcher
