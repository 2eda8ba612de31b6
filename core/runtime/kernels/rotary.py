"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

Shapes: T tokens, H heads, D head dim, R <= D rotated dims.
"""

from __future__ import annotations

import torch


def rotary(
    x_THD: torch.Tensor,
    cos_T1R: torch.Tensor,
    sin_T1R: torch.Tensor,
    *,
    is_interleaved: bool = False,
) -> torch.Tensor:
    """Rotate the first R dims of every head; the pair of dim `i` is dim `i + R / 2`.

    `sin_T1R` carries its sign: negative in the first half. With `is_interleaved`, pairs are
    adjacent; the rows of cosines and sines are the same. Returns a new contiguous tensor.
    """
    num_tokens, _, head_dim = x_THD.shape
    num_rotated = cos_T1R.shape[2]
    assert cos_T1R.shape == sin_T1R.shape
    assert cos_T1R.shape[0] == num_tokens
    assert num_rotated <= head_dim
    if num_rotated == head_dim and not is_interleaved:
        return _reference(x_THD, cos_T1R, sin_T1R)
    rotated, rest = x_THD.tensor_split((num_rotated,), dim=2)
    if is_interleaved:
        halves = _reference(_swapped(rotated, 2), cos_T1R, sin_T1R)
        rotated = _swapped(halves, num_rotated // 2)
    else:
        rotated = _reference(rotated, cos_T1R, sin_T1R)
    return torch.cat((rotated, rest), dim=2)


def _reference(x_THR: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor) -> torch.Tensor:
    return (x_THR * cos_T1R).addcmul_(x_THR.roll(x_THR.shape[2] // 2, -1), sin_T1R)


def _swapped(x_THR: torch.Tensor, inner: int) -> torch.Tensor:
    """Transpose the last axis as a matrix with `inner` columns: pairs to halves, and back."""
    swapped: torch.Tensor = x_THR.unflatten(2, (-1, inner)).transpose(2, 3).flatten(2)
    return swapped
