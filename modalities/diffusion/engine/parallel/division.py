"""Division of an image model's work over ranks: by guidance branches and by tokens.

Owns the groups of ranks, and the plans that ranks other than 0 follow; only rank 0 decodes pixels.
With both divisions, a rank belongs to a group of `--ulysses-degree` ranks that share the tokens of
a branch, and to one of `--cfg-parallel-size` ranks that compute the same tokens of other branches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from triptych.core.engine_api.plan import Plan, RankPlan
from triptych.modalities.diffusion.engine.parallel.guidance import BranchParallel
from triptych.modalities.diffusion.plan import DenoisePlan

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup


@dataclass(frozen=True, slots=True)
class Division:
    """The ranks with which this rank shares branches, and those with which it shares tokens."""

    branches: BranchParallel | None = None
    tokens: RankGroup | None = None

    @classmethod
    def of(cls, group: RankGroup, ulysses_degree: int) -> Division:
        """Divide the ranks; each must call it. Neighbouring ranks share tokens."""
        if ulysses_degree == 1:
            return cls(branches=BranchParallel(group))
        if ulysses_degree == group.num_ranks:
            return cls(tokens=group)
        ranks, place = range(group.num_ranks), group.rank % ulysses_degree
        first = group.rank - place
        tokens = group.part(ranks[first : first + ulysses_degree])
        return cls(BranchParallel(group.part(ranks[place::ulysses_degree])), tokens)


def follower_plan(plan: Plan) -> RankPlan:
    """The plan of the other ranks: they do not decode, nor wait while rank 0 does."""
    assert isinstance(plan, DenoisePlan), "a plan of the denoise scheduler"
    if plan.kind == "decode":
        over = tuple(row.key for row in plan.rows)
        released = replace(plan, kind="release", rows=(), dropped=(*plan.dropped, *over))
        return RankPlan(released, is_shared=False)
    return RankPlan(replace(plan, rows=tuple(replace(row, has_preview=False) for row in plan.rows)))
