"""The timeline: which of the steps proposed by all models runs next.

Owns the policy and the account of service received. Knows models by name only: the purpose of a
step (a chat token, a frame of speech, a denoising step) makes no difference to its turn.

The policy:

1. Fair share (`_order`). The model that received the least service so far, in device seconds
   divided by its weight, goes first (start-time fair queueing, Goyal et al. 1996: a model that
   returns from idling starts level with the others, without credit).
2. Deadlines (`_urgent_choice`). If running the fair choice first would make any proposed deadline
   late, the earliest deadline goes instead. If some are late already, the one of them with the
   least service goes: a model that is always late has had its share and cannot make others late as
   well. So a model with a feasible load waits for the one step that was running when its deadline
   came up, and for a turn of each other late model.
3. No starvation (`_is_fair_share_due`). Deadlines that overrule the fair choice for longer than
   `max_wait_s` on end (or three rounds of everything proposed, if steps are long) are not feasible
   together; from then on the fair choice gets `FAIR_FLOOR` of the device's time.
4. Gaps (`_choose_in_gap`). A gap lies between two steps of a model with deadlines (two tokens of a
   chat) that take T seconds each. Steps without a deadline may use of it:
   - `GAP_SHARE` x T in all, in a narrow gap;
   - one step of any length, or as many as are over within `WIDE_S`, in the wide gap that follows
     `NUM_NARROW` narrow ones.
   A model that finds no gap forfeits its share, except for the length of a wide gap. So tokens
   come at (1 + `GAP_SHARE`) x T at worst, except for one gap in `NUM_NARROW` + 1; and steps that
   do not fit between two of them run seldom and in larger batches, which cost less per row.

No model waits without bound: for n models whose longest step takes L seconds, fair order serves
each within 2 n L seconds of service, and endless deadlines stretch that by 1 / `FAIR_FLOOR`. A step
that fits no narrow gap also waits for `NUM_NARROW` steps of the models with deadlines.
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
    """The time other models took since a model's last step with a deadline, and may still take.

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
    def available_s(self) -> float:
        """How long a step in this gap may be, or in the next one if this gap is full."""
        if self.taken_s >= WIDE_S:
            return math.inf  # the model is idle, or its wide gap was just used up
        return self.left_s if self.left_s > 0 else self.room_s

    def has_room(self, proposal: Proposal) -> bool:
        if proposal.cost_s <= self.left_s:
            return True
        if self.is_wide:  # earlier steps that fit a narrow gap do not count
            return self.taken_s <= self.room_s
        return not (proposal.is_known or self.taken_s)

    def next(self, room_s: float) -> _Gap:
        """The gap after this one, which counts as wide if more than its room was used."""
        was_wide = self.taken_s > self.room_s
        return _Gap(room_s=room_s, num_narrow=0 if was_wide else self.num_narrow + 1)


class Timeline:
    """Picks among proposals, one per model, and keeps the account of service."""

    def __init__(
        self, *, max_wait_s: float = MAX_WAIT_S, weights: Mapping[str, float] | None = None
    ) -> None:
        self._max_wait_s = max_wait_s
        self._weights = weights or {}
        self._service: dict[str, float] = {}
        self._waiting: frozenset[str] = frozenset()
        self._level = 0.0
        # Service given to deadlines since they began to overrule the fair choice, and to fair
        # choices despite them.
        self._deadline_s = 0.0
        self._fair_s = 0.0
        self._gaps: dict[str, _Gap] = {}
        self._urgent: set[str] = set()  # models whose latest proposal had a deadline

    def pick(self, proposals: Sequence[Proposal], now_s: float) -> Proposal:
        """The proposal to run next; the caller records its service with `charge`."""
        self._update_accounts(proposals)
        chosen = self._choose(proposals, now_s)
        self._note_gaps(chosen)
        return chosen

    def step_budget_s(self, model: str, others: Collection[str]) -> float:
        """How long a step of `model` may be between steps of `others`; infinity if unknown.

        If its own steps have deadlines, no gap bounds them.
        """
        if model in self._urgent:
            return math.inf
        gaps = (self._gaps[other].available_s for other in others if other in self._gaps)
        return min(gaps, default=math.inf)

    def _choose(self, proposals: Sequence[Proposal], now_s: float) -> Proposal:
        fair = min(proposals, key=self._order)
        self._level = max(self._level, self._service[fair.model])
        urgent = self._urgent_choice(proposals, fair, now_s)
        if urgent is None or urgent is fair:
            self._deadline_s = self._fair_s = 0.0
            return self._choose_in_gap(proposals, fair)
        if self._is_fair_share_due(proposals):
            self._fair_s += fair.cost_s
            return fair
        self._deadline_s += urgent.cost_s
        return urgent

    def _choose_in_gap(self, proposals: Sequence[Proposal], fair: Proposal) -> Proposal:
        """The fair choice if it has a deadline or fits a gap; otherwise the fair one of the rest.

        The rest are all proposals with deadlines, and those short enough for every current gap. A
        model that finds no gap forfeits its turn and its share beyond a wide gap.
        """
        urgent = [proposal for proposal in proposals if proposal.has_deadline]
        gaps = [self._gaps[other.model] for other in urgent if other.model in self._gaps]
        if fair.has_deadline or all(gap.has_room(fair) for gap in gaps):
            return fair
        patient = [proposal for proposal in proposals if not proposal.has_deadline]
        left_s = min(gap.room_s - gap.taken_s for gap in gaps)  # a wide gap is for long steps
        short = [proposal for proposal in patient if proposal.cost_s <= left_s]
        chosen = min([*urgent, *short], key=self._order)
        behind_s = min(self._service[other.model] for other in urgent) - self._service[fair.model]
        self._forfeit(patient, max(0.0, behind_s - WIDE_S / self._weight(fair.model)))
        return chosen

    def _forfeit(self, patient: Sequence[Proposal], forfeited_s: float) -> None:
        """Reduce all shares by the same amount, so that their order stays."""
        for other in patient:
            self._service[other.model] += forfeited_s

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

    def _update_accounts(self, proposals: Sequence[Proposal]) -> None:
        """Start new proposers level with the served models, and note who has deadlines."""
        for proposal in proposals:
            if proposal.model not in self._waiting:
                received = self._service.get(proposal.model, 0.0)
                self._service[proposal.model] = max(received, self._level)
            if proposal.has_deadline:
                self._urgent.add(proposal.model)
            else:
                self._urgent.discard(proposal.model)
        self._waiting = frozenset(proposal.model for proposal in proposals)

    def _is_fair_share_due(self, proposals: Sequence[Proposal]) -> bool:
        """Whether deadlines overruled for too long without leaving other models their floor."""
        stretch_s = self._deadline_s + self._fair_s
        round_s = sum(proposal.cost_s for proposal in proposals)
        is_endless = stretch_s >= max(self._max_wait_s, _MAX_ROUNDS * round_s)
        return is_endless and self._fair_s < FAIR_FLOOR * stretch_s

    def _urgent_choice(
        self, proposals: Sequence[Proposal], fair: Proposal, now_s: float
    ) -> Proposal | None:
        """The deadline that goes first, if some deadline breaks when `fair` runs first."""
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
