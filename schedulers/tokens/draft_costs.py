"""The price of drafts, from the seconds of steps with and without them.

Owns the measurement: steps whose rows are all being answered. Each step with drafts is compared
with the latest ones without, of as many rows, since a machine's speed changes; its price, in tokens
that the rows would sample in that time, is taken to be a line over the number of drafts. Steps that
other programs interrupted say little: the line and the steps without drafts are low means.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from triptych.core.engine_api.plan import StepResult
from triptych.schedulers.tokens.scheduled_row import ScheduledRow

_WEIGHT = 0.15
"""That of the latest step in the mean of steps without drafts."""
_KEPT = 0.97
"""What is kept of what was learned of prices, after each step with drafts."""
_ABOVE = 0.1
"""The weight of a measurement above what is expected: other work on the machine makes steps longer,
nothing makes them shorter."""
_MOST = 4.0
"""The longest step that counts, in steps without drafts: others were interrupted."""
_FADED = 1 / 512
"""The part of what was learned that gives way to the guess, after each step without drafts: a price
that is too high to draft would otherwise be the last one."""
_MOST_WITHOUT = 48
"""Steps with drafts, after which there is one without, so that these are still measured."""
_FASTER = 0.95
"""A step with drafts that takes less than this part of one without shows that those are faster now:
a machine that was busy is no longer."""
_GUESS = ((1, 0.3), (7, 1.0))
"""Drafts and their price in a step of one row, before any were measured."""
_NUM_FIRST = 4
"""Measurements in steps of about as many rows that may correct the guess at once."""
_FOLLOW_PART, _LEAST_FOLLOWED = 0.2, 32
"""The price of a token that a drafting model follows, in its tokens, before any was measured: in
steps of at least so many tokens."""


class _Line:
    """A price by the number of drafts: a line through the measurements, which fade."""

    def __init__(self, guess: Sequence[tuple[float, float]] = _GUESS) -> None:
        self._sums = [0.0] * 5  # of 1, x, x * x, y and x * y
        self._num_measured = -len(guess)
        for num_drafts, price in guess:
            self.add(num_drafts, price)
        self._guess = self._sums

    def add(self, x: float, y: float, usual: float = 0.0) -> None:
        """Learn from a measurement, less from one above the line.

        The first ones count up to what is `usual`, which may be far above the guess.
        """
        is_below = not self._sums[0] or y <= self.at(x)
        is_usual = self._num_measured < _NUM_FIRST and y <= usual
        weight = 1.0 if is_below or is_usual else _ABOVE
        self._num_measured += 1
        added = (weight * each for each in (1.0, x, x * x, y, x * y))
        kept = 1 - weight * (1 - _KEPT)
        self._sums = [kept * old + new for old, new in zip(self._sums, added, strict=True)]

    def fade(self) -> None:
        """Forget a little of the measurements."""
        pairs = zip(self._sums, self._guess, strict=True)
        self._sums = [old + _FADED * (guess - old) for old, guess in pairs]

    def at(self, x: float) -> float:
        """The price of `x` drafts; one that falls with their number is flat."""
        num, sum_x, sum_xx, sum_y, sum_xy = self._sums
        spread = sum_xx - sum_x * sum_x / num
        slope = max(0.0, (sum_xy - sum_x * sum_y / num) / max(spread, 1e-9))
        return max(0.0, sum_y / num + slope * (x - sum_x / num))


_ONE_ROW = _Line()
"""The guess for a step of one row; of more rows it is at most as large a part of the step."""


class DraftCosts:
    """Learns from the steps of one model, and of one that drafts for it.

    `relative_size` is the size of that one in sizes of the first.
    """

    computes_again = False
    """Whether tokens before a wrong draft are computed once more, in the next step."""

    def __init__(self, relative_size: float = 0.0) -> None:
        self._plain_s: dict[int, float] = {}
        self._lines: defaultdict[int, _Line] = defaultdict(_Line)
        self._waits_s: dict[int, float] = {}
        guess = ((1, relative_size), (7, 7 * relative_size))
        self._model_lines: defaultdict[int, _Line] = defaultdict(lambda: _Line(guess))
        self._relative_size = relative_size
        self._text_token_s = math.inf
        self._follow_price: float | None = None
        self._num_without_plain = 0
        self._last_end_s = 0.0
        self._had_drafts = False

    def observe(self, pieces: Sequence[ScheduledRow], result: StepResult) -> None:
        """Learn from a step of these rows."""
        if result.ended_s is None or result.elapsed_s <= 0:  # it was not timed
            return
        wait_s = max(0.0, result.ended_s - result.elapsed_s - self._last_end_s)
        num_rows = len(pieces)
        num_drafts = sum([len(piece.drafts) for piece in pieces])
        num_tokens = sum([piece.num_tokens for piece in pieces])
        if num_tokens - num_drafts == num_rows and num_drafts:
            self._num_without_plain += 1
            self._compare(num_rows, num_drafts, result.elapsed_s, wait_s)
        elif num_tokens == num_rows:
            self._fade(num_rows)
            self._plain_s[num_rows] = self._mean_s(num_rows, result.elapsed_s)
            usual_s = self._waits_s.get(num_rows, wait_s)
            self._waits_s[num_rows] = usual_s + _WEIGHT * (wait_s - usual_s)
        elif not num_drafts and num_tokens - num_rows >= _LEAST_FOLLOWED:
            self._text_token_s = _low_mean(self._text_token_s, result.elapsed_s / num_tokens)
        if not num_drafts:
            self._num_without_plain = 0
        self._last_end_s, self._had_drafts = result.ended_s, num_drafts > 0

    def _fade(self, num_rows: int) -> None:
        """Forget a little of the prices in steps of about as many rows."""
        for lines in (self._lines, self._model_lines):
            if (line := lines.get(_size_of(num_rows))) is not None:
                line.fade()

    def _mean_s(self, num_rows: int, elapsed_s: float) -> float:
        """The mean of steps without drafts, after one more; the first ones also page in."""
        plain_s = self._plain_s.get(num_rows, elapsed_s)
        was_due = self._num_without_plain >= _MOST_WITHOUT
        if elapsed_s < (plain_s if was_due else plain_s / 2):
            return elapsed_s
        weight = _WEIGHT * (_ABOVE if elapsed_s > plain_s else 1.0)
        return plain_s + weight * (min(elapsed_s, _MOST * plain_s) - plain_s)

    def _compare(self, num_rows: int, num_drafts: int, elapsed_s: float, wait_s: float) -> None:
        """Learn from a step with drafts.

        It begins after the end of the step before, and the next one after its own end, so that no
        work on the host overlaps; a step after another one with drafts shares that wait. What steps
        without drafts wait as well, for steps of other models, is not theirs.
        """
        plain_s = self._plain_s.get(num_rows)
        if plain_s is None:
            return
        num_waits = 1 if self._had_drafts else 2
        wait_s = max(0.0, wait_s - self._waits_s.get(num_rows, 0.0))
        seconds = elapsed_s + num_waits * min(wait_s, plain_s)
        if seconds < _FASTER * plain_s:
            self._num_without_plain = _MOST_WITHOUT
            return
        part = max(0.0, min(seconds / plain_s, _MOST) - 1)
        usual = num_rows * _ONE_ROW.at(num_drafts) if num_rows > 1 else 0.0
        self._lines[_size_of(num_rows)].add(num_drafts, num_rows * part, usual)

    @property
    def is_known(self) -> bool:
        """Whether a step without drafts was timed."""
        return bool(self._plain_s)

    def observe_model(
        self, num_rows: int, num_tokens: int, drafts: Sequence[int], result: StepResult
    ) -> None:
        """Learn from a step of the drafting model, for rows that share steps with `num_rows`.

        It followed `num_tokens` tokens, and drafted as many as `drafts` has for each row.
        """
        plain_s = self._plain_s.get(num_rows) or next(iter(self._plain_s.values()), None)
        if result.ended_s is None or result.elapsed_s <= 0 or plain_s is None:
            return
        wait_s = max(0.0, result.ended_s - result.elapsed_s - self._last_end_s)
        part = min((result.elapsed_s + min(wait_s, plain_s)) / plain_s, _MOST)
        if num_tokens >= _LEAST_FOLLOWED:
            price = result.elapsed_s / plain_s / num_tokens
            before = math.inf if self._follow_price is None else self._follow_price
            self._follow_price = _low_mean(before, price)
        elif drafts:
            line = self._model_lines[_size_of(num_rows)]
            line.add(max(drafts), num_rows * part / len(drafts))
        self._last_end_s, self._had_drafts = result.ended_s, True

    def model_price(self, num_rows: int, num_drafts: int) -> float:
        """The price of a row's drafts by the drafting model, and of verifying them."""
        drafting = self._model_lines[_size_of(num_rows)].at(num_drafts)
        return drafting + self.price(num_rows, num_drafts)

    def follow_price(self, num_tokens: int) -> float:
        """The price of so many tokens that the drafting model has not seen.

        Before it was measured: that of the prompts of the other model, by its relative size.
        """
        if self._follow_price is not None:
            return num_tokens * self._follow_price
        plain_s = next(iter(self._plain_s.values()), 1.0)
        part = min(_FOLLOW_PART, self._text_token_s / plain_s)
        return num_tokens * self._relative_size * part

    def price(self, num_rows: int, num_drafts: int) -> float:
        """The price of a step's drafts: the tokens that its rows would sample in that time.

        It is infinite where a step without drafts is due. Where accepted tokens may be computed
        again, all of them are counted.
        """
        if self._num_without_plain >= _MOST_WITHOUT:
            return math.inf
        if self.computes_again:
            num_drafts *= 2
        return self._lines[_size_of(num_rows)].at(num_drafts)


def _low_mean(before: float, found: float) -> float:
    """The mean of seconds or prices after one more, of which lower ones say more."""
    return found if found < before else before + _WEIGHT * _ABOVE * (found - before)


def _size_of(num_rows: int) -> int:
    """Steps of about as many rows have one line."""
    return num_rows.bit_length()
