"""Adaptive norms against one operation after the other."""

from __future__ import annotations

import pytest
import torch

from support.kernel_device import on_device
from triptych.core.runtime.kernels import adaln as reference
from triptych.core.runtime.kernels.triton import adaln

pytestmark = pytest.mark.gpu
launch_modulated_norm = on_device(adaln.launch_modulated_norm)
launch_gated_modulated_norm = on_device(adaln.launch_gated_modulated_norm)
EPS = 1e-6


@pytest.mark.parametrize("is_rms", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 100), (3, 2, 257)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 5e-6), (torch.float16, 8e-3), (torch.bfloat16, 0.06)],
)
def test_equals_torch(
    shape: tuple[int, int, int], dtype: torch.dtype, tolerance: float, is_rms: bool
) -> None:
    generator = torch.Generator().manual_seed(shape[2])

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    rows, _, features = shape
    x, y = random(*shape) + 2, random(*shape)
    scale, shift, gate = random(rows, 3 * features).chunk(3, dim=1)  # as a projection has them
    close = {"rtol": tolerance, "atol": tolerance}
    expected = reference.modulated_norm(x, scale, shift, eps=EPS, is_rms=is_rms)
    found = launch_modulated_norm(x, scale, shift, EPS, is_rms)
    torch.testing.assert_close(found, expected, **close)
    expected, expected_total = reference.gated_modulated_norm(
        x, (y, gate), scale, shift, eps=EPS, is_rms=is_rms
    )
    found, total = launch_gated_modulated_norm(x, y, gate, scale, shift, EPS, is_rms)
    torch.testing.assert_close(total, expected_total, **close)
    torch.testing.assert_close(found, expected, **close)


def test_takes_tokens_that_lie_apart() -> None:
    wide = torch.randn(2, 5, 3, 16)
    x, scale, shift = wide[:, :, 1], torch.randn(2, 16), torch.randn(2, 16)
    expected = reference.modulated_norm(x, scale, shift, eps=EPS)
    torch.testing.assert_close(launch_modulated_norm(x, scale, shift, EPS, False), expected)
