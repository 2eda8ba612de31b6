"""Tensors of many rows in one block: a row holds cell numbers, steps gather and scatter cells.

Owns the storage of latents, sampler history and cached outputs, and the operation they share: a
weighted sum with coefficients per row. Knows no sampler and no cache.

Rows that join and leave never copy other rows, and a step takes a handful of device operations for
any number of rows. Growing doubles the block and keeps the cell numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from triptych.core.runtime.devices.transfer import to_device

Weights = Sequence[Sequence[float]]
"""A few numbers for each row, as lists: arrays take longer to create."""
SumRanks = Callable[[Tensor], Tensor]
"""Sums a tensor over the ranks that share a row."""
_LITTLE = 1e-9


class TensorPool:
    """Cells of one shape and dtype. A cell belongs to its taker until it is given back.

    A newly taken cell is zero. Not thread-safe: the engine's thread owns the pool.
    """

    def __init__(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> None:
        self._cells = torch.empty((2, *shape), dtype=dtype, device=device)  # it grows
        self._free = [1, 0]

    @property
    def shape(self) -> torch.Size:
        """The shape of one cell."""
        return self._cells.shape[1:]

    @property
    def device(self) -> torch.device:
        """The device of the cells."""
        return self._cells.device

    @property
    def num_used(self) -> int:
        """The number of cells taken and not given back."""
        return len(self._cells) - len(self._free)

    @property
    def num_bytes(self) -> int:
        """Bytes of the block on the device, used or not."""
        return self._cells.nbytes

    def take(self, count: int) -> tuple[int, ...]:
        """Take `count` free cells."""
        while len(self._free) < count:
            self._grow()
        left = len(self._free) - count
        cells = tuple(reversed(self._free[left:]))
        # Values left by other rows must never show.
        self._cells.index_fill_(0, _index(cells, self.device), 0)
        del self._free[left:]  # only now: if memory runs out, nothing was taken
        return cells

    def give_back(self, cells: Sequence[int]) -> None:
        """Free cells that were taken, each once."""
        assert not set(cells) & set(self._free), "a cell was given back twice"
        self._free.extend(cells)

    def read(self, cells: Sequence[int]) -> Tensor:
        """A copy of the cells, `[len(cells), *shape]`."""
        return self._cells.index_select(0, _index(cells, self.device))

    def read_columns(self, cells_IR: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Copies of cell lists of equal length, `[R, *shape]` each, gathered at once."""
        flat = [cell for cells_R in cells_IR for cell in cells_R]
        return self.read(flat).view(len(cells_IR), -1, *self.shape).unbind()

    def distances(
        self, cells: Sequence[int], values_R: Tensor, sum_ranks: SumRanks | None = None
    ) -> Tensor:
        """Distance of each of R values from its cell: mean|value - cell| / mean|cell|, float32.

        With `sum_ranks` each rank has a part of every value and cell.
        """
        index, values_RN = _index(cells, self.device), values_R.flatten(1)
        if self.device.type == "cuda" and sum_ranks is None:
            from triptych.core.runtime.kernels.triton.cache_metrics import relative_distances

            distances_R: Tensor = relative_distances(values_RN, self._cells.flatten(1), index)
            return distances_R
        cells_RN = self._cells.index_select(0, index).float().flatten(1)
        moved_RN = (values_RN.float() - cells_RN).abs()
        if sum_ranks is None:
            return moved_RN.mean(1) / (cells_RN.abs().mean(1) + _LITTLE)
        sums = (moved_RN.sum(1), cells_RN.abs().sum(1), torch.ones_like(cells_RN).sum(1))
        moved_R, size_R, count_R = sum_ranks(torch.stack(sums)).unbind()
        return moved_R / (size_R + _LITTLE * count_R)

    def weighted(self, cells_IR: Sequence[Sequence[int]], weights_RI: Weights) -> Tensor:
        """`weighted_sum` of lists of cells, in float32: `[R, *shape]`."""
        if self.device.type == "cuda":
            from triptych.core.runtime.kernels.triton.cache_metrics import weighted_cells

            weights_IR = torch.tensor(weights_RI, dtype=torch.float32).t().contiguous()
            index = _index([list(cells_R) for cells_R in cells_IR], self.device)
            sums: Tensor = weighted_cells(
                self._cells.flatten(1), index, to_device(weights_IR, self.device)
            )
            return sums.view(-1, *self.shape)
        columns = [column.float() for column in self.read_columns(cells_IR)]
        return weighted_sum(weights_RI, columns)

    def write(self, cells: Sequence[int], values: Tensor) -> None:
        """Overwrite cells with `values`, `[len(cells), *shape]`, in the pool's dtype."""
        self._cells.index_copy_(0, _index(cells, self.device), values.to(self._cells.dtype))

    def _grow(self) -> None:
        size = len(self._cells)
        self._cells = torch.cat([self._cells, torch.empty_like(self._cells)])
        self._free.extend(range(2 * size - 1, size - 1, -1))


class TensorPools:
    """One pool per shape, dtype and device, created on first use."""

    def __init__(self) -> None:
        self._pools: dict[tuple[torch.Size, torch.dtype, torch.device], TensorPool] = {}

    def pool(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> TensorPool:
        """The pool of this shape, dtype and device."""
        key = (torch.Size(shape), dtype, device)
        if key not in self._pools:
            self._pools[key] = TensorPool(shape, dtype=dtype, device=device)
        return self._pools[key]

    @property
    def num_used(self) -> int:
        """The number of cells taken in all pools: zero when no row is left."""
        return sum(pool.num_used for pool in self._pools.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools on their devices."""
        return sum(pool.num_bytes for pool in self._pools.values())

    def trim(self) -> None:
        """Drop pools that no row uses, such as those of sizes no longer generated."""
        self._pools = {key: pool for key, pool in self._pools.items() if pool.num_used}


def select_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows in this order, without waiting for the device; `tensor` itself if that is all of it."""
    if list(rows) == list(range(len(tensor))):
        return tensor
    return tensor.index_select(0, _index(rows, tensor.device))


def merge_rows(parts: Sequence[tuple[Sequence[int], Tensor]]) -> Tensor:
    """Merge parts, each given with its row numbers, into a tensor ordered by row number."""
    numbers = [row for rows, _ in parts for row in rows]
    tensors = [tensor for _, tensor in parts]
    whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    return select_rows(whole, sorted(range(len(numbers)), key=numbers.__getitem__))


def weighted_sum(weights_RI: Weights, columns: Sequence[Tensor]) -> Tensor:
    """Sum over i of `weights_RI[r, i] * columns[i][r]`, each row with its own weights.

    A column whose weights are all zero is not read, so it may hold anything. Terms are added in the
    order of the columns, so a row's result has the same bits in every batch.
    """
    of_columns = {index: w_R for index, w_R in enumerate(zip(*weights_RI, strict=True)) if any(w_R)}
    if not of_columns:
        return torch.zeros_like(columns[0])
    wanted = list(of_columns)
    first = columns[wanted[0]]
    w_IR = to_device(torch.tensor(list(of_columns.values()), dtype=first.dtype), first.device)
    w_IR = w_IR.view(*w_IR.shape, *[1] * (first.ndim - 1))
    total = first * w_IR[0]
    for index, w_R in zip(wanted[1:], w_IR[1:], strict=True):
        total.addcmul_(columns[index], w_R)
    return total


def _index(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return to_device(torch.tensor(numbers, dtype=torch.int64), device)
