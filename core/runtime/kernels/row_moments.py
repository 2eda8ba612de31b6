"""Mean values of rows and of their squares, and what is far above a row's mean.

Owns the operations. A row's result does not depend on other rows.

Shapes: T tokens, F features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class RowMoments(NamedTuple):
    """The means of a row's values and of their squares, `[T, 1]`, float32."""

    mean: torch.Tensor
    square: torch.Tensor


def row_moments(x_TF: torch.Tensor) -> RowMoments:
    """The moments of each row."""
    x_TF = x_TF.float()
    return RowMoments(x_TF.mean(1, keepdim=True), x_TF.square().mean(1, keepdim=True))


def relu_above(x_TF: torch.Tensor, num_deviations: float) -> None:
    """Replace values by how far they are above a limit, or 0.

    The limit is as many standard deviations above the row's mean (Gemma 3n's sparse activations: of
    normally distributed values a known share is above it).
    """
    mean_T1, square_T1 = row_moments(x_TF)
    deviation_T1 = (square_T1 - mean_T1.square()).clamp_(min=0).sqrt_()
    limit_T1 = mean_T1 + deviation_T1 * num_deviations
    x_TF.copy_((x_TF - limit_T1).clamp_(min=0))
