"""Combinations of the two guidance branches of a row: classifier-free guidance and its variants.

Owns the formulas. Knows no model, no sampler and no prompt.

Legend: R rows of one latent shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor
from torch.nn.functional import normalize

from triptych.modalities.diffusion.engine.tensor_pool import weighted_sum

_TINY = 1e-8


class NormRule(Enum):
    """The norm of the result over the last axis, which a large scale inflates."""

    NONE = auto()  # as it comes
    KEEP = auto()  # the positive branch's (Qwen-Image, Lumina 2)
    LIMIT = auto()  # at most the positive branch's (LongCat-Image)


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Adaptive projected guidance (Sadat et al. 2024, arXiv:2410.02416), from a step on.

    The difference of the branches, summed over the steps with `momentum`, is limited to the norm
    `limit` (0: not), and loses `1 - parallel` of its part along the positive branch.
    """

    scale: float
    momentum: float = 0.0
    limit: float = 0.0
    parallel: float = 0.0
    after_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """Two branches combine to `scale` times the positive minus `scale` - 1 times the negative.

    With `projection`, later steps combine by that.
    """

    scale: float = 1.0
    norm: NormRule = NormRule.NONE
    projection: Projection | None = None

    @property
    def is_linear(self) -> bool:
        """Whether the result is a fixed linear combination of the branches."""
        return self.norm is NormRule.NONE and self.projection is None


@dataclass(eq=False, slots=True)
class Trend:
    """The running sum of a row's differences, for `Projection`. A repeated step counts once."""

    momentum: float
    _step: int = -1
    _before: Tensor | None = None
    _sum: Tensor | None = None

    def add(self, step: int, difference: Tensor) -> Tensor:
        """Add a step's difference and return the sum."""
        if step != self._step:
            self._step, self._before = step, self._sum
        before = self._before
        self._sum = difference if before is None else difference + self.momentum * before
        return self._sum


@dataclass(frozen=True, slots=True)
class GuidedStep:
    """A row's step: its guidance, and the trend if that projects."""

    guidance: Guidance
    step: int
    trend: Trend | None = None


def combine(steps: Sequence[GuidedStep], positive_R: Tensor, negative_R: Tensor) -> Tensor:
    """The guided velocities of rows, `[R, ...]`."""
    scales = [(each.guidance.scale, 1 - each.guidance.scale) for each in steps]
    combined_R = weighted_sum(scales, [positive_R, negative_R])
    for each, result, positive, negative in zip(
        steps, combined_R, positive_R, negative_R, strict=True
    ):
        if each.guidance.norm is not NormRule.NONE:
            result.mul_(_norm_factor(each.guidance.norm, result, positive))
        if each.trend is not None and (projection := each.guidance.projection):
            difference = each.trend.add(each.step, positive - negative)
            if each.step > projection.after_step:
                result.copy_(negative + _projected(projection, difference, positive))
    return combined_R


def _norm_factor(rule: NormRule, result: Tensor, positive: Tensor) -> Tensor:
    wanted: Tensor = positive.norm(dim=-1, keepdim=True)
    found: Tensor = result.norm(dim=-1, keepdim=True)
    if rule is NormRule.KEEP:
        return wanted / found
    return (wanted / (found + _TINY)).clamp(max=1.0)


def _projected(projection: Projection, difference: Tensor, positive: Tensor) -> Tensor:
    """The scaled difference, without the part along the positive branch."""
    if projection.limit > 0:
        difference = difference * (projection.limit / difference.norm()).clamp(max=1.0)
    wide, along = difference.double(), normalize(positive.double().flatten(), dim=0)
    parallel = torch.dot(wide.flatten(), along) * along.view_as(wide)
    kept = wide - parallel + projection.parallel * parallel
    scaled: Tensor = projection.scale * kept.to(difference)
    return scaled
