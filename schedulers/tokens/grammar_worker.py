"""Token masks of rows with grammars, computed while steps run.

Owns the threads on which grammars are compiled and masks computed, and the delivery of masks to the
loop's thread. A row takes part in a step once its mask is there (`policy`). Masks of one step's
rows are computed together, so that the rows stay in one step; slow grammars and compilation run on
a second thread, where they delay no other row. Where all masks of a step take microseconds, as with
most grammars, a thread switch would take longer: they are computed inline. The first mask of a
grammar is the same for every row and is cached. Drafts of a row are checked likewise, once its mask
is there. Knows no pages or steps.
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
from triptych.core.grammar.matcher import DraftMasks, TokenMask, TokenMatcher
from triptych.core.grammar.vocabulary import GrammarVocabulary
from triptych.core.process.logs import fields
from triptych.schedulers.executors import Clock, Executor, Post

SLOW_S: Final = 0.004
"""The masks of a row whose last one took longer are computed on the slow thread."""
INLINE_S: Final = 0.004
"""Masks of a step that take no longer in sum, by the rows' last ones, are computed inline."""
NUM_FAST: Final = 4
"""Masks of a row that were all fast before its masks are computed inline."""
COOL_DOWN_S: Final = 60.0
"""After a slow inline mask, all masks are computed on threads for this long."""
MAX_FIRST_MASKS: Final = 64
"""First masks that are cached for later rows with the same grammar."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class GrammarState:
    """The state of one row's grammar on the loop's thread.

    While it `is_ready`, `allowed` is the mask of the row's next token, and `draft_masks` are those
    after each draft, if it has any.
    """

    request: TokenRequest
    allowed: bytes = b""
    draft_masks: tuple[bytes, ...] = ()
    is_ready: bool = False
    is_slow: bool = False
    num_fast: int = 0
    last_s: float = 0.0
    matcher: TokenMatcher | None = None
    """Used only by the thread that computes the row's masks."""

    def observe(self, elapsed_s: float) -> None:
        """Record the seconds of a mask."""
        self.last_s, self.is_slow = elapsed_s, elapsed_s > SLOW_S
        self.num_fast = -sys.maxsize if self.is_slow else self.num_fast + 1

    @property
    def max_drafts(self) -> int:
        """How many drafts are checked in the time that masks may take inline."""
        return 0 if self.is_slow else int(INLINE_S / max(self.last_s, 1e-6)) - 1

    @property
    def is_fast(self) -> bool:
        """Whether it had several masks, none of them slow."""
        return self.num_fast >= NUM_FAST


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """A row whose next mask is needed: its new tokens, the lengths of its output and rest.

    With `drafts` the masks after each of them are needed, and there are no new tokens.
    """

    grammar: GrammarState
    token_ids: tuple[int, ...]
    num_outputs: int
    num_left: int
    drafts: tuple[int, ...] = ()

    @property
    def expected_s(self) -> float:
        """The seconds that its masks take, by the row's last one."""
        return self.grammar.last_s * (1 + len(self.drafts))


_FirstKey = tuple[str, tuple[int, ...], bool]

MaskResults = Sequence[tuple[GrammarState, TokenMask | DraftMasks | TriptychError]]
"""The masks of some rows, or the errors that prevent them."""


