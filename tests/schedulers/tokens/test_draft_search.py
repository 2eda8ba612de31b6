"""What rows that share steps lose by drafts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from triptych.schedulers.tokens.draft_pace import MARGIN, DraftPace, Price
from triptych.schedulers.tokens.draft_search import Drafting, Verified


@dataclass
class _Lookup:
    """Drafts at the pace of a row, of no text."""

    pace: DraftPace = field(default_factory=DraftPace)
    num_tokens: int = 0

    def take(self, token_ids: list[int], num_rows: int) -> None:
        self.pace.go_on(len(token_ids))

    def find(self, most: int, num_rows: int, price: Price, room: float) -> tuple[int, ...]:
        return (0,) * self.pace.choose(most, 3, num_rows, price, room)

    def settle(self, num_drafts: int, num_accepted: int) -> None:
        self.pace.settle(num_drafts, num_accepted)


@dataclass
class _Row:
    part: float  # of its drafts, is right
    lookup: _Lookup | None = field(default_factory=_Lookup)
    max_outputs: int = 10**6
    output_ids: list[int] = field(default_factory=list)
    drafts: tuple[int, ...] = ()
    draft_room: float = 0.0
    num_known: int = 0
    num_unknown: int = 0
    num_new: int = 0
    is_answering: bool = True
    is_paused: bool = False
    reasoning: None = None
    grammar: None = None
    drafted: None = None

    def token_ids(self, start: int, end: int) -> list[int]:
        return [0] * self.num_new


def _run(rows: list[_Row], price: Price, rng: random.Random, num_steps: int) -> list[float]:
    """The least rate of a row, in those of plain steps, after each step."""
    drafting = Drafting(rows)  # type: ignore[arg-type]
    drafting.price = price
    tokens, time, least = [0] * len(rows), 0.0, list[float]()
    for _ in range(num_steps):
        added = [price(len(rows), len(row.drafts)) for row in rows if row.drafts]
        time += 1 + MARGIN * sum(added) / len(rows)
        for n, row in enumerate(rows):
            num_right = 0
            while num_right < len(row.drafts) and rng.random() < row.part:
                num_right += 1
            row.num_new = 1 + num_right
            tokens[n] += row.num_new
            verified = Verified(len(row.drafts), num_right, row.num_new)
            drafting.settle(row, verified)  # type: ignore[arg-type]
            drafting.find(row)  # type: ignore[arg-type]
        least.append(min(tokens) / time)
    return least


@pytest.mark.parametrize("seed", range(20))
def test_every_row_that_shares_steps_keeps_its_rate(seed: int) -> None:
    """Whatever drafts are right, and at each time, though prices are as high as is paid."""
    rng = random.Random(seed)
    slope, first = rng.choice((0.02, 0.1, 0.5)), rng.choice((0.0, 0.3, 1.0))
    rows = [_Row(rng.choice((0.0, 0.3, 0.7, 1.0))) for _ in range(rng.randrange(2, 17))]
    rows[0].lookup = None  # it never drafts
    rows[1].part = 1.0
    assert min(_run(rows, lambda _, num_drafts: first + slope * num_drafts, rng, 300)) >= 0.97


def test_rows_whose_drafts_are_all_right_are_fast() -> None:
    rows = [_Row(1.0) for _ in range(4)]
    least = _run(rows, lambda num_rows, num_drafts: 0.1 * num_rows, random.Random(0), 100)
    assert least[-1] > 1.8
