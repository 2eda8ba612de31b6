"""Maps between residual streams, and rows by their own means, against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.kernel_device import on_device
from triptych.core.runtime.kernels.altup import Router, correct_streams, predict_streams
from triptych.core.runtime.kernels.row_moments import as_large_as, relu_above
from triptych.core.runtime.kernels.triton import altup, row_moments

pytestmark = pytest.mark.gpu
predict = on_device(altup.launch_predict)
correct = on_device(altup.launch_correct)
scale = on_device(row_moments.launch_as_large_as)
keep = on_device(row_moments.launch_relu_above)
SOURCE = torch.Generator().manual_seed(2)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=SOURCE).to(dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    close: dict[str, Any] = dict.fromkeys(
        ("rtol", "atol"), 1e-5 if found.dtype is torch.float32 else 1.6e-2
    )
    torch.testing.assert_close(found, expected, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(3, 3, 530), (1, 4, 48), (0, 4, 8), (1, 7, 300)])
def test_streams_equal_torch(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_tokens, num_streams, hidden = sizes
    x = random(num_tokens, num_streams, hidden, dtype=dtype)
    router = Router(random(num_streams, hidden) / hidden**0.5, 1e-6)
    pairs = random(num_streams**2, num_streams, dtype=dtype)
    own, computed = pairs[:num_streams], random(num_tokens, hidden, dtype=dtype)
    assert_near(predict(x, *router, pairs), predict_streams(x, router, pairs))
    assert_near(correct(x, computed, *router, own), correct_streams(x, computed, router, own))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_equal_torch(dtype: torch.dtype) -> None:
    wide = random(3, 2 * 1100, dtype=dtype)
    wide[1, :1100] *= 1e-4  # too small to be enlarged as much
    x, other = random(3, 1100, dtype=dtype), wide[:, :1100]
    assert_near(scale(x, other), as_large_as(x, other))
    wide += 2
    expected, found = wide.clone(), wide.clone()
    relu_above(expected[:, :1100], 0.5)
    keep(found[:, :1100], 0.5)
    assert_near(found, expected)
    assert 0.2 < float((found[0, :1100] > 0).float().mean()) < 0.4
