"""Torch operations whose results for a row depend on the batch, computed row by row.

Owns the list of these operations. On a CPU torch chooses algorithms by the size of the whole batch,
and computes the remainder of a thread's share in another way than the rest, so that the last bits
of a row may change with the other rows. A row that is computed separately does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_ROW_DIMS: Mapping[Callable[..., Any], int] = MappingProxyType(
    {
        functional.conv1d: 3,
        functional.conv2d: 4,
        functional.conv3d: 5,
        functional.conv_transpose1d: 3,
        functional.conv_transpose2d: 4,
        functional.conv_transpose3d: 5,
        functional.linear: 2,
        functional.gelu: 1,
        functional.mish: 1,
        functional.silu: 1,
        functional.softplus: 1,
        torch.sigmoid: 1,
        Tensor.sigmoid: 1,
        functional.scaled_dot_product_attention: 3,
        torch.matmul: 3,
        Tensor.matmul: 3,
        Tensor.__matmul__: 3,
    }
)
"""The least number of dimensions of their first argument if its first dimension is rows."""
_PRODUCT: Sequence[int | str] = (0, 1)
_INPUT: Sequence[int | str] = (0, "input")
_ATTENDED: Sequence[int | str] = (*range(4), "query", "key", "value", "attn_mask")
_PLACES: Mapping[Callable[..., Any], Sequence[int | str]] = MappingProxyType(
    {
        functional.scaled_dot_product_attention: _ATTENDED,
        torch.matmul: _PRODUCT,
        Tensor.matmul: _PRODUCT,
        Tensor.__matmul__: _PRODUCT,
    }
)
"""Places and names of the arguments that have rows; of most operations only the first."""


def row_by_row(num_rows: int, device: torch.device) -> AbstractContextManager[object]:
    """Inside, each row of a batch of `num_rows` is computed as it would be without the others.

    That holds for tensors whose first dimension is a multiple of `num_rows`, a row's parts side by
    side. On a GPU nothing changes.
    """
    return _RowByRow(num_rows) if num_rows > 1 and device.type == "cpu" else nullcontext()


class _RowByRow(TorchFunctionMode):
    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func not in _ROW_DIMS or options.get("inplace"):
            return func(*args, **options)
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(options)
        by_row = [place for place in _PLACES.get(func, _INPUT) if place in given]
        first: Tensor = given[by_row[0]]
        if first.dim() < _ROW_DIMS[func] or not len(first) or len(first) % self._num_rows:
            return func(*args, **options)
        parts = {
            place: given[place].chunk(self._num_rows)
            for place in by_row
            if _is_alike(given[place], first)
        }
        found = []
        for row in range(self._num_rows):
            taken = {**given, **{place: chunks[row] for place, chunks in parts.items()}}
            named = {name: taken[name] for name in options}
            found.append(func(*(taken[at] for at in range(len(args))), **named))
        return torch.cat(found)


def _is_alike(tensor: Tensor | None, first: Tensor) -> bool:
    """Whether an argument has the same rows as the first, and is not shared by all rows."""
    return tensor is not None and tensor.dim() == first.dim() and len(tensor) == len(first)
