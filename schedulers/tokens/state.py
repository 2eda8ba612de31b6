"""The token scheduler's data: its rows, their queues, and the steps in flight.

Owns the data and its invariants. Decides nothing: `policy` reads it, `batch` changes it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from triptych.core.engine_api.frames import StepCodes
from triptych.core.engine_api.job import Job
from triptych.core.engine_api.tokens import TokenLogprob, TokenRequest
from triptych.core.kv.keys import page_key
from triptych.core.kv.pages import Lease, PagePool
from triptych.core.options.config import ScheduleOptions
from triptych.schedulers.batcher import Unit
from triptych.schedulers.shares import ServiceShares
from triptych.schedulers.tokens.drafted_row import DraftedRow
from triptych.schedulers.tokens.grammar_worker import GrammarState, MaskRequest
from triptych.schedulers.tokens.prompt_lookup import PromptLookup
from triptych.schedulers.tokens.reasoning import ReasoningCounter
from triptych.schedulers.tokens.retries import Retries
from triptych.schedulers.tokens.row_order import RankedRows

if TYPE_CHECKING:
    from triptych.schedulers.tokens.scheduled_row import ScheduledRow


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceState(Unit):
    """One sequence in the batch: a job's answer, or a segment of speech.

    Its tokens are the prompt, the committed output, and `num_unknown` more tokens that steps in
    flight sample. `num_booked` positions are computed or in flight, the first `num_committed` of
    them are computed. While it holds a `lease` it also holds a `slot`; a row that `is_bound` has
    both at the runner, with `num_bound_pages` of its pages, and `num_bound_windows` of those of
    window layers. A row that `is_over` may still be in flight. The last `num_forced` tokens are to
    be computed together: they follow from its `grammar` without sampling, or from drafts. Its
    `reasoning` may precede the output of the grammar. `num_fetched_pages` were computed by another
    engine. With `lookup` its next step verifies `drafts`, a guess of its next tokens; while it
    `is_verifying`, such a step is in flight. With `drafted` a smaller model makes the drafts;
    `draft_room` is the time that it may lose by drafts, in plain steps. Its adapter, if any, has a
    slot unless it still `awaits_adapter`.

    In a model with recurrent layers its state is saved after `saved_pages`, where memory is free
    after `spare_pages`, in steps in flight after `pending_pages`; its latest snapshot is that after
    `progress_page`, if not 0. A row that `is_spoiled` was in a step that ran out of memory, which
    may have changed its state: it begins again.
    """

    name: str
    job: Job
    request: TokenRequest
    rank: tuple[int, int]
    arrival_s: float
    max_outputs: int
    root: bytes
    grammar: GrammarState | None = None
    reasoning: ReasoningCounter | None = None
    keys: list[bytes] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    output_frames: list[StepCodes] = field(default_factory=list)
    lease: Lease | None = None
    slot: int = -1
    is_paused: bool = False
    is_over: bool = False
    has_started: bool = False
    is_bound: bool = False
    is_decoding: bool = False
    num_bound_pages: int = 0
    num_bound_windows: int = 0
    num_booked: int = 0
    num_committed: int = 0
    num_unknown: int = 0
    num_forced: int = 0
    num_cached_tokens: int = 0
    num_fetched_pages: int = 0
    num_preemptions: int = 0
    num_times_overtaken: int = 0
    awaited_key: bytes | None = None
    saved_pages: set[int] = field(default_factory=set)
    spare_pages: set[int] = field(default_factory=set)
    pending_pages: set[int] = field(default_factory=set)
    progress_page: int = 0
    is_spoiled: bool = False
    lookup: PromptLookup | None = None
    drafted: DraftedRow | None = None
    drafts: tuple[int, ...] = ()
    is_verifying: bool = False
    draft_room: float = 0.0
    adapter_slot: int = -1
    awaits_adapter: bool = False
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    has_answered: bool = False
    last_token_s: float = 0.0
    client: str = field(init=False)
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.client = self.job.client
        self.num_prompt_tokens = len(self.request.prompt_ids)

    @property
    def num_known(self) -> int:
        """The number of tokens whose values are known."""
        return self.num_prompt_tokens + len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        """The number of tokens known or in flight: the context of the next step."""
        return self.num_known + self.num_unknown

    @property
    def num_remaining(self) -> int:
        """The number of positions to compute before the next token can be sampled."""
        return self.num_tokens - self.num_booked

    @property
    def max_positions(self) -> int:
        """The bound of positions computed: the last token is sampled and never fed back."""
        return self.num_prompt_tokens + self.max_outputs - 1

    @property
    def can_step(self) -> bool:
        """Whether a step may be booked now: positions are left, and it waits for nothing.

        A row that must be bound again waits for its steps in flight, so that all its tokens are
        known and its slot is not rebound under them. A row with a grammar waits for its mask, which
        depends on its last token; a reasoning row may wait likewise. Drafts follow the last token.
        """
        return (
            not (self.is_paused or self.is_spoiled or self.awaits_adapter)
            and not (self.is_drafting and (self.num_unknown or self.awaits_drafts))
            and len(self.output_ids) + self.num_unknown < self.max_outputs
            and (self.is_bound or not self.num_in_flight)
            and (self.grammar is None or self.grammar.is_ready)
            and (not self.num_unknown or self.reasoning is None or self._is_free(self.reasoning))
        )

    @property
    def is_drafting(self) -> bool:
        """Whether it has, awaits or was booked with drafts, unless it is paused."""
        if self.is_verifying or self.drafts:
            return True
        return self.drafted is not None and (self.drafted.is_due or self.awaits_drafts)

    @property
    def awaits_drafts(self) -> bool:
        """Whether the smaller model is to draft its next tokens."""
        return self.drafted is not None and self.drafted.num_wanted > 0

    def _is_free(self, reasoning: ReasoningCounter) -> bool:
        """Whether no mask can apply to the next token, whatever those in flight are."""
        return self.num_unknown < reasoning.num_unconstrained

    def append(self, token_ids: Sequence[int]) -> None:
        """Extend the answer by known tokens."""
        self.output_ids += token_ids
        if self.reasoning is not None:
            self.reasoning.take(token_ids)

    @property
    def has_masks(self) -> bool:
        """Whether a mask may apply to its next token."""
        return self.grammar is not None or self.reasoning is not None

    @property
    def allowed(self) -> bytes:
        """The mask of its next token; empty if every token is allowed."""
        mask = self.reasoning.mask() if self.reasoning is not None and not self.num_unknown else b""
        return mask or (self.grammar.allowed if self.grammar is not None else b"")

    @property
    def is_answering(self) -> bool:
        """Whether its prompt is computed: next is one token, or the forced ones."""
        return self.is_decoding or (self.is_bound and self.num_forced > 0)

    @property
    def is_awaited(self) -> bool:
        """Whether other rows with grammars wait for its next mask, to share steps."""
        grammar = self.grammar
        return (
            grammar is not None and self.has_answered and not (grammar.is_ready or grammar.is_slow)
        )

    def draft_masks(self, num_drafts: int) -> tuple[bytes, ...]:
        """The masks of the tokens after each of its first drafts; none if all are allowed."""
        if self.grammar is not None:
            return self.grammar.draft_masks[:num_drafts]
        return (self.allowed,) * num_drafts if self.allowed else ()

    def mask_request(
        self, token_ids: Sequence[int] = (), drafts: tuple[int, ...] = ()
    ) -> MaskRequest:
        """The request for its next mask after `token_ids`, or for those after `drafts`."""
        assert self.grammar is not None, "masks are for rows with grammars"
        num_outputs = len(self.output_ids)
        num_left = self.max_outputs - num_outputs
        return MaskRequest(self.grammar, tuple(token_ids), num_outputs, num_left, drafts)

    def lookup_keys(self, page_size: int) -> list[bytes]:
        """Keys of the leading pages that may be taken from the cache.

        At least one token is computed, for its logits; a prompt whose log-probabilities are
        requested is computed as a whole.
        """
        if self.request.sampling.prompt_logprobs and not self.has_answered:
            return []
        return self.keys[: (self.num_known - 1) // page_size]

    def will_save(self, num_pages: int, page_size: int) -> bool:
        """Whether its state after so many pages is being saved, or still can be."""
        return num_pages in self.pending_pages or num_pages * page_size > self.num_booked

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """The known tokens at positions `start .. stop - 1`."""
        num_prompt = self.num_prompt_tokens
        if stop <= num_prompt:
            return self.request.prompt_ids[start:stop]
        output = self.output_ids[max(start - num_prompt, 0) : stop - num_prompt]
        return (*self.request.prompt_ids[start:num_prompt], *output)

    def binding(self) -> dict[str, Any]:
        """The fields of a `TokenRow` that binds the row to its slot."""
        return {
            "sampling": (self.reasoning or self.request).sampling,
            "history_ids": self.token_ids(0, self.num_known),
            "num_prompt_tokens": self.num_prompt_tokens,
            "frames": (*self.request.prompt_frames, *self.output_frames),
            "contents": tuple(content.span for content in self.request.contents),
            "adapter": self.adapter_slot,
        }

    def extend_keys(self, num_pages: int, page_size: int) -> None:
        """Compute the keys of the first `num_pages` pages, output included, for later lookups."""
        for page in range(len(self.keys), num_pages):
            parent = self.keys[-1] if self.keys else self.root
            start, stop = page * page_size, (page + 1) * page_size
            self.keys.append(page_key(parent, self.token_ids(start, stop), self._seen(start, stop)))

    def _seen(self, start: int, stop: int) -> bytes:
        """The images at positions `start .. stop - 1`, as part of a page's key."""
        return b"".join(content.span.mark(start, stop) for content in self.request.contents)


