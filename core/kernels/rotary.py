"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split layout.

Shapes: T tokens, H heads, D head dim, R <= D rotated dims.
"""

from __future__ import annotations

import torch


def rotary(x_THD: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor) -> torch.Tensor:
    """Rotate the first R dims of every head; the pair of dim `i` is dim `i + R / 2`.

    `sin_T1R` carries its sign: negative in the first half. Returns a new contiguous tensor.
    """
    num_tokens, _, head_dim = x_THD.shape
    assert cos_T1R.shape == sin_T1R.shape
    assert cos_T1R.shape[0] == num_tokens
    assert cos_T1R.shape[2] <= head_dim
    return _reference(x_THD, cos_T1R, sin_T1R)


def _reference(x_THD: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor) -> torch.Tensor:
    num_rotated = cos_T1R.shape[2]
    if num_rotated == x_THD.shape[2]:
        return (x_THD * cos_T1R).addcmul_(x_THD.roll(num_rotated // 2, -1), sin_T1R)
    rotated, rest = x_THD.tensor_split((num_rotated,), dim=2)
    return torch.cat((_reference(rotated, cos_T1R, sin_T1R), rest), dim=2)