class HelperThread(Protocol):
    """A helper thread: `schedulers.executors.Executor`."""

    def put(self, call: Callable[[], None]) -> None:
        """Make a call, which must not raise, after the calls put before."""
        ...

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread."""
        ...


class GrammarWorker:
    """Computes the token masks of one model's rows. All methods run on the loop's thread.

    `on_masks` receives the masks on that thread. The threads (by `start`) and the vocabulary are
    created for the first grammar, or by `warm`.
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
        """Register `post`, which schedules a call on the loop's thread."""
        self._post = post

    def warm(self) -> None:
        """Start preparing the compiler that the first grammar would wait for."""
        _, slow = self._open_threads()
        slow.put(self._open_compiler)

    def begin(self, row: MaskRequest) -> None:
        """Compile a row's grammar, and compute its first mask."""
        quick, slow = self._open_threads()
        is_known = self._compiler is not None and self._compiler.holds(row.grammar.request.grammar)
        key = _first_key(row)
        if is_known and not row.num_outputs and key in self._first_masks:
            self._first_masks.move_to_end(key)
            self.on_masks([(row.grammar, self._first_masks[key])])
            return
        (quick if is_known else slow).put(partial(self._report_first, row))

    def follow(self, rows: Iterable[MaskRequest]) -> None:
        """Compute the next masks of rows that have sampled a token, or have drafts."""
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
        """Whether masks are computed inline, faster than by a thread."""
        are_proven = all(row.grammar.is_fast for row in rows)
        is_cool = self._clock() >= self._inline_from_s
        return are_proven and is_cool and sum(row.expected_s for row in rows) <= INLINE_S

    def _compute_inline(self, rows: Sequence[MaskRequest]) -> None:
        found = [(row.grammar, self._compute_mask(row)) for row in rows]
        if any(isinstance(each, TokenMask) and each.elapsed_s > SLOW_S for _, each in found):
            self._inline_from_s = self._clock() + COOL_DOWN_S
        self.on_masks(found)

    def close(self) -> None:
        """End the threads; their remaining results are ignored."""
        if self._threads is not None:
            for thread in self._threads:
                thread.close(0)

    def _open_threads(self) -> tuple[HelperThread, HelperThread]:
        if self._threads is None:
            self._threads = self._start("triptych-masks"), self._start("triptych-grammars")
        return self._threads

    def _cache_first(self, row: MaskRequest, found: MaskResults) -> None:
        """Cache the first mask of a grammar for other rows, unless it completed the answer."""
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

    def _compute_mask(self, row: MaskRequest) -> TokenMask | DraftMasks | TriptychError:
        grammar = row.grammar
        try:
            if grammar.matcher is None:
                grammar.matcher = self._match(grammar.request)
            if row.drafts:
                return self._check_drafts(grammar.matcher, row)
            return grammar.matcher.follow(row.token_ids, row.num_outputs, row.num_left)
        except TriptychError as error:
            return error
        except Exception:  # a bug must not end the thread
            _log.exception("a token mask could not be computed")
            return InternalError(
                "The grammar's token mask could not be computed; see the server's log."
            )

    def _check_drafts(self, matcher: TokenMatcher, row: MaskRequest) -> DraftMasks:
        """The masks after a row's drafts; none if an error lies ahead, which may never come."""
        try:
            return matcher.follow_drafts(row.drafts, row.num_outputs, row.num_left, SLOW_S)
        except TriptychError:
            matcher.begin_again(self._known_compiler().compile(row.grammar.request.grammar))
            return DraftMasks()

    def _open_compiler(self) -> None:
        try:
            self._known_compiler()
        except Exception:  # the next row that needs it reports the error
            _log.exception("the vocabulary of grammars could not be created")

    def _known_compiler(self) -> GrammarCompiler:
        """The compiler; the first call, which takes seconds, is made on the slow thread."""
        if self._compiler is None:
            started_s = self._clock()
            self._compiler = GrammarCompiler(self._open_vocabulary())
            elapsed_s = round(self._clock() - started_s, 3)
            _log.debug("grammar compiler ready", extra=fields(elapsed_s=elapsed_s))
        return self._compiler

    def _match(self, request: TokenRequest) -> TokenMatcher:
        compiler = self._known_compiler()
        matcher = compiler.compile(request.grammar)
        sampling = request.sampling
        return TokenMatcher(matcher, compiler.vocabulary, sampling, is_jumping=_may_jump(sampling))


def _first_key(row: MaskRequest) -> _FirstKey:
    """The properties that determine the first mask of an answer."""
    request = row.grammar.request
    return request.grammar, request.sampling.stop_token_ids, request.sampling.min_tokens > 0


def _may_jump(sampling: SamplingParams) -> bool:
    """Whether forced tokens may skip sampling: not where each sample is reported or counted."""
    return sampling.top_logprobs is None and not sampling.has_penalty
