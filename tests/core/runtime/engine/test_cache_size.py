"""Pages of two kinds within given bytes."""

from __future__ import annotations

import pytest
import torch

from triptych.core.runtime.engine.cache_size import CacheSize, Demand
from triptych.core.runtime.layers.attention import KvLayout, KvShape

PAGES_PER_ROW, MOST_ROWS = 64, 8


def layout_of(num_windowed: int, window: int = 64) -> KvLayout:
    shape = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
    shapes = [KvShape(**shape, window=window)] * num_windowed + [KvShape(**shape)]
    return KvLayout(shapes=tuple(shapes), page_size=16, dtype=torch.float32)


def sizes(layout: KvLayout, num_pages: int) -> tuple[CacheSize, CacheSize]:
    """Whole pages in the bytes of `num_pages`, and pages of two kinds."""
    num_bytes, most = num_pages * layout.page_bytes, PAGES_PER_ROW * MOST_ROWS
    limits = {"least_pages": PAGES_PER_ROW, "most_pages": most}
    whole = CacheSize.divided(layout, num_bytes, num_slots=0, has_snapshots=False, **limits)
    return whole, whole.with_windows(layout, num_bytes, demand=Demand(MOST_ROWS, 128), **limits)


@pytest.mark.parametrize("num_pages", [PAGES_PER_ROW, 100, 300, 512, 2000])
@pytest.mark.parametrize("num_windowed", [1, 5])
def test_there_are_never_fewer_pages(num_windowed: int, num_pages: int) -> None:
    layout = layout_of(num_windowed)
    whole, own = sizes(layout, num_pages)
    assert own.windows is not None
    assert own.num_pages >= whole.num_pages > own.num_window_pages
    assert own.page_bytes(own.layout_of(layout)) <= num_pages * layout.page_bytes
    least = own.windows.num_rows * (own.windows.reach + 2) + 128 // 16
    assert own.num_window_pages >= least
    if num_pages >= 512:
        assert own.windows.num_rows == MOST_ROWS
        assert own.num_window_pages == least + MOST_ROWS * (own.windows.reach + 2)


def test_a_row_fits_where_whole_pages_do_not() -> None:
    layout = layout_of(5)
    num_bytes = 40 * layout.page_bytes
    own = CacheSize(PAGES_PER_ROW).with_windows(
        layout,
        num_bytes,
        least_pages=PAGES_PER_ROW,
        most_pages=PAGES_PER_ROW,
        demand=Demand(MOST_ROWS, 128),
    )
    assert own.num_pages == PAGES_PER_ROW
    assert own.page_bytes(own.layout_of(layout)) <= num_bytes


@pytest.mark.parametrize("window", [0, 16 * PAGES_PER_ROW, 16 * PAGES_PER_ROW - 40])
def test_pages_stay_whole_where_windows_save_nothing(window: int) -> None:
    whole, own = sizes(layout_of(3, window or None), 300)  # type: ignore[arg-type]
    assert own == whole


def test_one_layer_with_a_window_among_all_may_have_all_pages() -> None:
    shape = KvShape(num_heads=2, num_kv_heads=2, head_dim=8, window=64)
    layout = KvLayout(shapes=(shape,) * 2, page_size=16, dtype=torch.float32)
    own = sizes(layout, 100)[1]
    assert own.num_pages == PAGES_PER_ROW * MOST_ROWS
    assert own.layout_of(layout).page_bytes == 0
