"""The busiest client's share of a model's decode steps.

Owns the account of the seconds by which the busiest client's rows lengthened steps for other
clients. Decides no step: it determines whether that client stays out of the next one, or how many
rows decode a token.

Where k clients are being answered, a fair share of the time of the one with the most rows lengthens
the gaps of the others by 1 / (k - 1) of their time alone, on average. It takes its share in a few
large steps rather than many small ones, since reading the weights costs each step the same. The
time of the other clients alone is measured in the steps that it stays out of.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from triptych.schedulers.cost import CostModel
from triptych.schedulers.tokens.state import SequenceState

_ROWS: Final = "rows"  # the kind of work counted by rows alone, whatever their contexts
_STRETCH: Final = 1.75
"""The longest step with the busiest client, as a multiple of its share."""
_IN_STEPS: Final = 0.6
"""The part of its share that lies in steps: the work between steps also grows with rows."""
_PROBE_EVERY: Final = 16
"""Steps after which the other clients get one alone, only to measure it."""


@dataclass(frozen=True, slots=True)
class StepTurn:
    """The busiest client being answered, and the step seconds that it may use.

    If it `stays_out` the next step has only other clients; otherwise it has `max_rows` at most.
    """

    busiest: str
    share_s: float
    stays_out: bool
    max_rows: int


class StepShares:
    """Seconds of the decode steps of one model, by their rows."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._debt_s = 0.0
        self._num_since_probe = _PROBE_EVERY

    def turn(self, rows: Sequence[SequenceState]) -> StepTurn | None:
        """The turn among `rows`, those being answered; `None` where all may run.

        All may run while no single client has the most rows.
        """
        counts = Counter(row.client for row in rows)
        if len(counts) < 2 or not self._costs.is_timed(_ROWS, _work(0)):
            return None
        (busiest, num_own), (_, num_next) = counts.most_common(2)
        if num_own == num_next or _comes_first(busiest, rows):
            return None
        num_others = len(rows) - num_own
        is_due = self._num_since_probe >= _PROBE_EVERY
        share_s = (1 + _IN_STEPS / (len(counts) - 1)) * self._seconds(num_others)
        most_s = _STRETCH * share_s
        num_fitting = bisect_right(range(1, len(rows) + 1), most_s, key=self._trend)
        return StepTurn(
            busiest=busiest,
            share_s=share_s,
            stays_out=self._debt_s > 0 or (is_due and not self._is_measured(num_others)),
            max_rows=max(num_fitting, num_others + 1),
        )

    def book(self, turn: StepTurn | None, rows: Iterable[SequenceState]) -> None:
        """Account for a booked step of `rows` in that turn."""
        if turn is None:
            self._debt_s = 0.0
            return
        counts = Counter(row.client == turn.busiest for row in rows)
        self._num_since_probe = self._num_since_probe + 1 if counts[True] else 0
        due_s = turn.share_s if counts[False] else 0.0
        step_s = self._seconds(counts.total())
        # At most one step is owed: more would stem from other clients that could not run anyway.
        most_s = max(self._debt_s, step_s)
        self._debt_s = max(0.0, min(self._debt_s + step_s - due_s, most_s))

    def observe(self, num_rows: int, elapsed_s: float) -> None:
        """Learn the seconds of a step of `num_rows` decode rows and nothing else."""
        self._costs.observe(_ROWS, _work(num_rows), elapsed_s)

    def _seconds(self, num_rows: int) -> float:
        return self._costs.predict(_ROWS, _work(num_rows)) if num_rows else 0.0

    def _trend(self, num_rows: int) -> float:
        return self._costs.trend(_ROWS, _work(num_rows))

    def _is_measured(self, num_rows: int) -> bool:
        return self._costs.measured_s(_ROWS, _work(num_rows)) is not None


def _comes_first(client: str, rows: Sequence[SequenceState]) -> bool:
    """Whether all rows of the highest priority belong to `client`."""
    best = min(row.rank[0] for row in rows)
    return all(row.client == client for row in rows if row.rank[0] == best)


def _work(num_rows: int) -> dict[str, float]:
    return {"rows": num_rows}
