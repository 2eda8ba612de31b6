from __future__ import annotations

import pytest
import torch

from support.kernel_device import on_device
from triptych.core.runtime.kernels.triton import grouped as kernel

pytestmark = pytest.mark.gpu
group_pairs = on_device(kernel.group_pairs)


@pytest.mark.parametrize(
    ("num_pairs", "num_groups"), [(1, 1), (1, 30), (40, 5), (40, 30), (1500, 5), (9000, 3)]
)
def test_every_pair_is_in_a_tile_of_its_group_once_and_in_order(
    num_pairs: int, num_groups: int
) -> None:
    generator = torch.Generator().manual_seed(num_pairs)
    groups_P = torch.randint(-1, num_groups, (num_pairs,), generator=generator, dtype=torch.int32)
    grouped = group_pairs(groups_P, num_groups, 16)
    placed: list[int] = []
    tiles = grouped.pairs_S.view(-1, 16).tolist()
    for group, tile in zip(grouped.groups_of_tiles.tolist(), tiles, strict=True):
        assert -1 <= group < num_groups
        if group >= 0:
            pairs = [pair for pair in tile if pair != num_pairs]
            assert {int(groups_P[pair]) for pair in pairs} == {group}
            placed += pairs
    expected = [pair for pair in range(num_pairs) if groups_P[pair] >= 0]
    assert placed == sorted(expected, key=lambda pair: int(groups_P[pair]))


def test_there_are_tiles_enough_where_each_group_has_one_pair_too_many() -> None:
    groups_P = torch.arange(3, dtype=torch.int32).repeat(17)
    grouped = group_pairs(groups_P, 3, 16)
    assert grouped.groups_of_tiles.tolist() == [0, 0, 1, 1, 2, 2]
    assert (grouped.pairs_S < 51).sum() == 51
