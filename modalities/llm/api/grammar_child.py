"""Compiles grammars of callers in a child process, where they cannot harm the server.

Owns the child's work (see `core/media/worker.py`): all the steps of the engine before the first
token. The engine accepts every grammar that the child returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.errors import InvalidRequest, RequestError
from triptych.core.grammar.causes import locate_cause
from triptych.core.grammar.compiler import GrammarCompiler
from triptych.core.grammar.constraint import ANY_OBJECT, ConstraintKind
from triptych.core.grammar.matcher import TokenMatcher
from triptych.core.grammar.source import to_grammar
from triptych.core.grammar.vocabulary import GrammarVocabulary

_MAX_COMPILE_S: Final = 0.25  # well below the engine's limit

DECODERS: Mapping[str, Any] = MappingProxyType({})


def prepare(folder: str, vocab_size: int) -> Mapping[str, Callable[..., Iterator[bytes]]]:
    """The check of grammars over a model's tokens, after a first one that loads all imports."""
    vocabulary = GrammarVocabulary.open(Path(folder), "the model", vocab_size)
    compiler = GrammarCompiler(vocabulary, max_compile_s=_MAX_COMPILE_S)
    first = ANY_OBJECT.encode()
    for _ in _check(compiler, first, kind="json_schema", sizes=[len(first), 0]):
        pass
    return {"check": partial(_check, compiler)}


def _check(
    compiler: GrammarCompiler, data: bytes, *, kind: ConstraintKind, sizes: Sequence[int]
) -> Iterator[bytes]:
    """Yield the grammar of a constraint; `data` are its text, its surroundings and its schemas."""
    ends = [*accumulate(sizes, initial=0)]
    started_s = time.thread_time()
    try:
        parts = [bytes(data[start:end]).decode() for start, end in pairwise(ends)]
        text, around, *schemas = parts
        grammar = to_grammar(kind, text, around, schemas)
    except UnicodeDecodeError as error:
        raise InvalidRequest("The text is not valid UTF-8.") from error
    try:
        matcher = compiler.compile(grammar)
    except RequestError as error:
        cost_s = time.thread_time() - started_s
        found = locate_cause(compiler, text, cost_s) if kind == "json_schema" else None
        raise found or error from error
    first = TokenMatcher(matcher, compiler.vocabulary, SamplingParams(), is_jumping=True)
    first.follow((), 0, 1)
    yield grammar.encode()
