"""Norm and rotation in one pass, against one after the other."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb

from support.kernel_device import on_device
from triptych.core.runtime.kernels.norm_rotary import norm_rotary
from triptych.core.runtime.kernels.triton import norm_rotary as kernel

pytestmark = pytest.mark.gpu

launch = on_device(kernel.launch)
EPS = 1e-6
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def case_of(shape: tuple[int, int, int, int], dtype: torch.dtype) -> Case:
    """Heads as a joint projection has them, weights, and the angles of each pair."""
    rows, tokens, heads, dim = shape
    generator = torch.Generator().manual_seed(dim)
    wide = torch.randn(rows, tokens, 3, heads, dim, generator=generator).to(dtype)
    weight = torch.randn(dim, generator=generator).to(dtype)
    angles = torch.randn(tokens, dim // 2, generator=generator).repeat_interleave(2, 1)
    return wide[:, :, 1], weight, angles.cos(), angles.sin()


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 3, 3, 10), (1, 5, 24, 128), (2, 2, 5, 64)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 0.03)])
def test_equals_torch(
    shape: tuple[int, int, int, int], dtype: torch.dtype, tolerance: float
) -> None:
    x, weight, cos, sin = case_of(shape, dtype)
    expected, found = torch.empty_like(x), torch.empty_like(x)
    norm_rotary(x, weight, cos, sin, expected, eps=EPS)
    launch(x, weight, cos, sin, found, EPS)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_the_reference_is_that_of_diffusers() -> None:
    x, weight, cos, sin = case_of((2, 3, 4, 8), torch.float32)
    norm, found = torch.nn.RMSNorm(8, eps=EPS), torch.empty_like(x)
    norm.weight.data = weight
    norm_rotary(x, weight, cos, sin, found, eps=EPS)
    expected = apply_rotary_emb(norm(x), (cos, sin), sequence_dim=1)
    torch.testing.assert_close(found, expected)


def test_writes_a_part_of_a_larger_tensor() -> None:
    x, weight, cos, sin = case_of((2, 3, 5, 8), torch.float32)
    joint, expected = torch.zeros(2, 7, 5, 8), torch.empty_like(x)
    norm_rotary(x, weight, cos, sin, expected, eps=EPS)
    launch(x, weight, cos, sin, joint[:, 2:5], EPS)
    torch.testing.assert_close(joint[:, 2:5], expected)
    assert joint[:, :2].count_nonzero() == joint[:, 5:].count_nonzero() == 0
