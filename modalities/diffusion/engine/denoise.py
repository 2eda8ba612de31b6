"""The denoise loop: rows of any sampler, step, guidance and cache, one step at a time.

Owns an image's row from noise to finished latents. Knows no request, no text and no codec:
`recipes` makes rows of prompts and images of latents.

Guidance branches are rows to the model: each has its own conditioning and its own cache, so a
branch may skip while the other computes.

Legend: R images, B branches of all images.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from triptych.core.runtime.devices.transfer import sent
from triptych.modalities.diffusion.engine.caches.evaluation import evaluate
from triptych.modalities.diffusion.engine.caches.extrapolation import Point
from triptych.modalities.diffusion.engine.caches.fused_skips import FusedSkip, take_skips
from triptych.modalities.diffusion.engine.caches.row_cache import RowCache
from triptych.modalities.diffusion.engine.families.model import Batch, Conditioning, DenoiseModel
from triptych.modalities.diffusion.engine.parallel.guidance import BranchParallel
from triptych.modalities.diffusion.engine.samplers.rows import (
    SampleRow,
    advance,
    model_inputs,
    noised,
    overwrite,
    release_row,
)
from triptych.modalities.diffusion.engine.tensor_pool import (
    TensorPool,
    joined,
    picked,
    weighted_sum,
)


@dataclass(eq=False, slots=True, kw_only=True)
class GuidanceBranch:
    """One side of guidance: its conditioning, and its cache.

    `batch_key`: branches with an equal one may share a run; computed once. `answer`: its
    velocity of the row's step, if it was asked ahead. `num_asked` counts what it was asked.
    `rank` is the one that asks the model for it, where branches are divided over several.
    """

    conditioning: Conditioning
    cache: RowCache | None = None
    batch_key: Hashable = None
    answer: Tensor | None = None
    num_asked: int = 0
    rank: int = 0

    @property
    def num_runs(self) -> int:
        """Steps at which the model was run for it."""
        return self.cache.decisions.num_computed if self.cache else self.num_asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """How two branches become one: `scale` times the first less `scale` - 1 times the second.

    `keeps_norm`: the result gets back the first branch's norm over the last axis, which a large
    scale would inflate (Qwen-Image, Lumina 2).
    """

    scale: float = 1.0
    keeps_norm: bool = False


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Kept:
    """What must stay of an image that is edited: its latents, where, and the noise they began in.

    `mask` is 1 where the row generates and 0 where `clean` stays. All are of the sample's shape.
    """

    clean: Tensor
    mask: Tensor
    noise: Tensor


@dataclass(eq=False, kw_only=True)
class DenoiseRow:
    """An image being generated. `release` once, however it ends.

    `branches`: the prompt's, then the negative prompt's where there is guidance.
    """

    sample: SampleRow
    branches: list[GuidanceBranch]
    guidance: Guidance = field(default_factory=Guidance)
    kept: Kept | None = None

    @property
    def is_done(self) -> bool:
        """Whether the latents are finished."""
        return self.sample.is_done

    @property
    def num_steps(self) -> int:
        """Steps of the whole way."""
        return len(self.sample.timesteps)

    @property
    def point(self) -> Point:
        """Where on its way the row stands."""
        step = self.sample.step
        return Point(step, self.sample.noise_levels[step])

    def planned_runs(self) -> list[int]:
        """How many branches may need a run of the model, for each step of the whole way.

        None where all are known to be skipped, and before the row's first step, where it stands.
        """
        num_rows = [0] * self.num_steps
        steps = range(self.sample.step, self.num_steps)
        for branch in self.branches:
            computes = branch.cache.may_compute(steps) if branch.cache else [True] * len(steps)
            for step, may_compute in zip(steps, computes, strict=True):
                num_rows[step] += may_compute
        return num_rows

    def fused_skip(self, num_steps: int) -> FusedSkip | None:
        """The next steps as one map; `None` where they are none, or not known to be skipped."""
        if self.kept is not None or (len(self.branches) == 2 and self.guidance.keeps_norm):
            return None
        caches = [branch.cache for branch in self.branches if branch.cache is not None]
        if len(caches) < len(self.branches):
            return None
        scale = self.guidance.scale
        shares = (scale, 1 - scale) if len(caches) == 2 else (1.0,)
        skip = FusedSkip(self.sample, num_steps, list(zip(caches, shares, strict=True)))
        return skip if skip.is_possible else None

    def forget_answers(self) -> None:
        """The step was taken that branches were asked of."""
        for branch in self.branches:
            branch.answer = None

    def release(self) -> None:
        """Give back everything the row holds."""
        release_row(self.sample)
        for branch in self.branches:
            if branch.cache is not None:
                branch.cache.release()


# Rows of one shape, and their velocities after guidance, `[R, ...]`.
Watch = Callable[[list[DenoiseRow], Tensor], None]


class Denoiser:
    """Steps rows through one model. All state is the rows', in shared pools (`tensor_pool`).

    With `branches`, ranks share the branches of every step; each must take the same steps.
    """

    def __init__(self, model: DenoiseModel, branches: BranchParallel | None = None) -> None:
        self.model = model
        self._division = branches

    def begin(self, row: DenoiseRow) -> None:
        """Take note of a row before its first step."""
        if self._division is not None:
            self._division.assign(row.branches)

    def step(self, rows: Sequence[DenoiseRow], watch: Watch | None = None) -> None:
        """One step of each row. None may be done. `watch` is called before the step is taken.

        Where it raises, each row has either taken its step or can be asked to take it again.
        """
        for members in _by_shape(rows):
            velocities = self._guided(members)
            if watch is not None:
                watch(members, velocities)
            advance([row.sample for row in members], velocities)
            for row in members:
                row.forget_answers()
                if (kept := row.kept) is not None:  # what an edit must not change, as noisy as now
                    before = noised(row.sample, kept.clean, kept.noise)
                    overwrite(row.sample, torch.lerp(before, row.sample.sample, kept.mask))

    def advance(
        self, rows: Sequence[DenoiseRow], num_steps: Sequence[int], watch: Watch | None = None
    ) -> None:
        """Each row takes its number of steps, of which all but the last should be skipped.

        So rows whose plans differ meet at their computed steps, and a run is as full as can be.
        `watch` is called for the last ones alone.
        """
        self._skip(rows, [count - 1 for count in num_steps])
        self.step(rows, watch)

    def ask_ahead(self, rows: Sequence[DenoiseRow], num_steps: Sequence[int]) -> None:
        """Each row takes its number of steps, which should be skipped, and asks one branch more.

        So half of a guided step is done, and may be followed by work for others. Its next step asks
        only the other branch.
        """
        self._skip(rows, num_steps)
        for members in _by_shape(rows):
            branches = [row.branches[0] for row in members]
            answers = self._ask(members, list(range(len(members))), branches)
            for branch, answer in zip(branches, answers, strict=True):
                branch.answer = answer

    def _skip(self, rows: Sequence[DenoiseRow], num_steps: Sequence[int]) -> None:
        ends = {
            id(row): row.sample.step + count for row, count in zip(rows, num_steps, strict=True)
        }
        skipping = [row for row in rows if row.sample.step < ends[id(row)]]
        for members in _by_shape(skipping):
            skips = [row.fused_skip(ends[id(row)] - row.sample.step) for row in members]
            take_skips([skip for skip in skips if skip is not None])
        while left := [row for row in skipping if row.sample.step < ends[id(row)]]:
            self.step(left)

    def _guided(self, rows: list[DenoiseRow]) -> Tensor:
        """Velocities of rows of one shape, `[R, ...]`."""
        guided = [index for index, row in enumerate(rows) if len(row.branches) == 2]
        of_row = [*range(len(rows)), *guided]
        branches = [row.branches[0] for row in rows] + [rows[i].branches[1] for i in guided]
        velocities_B = self._ask(rows, of_row, branches)
        if not guided:
            return velocities_B
        prompted, negative = velocities_B[: len(rows)], velocities_B[len(rows) :]
        guidances = [rows[index].guidance for index in guided]
        if len(guided) == len(rows):
            return _guide(guidances, prompted, negative)
        alone = [index for index in range(len(rows)) if index not in guided]
        both = _guide(guidances, picked(prompted, guided), negative)
        return joined([(alone, picked(prompted, alone)), (guided, both)])

    def _ask(
        self, rows: list[DenoiseRow], of_row: list[int], branches: list[GuidanceBranch]
    ) -> Tensor:
        """Velocities of branches, `[B, ...]`; the model is asked of those that have no answer."""
        parts: list[tuple[list[int], Tensor]] = []
        if left := [index for index, branch in enumerate(branches) if branch.answer is None]:
            asked = [branches[index] for index in left]
            parts.append((left, self._run(rows, [of_row[index] for index in left], asked)))
            for branch in asked:
                branch.num_asked += 1
        if answered := [index for index in range(len(branches)) if index not in left]:
            answers = [branches[index].answer for index in answered]
            parts.append((answered, torch.stack([each for each in answers if each is not None])))
        return joined(parts)

    def _run(
        self, rows: list[DenoiseRow], of_row: list[int], branches: list[GuidanceBranch]
    ) -> Tensor:
        """Velocities of branches, `[B, ...]`."""
        inputs_R = model_inputs([row.sample for row in rows])
        times = [rows[index].sample.timesteps[rows[index].sample.step] for index in of_row]
        batch = Batch(
            samples=picked(inputs_R, of_row),
            times=sent(torch.tensor(times), inputs_R.device),
            conditioning=[branch.conditioning for branch in branches],
        )
        at = [rows[index].point for index in of_row]
        if self._division is None:
            return joined(self._evaluate(batch, branches, at, range(len(branches))))
        here = self._division.asked_here(branches, at)
        answers = {
            number: velocity
            for members, velocities in self._evaluate(batch, branches, at, here)
            for number, velocity in zip(members, velocities, strict=True)
        }
        return self._division.complete(answers, inputs_R[0], branches, at)

    def _evaluate(
        self,
        batch: Batch,
        branches: Sequence[GuidanceBranch],
        at: Sequence[Point],
        numbers: Iterable[int],
    ) -> list[tuple[list[int], Tensor]]:
        """Velocities of some of the branches, in one run for each group that can share one."""
        groups: defaultdict[Hashable, list[int]] = defaultdict(list)
        for number in numbers:
            groups[self._batch_key(branches[number], batch.samples.shape[1:])].append(number)
        return [
            (
                members,
                evaluate(
                    self.model,
                    batch.select(members),
                    [branches[number].cache for number in members],
                    [at[number] for number in members],
                ),
            )
            for members in groups.values()
        ]

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


def _guide(guidances: Sequence[Guidance], prompted: Tensor, negative: Tensor) -> Tensor:
    scales = [(guidance.scale, 1 - guidance.scale) for guidance in guidances]
    guided = weighted_sum(scales, [prompted, negative])
    for guidance, result, first in zip(guidances, guided, prompted, strict=True):
        if guidance.keeps_norm:
            result.mul_(first.norm(dim=-1, keepdim=True) / result.norm(dim=-1, keepdim=True))
    return guided
