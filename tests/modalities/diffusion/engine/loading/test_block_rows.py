"""Matrices in blocks in a conversion of names: whole rows as they are, others as values."""

from __future__ import annotations

import pytest
import torch

from support.block_weights import random_blocks
from triptych.core.runtime.kernels.dequantize import PackedTensor
from triptych.modalities.diffusion.engine.loading.block_rows import BlockRows


def rows(kind: str = "q4_0", num_outputs: int = 6, seed: int = 0) -> tuple[BlockRows, torch.Tensor]:
    packed = random_blocks(kind, num_outputs, 64, seed=seed)
    return BlockRows.of(packed, torch.float32), packed.dequantize(torch.float32)


def test_cutting_and_joining_rows_keeps_blocks() -> None:
    given, values = rows()
    other, more = rows(seed=1)
    assert given.shape == values.shape
    for part, expected in zip(torch.chunk(given, 3, dim=0), values.chunk(3), strict=True):
        assert isinstance(part, BlockRows)
        assert torch.equal(part.packed.dequantize(torch.float32), expected)
    first, rest = given.split([2, 4])
    swapped = torch.cat([rest, first, other], dim=0)
    assert isinstance(swapped, BlockRows)
    assert isinstance(swapped.packed, PackedTensor)
    assert swapped.shape == (12, 64)
    expected = torch.cat([values[2:], values[:2], more])
    assert torch.equal(swapped.packed.dequantize(torch.float32), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t(),
        lambda x: x * 2,
        lambda x: torch.chunk(x, 2, dim=1)[1],
        lambda x: torch.cat([x, torch.zeros(1, 64)]),
        lambda x: torch.cat([x, rows("q8_0")[0]]),
        lambda x: x[:, :3],
        lambda x: x.reshape(3, 2, 64),
    ],
)
def test_any_other_change_has_the_values(change) -> None:
    given, values = rows()
    changed = change(given)
    assert type(changed) is torch.Tensor
    other = rows("q8_0")[1]
    expected = torch.cat([values, other]) if changed.shape == (12, 64) else change(values)
    assert torch.equal(changed, expected)


def test_reading_a_checkpoint_looks_at_shape_and_type() -> None:
    given, values = rows()
    assert (given.ndim, given.dim(), given.size(0)) == (2, 2, 6)
    assert given.dtype is values.dtype
    assert given.numel() == values.numel()
