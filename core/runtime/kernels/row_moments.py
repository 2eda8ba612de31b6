"""Rows by their own mean values: as large as other rows, or what is far above their mean.

Owns the operations and their torch references. A row's result does not depend on other rows.

Shapes: T tokens, F features.
"""

from __future__ import annotations

import torch

LEAST_SQUARE = 1e-5
"""Below this mean square a row is not enlarged any more (Gemma 3n)."""


def as_large_as(x_TF: torch.Tensor, other_TF: torch.Tensor) -> torch.Tensor:
    """Rows of `other_TF` with the root mean squares of those of `x_TF`."""
    if x_TF.is_cuda:
        from triptych.core.runtime.kernels.triton.row_moments import as_large_as as on_gpu

        found_TF: torch.Tensor = on_gpu(x_TF, other_TF)
        return found_TF
    target_T1, own_T1 = (each.float().square().mean(1, keepdim=True) for each in (x_TF, other_TF))
    factor_T1 = (target_T1 / own_T1.clamp(min=LEAST_SQUARE)).sqrt()
    return (other_TF * factor_T1).to(x_TF.dtype)


def relu_above(x_TF: torch.Tensor, num_deviations: float) -> None:
    """Replace values by how far they are above a limit, or 0.

    The limit is as many standard deviations above the row's mean (Gemma 3n's sparse activations: of
    normally distributed values a known share is above it).
    """
    if x_TF.is_cuda:
        from triptych.core.runtime.kernels.triton.row_moments import relu_above as on_gpu

        on_gpu(x_TF, num_deviations)
        return
    wide_TF = x_TF.float()
    mean_T1 = wide_TF.mean(1, keepdim=True)
    limit_T1 = mean_T1 + wide_TF.std(1, keepdim=True, correction=0) * num_deviations
    x_TF.copy_((wide_TF - limit_T1).clamp_(min=0))
