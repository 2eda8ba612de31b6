"""Which of the steps that all models propose runs next.

Owns the policy and the account of service received. Knows models by name only: what a step is
for (a chat token, a frame of speech, a denoising step) makes no difference to its turn.

The policy:

1. Fair share. The model that received the least service so far, in device seconds divided by its
   weight, goes first (start-time fair queueing, Goyal et al. 1996: a model that comes back from
   idling starts level with the others and brings no credit).
2. Deadlines. If running the fair choice first would make any proposed deadline late, the earliest
   deadline goes instead. If some are late already, the one of them with the least service goes:
   a model that is always late has had its share and cannot make others late as well. So a model
   with a feasible load waits for the one step that was running when its deadline came up, and
   for a turn of each other model that is late too.
3. No starvation. Deadlines that overrule the fair choice for longer than `max_wait_s` on end (or
   three rounds of everything proposed, if steps are long) are not feasible together; from then
   on the fair choice gets `FAIR_FLOOR` of the device's time all the same.
4. Gaps. A gap lies between two steps of a model with deadlines (two tokens of a chat) that take
   T seconds each. Steps without a deadline may take in it:
   - `GAP_SHARE` x T in all, in a narrow gap;
   - one step of any length, or as many as are over within `WIDE_S`, in the wide gap that follows
     `NUM_NARROW` narrow ones.
   A model that finds no gap forgoes its share, but for what a wide gap holds. So tokens come at
   (1 + `GAP_SHARE`) x T at worst, but for one gap in `NUM_NARROW` + 1; and what does not fit
   between two of them runs seldom and in larger batches, which cost less for each row.

No model waits without bound: for n models whose longest step takes L seconds, fair order serves
each within 2 n L seconds of service, and endless deadlines stretch that by 1 / `FAIR_FLOOR`. What
fits no narrow gap waits for `NUM_NARROW` steps of those with deadlines besides.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from triptych.schedulers.base import Proposal

MAX_WAIT_S = 0.5
WIDE_S = 0.1
FAIR_FLOOR = 0.2
GAP_SHARE = 0.75
NUM_NARROW = 24
_MAX_ROUNDS = 3


@dataclass(slots=True)
class _Gap:
    """Time that others took since a model's last step with a deadline, and what they may take.

    `num_narrow` gaps since the last wide one were narrow.
    """

    taken_s: float = 0.0
    room_s: float = 0.0
    num_narrow: int = NUM_NARROW

    @property
    def is_wide(self) -> bool:
        return self.num_narrow >= NUM_NARROW

    @property
    def left_s(self) -> float:
        return (WIDE_S if self.is_wide else self.room_s) - self.taken_s

    @property
    def offer_s(self) -> float:
        """How long a step may be that would go here, or in the next gap if this one is full."""
        if self.taken_s >= WIDE_S:
            return math.inf  # the model rests, or its wide gap was used up a moment ago
        return self.left_s if self.left_s > 0 else self.room_s

    def has_room(self, proposal: Proposal) -> bool:
        if proposal.cost_s <= self.left_s:
            return True
        if self.is_wide:  # what was served before within a narrow gap's time is in no one's way
            return self.taken_s <= self.room_s
        return not (proposal.is_known or self.taken_s)

    def next(self, room_s: float) -> _Gap:
        """The gap after this one, which was wide if it was used so."""
        was_wide = self.taken_s > self.room_s
        return _Gap(room_s=room_s, num_narrow=0 if was_wide else self.num_narrow + 1)


class Timeline:
    """Picks among proposals, one of each model, and keeps the account of service."""

    def __init__(
        self, *, max_wait_s: float = MAX_WAIT_S, weights: Mapping[str, float] | None = None
    ) -> None:
        self._max_wait_s = max_wait_s
        self._weights = weights or {}
        self._service: dict[str, float] = {}
        self._waiting: frozenset[str] = frozenset()
        self._level = 0.0
        # Service given to deadlines since they began to overrule the fair choice, and despite them.
        self._pressed_s = 0.0
        self._spared_s = 0.0
        self._gaps: dict[str, _Gap] = {}
        self._urgent: set[str] = set()  # models whose latest proposal had a deadline

    def pick(self, proposals: Sequence[Proposal], now_s: float) -> Proposal:
        """The proposal to run next; charge its service with `charge`."""
        self._admit(proposals)
        chosen = self._choose(proposals, now_s)
        self._note_gaps(chosen)
        return chosen

    def step_budget_s(self, model: str, others: Collection[str]) -> float:
        """How long a step of `model` may be beside those of `others`; infinity if unknown.

        Where its steps have deadlines of their own, no gap bounds them.
        """
        if model in self._urgent:
            return math.inf
        gaps = (self._gaps[other].offer_s for other in others if other in self._gaps)
        return min(gaps, default=math.inf)

    def _choose(self, proposals: Sequence[Proposal], now_s: float) -> Proposal:
        fair = min(proposals, key=self._order)
        self._level = max(self._level, self._service[fair.model])
        urgent = self._pressing(proposals, fair, now_s)
        if urgent is None or urgent is fair:
            self._pressed_s = self._spared_s = 0.0
            return self._between(proposals, fair)
        if self._is_owed(proposals):
            self._spared_s += fair.cost_s
            return fair
        self._pressed_s += urgent.cost_s
        return urgent

    def _between(self, proposals: Sequence[Proposal], fair: Proposal) -> Proposal:
        """The fair choice, if it is waited for or there is a gap; else the fair one of the others.

        Those are all that are waited for, and what is short enough for every gap as it is. A model
        that finds no gap gives up its turn, and all but so much of its share.
        """
        waited = [proposal for proposal in proposals if proposal.has_deadline]
        gaps = [self._gaps[other.model] for other in waited if other.model in self._gaps]
        if fair.has_deadline or all(gap.has_room(fair) for gap in gaps):
            return fair
        unwaited = [proposal for proposal in proposals if not proposal.has_deadline]
        left_s = min(gap.room_s - gap.taken_s for gap in gaps)  # a wide gap is for the long ones
        short = [proposal for proposal in unwaited if proposal.cost_s <= left_s]
        chosen = min([*waited, *short], key=self._order)
        behind_s = min(self._service[other.model] for other in waited) - self._service[fair.model]
        self._forgo(unwaited, max(0.0, behind_s - WIDE_S / self._weight(fair.model)))
        return chosen

    def _forgo(self, unwaited: Sequence[Proposal], forgone_s: float) -> None:
        """Take as much of each one's share, so that their shares among themselves stay."""
        for other in unwaited:
            self._service[other.model] += forgone_s

    def _note_gaps(self, chosen: Proposal) -> None:
        if chosen.has_deadline:
            gap = self._gaps.get(chosen.model, _Gap())
            self._gaps[chosen.model] = gap.next(GAP_SHARE * chosen.cost_s)
            return
        for model, gap in self._gaps.items():
            if model != chosen.model:
                gap.taken_s += chosen.cost_s

    def charge(self, model: str, seconds: float) -> None:
        """Add service to a model's account; negative seconds correct an earlier prediction."""
        self._service[model] = self._service.get(model, 0.0) + seconds / self._weight(model)

    def _weight(self, model: str) -> float:
        return self._weights.get(model, 1.0)

    def _admit(self, proposals: Sequence[Proposal]) -> None:
        """Let newcomers start level with those already served."""
        for proposal in proposals:
            if proposal.model not in self._waiting:
                received = self._service.get(proposal.model, 0.0)
                self._service[proposal.model] = max(received, self._level)
            if proposal.has_deadline:
                self._urgent.add(proposal.model)
            else:
                self._urgent.discard(proposal.model)
        self._waiting = frozenset(proposal.model for proposal in proposals)

    def _is_owed(self, proposals: Sequence[Proposal]) -> bool:
        """Whether deadlines have pressed for too long without leaving the others their floor."""
        stretch_s = self._pressed_s + self._spared_s
        round_s = sum(proposal.cost_s for proposal in proposals)
        is_endless = stretch_s >= max(self._max_wait_s, _MAX_ROUNDS * round_s)
        return is_endless and self._spared_s < FAIR_FLOOR * stretch_s

    def _pressing(
        self, proposals: Sequence[Proposal], fair: Proposal, now_s: float
    ) -> Proposal | None:
        """Which deadline goes first, if some deadline breaks when `fair` runs before the others."""
        due = sorted((c for c in proposals if math.isfinite(c.due_s)), key=lambda c: c.due_s)
        late = [c for c in due if c.due_s < now_s + c.cost_s]
        if late:
            return min(late, key=self._order)
        finish_s = now_s + fair.cost_s
        for proposal in due:
            if proposal is not fair:
                finish_s += proposal.cost_s
            if finish_s > proposal.due_s:
                return due[0]
        return None

    def _order(self, proposal: Proposal) -> tuple[float, str]:
        return self._service[proposal.model], proposal.model
