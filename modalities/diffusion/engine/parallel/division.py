"""How the ranks of an image model share its work: by branches of guidance, and by tokens.

Owns which ranks do which together, and what the others are told of rank 0's plans, which alone is
asked for pixels. With both, a rank is one of `--ulysses-degree` that compute the tokens of one
branch, and one of `--cfg-parallel-size` that compute the same tokens of other branches.
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
    """This rank's part: those it shares branches with, and those it shares tokens with."""

    branches: BranchParallel | None = None
    tokens: RankGroup | None = None

    @classmethod
    def of(cls, group: RankGroup, ulysses_degree: int) -> Division:
        """Divide the ranks; all of them call it. Those that share tokens are neighbours."""
        if ulysses_degree == 1:
            return cls(branches=BranchParallel(group))
        if ulysses_degree == group.num_ranks:
            return cls(tokens=group)
        ranks, place = range(group.num_ranks), group.rank % ulysses_degree
        first = group.rank - place
        tokens = group.part(ranks[first : first + ulysses_degree])
        return cls(BranchParallel(group.part(ranks[place::ulysses_degree])), tokens)


def told(plan: Plan) -> RankPlan:
    """What the other ranks do of a plan: they decode nothing, and none waits while rank 0 does."""
    assert isinstance(plan, DenoisePlan), "a plan of the denoise scheduler"
    if plan.kind == "decode":
        over = tuple(row.key for row in plan.rows)
        released = replace(plan, kind="release", rows=(), dropped=(*plan.dropped, *over))
        return RankPlan(released, is_shared=False)
    return RankPlan(replace(plan, rows=tuple(replace(row, has_preview=False) for row in plan.rows)))
