"""The guidance branches of a step, divided over the ranks of an image model.

Owns the rank of each branch (`assign`), the branches that a rank evaluates (`local_indices`), and
the exchange (`gather`), after which every rank has the velocity of every branch. Every rank
evaluates the branches that a step cache certainly predicts, and these are not exchanged. With an
exchanged velocity goes a flag, whether it was computed: ranks need it where the cache decides by a
signal that only the evaluating rank has seen. Evaluates nothing itself; knows no sampler and no
request.

Legend: B branches of all images of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from triptych.modalities.diffusion.engine.branch_batch import BranchBatch
from triptych.modalities.diffusion.engine.caches.extrapolation import Point
from triptych.modalities.diffusion.engine.denoise_row import GuidanceBranch

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup

Velocities = dict[int, Tensor]
"""Velocities by the branch's index in the batch."""


class BranchParallel:
    """The ranks that share the branches of every step."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._num_images = 0

    def assign(self, branches: Sequence[GuidanceBranch]) -> None:
        """Assign the branches of a new image to ranks in turn."""
        for number, branch in enumerate(branches):
            branch.rank = (self._num_images + number) % self.group.num_ranks
        self._num_images += 1

    def local_indices(self, batch: BranchBatch) -> list[int]:
        """The branches to evaluate here: this rank's, and those every rank can predict itself."""
        return [
            index
            for index, (branch, point) in enumerate(zip(batch.branches, batch.points, strict=True))
            if branch.rank == self.group.rank or _is_predictable(branch, point)
        ]

    def gather(self, batch: BranchBatch, velocities: Velocities) -> Tensor:
        """Velocities of all branches, `[B, ...]`, from those of `local_indices`."""
        pairs = zip(batch.branches, batch.points, strict=True)
        shared = [i for i, pair in enumerate(pairs) if not _is_predictable(*pair)]
        if shared:
            of_ranks = [
                [i for i in shared if batch.branches[i].rank == rank]
                for rank in range(self.group.num_ranks)
            ]
            gathered = self._exchange(batch, velocities, of_ranks)
            computed = _computed(batch, gathered)
            for rank, indices in enumerate(of_ranks):
                if rank == self.group.rank:
                    continue
                for place, i in enumerate(indices):
                    velocities[i] = gathered[rank][place, 1:].view(batch.latent_shape)
                    if (cache := batch.branches[i].cache) is not None:
                        cache.follow(batch.points[i], velocities[i], computes=computed[rank][place])
        return torch.stack([velocities[i] for i in range(len(batch))])

    def _exchange(
        self, batch: BranchBatch, velocities: Velocities, of_ranks: Sequence[Sequence[int]]
    ) -> tuple[Tensor, ...]:
        """For each rank and branch of it: whether the branch was computed, and its velocity."""
        size = batch.latent_shape.numel()
        shape = (max(map(len, of_ranks)), 1 + size)
        sent = torch.zeros(shape, dtype=torch.float32, device=batch.device)
        for place, i in enumerate(of_ranks[self.group.rank]):
            cache = batch.branches[i].cache
            sent[place, 0] = float(cache is None or cache.decisions.decide(batch.points[i].step))
            sent[place, 1:] = velocities[i].flatten()
        return self.group.all_gather(sent)


def _is_predictable(branch: GuidanceBranch, point: Point) -> bool:
    """Whether the branch takes a prediction that every rank can make."""
    return branch.cache is not None and not any(branch.cache.may_compute([point.step]))


def _computed(batch: BranchBatch, gathered: Sequence[Tensor]) -> list[list[bool]]:
    """Which branches each rank computed; `False` for all if every rank can decide alone.

    Reading the flags waits for the device.
    """
    if not any(branch.cache is not None and branch.cache.signal for branch in batch.branches):
        return [[False] * len(each) for each in gathered]
    return [[bool(flag) for flag in row] for row in torch.stack(list(gathered))[:, :, 0].tolist()]
