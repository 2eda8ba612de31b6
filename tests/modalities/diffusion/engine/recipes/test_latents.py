"""Masks on the latents' grid: as diffusers scales them, and never nothing."""

from __future__ import annotations

import pytest
import torch

from triptych.modalities.diffusion.engine.recipes.latents import cell_mask


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize(("top", "left"), [(0, 0), (3, 5), (17, 30), (31, 63)])
@pytest.mark.parametrize("side", [1, 3, 8, 20])
def test_the_smallest_mask_changes_a_cell(mode: str, top: int, left: int, side: int) -> None:
    mask_1HW = torch.zeros(1, 32, 64)
    mask_1HW[0, top : top + side, left : left + side] = 1
    cells_1HW = cell_mask(mask_1HW, 4, 8, mode)
    assert cells_1HW.shape == (1, 4, 8)
    assert cells_1HW.any()
    touched_1HW = torch.nn.functional.max_pool2d(mask_1HW, 8)
    assert not cells_1HW[touched_1HW == 0].any() or mode == "bilinear"
    assert not cell_mask(torch.zeros(1, 32, 64), 4, 8, mode).any()


def test_a_mask_that_covers_cells_is_scaled_as_diffusers_does() -> None:
    mask_1HW = (torch.rand(1, 64, 64, generator=torch.Generator().manual_seed(1)) > 0.4).float()
    for mode in ("nearest", "bilinear"):
        wanted = torch.nn.functional.interpolate(mask_1HW[None], (8, 8), mode=mode)[0]
        assert torch.equal(cell_mask(mask_1HW, 8, 8, mode), wanted)
