"""The page table of layers with a window, on the host.

Owns the rows' pages in these layers, of which those before a row's windows have been given back.
Knows no steps and no tensors.
"""

from __future__ import annotations

import numpy as np

from triptych.core.engine_api.plan import TokenRow
from triptych.core.runtime.kernels.paged_attention import Int64s


class WindowTable:
    """Tables of `shape` (batch slots and a line of padding, pages of a row).

    The last of `num_pages` is the null page: kernels may read, and ignore, tokens before a window,
    and other rows write to pages that were given back.
    """

    def __init__(self, shape: tuple[int, int], num_pages: int) -> None:
        self._null_page = num_pages - 1
        self.table: Int64s = np.full(shape, self._null_page, dtype=np.int64)
        self.table[-1] = num_pages - 2
        self._places = [(0, 0)] * shape[0]  # the first page that is held, and the end of them

    def update(self, row: TokenRow) -> None:
        """Record what a step takes and gives back."""
        line, new = self.table[row.slot], row.new_window_ids
        first, end = self._places[row.slot]
        if row.sampling is not None:
            line[first:end] = self._null_page
            end = row.first_window
        elif row.first_window > first:
            line[first : row.first_window] = self._null_page
        if new:
            line[end : end + len(new)] = new
        self._places[row.slot] = row.first_window, end + len(new)
