"""Distances and predictions of step caches against the pool's on a CPU."""

from __future__ import annotations

import pytest
import torch

from support.kernel_device import on_device
from triptych.core.runtime.kernels.triton import cache_metrics
from triptych.modalities.diffusion.engine.caches.extrapolation import Point, StepTaylor
from triptych.modalities.diffusion.engine.tensor_pool import TensorPool

pytestmark = pytest.mark.gpu
launch_distances = on_device(cache_metrics.launch_distances)
launch_weighted = on_device(cache_metrics.launch_weighted)


def pool_of(size: int, dtype: torch.dtype) -> tuple[TensorPool, tuple[int, ...]]:
    pool = TensorPool((size,), dtype=dtype, device=torch.device("cpu"))
    cells = pool.take(7)
    generator = torch.Generator().manual_seed(size)
    pool.write(cells, torch.randn(7, size, generator=generator))
    return pool, cells


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 300, 2048, 33000])
def test_distances_equal_the_pool_s(size: int, dtype: torch.dtype) -> None:
    pool, cells = pool_of(size, dtype)
    values = torch.randn(3, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    chosen = [cells[4], cells[0], cells[4]]
    expected = pool.distances(chosen, values)
    found = launch_distances(values, pool._cells, torch.tensor(chosen))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    alone = launch_distances(values[1:2], pool._cells, torch.tensor(chosen[1:2]))
    assert torch.equal(alone, found[1:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 300, 2500])
def test_predictions_equal_the_pool_s(size: int, dtype: torch.dtype) -> None:
    pool, cells = pool_of(size, dtype)
    taylor = StepTaylor(order=2)
    points = [Point(9, 0.3), Point(6, 0.5), Point(4, 0.7)]
    weights = [taylor.weights(points, Point(step, 0.0)) for step in (10, 11)]
    weights.append([1.0, 0.0, 0.0])
    cells_KR = [[cells[0], cells[3], cells[6]], [cells[1], cells[4], cells[6]]]
    cells_KR.append([cells[2], cells[5], cells[6]])
    found = launch_weighted(
        pool._cells, torch.tensor(cells_KR), torch.tensor(weights).float().t().contiguous()
    )
    torch.testing.assert_close(found, pool.weighted(cells_KR, weights), rtol=1e-5, atol=1e-5)


def test_a_cell_without_weight_may_hold_anything() -> None:
    cells = torch.ones(3, 5)
    cells[1] = torch.nan
    numbers = torch.tensor([[0, 2], [1, 1]])
    found = launch_weighted(cells, numbers, torch.tensor([[2.0, 3.0], [0.0, 0.0]]))
    assert found.tolist() == [[2.0] * 5, [3.0] * 5]
