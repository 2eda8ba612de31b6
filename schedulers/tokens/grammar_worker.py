"""Rows whose tokens follow a grammar: what each may sample next is found out beside the steps.

Owns the threads on which grammars are compiled and followed, and the way of what they find to the
loop's thread. A row takes part in a step once its mask is there (`policy`). Rows of one step
are followed in one go, so that they go on together; a grammar that is slow to follow, like one that
is compiled, has its thread, where it keeps none of the others waiting. Where all of a step's masks
take microseconds, as those of most grammars do, going to a thread and back takes longer: these are
found at once. The first mask of a grammar is the same for every row: it is kept. Knows no pages or
steps.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.errors import InternalError, TriptychError
from triptych.core.grammar.compiler import GrammarCompiler
from triptych.core.grammar.matcher import TokenMask, TokenMatcher
from triptych.core.grammar.vocabulary import GrammarVocabulary
from triptych.core.process.logs import fields
from triptych.schedulers.executors import Clock, Executor, Post

SLOW_S: Final = 0.004
"""A row whose last mask took longer is followed apart from others, which do not wait for it."""
INLINE_S: Final = 0.004
"""Masks of a step that take no longer, by its rows' last ones, are found on the loop's thread."""
NUM_FAST: Final = 4
"""Masks that a row has had before that, none of them slow."""
COOL_DOWN_S: Final = 60.0
"""After a mask found so that was slow after all, for so long all are found on threads again."""
MAX_FIRST_MASKS: Final = 64
"""First masks that are kept for the next rows with the same grammar."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class GrammarState:
    """What the loop knows of one row's way through its grammar.

    While it `is_ready`, `allowed` is the mask of the row's next token.
    """

    request: TokenRequest
    allowed: bytes = b""
    is_ready: bool = False
    is_slow: bool = False
    num_fast: int = 0
    last_s: float = 0.0
    matcher: TokenMatcher | None = None
    """Belongs to the thread that follows the row."""

    def observe(self, elapsed_s: float) -> None:
        """A mask took so long."""
        self.last_s, self.is_slow = elapsed_s, elapsed_s > SLOW_S
        self.num_fast = -sys.maxsize if self.is_slow else self.num_fast + 1

    @property
    def is_fast(self) -> bool:
        """Whether no mask of it was slow, of several."""
        return self.num_fast >= NUM_FAST


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """A row whose next mask is needed: its new tokens, its output so far and what is left of it."""

    grammar: GrammarState
    token_ids: tuple[int, ...]
    num_outputs: int
    num_left: int


_FirstKey = tuple[str, tuple[int, ...], bool]

MaskResults = Sequence[tuple[GrammarState, TokenMask | TriptychError]]
"""What may come next in some rows, or why nothing can."""


class HelperThread(Protocol):
    """A thread beside the loop: `schedulers.executors.Executor`."""

    def put(self, call: Callable[[], None]) -> None:
        """Make a call, which must not raise, after those put before."""
        ...

    def close(self, timeout_s: float | None = None) -> None:
        """Let it end."""
        ...


