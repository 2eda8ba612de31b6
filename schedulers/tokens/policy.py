"""Which rows take part in the next token step: the policy of continuous batching.

Owns the choice. Reads the scheduler's state and writes nothing: a `TokenStep` says what booking
would do, and booking does just that. The rules, in the order they are applied:

- Every row that is being answered takes one token, oldest first, or the tokens that its grammar
  forces. Where the pool has no page for one, the newest row gives way (is preempted: it will be
  computed again later). A row never preempts an older one, and waits instead. Rows whose reader
  is slow are preempted first.
  A row with a step in flight gives its pages back only when that step is over, so it sits this
  step out; likewise no row is preempted while rows that have ended are about to free pages.
- A row that gave way `max_preemptions` times takes all the pages it can ever need when it starts
  again. It never lacks one, so it gives way again only to another client that holds less.
- Prompts fill what the token budget leaves, those begun first, then those waiting. While rows are
  being answered prompts take `max_prompt_share` of the budget, and rows being answered are so few
  that they take half of it at most: neither can starve the other.
- Rows with grammars wait for each other's masks, so that they share steps; rows without go on.
- A waiting prompt for which there is no room may be passed by later ones, but only so often.
- A waiting prompt whose next page some row is computing right now, or that is on its way from
  another engine, waits for that page.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from triptych.schedulers.batcher import ScheduledStep
from triptych.schedulers.shares import has_none, spread
from triptych.schedulers.tokens.holdings import Holdings
from triptych.schedulers.tokens.state import ScheduledRow, SequenceState, TokenState
from triptych.schedulers.tokens.step_shares import StepTurn

_MAX_PASSED = 16  # times a waiting prompt is passed by later ones
_MAX_BLOCKED = 8  # prompts without room that are looked behind
_MAX_FAVOURED = 8  # waiting prompts for which room is made in one step
_MAX_LOOKAHEAD = 128  # waiting prompts looked at in one step


@dataclass(frozen=True, slots=True)
class AdmittedRow:
    """A waiting row that starts: `num_cached` pages are found, `num_pages` is what it will hold."""

    row: SequenceState
    num_cached: int
    num_pages: int


def _at_will(row: SequenceState, start: int, end: int) -> int:
    return end


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """What the owner of the rows keeps out of a step, though it could take part.

    Rows with these `names`, or of these `clients`, stand still, waiting or running; prompts take
    `max_prompt_tokens` at most, and `max_answering` rows go on by a token, those of all clients in
    turn. `chunk_end` says where a chunk of a row's prompt that begins at `start`, with room up to
    `end`, does end: at `start` if it has to wait, beyond `end` where it cannot be cut before that.
    A second try after an OutOfMemory is not held up.
    """

    names: frozenset[str] = frozenset()
    max_prompt_tokens: int = sys.maxsize
    max_answering: int = sys.maxsize
    chunk_end: Callable[[SequenceState, int, int], int] = _at_will
    clients: frozenset[str] = frozenset()

    def holds(self, row: SequenceState) -> bool:
        """Whether a row stands still."""
        return row.name in self.names or row.client in self.clients


UNCONSTRAINED = TokenLimits()


@dataclass(slots=True, kw_only=True)
class TokenStep(ScheduledStep):
    """A token step, and what booking it will do. Decode rows come first."""

    kind: str = "prefill"
    rows: list[Any] = field(default_factory=list)
    victims: list[SequenceState] = field(default_factory=list)
    admissions: list[AdmittedRow] = field(default_factory=list)
    passed: list[SequenceState] = field(default_factory=list)
    awaited: list[tuple[SequenceState, bytes]] = field(default_factory=list)
    is_retry: bool = False
    turn: StepTurn | None = None


def choose_step(state: TokenState, limits: TokenLimits = UNCONSTRAINED) -> TokenStep:
    """The next step. Without rows there is nothing to do before something else happens."""
    if state.retries:
        return _retry_step(state)
    policy = _TokenPolicy(state, limits)
    policy.make_way()
    policy.fill()
    if not policy.has_helped:
        policy = _TokenPolicy(state, limits)
        policy.fill()
    return policy.step


def _retry_step(state: TokenState) -> TokenStep:
    """Half of a step that ran out of memory, once none of its rows is in flight any more."""
    group = state.retries[0]
    if any(piece.unit.num_in_flight for piece in group):
        return TokenStep(is_retry=True)
    pieces = [ScheduledRow(p.unit, p.start, p.num_tokens, p.is_sampled) for p in group]
    return TokenStep(rows=pieces, is_retry=True)


class _TokenPolicy:
    """Fills one step, keeping count of what it has promised."""

    def __init__(self, state: TokenState, limits: TokenLimits) -> None:
        self.step = TokenStep()
        self._state = state
        self._limits = limits
        self._options = state.options
        self._pool = state.pool
        self._num_rows_left = min(len(state.free_slots), state.max_rows - len(state.running))
        self._num_tokens_left = state.options.max_batch_input_tokens
        self._num_pages_left = state.pool.num_available
        self._is_gathering = any(row.is_awaited for row in state.running)
        self._num_prompts = 0
        self._total_tokens = 0
        self._is_short = False
        self._must_wait = bool(state.leaving)
        self._sitting_out: set[SequenceState] = set()
        self._dropped: Counter[int] = Counter()
        self._pinned: set[int] = set()
        self._claimed: set[bytes] = set()
        self._favoured: list[SequenceState] = []
        self._stuck: list[SequenceState] = []
        self._long: ScheduledRow | None = None
        self._half = 0
        self._deferred: list[SequenceState] = []
        self._idle = (row for row in reversed(state.running) if self._is_idle(row))

    def make_way(self) -> None:
        """Have rows of clients that hold the most give way to the first of those that hold less.

        One in flight stays out of this step, so that it can give way before the next.
        """
        shares = self._state.shares
        if not (shares.is_contended and self._limits.max_prompt_tokens and self._state.waiting):
            return
        holdings = Holdings(
            self._state.running, self._pool, self._num_rows_left, self._num_free_pages()
        )
        for row in islice(shares.in_turn(self._state.waiting), _MAX_FAVOURED):
            is_behind = any(row.client == other.client for other in self._stuck)
            if is_behind or not self._can_begin(row):
                continue
            found = self._pool.peek(row.lookup_keys(self._pool.page_size))
            if self._find_awaited(row, len(found)) is not None:
                continue
            num_pages = self._num_pages_to_start(row) - sum(map(self._is_held, found))
            victims = holdings.begin(row, num_pages)
            if victims is None:
                if self._blocks_all(row):
                    return
                self._stuck.append(row)
                continue
            self._sitting_out.update(victims)
            if victims and not any(victim.num_in_flight for victim in victims):
                self._favoured.append(row)
                for victim in victims:
                    self._drop(victim)

    @property
    def has_helped(self) -> bool:
        """Whether all for whom rows gave way do begin: what is cached may be found no more."""
        return {admission.row for admission in self.step.admissions}.issuperset(self._favoured)

    def fill(self) -> None:
        """Add rows to the step, in the order of the options."""
        if self._options.enable_in_flight_batching:
            self.add_decodes()
            self.add_prompts()
        else:
            self.add_prompts()
            if not self.step.rows:
                self.add_decodes()

    def _turns(self) -> list[SequenceState]:
        """The rows that are answered in this step: where not all are, those that waited longest."""
        answering = [row for row in self._state.running if row.is_answering]
        most = self._limits.max_answering
        if len(answering) <= most:
            return answering
        able = [row for row in answering if self._can_go_on(row)]
        able.sort(key=lambda row: (row.rank[0], row.num_in_flight, row.last_token_s))
        chosen = set(spread(able, most))
        return [row for row in answering if row in chosen]

    def add_decodes(self) -> None:
        """One token for every row that is being answered, as far as pages go; or those forced."""
        victims = self._victims()
        turns = self._turns()
        num_spare = max(0, self._num_tokens_left - len(turns))
        forced: list[ScheduledRow] = []
        for row in turns:
            if not self._can_go_on(row):
                continue
            num_tokens = min(row.num_remaining, 1 + num_spare)
            if self._find_pages(row, num_tokens, victims):
                is_sampled = num_tokens == row.num_remaining
                piece = ScheduledRow(row, row.num_booked, num_tokens, is_sampled)
                (self.step.rows if row.is_decoding else forced).append(piece)
                num_spare -= num_tokens - 1
                self._num_tokens_left -= num_tokens
                self._total_tokens += self._rounded(row)
        self.step.rows += forced

    def add_prompts(self) -> None:
        """Chunks of prompts: those begun, then, if no row lacks a page, those waiting.

        The first that takes more than half of what there is leaves the rest to shorter ones; what
        these do not need goes to it, and then to other long ones.
        """
        if self.step.rows:
            share = int(self._options.max_prompt_share * self._options.max_batch_input_tokens)
            self._num_tokens_left = min(self._num_tokens_left, max(1, share))
        if not self._limits.max_prompt_tokens:
            return
        self._num_tokens_left = min(self._num_tokens_left, self._limits.max_prompt_tokens)
        self._half = self._num_tokens_left // 2
        self._add_waiting(self._favoured, blocked=self._stuck)
        begun = (row for row in self._state.running if not row.is_answering)
        if not self._add_begun(self._state.shares.in_turn(begun)):
            return
        has_rows = self._num_rows_left or any(map(self._is_idle, self._state.running))
        if has_rows and not self._is_short:
            waiting = self._state.shares.in_turn(self._state.waiting)
            favoured = set(self._favoured)
            rows = (row for row in waiting if row not in favoured)
            self._add_waiting(islice(rows, _MAX_LOOKAHEAD))
        self._fill_up()

    def _add_begun(self, rows: Iterable[SequenceState]) -> bool:
        """Chunks of prompts that are begun; false if the step is full."""
        for row in rows:
            if self._can_step(row):
                if not self._has_budget(row.num_remaining) or not self._has_context(row):
                    return False
                if not self._defers(row, row.num_remaining):
                    self._add_chunk(row, row.num_booked)
        return True

    def _fill_up(self) -> None:
        """Give what is left of the step to the long prompts, in order."""
        piece, self._long, self._half = self._long, None, sys.maxsize
        if piece is not None and self._num_tokens_left > 0:
            self._num_tokens_left += piece.num_tokens
            piece.num_tokens = self._chunk_size(piece.unit, piece.start)
            piece.is_sampled = piece.start + piece.num_tokens == piece.unit.num_tokens
            self._num_tokens_left -= piece.num_tokens
        deferred, self._deferred = self._deferred, []
        begun = [row for row in deferred if row.lease is not None]
        if self._add_begun(begun) and not self._is_short:
            self._add_waiting(row for row in deferred if row.lease is None)

    def _defers(self, row: SequenceState, num_remaining: int) -> bool:
        """Have a prompt stand back for shorter ones, where another long one takes part already.

        Where priorities count, those of a lower one stand back in any case.
        """
        if self._long is None:
            return False
        is_deferred = num_remaining > self._half or row.rank[0] > self._long.unit.rank[0]
        if is_deferred:
            self._deferred.append(row)
        return is_deferred

    def _can_step(self, row: SequenceState) -> bool:
        """Whether `row`, which runs, may take part."""
        is_held = row in self._sitting_out or self._limits.holds(row)
        return row.can_step and not is_held

    def _can_go_on(self, row: SequenceState) -> bool:
        """Whether `row`, which is being answered, may take part."""
        return self._can_step(row) and not (self._is_gathering and row.grammar is not None)

    def _is_idle(self, row: SequenceState) -> bool:
        """Whether `row` only keeps its place for a slow reader, and may lose it to a prompt."""
        is_kept = row.num_in_flight or self._state.is_protected(row)
        return row.is_paused and row not in self._sitting_out and not is_kept

    def _victims(self) -> Iterator[SequenceState]:
        """Rows that may be preempted, in order: slow readers, then the newest."""
        newest = list(reversed(self._state.running))
        for row in (*(row for row in newest if row.is_paused), *newest):
            is_kept = self._state.is_protected(row) and not row.is_paused
            if not is_kept and row not in self.step.victims:
                yield row

    def _find_pages(
        self, row: SequenceState, num_positions: int, victims: Iterator[SequenceState]
    ) -> bool:
        """Make room for the next positions of `row`; false if it stands still in this step."""
        assert row.lease is not None, "a running row holds a lease"
        num_pages = self._pool.num_pages_for(row.num_booked + num_positions) - len(row.lease)
        if num_pages <= 0:
            return True
        if self._num_pages_left < num_pages:
            self._is_short = True
            self._preempt_for(row, num_pages, victims)
        if self._num_pages_left < num_pages:
            return False
        self._num_pages_left -= num_pages
        return True

    def _preempt_for(
        self, row: SequenceState, num_pages: int, victims: Iterator[SequenceState]
    ) -> None:
        """Choose rows to give way until so many pages come free."""
        while self._num_pages_left < num_pages and not self._must_wait:
            victim = next(victims, None)
            if victim is None or not (victim.is_paused or victim.rank > row.rank):
                return
            if victim.num_in_flight:
                self._sitting_out.add(victim)
                self._must_wait = True
            else:
                self._drop(victim)

    def _drop(self, victim: SequenceState) -> None:
        assert victim.lease is not None, "a running row holds a lease"
        self._sitting_out.add(victim)
        self.step.victims.append(victim)
        self._dropped.update(victim.lease.page_ids)
        self._num_rows_left += 1
        self._num_pages_left += sum(not self._is_held(page) for page in victim.lease.page_ids)

    def _is_held(self, page_id: int) -> bool:
        """Whether some row will hold a page, as chosen so far."""
        return page_id in self._pinned or self._pool.num_holders(page_id) > self._dropped[page_id]

    def _evict_idle(self) -> bool:
        """Let a waiting prompt take the place of a row whose reader is slow."""
        victim = next(self._idle, None)
        if victim is not None:
            self._drop(victim)
        return victim is not None

    def _add_waiting(
        self, rows: Iterable[SequenceState], blocked: Iterable[SequenceState] = ()
    ) -> None:
        blocked = list(blocked)
        for row in rows:
            if len(blocked) == _MAX_BLOCKED:
                return
            if not self._can_begin(row) or any(self._blocks(other, row) for other in blocked):
                continue
            found = self._pool.peek(row.lookup_keys(self._pool.page_size))
            awaited = self._find_awaited(row, len(found))
            if awaited is not None:
                self.step.awaited.append((row, awaited))
                continue
            start = len(found) * self._pool.page_size
            if not self._has_budget(row.num_tokens - start):
                return
            if self._defers(row, row.num_tokens - start) or not self._chunk_size(row, start):
                continue
            if not self._num_rows_left and not self._evict_idle():
                return
            if self._has_context(row) and self._try_admit(row, found):
                self.step.passed += (other for other in blocked if self._counts_pass(other, row))
            elif self._blocks_all(row):
                return
            else:
                blocked.append(row)

    def _counts_pass(self, row: SequenceState, other: SequenceState) -> bool:
        """Whether `row` counts that `other` passes it.

        It always does within a client; of another client, where nothing of its own runs.
        """
        return row.client == other.client or has_none(row.client, self._state.running)

    def _blocks(self, row: SequenceState, other: SequenceState) -> bool:
        """Whether `row` was passed so often that `other`, of the same client, waits for it."""
        return row.num_times_passed >= _MAX_PASSED and row.client == other.client

    def _blocks_all(self, row: SequenceState) -> bool:
        """Whether all later prompts wait for `row`, which was passed so often."""
        if row.num_times_passed < _MAX_PASSED:
            return False
        is_contended = self._state.shares.is_contended
        return not is_contended or has_none(row.client, self._state.running)

    def _can_begin(self, row: SequenceState) -> bool:
        """Whether nothing but want of room keeps a waiting row out of the step."""
        is_held = self._limits.holds(row) or self._still_awaits(row)
        return row.can_step and not is_held

    def _still_awaits(self, row: SequenceState) -> bool:
        return row.awaited_key is not None and self._is_coming(row.awaited_key)

    def _is_coming(self, key: bytes) -> bool:
        """Whether the page called `key` is fetched, or computed by a row that is not held up."""
        owner = self._state.computing.get(key)
        is_moving = owner is not None and not (owner.is_paused or owner.name in self._limits.names)
        return key in self._claimed or key in self._state.arriving or is_moving

    def _find_awaited(self, row: SequenceState, num_found: int) -> bytes | None:
        """The last of the pages that `row` lacks and that are coming in one go.

        Where one is coming, those before it are: its row computes them first.
        """
        missing = row.lookup_keys(self._pool.page_size)[num_found:]
        num_coming = bisect_left(missing, True, key=lambda key: not self._is_coming(key))
        return missing[num_coming - 1] if num_coming else None

    def _has_budget(self, num_remaining: int) -> bool:
        """Whether a prompt may take part: without chunks the first does, whatever its size."""
        if self._options.enable_chunked_prefill:
            return self._num_tokens_left > 0
        return not self._num_prompts or num_remaining <= self._num_tokens_left

    def _has_context(self, row: SequenceState) -> bool:
        """Whether the contexts of all rows in the step stay within their bound with `row`.

        A resumed row may have outgrown the bound; it runs alone.
        """
        limit = self._options.max_batch_total_tokens
        return not limit or not self.step.rows or self._total_tokens + self._rounded(row) <= limit

    def _rounded(self, row: SequenceState) -> int:
        return self._pool.num_pages_for(row.num_tokens) * self._pool.page_size

    def _try_admit(self, row: SequenceState, found: list[int]) -> bool:
        """Start `row` if the pool has room for all of its tokens, and use stays below the mark."""
        num_pages = self._num_pages_to_start(row)
        while True:
            num_needed = num_pages - sum(self._is_held(page) for page in found)
            if self._has_room(num_needed):
                break
            if not self._evict_idle():
                return False
        self._num_pages_left -= num_needed
        self._num_rows_left -= 1
        self._pinned.update(found)
        self._claimed.update(row.keys[len(found) :])
        self.step.admissions.append(AdmittedRow(row, len(found), num_pages))
        self._add_chunk(row, len(found) * self._pool.page_size)
        return True

    def _num_pages_to_start(self, row: SequenceState) -> int:
        is_whole = self._state.is_protected(row)
        return self._pool.num_pages_for(row.max_positions if is_whole else row.num_tokens)

    def _num_free_pages(self) -> int:
        """How many pages prompts may take while rows are active."""
        most = math.ceil(self._options.kvcache_ce_watermark * self._pool.num_pages) - 1
        return self._num_pages_left - (self._pool.num_pages - most)

    def _has_room(self, num_pages: int) -> bool:
        """Whether so many pages may be taken for a prompt."""
        is_low = num_pages <= self._num_free_pages()
        return num_pages <= self._num_pages_left and (is_low or self._is_quiet())

    def _is_quiet(self) -> bool:
        """Whether nothing else is active."""
        return not self.step.admissions and all(row.is_paused for row in self._state.running)

    def _chunk_size(self, row: SequenceState, start: int) -> int:
        """How many tokens of `row` the step can take from `start` on; 0 if it has to wait."""
        num_remaining = row.num_tokens - start
        room = num_remaining
        if self._options.enable_chunked_prefill:
            room = min(num_remaining, self._num_tokens_left)
            if self._long is None and room > self._half:
                room = max(1, self._half)
        num_tokens = self._limits.chunk_end(row, start, start + room) - start
        is_cut = num_tokens < num_remaining and not self._options.enable_chunked_prefill
        return 0 if is_cut else num_tokens

    def _add_chunk(self, row: SequenceState, start: int) -> None:
        num_remaining, num_tokens = row.num_tokens - start, self._chunk_size(row, start)
        if not num_tokens:
            return
        self._num_tokens_left -= num_tokens
        self._num_prompts += 1
        self._total_tokens += self._rounded(row)
        piece = ScheduledRow(row, start, num_tokens, is_sampled=num_tokens == num_remaining)
        if self._long is None and num_remaining > self._half:
            self._long = piece
        self.step.rows.append(piece)
