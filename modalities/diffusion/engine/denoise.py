"""The denoise loop: rows with any sampler, step, guidance and cache advance together.

Owns the order of events within a step. Knows no request, no text and no codec: `recipes` turns
prompts into rows and latents into images.

Guidance branches are rows to the model: each has its own conditioning and its own cache, so one
branch may skip a step that the other computes.

Legend: R rows of one latent shape, B guidance branches of all rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor

from triptych.modalities.diffusion.engine.branch_batch import BranchBatch
from triptych.modalities.diffusion.engine.caches.evaluation import evaluate
from triptych.modalities.diffusion.engine.caches.fused_skips import take_skips
from triptych.modalities.diffusion.engine.denoise_row import DenoiseRow, GuidanceBranch
from triptych.modalities.diffusion.engine.families.model import DenoiseModel
from triptych.modalities.diffusion.engine.parallel.guidance import BranchParallel
from triptych.modalities.diffusion.engine.samplers.rows import advance
from triptych.modalities.diffusion.engine.tensor_pool import TensorPool, merge_rows

# Called with rows of one shape and their velocities after guidance, `[R, ...]`.
VelocityHook = Callable[[Sequence[DenoiseRow], Tensor], None]


class Denoiser:
    """Steps rows through one model. All state belongs to the rows, in pools (`tensor_pool`).

    With `branches`, ranks share the branches of every step; each rank must take the same steps.
    """

    def __init__(self, model: DenoiseModel, branches: BranchParallel | None = None) -> None:
        self.model = model
        self._parallel = branches

    def begin(self, row: DenoiseRow) -> None:
        """Assign the branches of a row to ranks, before its first step."""
        if self._parallel is not None:
            self._parallel.assign(row.branches)

    def step(self, rows: Sequence[DenoiseRow], on_velocities: VelocityHook | None = None) -> None:
        """Take one step of each row: predict, guide, step.

            v+, v- = model(x, t, prompt), model(x, t, negative prompt)
            v      = s v+ + (1 - s) v-
            x, h   = weights[t] @ (x, h, v, noise)        (`samplers.program`)

        No row may be done. If this raises, each row has taken its step or can take it again. Tokens
        that a row still lacks are written first.
        """
        for row in rows:
            row.write_tokens()
        for group in _by_shape(rows):
            batch = BranchBatch.of_rows(group)
            velocities = batch.guide(self._predict(batch))
            if on_velocities is not None:
                on_velocities(group, velocities)
            advance([row.sample for row in group], velocities)
            for row in group:
                row.finish_step()

    def advance(
        self,
        rows: Sequence[DenoiseRow],
        num_steps: Sequence[int],
        on_velocities: VelocityHook | None = None,
    ) -> None:
        """Take each row's number of steps, of which all but the last should be skipped.

        So rows with different plans compute their steps in one run of the model. `on_velocities`
        is called for the last steps only.
        """
        self._skip(rows, [count - 1 for count in num_steps])
        self.step([row for row in rows if not row.is_interrupted], on_velocities)

    def evaluate_ahead(self, rows: Sequence[DenoiseRow], num_steps: Sequence[int]) -> None:
        """Take each row's number of steps, which should be skipped, and evaluate one branch more.

        This is half of a guided step: the row's next step evaluates only the other branch.
        """
        self._skip(rows, num_steps)
        left = [row for row in rows if not row.is_interrupted]
        for row in left:
            row.write_tokens()
        for group in _by_shape(left):
            batch = BranchBatch.of_rows(group, positive_only=True)
            for branch, velocity in zip(batch.branches, self._predict(batch), strict=True):
                branch.velocity = velocity

    def _skip(self, rows: Sequence[DenoiseRow], num_steps: Sequence[int]) -> None:
        ends = {
            id(row): row.sample.step + count for row, count in zip(rows, num_steps, strict=True)
        }
        skipping = [row for row in rows if row.sample.step < ends[id(row)]]
        for group in _by_shape(skipping):
            skips = [row.fused_skip(ends[id(row)] - row.sample.step) for row in group]
            take_skips([skip for skip in skips if skip is not None])
        while left := [row for row in skipping if row.sample.step < ends[id(row)]]:
            self.step(left)

    def _predict(self, batch: BranchBatch) -> Tensor:
        """Velocities of the branches, `[B, ...]`; those evaluated ahead are not evaluated again."""
        ready = [i for i, branch in enumerate(batch.branches) if branch.velocity is not None]
        if not ready:
            return self._evaluate(batch)
        velocities = [branch.velocity for branch in batch.branches if branch.velocity is not None]
        parts: list[tuple[Sequence[int], Tensor]] = [(ready, torch.stack(velocities))]
        if pending := [i for i, branch in enumerate(batch.branches) if branch.velocity is None]:
            parts.append((pending, self._evaluate(batch.select(pending))))
        return merge_rows(parts)

    def _evaluate(self, batch: BranchBatch) -> Tensor:
        """Velocities of the branches, `[B, ...]`, from the model or their step caches."""
        if self._parallel is None:
            velocities = merge_rows(self._evaluate_here(batch, range(len(batch))))
        else:
            parts = self._evaluate_here(batch, self._parallel.local_indices(batch))
            local = {i: v for indices, part in parts for i, v in zip(indices, part, strict=True)}
            velocities = self._parallel.gather(batch, local)
        for branch in batch.branches:
            branch.num_evaluations += 1
        return velocities

    def _evaluate_here(
        self, batch: BranchBatch, indices: Iterable[int]
    ) -> list[tuple[list[int], Tensor]]:
        """Velocities of some of the branches, in one run for each group that can share a run."""
        inputs = batch.model_inputs()
        groups: defaultdict[Hashable, list[int]] = defaultdict(list)
        for index in indices:
            groups[self._batch_key(batch.branches[index], inputs.samples.shape[1:])].append(index)
        evaluated = []
        for group in groups.values():
            caches = [batch.branches[index].cache for index in group]
            points = [batch.points[index] for index in group]
            velocities = evaluate(self.model, inputs.select(group), caches, points)
            evaluated.append((group, velocities))
        return evaluated

    def _batch_key(self, branch: GuidanceBranch, sample_shape: torch.Size) -> Hashable:
        if branch.batch_key is None:
            is_on_cpu = self.model.device.type == "cpu"  # where rows of one length stay exact
            is_exact = is_on_cpu or (branch.cache is not None and branch.cache.keeps_hidden)
            branch.batch_key = self.model.batch_key(
                sample_shape, branch.conditioning, is_exact=is_exact
            )
        return branch.batch_key


def _by_shape(rows: Sequence[DenoiseRow]) -> list[list[DenoiseRow]]:
    groups: defaultdict[TensorPool, list[DenoiseRow]] = defaultdict(list)
    for row in rows:
        groups[row.sample.pool].append(row)
    return list(groups.values())
