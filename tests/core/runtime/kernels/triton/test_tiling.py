from __future__ import annotations

import pytest

from triptych.core.runtime.kernels.triton.tiling import choose_tiling


@pytest.mark.parametrize(("num_outputs", "num_steps"), [(64, 64), (4096, 32), (128_000, 64)])
def test_in_deterministic_mode_tiles_and_splits_are_those_of_the_weight(
    num_outputs: int, num_steps: int
) -> None:
    tilings = [
        choose_tiling(num_rows, num_outputs, num_steps, is_deterministic=True)
        for num_rows in (1, 2, 16, 17, 64, 65, 1000)
    ]
    assert len({(tiling.rows, tiling.outputs, tiling.num_splits) for tiling in tilings}) == 1
    assert all(tiling.num_splits % tiling.splits_per_program == 0 for tiling in tilings)


def test_parts_are_written_for_few_rows_alone() -> None:
    one = choose_tiling(1, 64, 64, is_deterministic=True)
    many = choose_tiling(1000, 64, 64, is_deterministic=True)
    assert one.num_parts == one.num_splits > 1
    assert many.num_parts == 1


def test_few_tiles_are_split_and_many_are_not() -> None:
    assert choose_tiling(1, 512, 64, is_deterministic=False).num_splits > 1
    assert choose_tiling(1, 128_000, 64, is_deterministic=False).num_splits == 1
    assert choose_tiling(1, 512, 1, is_deterministic=False).num_splits == 1
