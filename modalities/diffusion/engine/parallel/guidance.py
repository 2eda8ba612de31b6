"""Guidance branches divided over ranks: each rank asks the model for some, and all know the answer.

Owns who asks for which, and how the others learn of it: one latent for each branch and step, and
whether it was computed where a cache decides by what its rank alone has seen. Everything else is
computed by every rank, from the same numbers. Knows no sampler and no request.

Legend: R ranks' branches, B branches of all images of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from triptych.modalities.diffusion.engine.caches.extrapolation import Point
from triptych.modalities.diffusion.engine.caches.row_cache import RowCache

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup


class Branch(Protocol):
    """What is asked of a guidance branch; see `denoise.GuidanceBranch`."""

    cache: RowCache | None
    rank: int


Answers = dict[int, Tensor]
"""Velocities by the number of the branch."""


class BranchParallel:
    """The ranks that share the branches of every step."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._num_images = 0

    def assign(self, branches: Sequence[Branch]) -> None:
        """Say who asks for the branches of an image that begins: images take turns."""
        for number, branch in enumerate(branches):
            branch.rank = (self._num_images + number) % self.group.num_ranks
        self._num_images += 1

    def asked_here(self, branches: Sequence[Branch], at: Sequence[Point]) -> list[int]:
        """The numbers of those to be evaluated here: this rank's, and what every rank can tell."""
        return [
            number
            for number, (branch, point) in enumerate(zip(branches, at, strict=True))
            if branch.rank == self.group.rank or _is_foreseen(branch, point)
        ]

    def complete(
        self, answers: Answers, like: Tensor, branches: Sequence[Branch], at: Sequence[Point]
    ) -> Tensor:
        """Velocities of all branches, `[B, ...]`, each shaped as `like`, from those found here."""
        asked = [i for i, branch in enumerate(branches) if not _is_foreseen(branch, at[i])]
        if asked:
            of_ranks = [
                [i for i in asked if branches[i].rank == rank]
                for rank in range(self.group.num_ranks)
            ]
            told = self._tell(answers, like, of_ranks, branches, at)
            decided = _decisions(told, branches)
            for rank, numbers in enumerate(of_ranks):
                if rank == self.group.rank:
                    continue
                for place, i in enumerate(numbers):
                    answers[i] = told[rank][place, 1:].view(like.shape)
                    if (cache := branches[i].cache) is not None:
                        cache.follow(at[i], answers[i], computes=decided[rank][place])
        return torch.stack([answers[i] for i in range(len(branches))])

    def _tell(
        self,
        answers: Answers,
        like: Tensor,
        of_ranks: Sequence[Sequence[int]],
        branches: Sequence[Branch],
        at: Sequence[Point],
    ) -> tuple[Tensor, ...]:
        """What each rank found of its branches: whether it was computed, and the velocity."""
        sent = like.new_zeros(max(map(len, of_ranks)), 1 + like.numel(), dtype=torch.float32)
        for place, i in enumerate(of_ranks[self.group.rank]):
            cache = branches[i].cache
            sent[place, 0] = float(cache is None or cache.decisions.decide(at[i].step))
            sent[place, 1:] = answers[i].flatten()
        return self.group.all_gather(sent)


def _is_foreseen(branch: Branch, at: Point) -> bool:
    """Whether the branch takes a prediction that every rank can make."""
    return branch.cache is not None and not any(branch.cache.may_compute([at.step]))


def _decisions(told: Sequence[Tensor], branches: Sequence[Branch]) -> list[list[bool]]:
    """What each rank decided for its branches; where none has seen more, all decide for themselves.

    Reading it waits for the device.
    """
    if not any(branch.cache is not None and branch.cache.signal for branch in branches):
        return [[False] * len(each) for each in told]
    return [[bool(flag) for flag in row] for row in torch.stack(list(told))[:, :, 0].tolist()]
