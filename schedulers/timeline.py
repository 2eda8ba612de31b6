"""Who goes next among the steps that all models propose.

Owns the policy and the account of service received. Knows models by name only: what a step is
for (a chat token, a frame of speech, a denoising step) makes no difference to its turn.

The policy:

1. Fair share. The model that received the least service so far, in device seconds divided by its
   weight, goes first (start-time fair queueing, Goyal et al. 1996: a model that comes back from
   idling starts level with the others and brings no credit).
2. Deadlines. If running the fair choice first would make any proposed deadline late, the earliest
   deadline goes instead. So as long as the load is feasible, a deadline waits for at most the
   one step that was already running when it came up.
3. No starvation. Deadlines may put the fair choice off only for so long: once it has waited
   `max_wait_s` (or three rounds of everything proposed, if steps are long), it goes, though never
   twice in a row while deadlines press.

Where no deadline presses, a model with share s of the total weight thus waits for at most 1 / s
steps of the longest kind, and otherwise `max_wait_s` longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_WAIT_S = 0.5
_MAX_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Candidate:
    """One model's proposed step: its deadline (infinity: none) and predicted cost in seconds."""

    model: str
    due_s: float
    cost_s: float


class Timeline:
    """Picks among candidates, one of each model, and keeps the account of service."""

    def __init__(
        self, *, max_wait_s: float = MAX_WAIT_S, weights: Mapping[str, float] | None = None
    ) -> None:
        self._max_wait_s = max_wait_s
        self._weights = weights or {}
        self._service: dict[str, float] = {}
        self._waiting_since_s: dict[str, float] = {}
        self._level = 0.0
        self._was_owed = False

    def pick(self, candidates: Sequence[Candidate], now_s: float) -> Candidate:
        """The candidate to run next. Its waiting ends here; charge its service with `charge`."""
        self._admit(candidates, now_s)
        fair = min(candidates, key=lambda c: (self._service[c.model], c.model))
        urgent = _pressing(candidates, fair, now_s)
        is_owed = (
            urgent is not None and not self._was_owed and self._is_owed(fair, candidates, now_s)
        )
        choice = fair if urgent is None or is_owed else urgent
        self._was_owed = is_owed
        self._waiting_since_s[choice.model] = now_s
        self._level = max(self._level, self._service[fair.model])
        return choice

    def charge(self, model: str, seconds: float) -> None:
        """Add service to a model's account; negative seconds correct an earlier prediction."""
        self._service[model] = self._service.get(model, 0.0) + seconds / self._weight(model)

    def _weight(self, model: str) -> float:
        return self._weights.get(model, 1.0)

    def _admit(self, candidates: Sequence[Candidate], now_s: float) -> None:
        """Note who waits since when; newcomers start level with those already served."""
        since = self._waiting_since_s
        self._waiting_since_s = {c.model: since.get(c.model, now_s) for c in candidates}
        for candidate in candidates:
            if candidate.model not in since:
                received = self._service.get(candidate.model, 0.0)
                self._service[candidate.model] = max(received, self._level)

    def _is_owed(self, fair: Candidate, candidates: Sequence[Candidate], now_s: float) -> bool:
        round_s = sum(candidate.cost_s for candidate in candidates)
        bound_s = max(self._max_wait_s, _MAX_ROUNDS * round_s)
        return now_s - self._waiting_since_s[fair.model] >= bound_s


def _pressing(candidates: Sequence[Candidate], fair: Candidate, now_s: float) -> Candidate | None:
    """The earliest deadline, if some deadline breaks when `fair` runs before all the others."""
    due = sorted((c for c in candidates if math.isfinite(c.due_s)), key=lambda c: c.due_s)
    finish_s = now_s + fair.cost_s
    for candidate in due:
        if candidate is not fair:
            finish_s += candidate.cost_s
        if finish_s > candidate.due_s:
            return due[0]
    return None