class TokenProgress(NamedTuple):
    """The progress of a sequence, with steps in flight counted as done.

    `num_left` positions are to be computed for its next token, if it `can_step`; `num_outputs`
    tokens are sampled. It `is_waiting` before its prompt is begun, and `is_answered` after it.
    """

    num_left: int
    num_outputs: int
    can_step: bool
    is_waiting: bool
    is_answered: bool


def _client(piece: ScheduledRow) -> str:
    return piece.unit.client


class TokenState:
    """Rows and the resources they hold.

    A row that is not done is in exactly one of `waiting` (holds nothing), `held_back` (waiting,
    with a slow reader) and `running` (holds a lease and a slot). `leaving` rows are done but in
    flight; their resources are freed when their last step ends, since until then the device may
    still write to their pages.
    """

    def __init__(self, *, pool: PagePool, options: ScheduleOptions) -> None:
        self.pool = pool
        self.options = options
        self.rows: set[SequenceState] = set()
        self.waiting = RankedRows[SequenceState]()
        self.held_back: set[SequenceState] = set()
        self.running = RankedRows[SequenceState]()
        self.leaving: set[SequenceState] = set()
        self.retries = Retries()
        self.computing: dict[bytes, SequenceState] = {}
        self.arriving: Counter[bytes] = Counter()
        """Fetches of pages by their keys (`schedulers.tokens.page_fetches`)."""
        self.in_transfer: set[Lease] = set()
        """Leases of pages in transfer from other engines and lower tiers."""
        self.shares = ServiceShares()
        """Tokens computed for each client."""
        self.free_slots = list(range(options.max_batch_size))

    @property
    def max_rows(self) -> int:
        """The bound of running rows: half a step's tokens, so that prompts get the rest."""
        most = min(self.options.max_batch_size, max(1, self.options.max_batch_input_tokens // 2))
        windows = self.pool.windows
        return most if windows is None else min(most, windows.size.num_rows)

    def is_coming(self, key: bytes) -> bool:
        """Whether a page is being computed, by this engine or another one."""
        return key in self.computing or key in self.arriving

    def settle_arriving(self, keys: Iterable[bytes]) -> None:
        """Expect pages of one fetch no longer."""
        for key in keys:
            self.arriving[key] -= 1
            if not self.arriving[key]:
                del self.arriving[key]

    def is_protected(self, row: SequenceState) -> bool:
        """Whether `row` was preempted so often that it takes all its pages when it starts."""
        return row.num_preemptions >= self.options.max_preemptions

    def enqueue(self, row: SequenceState) -> None:
        """Queue `row` by rank; a paused one is held back."""
        if row.is_paused:
            self.held_back.add(row)
        else:
            self.waiting.add(row)

    def dequeue(self, row: SequenceState) -> None:
        """Remove `row` from the queue."""
        if row in self.held_back:
            self.held_back.remove(row)
        else:
            self.waiting.remove(row)

    def set_paused(self, row: SequenceState, is_paused: bool) -> None:
        """Pause or resume `row`."""
        if row.lease is None:
            self.dequeue(row)
        row.is_paused = is_paused
        if row.lease is None:
            self.enqueue(row)
        if is_paused:
            self.retries.drop(row)

    def admit(self, row: SequenceState, num_pages: int) -> None:
        """Start a waiting row on its cached pages, with blank pages and a slot."""
        self.dequeue(row)
        lease = row.lease
        assert lease is not None, "its cached pages were acquired before"
        self.pool.extend(lease, num_pages - len(lease))
        row.slot = heapq.heappop(self.free_slots)
        row.num_booked = row.num_committed = lease.num_published * self.pool.page_size
        row.awaited_key = None
        self.running.add(row)
        for key in row.keys[lease.num_published :]:
            self.computing[key] = row

    def charge(self, pieces: Sequence[ScheduledRow]) -> None:
        """Charge the tokens of a step to its clients."""
        if not self.shares.is_contended:  # all belong to one client
            self.shares.charge(pieces[0].unit.client, *[piece.num_tokens for piece in pieces])
            return
        for client, own in groupby(pieces, key=_client):
            self.shares.charge(client, *[piece.num_tokens for piece in own])

    def publish(self, row: SequenceState) -> None:
        """Publish the committed full pages of `row` in the prefix index."""
        lease = row.lease
        assert lease is not None, "a running row holds a lease"
        if not self.pool.enable_prefix_caching:
            return
        num_full = row.num_committed // self.pool.page_size
        row.extend_keys(num_full, self.pool.page_size)
        keys = row.keys[lease.num_published : num_full]
        self.pool.publish(lease, keys)
        for key in keys:
            self.computing.pop(key, None)

    def release(self, row: SequenceState) -> None:
        """Take back everything `row` holds; it must not be in flight."""
        assert not row.num_in_flight, "a step in flight may still write to its pages"
        lease = row.lease
        assert lease is not None, "a running row holds a lease"
        self.unclaim(row)
        self.pool.release(lease)
        heapq.heappush(self.free_slots, row.slot)
        row.lease, row.slot = None, -1
        row.is_bound = row.is_decoding = row.is_spoiled = row.is_verifying = False
        row.drafts = ()
        row.num_booked = row.num_committed = row.num_forced = 0
        row.num_bound_pages = row.num_bound_windows = 0
        row.progress_page = 0

    def leave(self, row: SequenceState) -> None:
        """Remove an ended row from every queue; it keeps its resources until released."""
        self.rows.remove(row)
        self.retries.drop(row)
        if row.lease is None:
            self.dequeue(row)
            return
        self.running.remove(row)
        self.unclaim(row)
        self.leaving.add(row)

    def unclaim(self, row: SequenceState) -> None:
        """Withdraw the pages that `row` was going to compute: no row waits for them any more."""
        assert row.lease is not None, "a running row holds a lease"
        for key in row.keys[row.lease.num_published :]:
            if self.computing.get(key) is row:
                del self.computing[key]

    def check(self, pieces: Sequence[ScheduledRow]) -> None:
        """Assert that every row is in one place, and every slot and claim has its owner.

        `pieces` are in flight.
        """
        waiting, running = set(self.waiting), set(self.running)
        assert not waiting & self.held_back
        assert waiting | self.held_back | running == self.rows
        assert not any(row.is_over for row in self.rows)
        assert self.retries.restarts.keys() <= self.rows, "a row that is over begins again"
        assert all(row.lease is None and not row.num_in_flight for row in waiting | self.held_back)
        assert all(row.is_paused for row in self.held_back)
        assert not any(row.is_paused for row in waiting)
        holders = running | self.leaving
        slots = [row.slot for row in holders] + self.free_slots
        assert sorted(slots) == list(range(self.options.max_batch_size)), "a slot is lost"
        leases = {row.lease for row in holders}
        assert None not in leases
        assert len(leases) == len(holders), "two rows hold a lease"
        assert len(leases | self.in_transfer) == self.pool.num_leases, "a lease is lost"
        assert all(row.num_in_flight for row in self.leaving)
        assert set(self.computing.values()) <= running, "a page is awaited from no running row"
        assert all(row.num_remaining == 1 for row in running if row.is_decoding)
        for row in holders:
            mine = [piece for piece in pieces if piece.unit is row]
            assert row.num_in_flight == len(mine)
            fresh = [piece for piece in mine if not piece.is_stale]
            if not row.is_over:
                assert row.num_unknown == sum(piece.is_sampled for piece in fresh)
