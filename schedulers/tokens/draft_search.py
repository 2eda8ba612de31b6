"""The drafts of a row's next step, within what all rows of its steps may lose by them.

Owns the room of each row: plain steps of time that it may lose by drafts, its own and others'. It
gets a small part of each of its tokens, and what its accepted drafts save. A row pays its part of a
draft's price, whichever row has the draft, and no draft is made that a row has no room for. So each
row that shares steps is as fast as without drafts, but for that part. A row alone is
bounded by its credit (`draft_pace`). Prompts bear drafts without limit. Knows no texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from triptych.core.grammar.matcher import DraftMasks
from triptych.schedulers.tokens.draft_model import DraftModel
from triptych.schedulers.tokens.draft_pace import MARGIN, Price
from triptych.schedulers.tokens.grammar_worker import MaskRequest
from triptych.schedulers.tokens.row_order import RankedRows
from triptych.schedulers.tokens.state import SequenceState

_SHARE = 0.015
"""The part of a row's time that it may lose."""
_MOST_ROOM = 3.0
_MAX_VERIFIED = 32
"""Tokens of rows with drafts in one step: more cost about as much as steps of their own."""


Running = RankedRows[SequenceState] | Sequence[SequenceState]


class Verified(NamedTuple):
    """A row's part of a step: drafts that were verified, right ones, tokens of the answer."""

    num_drafts: int
    num_accepted: int
    num_tokens: int


def settle_drafts(row: SequenceState, verified: Verified, drafter: DraftModel | None) -> None:
    """Learn from a step of a row, which gets room for its tokens and the steps that it saved."""
    earned = _SHARE * verified.num_tokens + verified.num_accepted
    row.draft_room = min(row.draft_room + earned, _MOST_ROOM)
    if row.lookup is not None and verified.num_drafts:
        row.lookup.settle(verified.num_drafts, verified.num_accepted)
    if drafter is not None and row.drafted is not None:
        if verified.num_drafts:
            drafter.settle(row, verified.num_drafts, verified.num_accepted)
        row.drafted.pace.go_on(verified.num_tokens)


def find_drafts(
    row: SequenceState, running: Running, price: Price, drafter: DraftModel | None
) -> None:
    """Find or await the next drafts of a row."""
    num_rows = max(1, len(running))
    most = min(row.max_outputs - len(row.output_ids) - 1, _MAX_VERIFIED // num_rows - 1)
    if row.reasoning is not None:
        most = min(most, row.reasoning.num_draftable - 1)
    if row.grammar is not None:
        most = min(most, row.grammar.max_drafts)
    # Not with many rows, which would all look at all.
    payers = _payers(running) if most > 0 else []
    room = min(each.draft_room for each in payers) if len(payers) > 1 else math.inf
    if (lookup := row.lookup) is not None:
        lookup.take(row.token_ids(lookup.num_tokens, row.num_known))
        row.drafts = lookup.find(most, num_rows, price, room)
        num_drafts = len(row.drafts)
    elif drafter is not None and row.drafted is not None:
        drafter.want(row, most, num_rows, room)
        price, num_drafts = drafter.costs.model_price, row.drafted.num_wanted
    else:
        return
    if num_drafts and not row.num_unknown:  # else they are found once more
        _pay(payers, price(num_rows, num_drafts), num_rows)


def check_drafts(row: SequenceState) -> tuple[MaskRequest, ...]:
    """Cut a row's drafts where its reasoning ends; the request to its grammar to check them."""
    if row.reasoning is not None:
        row.drafts = row.reasoning.cut(row.drafts)
    if row.grammar is None or not row.drafts:
        return ()
    row.grammar.is_ready = False
    return (row.mask_request(drafts=row.drafts),)


def keep_drafts(row: SequenceState, found: DraftMasks, running: Running, price: Price) -> None:
    """Keep the drafts that a row's grammar allows, with their masks; others cost nothing."""
    grammar, num_rows, num_drafts = row.grammar, max(1, len(running)), len(row.drafts)
    assert grammar is not None, "masks are for rows with grammars"
    grammar.is_ready, grammar.draft_masks = True, found.masks
    row.drafts = row.drafts[: len(found.masks)]
    if row.lookup is not None and len(row.drafts) < num_drafts:
        price_left = price(num_rows, len(row.drafts)) if row.drafts else 0.0
        _pay(_payers(running), -row.lookup.cut(price_left), num_rows)


def _payers(running: Running) -> list[SequenceState]:
    """The rows that wait for each other's drafts."""
    return [row for row in running if row.is_answering and not row.is_paused]


def _pay(payers: Iterable[SequenceState], price: float, num_rows: int) -> None:
    """Let all pay their part of the price of drafts."""
    for row in payers:
        row.draft_room -= MARGIN * price / num_rows
