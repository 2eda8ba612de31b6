"""One image's row on its way from noise to finished latents, with its guidance branches.

Owns the state of the row. Knows no model and no other row; `denoise` advances rows together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from triptych.modalities.diffusion.engine.caches.extrapolation import Point
from triptych.modalities.diffusion.engine.caches.fused_skips import FusedSkip
from triptych.modalities.diffusion.engine.caches.row_cache import RowCache
from triptych.modalities.diffusion.engine.families.model import Conditioning
from triptych.modalities.diffusion.engine.guidance import Guidance, GuidedStep, Trend
from triptych.modalities.diffusion.engine.prior import ImageTokens
from triptych.modalities.diffusion.engine.samplers.rows import (
    SampleRow,
    noised,
    overwrite,
    release_row,
)


@dataclass(eq=False, slots=True, kw_only=True)
class GuidanceBranch:
    """One branch of classifier-free guidance: its conditioning and its step cache.

    `batch_key`: branches with equal keys may share a run of the model; computed once. `velocity`:
    the branch's velocity at the row's step, if it was evaluated ahead. `num_evaluations` counts
    the steps evaluated, skipped ones included. `rank` evaluates the branch where several ranks
    share the branches.
    """

    conditioning: Conditioning
    cache: RowCache | None = None
    batch_key: Hashable = None
    velocity: Tensor | None = None
    num_evaluations: int = 0
    rank: int = 0

    @property
    def num_runs(self) -> int:
        """Steps at which the model ran for this branch."""
        return self.cache.decisions.num_computed if self.cache else self.num_evaluations


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Inpainting:
    """The part of an edited image that must stay: its latents, the mask and the initial noise.

    `mask` is 1 where the row generates and 0 where `clean` stays. All have the sample's shape.
    """

    clean: Tensor
    mask: Tensor
    noise: Tensor


@dataclass(eq=False, kw_only=True)
class DenoiseRow:
    """An image being generated. `release` must be called once, however generation ends.

    `branches`: the positive prompt's, then the negative prompt's if the row is guided.
    `on_step_end`, if set, is called with the row after each of its steps. `tokens`, if there are
    any, are written before the first step.
    """

    sample: SampleRow
    branches: list[GuidanceBranch]
    guidance: Guidance = field(default_factory=Guidance)
    inpainting: Inpainting | None = None
    tokens: ImageTokens | None = None
    on_step_end: Callable[[DenoiseRow], None] | None = None
    is_interrupted: bool = False
    _trend: Trend | None = None

    def __post_init__(self) -> None:
        if self.guidance.projection is not None:
            self._trend = Trend(self.guidance.projection.momentum)

    @property
    def guided_step(self) -> GuidedStep:
        """The present step, for `guidance.combine`."""
        return GuidedStep(self.guidance, self.sample.step, self._trend)

    @property
    def is_done(self) -> bool:
        """Whether the latents are finished."""
        return self.sample.is_done

    @property
    def num_steps(self) -> int:
        """The number of steps of the whole trajectory."""
        return len(self.sample.timesteps)

    @property
    def point(self) -> Point:
        """The row's present point on its trajectory."""
        step = self.sample.step
        return Point(step, self.sample.noise_levels[step])

    def planned_runs(self) -> list[int]:
        """How many branches may need a run of the model, for each step of the whole trajectory.

        0 where every branch is known to skip the step, and for steps before the present one.
        """
        num_rows = [0] * self.num_steps
        steps = range(self.sample.step, self.num_steps)
        for branch in self.branches:
            computes = branch.cache.may_compute(steps) if branch.cache else [True] * len(steps)
            for step, may_compute in zip(steps, computes, strict=True):
                num_rows[step] += may_compute
        return num_rows

    def fused_skip(self, num_steps: int) -> FusedSkip | None:
        """The next steps as one linear map; `None` unless all are known to be skipped."""
        if self.inpainting or self.on_step_end:
            return None
        if len(self.branches) == 2 and not self.guidance.is_linear:
            return None
        caches = [branch.cache for branch in self.branches if branch.cache is not None]
        if len(caches) < len(self.branches):
            return None
        scale = self.guidance.scale
        shares = (scale, 1 - scale) if len(caches) == 2 else (1.0,)
        skip = FusedSkip(self.sample, num_steps, list(zip(caches, shares, strict=True)))
        return skip if skip.is_possible else None

    @property
    def num_tokens(self) -> int:
        """The number of tokens to write before the first step."""
        return self.tokens.num_tokens if self.tokens is not None else 0

    def write_tokens(self, end: int | None = None) -> None:
        """Write tokens until there are `end`, by default all."""
        if self.tokens is not None and not self.tokens.is_done:
            self.tokens.advance(self.num_tokens if end is None else end)

    def finish_step(self) -> None:
        """Drop the velocities of the step just taken, and restore what an edit must not change."""
        for branch in self.branches:
            branch.velocity = None
        if (edit := self.inpainting) is not None:
            original = noised(self.sample, edit.clean, edit.noise)
            overwrite(self.sample, torch.lerp(original, self.sample.sample, edit.mask))
        if self.on_step_end is not None:
            self.on_step_end(self)

    def interrupt(self) -> None:
        """Take no further step: the present latents are the finished ones."""
        self.sample.step, self.is_interrupted = self.num_steps, True

    def release(self) -> None:
        """Give back everything the row holds."""
        release_row(self.sample)
        for branch in self.branches:
            if branch.cache is not None:
                branch.cache.release()
