"""The price of drafts, from the seconds of steps with and without them.

Owns the measurement: steps whose rows are all being answered, by rows and drafted tokens. A step
with drafts needs the tokens of the step before, so the time between the two counts as its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from triptych.core.engine_api.plan import StepResult
from triptych.schedulers.cost import CostModel
from triptych.schedulers.tokens.state import ScheduledRow

_ANSWERS = "answers"  # the kind of work counted by rows and drafts, whatever their contexts


class DraftCosts:
    """Learns from the steps of one model."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._last_end_s = 0.0

    def observe(self, pieces: Sequence[ScheduledRow], result: StepResult) -> None:
        """Learn from a step of these rows."""
        last_end_s, elapsed_s = self._last_end_s, result.elapsed_s
        if result.ended_s is None:
            return
        self._last_end_s = result.ended_s
        num_drafts = sum([len(piece.drafts) for piece in pieces])
        num_tokens = sum([piece.num_tokens for piece in pieces])
        if num_tokens - num_drafts > len(pieces):  # prompts, or forced tokens
            return
        if num_drafts:
            wait_s = result.ended_s - elapsed_s - last_end_s
            elapsed_s += min(max(0.0, wait_s), elapsed_s)
        self._costs.observe(_ANSWERS, _work(len(pieces), num_drafts), elapsed_s)

    def price(self, num_rows: int, num_drafts: int) -> float:
        """The price of a step's drafts: the tokens that its rows would sample in that time."""
        plain_s = self._costs.predict(_ANSWERS, _work(num_rows, 0))
        drafted_s = self._costs.predict(_ANSWERS, _work(num_rows, num_drafts))
        return num_rows * max(0.0, drafted_s / plain_s - 1)


def _work(num_rows: int, num_drafts: int) -> dict[str, float]:
    return {"rows": num_rows, "drafts": num_drafts}
