"""The drafts of a row's next step, within what all rows of its steps may lose by them.

Owns the room of each row: plain steps of time that it may lose by drafts, its own and others'. It
gets a small part of each of its tokens, and what its accepted drafts save. A row pays its part of a
draft's price, whichever row has the draft, and no draft is made that a row has no room for. So each
row that shares steps is as fast as without drafts, but for that part. A row alone is
bounded by its credit (`draft_pace`). Prompts bear drafts without limit. Knows no texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from triptych.schedulers.tokens.draft_model import DraftModel
from triptych.schedulers.tokens.draft_pace import MARGIN, Price
from triptych.schedulers.tokens.row_order import RankedRows
from triptych.schedulers.tokens.state import SequenceState

_SHARE = 0.03
"""The part of a row's time that it may lose."""
_MOST_ROOM = 3.0
_MAX_VERIFIED = 32
"""Tokens of rows with drafts in one step: more cost about as much as steps of their own."""


class Verified(NamedTuple):
    """A row's part of a step: drafts that were verified, right ones, tokens of the answer."""

    num_drafts: int
    num_accepted: int
    num_tokens: int


def earn_room(row: SequenceState, num_tokens: int, num_accepted: int) -> None:
    """Count tokens of an answer, and the steps that it saved."""
    row.draft_room = min(row.draft_room + _SHARE * num_tokens + num_accepted, _MOST_ROOM)


def find_drafts(
    row: SequenceState,
    running: RankedRows[SequenceState] | Sequence[SequenceState],
    verified: Verified,
    price: Price,
    drafter: DraftModel | None,
) -> None:
    """Find or await the next drafts of a row, after a step."""
    num_rows = max(1, len(running))
    most = min(row.max_outputs - len(row.output_ids) - 1, _MAX_VERIFIED // num_rows - 1)
    if row.reasoning is not None:
        most = min(most, row.reasoning.num_unconstrained - 1)
    payers: list[SequenceState] = []
    if most > 0:  # not with many rows, which would all look at all
        payers = [each for each in running if each.is_answering and not each.is_paused]
    room = min(each.draft_room for each in payers) if len(payers) > 1 else math.inf
    if (lookup := row.lookup) is not None:
        if verified.num_drafts:
            lookup.settle(verified.num_drafts, verified.num_accepted)
        lookup.take(row.token_ids(lookup.num_tokens, row.num_known))
        row.drafts = lookup.find(most, num_rows, price, room)
        num_drafts = len(row.drafts)
    elif drafter is not None and row.drafted is not None:
        if verified.num_drafts:
            drafter.settle(row, verified.num_drafts, verified.num_accepted)
        row.drafted.pace.go_on(verified.num_tokens)
        drafter.want(row, most, num_rows, room)
        price, num_drafts = drafter.costs.model_price, row.drafted.num_wanted
    else:
        return
    if num_drafts and not row.num_unknown:  # else they are found once more
        part = MARGIN * price(num_rows, num_drafts) / num_rows
        for each in payers:
            each.draft_room -= part
