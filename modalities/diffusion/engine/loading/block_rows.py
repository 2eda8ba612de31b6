"""Matrices in blocks of integers, as tensors that name conversions can split and join.

Owns which operations keep blocks: those on whole rows. All others get the dequantized values.
Conversions are diffusers' own and expect plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from triptych.core.runtime.kernels.dequantize import PackedTensor

_BY_ROW: frozenset[Callable[..., Any]] = frozenset(
    {torch.chunk, Tensor.chunk, torch.split, Tensor.split, torch.cat, torch.concat}
)
_SAME: frozenset[Callable[..., Any]] = frozenset({Tensor.clone, Tensor.contiguous, Tensor.detach})


class BlockRows(Tensor):
    """The bytes of a matrix's rows; operations other than on whole rows see its values."""

    packed: PackedTensor
    values_dtype: torch.dtype

    @classmethod
    def of(cls, packed: PackedTensor, dtype: torch.dtype) -> BlockRows:
        """Wrap a matrix, whose values have type `dtype`."""
        rows = packed.blocks_OB.as_subclass(BlockRows)
        rows.packed, rows.values_dtype = packed, dtype
        return rows

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape of the values."""
        return torch.Size(self.packed.shape)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        kinds = {(each.packed.format, each.values_dtype) for each in _rows_in((args, options))}
        if len(kinds) > 1 or not _keeps_rows(func, args, options):
            given = _map_rows(
                (args, options), lambda rows: rows.packed.dequantize(rows.values_dtype)
            )
            return func(*given[0], **given[1])
        ((form, dtype),) = kinds
        given = _map_rows((args, options), lambda rows: rows.packed.blocks_OB)
        found = func(*given[0], **given[1])
        if isinstance(found, Tensor):
            return cls.of(PackedTensor(found, form), dtype)
        return tuple(cls.of(PackedTensor(part, form), dtype) for part in found)


def _keeps_rows(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Whether an operation only splits or joins rows, all of matrices in blocks."""
    if func in _SAME:
        return True
    if func not in _BY_ROW:
        return False
    place = 1 if func in (torch.cat, torch.concat) else 2
    dim = options.get("dim", args[place] if len(args) > place else 0)
    given = args[0] if isinstance(args[0], list | tuple) else args[:1]
    return dim == 0 and all(isinstance(each, BlockRows) for each in given)


def _rows_in(value: Any) -> Iterator[BlockRows]:
    if isinstance(value, BlockRows):
        yield value
    elif isinstance(value, dict):
        yield from _rows_in(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _rows_in(each)


def _map_rows(value: Any, change: Callable[[BlockRows], Tensor]) -> Any:
    if isinstance(value, BlockRows):
        return change(value)
    if isinstance(value, dict):
        return {name: _map_rows(each, change) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_rows(each, change) for each in value)
    return value
