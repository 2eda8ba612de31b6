"""The policy of continuous batching: which rows take part in the next token step.

Owns the choice. Reads the scheduler's state and changes nothing: a `TokenStep` says what booking
would do, and booking does exactly that. The rules, in the order they are applied:

0. Rows whose step ran out of memory come first; prompts that wait do not begin meanwhile
   (`_retry_step`, `restart`).
1. Where clients compete, rows of the clients that hold the most are preempted for the first waiting
   prompts of clients that hold less (`preempt_for_clients`).
2. Every row that is being answered takes one token, oldest first, or the tokens that its grammar
   forces (jump-forward decoding). Rows with grammars wait for each other's masks, so that they
   share steps; rows without do not wait. A row with drafts also takes these; as they follow its
   last token, all rows then wait for the step in flight (`decodes`).
3. Where the pool has no page for such a row, rows of slow readers and then the newest row are
   preempted: they are computed again later. A row never preempts an older one, and waits instead. A
   row with a step in flight frees its pages only when that step is over, so it sits this step out;
   likewise no row is preempted while rows that have ended are about to free pages (`preemption`).
4. A row that was preempted `max_preemptions` times takes all the pages it can ever need when it
   starts again. It never lacks one, so only rule 1 preempts it again (`_num_pages_to_start`).
5. Prompts fill what the token budget leaves, those begun first, then waiting ones. While rows are
   being answered prompts take `max_prompt_share` of the budget, and rows being answered are so few
   that they take half of it at most: neither can starve the other (`add_prompts`).
6. The first prompt that would take more than half of that is long: it takes half, and prompts with
   clearly less work left take the other half, shortest first. What they do not need goes to the
   long one, and then to the others (`_fill_rest`, `prompt_order`).
7. A waiting prompt whose next page a running row is computing, or that is on its way from another
   engine, waits for that page (`coming_pages`).
8. A waiting prompt for which there is no room may be overtaken by later ones, but only
   `MAX_OVERTAKEN` times, also by those that pass a long one (`_begin`, `_find_passed`), and under
   `lpm` by those with longer cached prefixes (`prefix_order`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import islice

from triptych.core.options.config import LONGEST_PREFIX
from triptych.schedulers.shares import none_running
from triptych.schedulers.tokens.budget import StepBudget
from triptych.schedulers.tokens.client_usage import ClientUsage
from triptych.schedulers.tokens.coming_pages import ComingPages
from triptych.schedulers.tokens.decodes import Decodes
from triptych.schedulers.tokens.preemption import Preemption
from triptych.schedulers.tokens.prefix_order import MAX_OVERTAKEN, by_prefix, overtaken_by
from triptych.schedulers.tokens.prompt_order import split_by_work
from triptych.schedulers.tokens.scheduled_row import ScheduledRow
from triptych.schedulers.tokens.state import SequenceState, TokenState
from triptych.schedulers.tokens.step import UNLIMITED, AdmittedRow, TokenLimits, TokenStep

_MAX_BLOCKED = 8  # prompts without room that later ones may overtake in one step
_MAX_PRIORITIZED = 8  # waiting prompts for which rows are preempted in one step
_MAX_LOOKAHEAD = 128  # waiting prompts considered for one step


def choose_step(state: TokenState, limits: TokenLimits = UNLIMITED) -> TokenStep:
    """The next step. Without rows there is nothing to do before another event."""
    if state.retries.groups:
        return _retry_step(state)
    policy = _TokenPolicy(state, limits)
    if state.retries.restarts and policy.restart():
        return policy.step
    policy.preempt_for_clients()
    policy.fill()
    if not policy.admits_all_prioritized:
        policy = _TokenPolicy(state, limits)
        policy.fill()
    if state.options.schedule_policy == LONGEST_PREFIX:
        admitted = [admission.row for admission in policy.step.admissions]
        passed = overtaken_by(admitted, state.waiting)
        others = [row for row in policy.step.overtaken if row not in passed]  # of other clients
        policy.step.overtaken = passed + others
    return policy.step


def _retry_step(state: TokenState) -> TokenStep:
    """Half of a step that ran out of memory, once none of its rows is in flight any more."""
    group = state.retries.groups[0]
    if any(piece.unit.num_in_flight for piece in group):
        return TokenStep(is_retry=True)
    pieces = [ScheduledRow(p.unit, p.start, p.known_end - p.start, p.is_sampled) for p in group]
    return TokenStep(rows=pieces, is_retry=True)


class _TokenPolicy:
    """Fills one step within its budget."""

    def __init__(self, state: TokenState, limits: TokenLimits) -> None:
        self.step = TokenStep()
        self._state = state
        self._limits = limits
        self._options = state.options
        self._pool = state.pool
        self._budget = StepBudget(state)
        self._excluded = self._budget.excluded
        self._coming = ComingPages(state, self._budget, limits.names)
        self._may_begin = not state.retries.restarts
        self._prioritized: list[SequenceState] = []
        self._blocked: list[SequenceState] = []
        self._num_prompts = 0
        self._num_partial = 0
        self._long_prompt: ScheduledRow | None = None
        self._half = 0
        self._deferred: list[SequenceState] = []
        self._passed: dict[SequenceState, list[SequenceState]] = {}
        self._preemption = Preemption(state, self._budget)
        self.step.victims = self._preemption.victims
        self._decodes = Decodes(state, limits, self._budget, self._preemption)

    def restart(self) -> bool:
        """Add a part of the first row that begins again; if it has to wait, only others may run."""
        retries, budget = self._state.retries, self._budget
        row, num_tokens = next(iter(retries.restarts)), budget.num_tokens
        budget.num_tokens, self._half = min(num_tokens, retries.max_tokens), sys.maxsize
        if not row.is_answering:
            self._add(row, [])
        budget.num_tokens = num_tokens
        self._excluded.update(retries.restarts)
        return bool(self.step.rows)

    def preempt_for_clients(self) -> None:
        """Preempt rows of clients that hold the most for the first prompts of those that hold less.

        A row in flight is excluded from this step, so that it can be preempted before the next.
        """
        shares, budget = self._state.shares, self._budget
        may_begin = self._may_begin and self._limits.max_prompt_tokens
        if not (shares.is_contended and may_begin and self._state.waiting):
            return
        usage = ClientUsage(
            self._state.running, self._pool, budget.num_rows, budget.num_prompt_pages
        )
        if usage.is_even and not self._has_rows():
            return  # before thousands of waiting rows are put in order
        for row in islice(shares.in_turn(self._state.waiting), _MAX_PRIORITIZED):
            is_behind = any(row.client == other.client for other in self._blocked)
            if is_behind or not self._can_begin(row):
                continue
            found = self._pool.peek(row.lookup_keys(self._pool.page_size))
            if self._coming.find_awaited(row, len(found)):
                continue
            victims = usage.admit(row, budget.num_missing(self._num_pages_to_start(row), found))
            if victims is None:
                if self._blocks_all(row):
                    return
                self._blocked.append(row)
                continue
            self._excluded.update(victims)
            if victims and not any(victim.num_in_flight for victim in victims):
                self._prioritized.append(row)
                for victim in victims:
                    self._preemption.preempt(victim)

    @property
    def admits_all_prioritized(self) -> bool:
        """Whether all rows for which others are preempted start: cached pages may have gone."""
        admitted = {admission.row for admission in self.step.admissions}
        return admitted.issuperset(self._prioritized)

    def fill(self) -> None:
        """Add rows to the step, in the order of the options."""
        if self._options.enable_in_flight_batching:
            self.step.rows += self._decodes.choose()
            self.add_prompts()
        else:
            self.add_prompts()
            if not self.step.rows:
                self.step.rows += self._decodes.choose()

    def add_prompts(self) -> None:
        """Add chunks of prompts: those begun, then, if no row lacks a page, waiting ones."""
        budget, limits = self._budget, self._limits
        if self.step.rows:
            share = int(self._options.max_prompt_share * self._options.max_batch_input_tokens)
            budget.num_tokens = min(budget.num_tokens, max(1, share))
        if not limits.max_prompt_tokens:
            return
        budget.num_tokens = min(budget.num_tokens, limits.max_prompt_tokens)
        self._half = budget.num_tokens // 2
        self._num_partial = sum(row not in self.step.victims for row in self._decodes.begun)
        for row in self._prioritized:
            if not self._add(row, self._blocked):
                break
        blocked: list[SequenceState] = []
        if not self._add_in_turn(self._state.shares.in_turn(self._decodes.begun), blocked):
            return
        if self._state.waiting and self._may_begin and not budget.is_short and self._has_rows():
            waiting = self._state.shares.in_turn(self._waiting())
            prioritized = set(self._prioritized)
            rows = (row for row in waiting if row not in prioritized)
            self._add_in_turn(islice(rows, _MAX_LOOKAHEAD), blocked)
        if self._long_prompt is not None:
            self._fill_rest(self._long_prompt, blocked)

    def _waiting(self) -> Iterable[SequenceState]:
        """The waiting prompts in the order of the options."""
        if self._options.schedule_policy == LONGEST_PREFIX:
            return by_prefix(self._state.waiting, self._pool)
        return self._state.waiting

    def _has_rows(self) -> bool:
        """Whether a waiting prompt can get a slot."""
        return self._budget.num_rows > 0 or any(map(self._preemption.is_idle, self._state.running))

    def _add_in_turn(self, rows: Iterable[SequenceState], blocked: list[SequenceState]) -> bool:
        """Add chunks of prompts up to a long one, and defer the rest; false if the step is full."""
        for row in rows:
            if self._long_prompt is not None:
                self._deferred.append(row)
            elif not self._add(row, blocked):
                return False
        return True

    def _fill_rest(self, long: ScheduledRow, blocked: list[SequenceState]) -> None:
        """Give the rest of the step to shorter prompts, then to the long one, then to others."""
        self._half = sys.maxsize
        shorter, others = split_by_work(long, self._deferred, self._num_left)
        self._find_passed(list(blocked))
        may_begin = self._add_all(shorter, blocked)
        self._passed.clear()  # the others are tried in turn
        self._extend(long)
        self._add_all([row for row in others if may_begin or row.lease is not None], blocked)

    def _find_passed(self, blocked: list[SequenceState]) -> None:
        """Find the prompts without room ahead of each deferred one, at most `_MAX_BLOCKED`."""
        has_limit = self._options.max_batch_total_tokens > 0
        room = 0 if has_limit else self._budget.num_prompt_pages * self._pool.page_size
        for row in self._deferred:
            if row.lease is None:
                self._passed[row] = blocked
                may_count = len(blocked) < _MAX_BLOCKED and row.max_positions > room
                if may_count and self._lacks_room(row):  # slow, and not asked for most rows
                    blocked = [*blocked, row]

    def _lacks_room(self, row: SequenceState) -> bool:
        """Whether nothing but pages and context keeps a waiting prompt from beginning now."""
        found = self._pool.peek(row.lookup_keys(self._pool.page_size))
        num_missing = self._budget.num_missing(self._num_pages_to_start(row), found)
        if self._has_room(num_missing) and self._has_context(row):
            return False
        start = len(found) * self._pool.page_size
        may_begin = self._may_begin_with(self._chunk_size(row, start), row.num_tokens - start)
        return self._can_begin(row) and may_begin and not self._coming.find_awaited(row, len(found))

    def _add_all(self, rows: Iterable[SequenceState], blocked: list[SequenceState]) -> bool:
        """Add chunks of prompts in any order; false if no other prompt may begin."""
        may_begin = True
        for row in rows:
            if may_begin or row.lease is not None:
                may_begin &= self._add(row, blocked)
        return may_begin

    def _extend(self, piece: ScheduledRow) -> None:
        """Enlarge a chunk by what is left of the step."""
        budget, was_sampled = self._budget, piece.is_sampled
        if budget.num_tokens > 0:
            budget.num_tokens += piece.num_tokens
            budget.num_windows += self._num_windows_of(piece)
            piece.num_tokens = self._chunk_size(piece.unit, piece.start)
            budget.num_windows -= self._num_windows_of(piece)
            piece.is_sampled = piece.start + piece.num_tokens == piece.unit.num_tokens
            self._num_partial -= piece.is_sampled - was_sampled
            budget.num_tokens -= piece.num_tokens

    def _num_windows_of(self, piece: ScheduledRow) -> int:
        return self._budget.num_windows_for(piece.unit, piece.start, piece.num_tokens)

    def _num_left(self, row: SequenceState) -> int:
        """The number of positions to compute for the next token of `row`."""
        if row.lease is not None:
            return row.num_remaining
        page_size = self._pool.page_size
        return row.num_tokens - len(self._pool.peek(row.lookup_keys(page_size))) * page_size

    def _add(self, row: SequenceState, blocked: list[SequenceState]) -> bool:
        """Add a chunk of a prompt that was begun, or begin it; false if the step is full."""
        if row.lease is None:
            return self._begin(row, blocked)
        if self._decodes.can_step(row):
            if not self._has_tokens(row.num_remaining) or not self._has_context(row):
                return False
            self._add_chunk(row, row.num_booked)
        return True

    def _begin(self, row: SequenceState, blocked: list[SequenceState]) -> bool:
        """Begin a waiting prompt if it can; false if no other may begin after it."""
        if len(blocked) == _MAX_BLOCKED:
            return False
        passed = self._passed.get(row, blocked)
        if not self._can_begin(row) or any(self._blocks(other, row) for other in passed):
            return True
        found = self._pool.peek(row.lookup_keys(self._pool.page_size))
        num_awaited = self._coming.find_awaited(row, len(found))
        if num_awaited:
            self.step.awaited.append((row, num_awaited))
            return True
        return self._begin_after(found, row, blocked)

    def _begin_after(
        self, found: list[int], row: SequenceState, blocked: list[SequenceState]
    ) -> bool:
        """Begin a waiting prompt after its cached pages, as `_begin` does."""
        start = len(found) * self._pool.page_size
        num_left = row.num_tokens - start
        if not self._has_tokens(num_left):
            return False
        if self._lacks_windows(row, start):
            blocked.append(row)
            return not self._blocks_all(row)
        if not self._may_begin_with(self._chunk_size(row, start), num_left):
            return True
        if not self._budget.num_rows and not self._preemption.preempt_idle():
            return False
        if self._has_context(row) and self._try_admit(row, found):
            passed = self._passed.get(row, blocked)
            self.step.overtaken += [o for o in passed if self._counts_overtaking(o, row)]
            return True
        blocked.append(row)
        return not self._blocks_all(row)

    def _lacks_windows(self, row: SequenceState, start: int) -> bool:
        """Whether nothing but pages of window layers keeps a prompt from being computed."""
        if self._pool.windows is None or self._chunk_size(row, start):
            return False
        return self._chunk_size(row, start, waits_for_windows=False) > 0

    def _may_begin_with(self, num_tokens: int, num_left: int) -> bool:
        """Whether a prompt may begin with a chunk of so many of its tokens."""
        most = self._options.max_num_partial_prefills
        return num_tokens == num_left or (num_tokens > 0 and not 0 < most <= self._num_partial)

    def _counts_overtaking(self, row: SequenceState, other: SequenceState) -> bool:
        """Whether it counts for `row` that `other` overtakes it.

        It always does within a client; across clients only while no row of its own client runs.
        """
        return row.client == other.client or none_running(row.client, self._state.running)

    def _blocks(self, row: SequenceState, other: SequenceState) -> bool:
        """Whether `row` was overtaken so often that `other` waits for it."""
        is_held_up = row.num_times_overtaken >= MAX_OVERTAKEN
        return is_held_up and (row.client == other.client or self._blocks_all(row))

    def _blocks_all(self, row: SequenceState) -> bool:
        """Whether `row` was overtaken so often that all later prompts wait for it."""
        if row.num_times_overtaken < MAX_OVERTAKEN:
            return False
        is_contended = self._state.shares.is_contended
        return not is_contended or none_running(row.client, self._state.running)

    def _can_begin(self, row: SequenceState) -> bool:
        """Whether only lack of room can keep a waiting row out of the step."""
        awaits_page = row.awaited_key is not None and self._coming.has(row.awaited_key)
        return row.can_step and not (self._limits.excludes(row) or awaits_page)

    def _has_tokens(self, num_remaining: int) -> bool:
        """Whether a prompt fits the token budget: without chunks the first does at any size."""
        if self._options.enable_chunked_prefill:
            return self._budget.num_tokens > 0
        return not self._num_prompts or num_remaining <= self._budget.num_tokens

    def _has_context(self, row: SequenceState) -> bool:
        """Whether the contexts of all rows in the step stay within their bound with `row`.

        A resumed row may have outgrown the bound; it runs alone.
        """
        limit, budget = self._options.max_batch_total_tokens, self._budget
        if not limit or not self.step.rows:
            return True
        return budget.context_tokens + budget.rounded_context(row) <= limit

    def _try_admit(self, row: SequenceState, found: list[int]) -> bool:
        """Start `row` if the pool has room for all of its tokens and stays below the watermark."""
        num_pages = self._num_pages_to_start(row)
        while True:
            num_missing = self._budget.num_missing(num_pages, found)
            if self._has_room(num_missing):
                break
            if not self._preemption.preempt_idle():
                return False
        self._budget.admit(row, found, num_missing)
        self.step.admissions.append(AdmittedRow(row, len(found), num_pages))
        self._add_chunk(row, len(found) * self._pool.page_size)
        return True

    def _num_pages_to_start(self, row: SequenceState) -> int:
        is_whole = self._state.is_protected(row)
        return self._pool.num_pages_for(row.max_positions if is_whole else row.num_tokens)

    def _has_room(self, num_pages: int) -> bool:
        """Whether a prompt may take `num_pages`: above the watermark only if it runs alone."""
        budget = self._budget
        is_low = num_pages <= budget.num_prompt_pages
        return num_pages <= budget.num_pages and (is_low or self._is_alone())

    def _is_alone(self) -> bool:
        """Whether no other row is active."""
        return not self.step.admissions and all(row.is_paused for row in self._state.running)

    def _chunk_size(self, row: SequenceState, start: int, *, waits_for_windows: bool = True) -> int:
        """How many tokens of `row` the step can take from `start` on; 0 if it has to wait."""
        room = num_remaining = row.num_tokens - start
        if waits_for_windows:
            room = min(room, self._budget.window_room(row, start))
        window_room = room if waits_for_windows else sys.maxsize
        if self._options.enable_chunked_prefill:
            most = self._options.long_prefill_token_threshold or sys.maxsize
            room = min(room, self._budget.num_tokens, most)
            if self._long_prompt is None and room > self._half:
                room = max(1, self._half)
        num_tokens = self._limits.chunk_end(row, start, start + room) - start
        is_cut = num_tokens < num_remaining and not self._options.enable_chunked_prefill
        return 0 if is_cut or num_tokens > window_room else num_tokens

    def _add_chunk(self, row: SequenceState, start: int) -> None:
        num_remaining, num_tokens = row.num_tokens - start, self._chunk_size(row, start)
        if not num_tokens:
            return
        self._budget.num_tokens -= num_tokens
        self._num_prompts += 1
        self._budget.num_windows -= self._budget.num_windows_for(row, start, num_tokens)
        self._budget.context_tokens += self._budget.rounded_context(row)
        piece = ScheduledRow(row, start, num_tokens, is_sampled=num_tokens == num_remaining)
        self._num_partial += (row.lease is None) - piece.is_sampled
        if self._long_prompt is None and num_remaining > self._half:
            self._long_prompt = piece
        self.step.rows.append(piece)
