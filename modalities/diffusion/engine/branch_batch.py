"""The guidance branches of one denoise step, as a batch.

Owns which branch belongs to which row; `guidance` combines them. Knows no model.

Legend: R rows of one latent shape, B guidance branches of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.core.runtime.devices.transfer import to_device
from triptych.modalities.diffusion.engine.caches.extrapolation import Point
from triptych.modalities.diffusion.engine.denoise_row import DenoiseRow, GuidanceBranch
from triptych.modalities.diffusion.engine.families.model import Batch
from triptych.modalities.diffusion.engine.guidance import combine
from triptych.modalities.diffusion.engine.samplers.rows import model_inputs
from triptych.modalities.diffusion.engine.tensor_pool import merge_rows, select_rows


@dataclass(frozen=True, eq=False, slots=True)
class BranchBatch:
    """B branches of R rows: branch b belongs to `rows[row_indices[b]]`, which is at `points[b]`."""

    rows: Sequence[DenoiseRow]
    row_indices: Sequence[int]
    branches: Sequence[GuidanceBranch]
    points: Sequence[Point]

    @classmethod
    def of_rows(cls, rows: Sequence[DenoiseRow], *, positive_only: bool = False) -> BranchBatch:
        """The positive branches of all rows, then the negative branches of the guided rows."""
        guided = [] if positive_only else [i for i, row in enumerate(rows) if row.branches[1:]]
        row_indices = [*range(len(rows)), *guided]
        branches = [row.branches[0] for row in rows] + [rows[i].branches[1] for i in guided]
        points = [row.point for row in rows]
        return cls(rows, row_indices, branches, [points[i] for i in row_indices])

    def __len__(self) -> int:
        return len(self.branches)

    @property
    def latent_shape(self) -> torch.Size:
        """The shape of one velocity."""
        return self.rows[0].sample.pool.shape

    @property
    def device(self) -> torch.device:
        """The device of the latents."""
        return self.rows[0].sample.pool.device

    def select(self, indices: Sequence[int]) -> BranchBatch:
        """The branches at these indices."""
        return BranchBatch(
            self.rows,
            [self.row_indices[i] for i in indices],
            [self.branches[i] for i in indices],
            [self.points[i] for i in indices],
        )

    def model_inputs(self) -> Batch:
        """The model's inputs for all branches."""
        inputs_R = model_inputs([row.sample for row in self.rows])
        samples = [self.rows[i].sample for i in self.row_indices]
        times, next_times = (
            [sample.time_at(sample.step + ahead) for sample in samples] for ahead in (0, 1)
        )
        return Batch(
            samples=select_rows(inputs_R, self.row_indices),
            times=to_device(torch.tensor(times), inputs_R.device),
            conditioning=[branch.conditioning for branch in self.branches],
            next_times=to_device(torch.tensor(next_times), inputs_R.device),
        )

    def guide(self, velocities_B: Tensor) -> Tensor:
        """Combine the branches of each row; the batch is `of_rows`. Returns `[R, ...]`."""
        num_rows = len(self.rows)
        guided = self.row_indices[num_rows:]
        positive_R, negative = velocities_B[:num_rows], velocities_B[num_rows:]
        if not guided:
            return positive_R
        steps = [self.rows[i].guided_step for i in guided]
        combined = combine(steps, select_rows(positive_R, guided), negative)
        if len(guided) == num_rows:
            return combined
        unguided = [i for i in range(num_rows) if i not in guided]
        return merge_rows([(unguided, select_rows(positive_R, unguided)), (guided, combined)])