class GrammarWorker:
    """Computes the token masks of one model's rows. All methods belong to the loop's thread.

    `found` gets what is found, on that thread, too. Nothing is made before the first grammar comes:
    neither the threads, by `start`, nor the vocabulary; or before `warm` asks for it.
    """

    def __init__(
        self,
        open_vocabulary: Callable[[], GrammarVocabulary],
        *,
        start: Callable[[str], HelperThread] = Executor,
        clock: Clock = time.monotonic,
    ) -> None:
        self.on_masks: Callable[[MaskResults], None] = lambda found: None
        self._open_vocabulary = open_vocabulary
        self._start = start
        self._clock = clock
        self._inline_from_s = -math.inf
        self._first_masks: OrderedDict[_FirstKey, TokenMask] = OrderedDict()
        self._post: Post = lambda call: call()
        self._compiler: GrammarCompiler | None = None
        self._threads: tuple[HelperThread, HelperThread] | None = None

    def connect(self, post: Post) -> None:
        """Say how the threads reach the loop's."""
        self._post = post

    def warm(self) -> None:
        """Have made what the first grammar would wait for."""
        _, slow = self._open_threads()
        slow.put(self._open_compiler)

    def begin(self, row: MaskRequest) -> None:
        """Compile a row's grammar, and find its first mask."""
        quick, slow = self._open_threads()
        is_known = self._compiler is not None and self._compiler.holds(row.grammar.request.grammar)
        key = _first_key(row)
        if is_known and not row.num_outputs and key in self._first_masks:
            self._first_masks.move_to_end(key)
            self.on_masks([(row.grammar, self._first_masks[key])])
            return
        (quick if is_known else slow).put(partial(self._report_first, row))

    def follow(self, rows: Iterable[MaskRequest]) -> None:
        """Find the next masks of rows that have sampled a token."""
        quick_rows = []
        quick, slow = self._open_threads()
        for row in rows:
            if row.grammar.is_slow:
                slow.put(partial(self._report, [row]))
            else:
                quick_rows.append(row)
        if not quick_rows:
            return
        if self._are_fast(quick_rows):
            self._compute_inline(quick_rows)
        else:
            quick.put(partial(self._report, quick_rows))

    def _are_fast(self, rows: Sequence[MaskRequest]) -> bool:
        """Whether masks are found sooner here than a thread takes to begin."""
        grammars = [row.grammar for row in rows]
        are_proven = all(grammar.is_fast for grammar in grammars)
        is_cool = self._clock() >= self._inline_from_s
        return are_proven and is_cool and sum(grammar.last_s for grammar in grammars) <= INLINE_S

    def _compute_inline(self, rows: Sequence[MaskRequest]) -> None:
        found = [(row.grammar, self._compute_mask(row)) for row in rows]
        if any(isinstance(each, TokenMask) and each.elapsed_s > SLOW_S for _, each in found):
            self._inline_from_s = self._clock() + COOL_DOWN_S
        self.on_masks(found)

    def close(self) -> None:
        """End the threads; what they still find is of no use to anyone."""
        if self._threads is not None:
            for thread in self._threads:
                thread.close(0)

    def _open_threads(self) -> tuple[HelperThread, HelperThread]:
        if self._threads is None:
            self._threads = self._start("triptych-masks"), self._start("triptych-grammars")
        return self._threads

    def _cache_first(self, row: MaskRequest, found: MaskResults) -> None:
        """Let other rows begin with what one has begun with; nothing if that was its end."""
        ((_, first),) = found
        if not row.num_outputs and isinstance(first, TokenMask) and not first.is_complete:
            self._first_masks[_first_key(row)] = first
            if len(self._first_masks) > MAX_FIRST_MASKS:
                self._first_masks.popitem(last=False)
        self.on_masks(found)

    # On the threads.

    def _report_first(self, row: MaskRequest) -> None:
        found = [(row.grammar, self._compute_mask(row))]
        self._post(lambda: self._cache_first(row, found))

    def _report(self, rows: Sequence[MaskRequest]) -> None:
        found = [(row.grammar, self._compute_mask(row)) for row in rows]
        self._post(lambda: self.on_masks(found))

    def _compute_mask(self, row: MaskRequest) -> TokenMask | TriptychError:
        grammar = row.grammar
        try:
            if grammar.matcher is None:
                grammar.matcher = self._match(grammar.request)
            return grammar.matcher.follow(row.token_ids, row.num_outputs, row.num_left)
        except TriptychError as error:
            return error
        except Exception:  # a fault of ours must not end the thread
            _log.exception("a grammar could not be followed")
            return InternalError("The grammar could not be followed; the server's log says why.")

    def _open_compiler(self) -> None:
        try:
            self._known_compiler()
        except Exception:  # whoever needs it is told
            _log.exception("the vocabulary of grammars could not be made")

    def _known_compiler(self) -> GrammarCompiler:
        """The compiler; the first call, which takes seconds, is the slow thread's."""
        if self._compiler is None:
            started_s = self._clock()
            self._compiler = GrammarCompiler(self._open_vocabulary())
            elapsed_s = round(self._clock() - started_s, 3)
            _log.info("grammars can be followed", extra=fields(elapsed_s=elapsed_s))
        return self._compiler

    def _match(self, request: TokenRequest) -> TokenMatcher:
        compiler = self._known_compiler()
        matcher = compiler.compile(request.grammar)
        sampling = request.sampling
        return TokenMatcher(matcher, compiler.vocabulary, sampling, is_jumping=_may_jump(sampling))


def _first_key(row: MaskRequest) -> _FirstKey:
    """What the first mask of an answer follows from."""
    request = row.grammar.request
    return request.grammar, request.sampling.stop_token_ids, request.sampling.min_tokens > 0


def _may_jump(sampling: SamplingParams) -> bool:
    """Whether tokens may go unsampled: not where each sample is reported or counted."""
    return sampling.top_logprobs is None and not sampling.has_penalty
