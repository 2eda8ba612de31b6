"""The drafts of a model's rows, within what all rows of a step may lose by them.

Owns how rows come by drafts, in their own text or by a model that drafts, and the room of each row:
plain steps of time that it may lose by drafts, its own and others'. It gets a small part of each of
its tokens, and what its accepted drafts save. A row pays its part of a draft's price, whichever row
has the draft, and no draft is made that a row has no room for. So each row that shares steps is as
fast as without drafts, but for that part. A row alone is bounded by its credit (`draft_pace`).
Prompts bear drafts without limit. Knows no texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.grammar.matcher import DraftMasks
from triptych.core.options.speculation import MAX_DRAFTS
from triptych.schedulers.tokens.draft_model import DraftModel
from triptych.schedulers.tokens.draft_pace import MARGIN, Price, no_price
from triptych.schedulers.tokens.drafted_row import DraftedRow
from triptych.schedulers.tokens.grammar_worker import MaskRequest
from triptych.schedulers.tokens.prompt_lookup import LookupRule, PromptLookup
from triptych.schedulers.tokens.row_order import RankedRows
from triptych.schedulers.tokens.state import SequenceState

_SHARE = 0.015
"""The part of a row's time that it may lose."""
_MOST_ROOM = 3.0
_MAX_VERIFIED = MAX_DRAFTS + 1
"""Tokens of rows with drafts in one step."""

Running = RankedRows[SequenceState] | Sequence[SequenceState]


class Verified(NamedTuple):
    """A row's part of a step: drafts that were verified, right ones, tokens of the answer."""

    num_drafts: int
    num_accepted: int
    num_tokens: int


class Drafting:
    """The drafts of one model's rows. `running` are those that share its steps."""

    def __init__(self, running: Running) -> None:
        self.lookup_rule: LookupRule | None = None
        """How rows find drafts in their own text; set before the first sequence, if they do."""
        self.drafter: DraftModel | None = None
        """The model that drafts; set before the first sequence, if there is one."""
        self.price: Price = no_price
        """The price of drafts."""
        self._running = running

    @property
    def is_on(self) -> bool:
        """Whether rows may have drafts."""
        return self.lookup_rule is not None or self.drafter is not None

    def lookup(self, request: TokenRequest) -> PromptLookup | None:
        """The search for drafts in a new row's own text, if there may be any."""
        if self.lookup_rule is None or not _may_draft(request):
            return None
        return PromptLookup(self.lookup_rule)

    def drafted(self, request: TokenRequest) -> DraftedRow | None:
        """The new row of the drafting model, if there may be drafts. Heads alone know images."""
        if self.drafter is None or not _may_draft(request):
            return None
        if request.contents and not self.drafter.reads_states:
            return None
        return self.drafter.open()

    def settle(self, row: SequenceState, verified: Verified) -> None:
        """Learn from a step of a row, which gets room for its tokens and the steps it saved."""
        earned = _SHARE * verified.num_tokens + verified.num_accepted
        row.draft_room = min(row.draft_room + earned, _MOST_ROOM)
        if row.lookup is not None and verified.num_drafts:
            row.lookup.settle(verified.num_drafts, verified.num_accepted)
        if self.drafter is not None and row.drafted is not None:
            if verified.num_drafts:
                self.drafter.settle(row, verified.num_drafts, verified.num_accepted)
            row.drafted.pace.go_on(verified.num_tokens)

    def find(self, row: SequenceState, *, is_forced: bool = False) -> tuple[MaskRequest, ...]:
        """Find or await the next drafts of a row; the request to its grammar to check them.

        `is_forced`: the grammar forced its last tokens. No step has computed their states, so that
        a head waits.
        """
        drafter = self.drafter
        if row.lookup is not None:
            self._look_up(row, row.lookup)
        elif drafter is None or row.drafted is None or (is_forced and drafter.reads_states):
            return ()
        else:
            self._await(row, row.drafted, drafter)
        return check_drafts(row)

    def _look_up(self, row: SequenceState, lookup: PromptLookup) -> None:
        lookup.take(row.token_ids(lookup.num_tokens, row.num_known), self._num_rows)
        most, payers, room = self._bounds(row)
        row.drafts = lookup.find(most, self._num_rows, self.price, room)
        self._charge(row, payers, self.price, len(row.drafts))

    def _await(self, row: SequenceState, drafted: DraftedRow, drafter: DraftModel) -> None:
        most, payers, room = self._bounds(row)
        drafter.want(row, most, self._num_rows, room)
        self._charge(row, payers, drafter.costs.model_price, drafted.num_wanted)

    @property
    def _num_rows(self) -> int:
        return max(1, len(self._running))

    def _bounds(self, row: SequenceState) -> tuple[int, list[SequenceState], float]:
        """The most drafts of a row, the rows that pay for them, and the least room of these."""
        most = min(row.max_outputs - len(row.output_ids), _MAX_VERIFIED // self._num_rows) - 1
        if row.reasoning is not None:
            most = min(most, row.reasoning.num_draftable - 1)
        if row.grammar is not None:
            most = min(most, row.grammar.max_drafts)
        # Not with many rows, which would all look at all.
        payers = self._payers() if most > 0 else []
        room = min(each.draft_room for each in payers) if len(payers) > 1 else math.inf
        return most, payers, room

    def _charge(
        self, row: SequenceState, payers: Sequence[SequenceState], price: Price, num_drafts: int
    ) -> None:
        """Let all pay for a row's drafts; with tokens in flight, these are found once more."""
        if num_drafts and not row.num_unknown:
            _pay(payers, price(self._num_rows, num_drafts), self._num_rows)

    def keep(self, row: SequenceState, found: DraftMasks) -> None:
        """Keep the drafts that a row's grammar allows, with their masks; others cost nothing."""
        grammar, num_drafts = row.grammar, len(row.drafts)
        assert grammar is not None, "masks are for rows with grammars"
        grammar.is_ready, grammar.draft_masks = True, found.masks
        row.drafts = row.drafts[: len(found.masks)]
        if row.lookup is not None and len(row.drafts) < num_drafts:
            price_left = self.price(self._num_rows, len(row.drafts)) if row.drafts else 0.0
            _pay(self._payers(), -row.lookup.cut(price_left), self._num_rows)

    def _payers(self) -> list[SequenceState]:
        """The rows that wait for each other's drafts."""
        return [row for row in self._running if row.is_answering and not row.is_paused]


def check_drafts(row: SequenceState) -> tuple[MaskRequest, ...]:
    """Cut a row's drafts where its reasoning ends; the request to its grammar to check them."""
    if row.reasoning is not None:
        row.drafts = row.reasoning.cut(row.drafts)
    if row.grammar is None or not row.drafts:
        return ()
    row.grammar.is_ready = False
    return (row.mask_request(drafts=row.drafts),)


def _may_draft(request: TokenRequest) -> bool:
    """Whether tokens can be drafted: a state ends its answer."""
    return not request.sampling.returns_state


def _pay(payers: Iterable[SequenceState], price: float, num_rows: int) -> None:
    """Let all pay their part of the price of drafts."""
    for row in payers:
        row.draft_room -= MARGIN * price / num_rows
