"""How many tokens a row drafts: as many as are expected to save time, and none where they lose it.

Owns what is known of a row's drafts so far, and the time that it may lose by them. Knows neither
texts nor steps.

A step that verifies drafts takes longer than one without; the difference is their price, in tokens
that the batch would sample in that time. A row pays prices out of a credit: it gets a small part of
each of its tokens, and what accepted drafts save. It pays more than the price that is expected,
since prices are known badly. So however its drafts turn out, it loses no more than the first credit
and that part of its time, where no price is above what was paid.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Sequence

_SHARE = 0.015
"""The part of a row's time that it may lose."""
_FIRST_CREDIT, _MOST_CREDIT = 0.75, 3.0
MARGIN = 1.2
"""What is paid, in expected prices."""
_LONGER = 2, 6
"""Matches of so many tokens are followed by the same tokens more often than shorter ones."""
_EXPECTED = 0.4, 0.7, 0.9
"""The part of drafted tokens that is accepted after matches of each length, before any was."""
_TRUST = 2.0
"""The drafted tokens whose weight that expectation has."""
_KEPT = 0.98
"""What was found out fades: this part of it is left after each token."""

Price = Callable[[int, int], float]
"""The price of `(num_rows, num_drafts)`, in tokens."""


def no_price(num_rows: int, num_drafts: int) -> float:
    """The price where none was measured."""
    return 0.0


class DraftPace:
    """One row's drafts. `expected` parts of them are accepted, after ever longer matches."""

    def __init__(self, expected: Sequence[float] = _EXPECTED) -> None:
        self._expected = expected
        self._credit = _FIRST_CREDIT
        self._tried, self._accepted = [0.0] * len(expected), [0.0] * len(expected)
        self._kind, self._price = 0, 0.0

    def choose(
        self, most: int, match: int, num_rows: int, price: Price, room: float = math.inf
    ) -> int:
        """The number of tokens to draft, `most` at most, after a match of so many tokens.

        It gives the batch of `num_rows` the most tokens for its time, and makes a step longer by no
        more than `room`, in plain steps.
        """
        kind = bisect(_LONGER, match)
        expected = self._expected[kind] * _TRUST + self._accepted[kind]
        expected /= _TRUST + self._tried[kind]
        best, best_speed, gain, part = 0, 1.0, 0.0, 1.0
        most_paid = min(self._credit, room * num_rows)
        for num_drafts in range(1, most + 1):
            part *= expected
            gain += part
            cost = price(num_rows, num_drafts)
            speed = (num_rows + gain) / (num_rows + cost)
            if speed > best_speed and MARGIN * cost <= most_paid:
                best, best_speed, self._price = num_drafts, speed, cost
        self._kind = kind
        return best

    def settle(self, num_drafts: int, num_accepted: int) -> None:
        """Learn from a verified draft, of the number chosen last or less."""
        self._accepted[self._kind] += num_accepted
        self._tried[self._kind] += min(num_drafts, num_accepted + 1)
        self._credit = min(self._credit + num_accepted - MARGIN * self._price, _MOST_CREDIT)

    def cut(self, price: float) -> float:
        """Count this price of the number chosen last, if it is less; returns what is saved."""
        saved = max(0.0, self._price - price)
        self._price -= saved
        return saved

    def pay(self, price: float) -> bool:
        """Pay something else, if the credit is enough for it."""
        is_enough = MARGIN * price <= self._credit
        self._credit -= MARGIN * price if is_enough else 0.0
        return is_enough

    def go_on(self, num_tokens: int) -> None:
        """Count tokens of the answer."""
        self._credit = min(self._credit + _SHARE * num_tokens, _MOST_CREDIT)
        kept = _KEPT**num_tokens
        self._tried = [kept * each for each in self._tried]
        self._accepted = [kept * each for each in self._accepted]
