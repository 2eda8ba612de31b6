"""One layer's keys and values in pages: the types of cells, and their conversion in torch.

Owns the formats. Knows nothing of their readers and writers, or of the order within a page that CPU
kernels use.

Cells of a byte take half of bfloat16's memory. `float8_e4m3fn` holds values with four significant
bits, up to 448. `int8` holds multiples of a scale for each token and head, which maps the largest
value to 127. A scale for a page would have to grow with its tokens, and earlier tokens would be
rounded again: the contents would depend on how a prompt was cut into chunks. Scales are bfloat16
(two bytes for a head's 64 or 128), and values are divided by the rounded scale.

Latent attention (DeepSeek-V2, arXiv:2405.04434) stores one row for all heads: its first values are
also the value (`LatentPages`).

Shapes: T tokens, N pages, P tokens per page, K key-value heads, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_SCALE_TYPE = torch.bfloat16
_MAX_INT8 = 127
_MAX_FLOAT8 = 448.0


class KvPages(NamedTuple):
    """Keys and values, and their scales where cells are int8."""

    k_NPKD: torch.Tensor
    v_NPKD: torch.Tensor
    k_scale_NPK: torch.Tensor | None = None
    v_scale_NPK: torch.Tensor | None = None

    @classmethod
    def empty(
        cls, shape_NPKD: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> KvPages:
        """Allocate without initializing: a host page that is never used takes no memory."""
        k_NPKD, v_NPKD = (torch.empty(shape_NPKD, dtype=dtype, device=device) for _ in range(2))
        if dtype is not torch.int8:
            return cls(k_NPKD, v_NPKD)
        shape_NPK = shape_NPKD[:3]
        scales = (torch.empty(shape_NPK, dtype=_SCALE_TYPE, device=device) for _ in range(2))
        return cls(k_NPKD, v_NPKD, *scales)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors, with scales if there are any."""
        return tuple(tensor for tensor in self if tensor is not None)

    def check(self) -> None:
        """Assert that all tensors have matching shapes and types."""
        assert self.k_NPKD.shape == self.v_NPKD.shape
        assert self.k_NPKD.dtype == self.v_NPKD.dtype
        has_scales = self.k_NPKD.dtype is torch.int8
        for scale_NPK in (self.k_scale_NPK, self.v_scale_NPK):
            assert (scale_NPK is not None) == has_scales
            assert scale_NPK is None or scale_NPK.shape == self.k_NPKD.shape[:3]
            assert scale_NPK is None or scale_NPK.dtype is _SCALE_TYPE
        assert all(tensor.is_contiguous() for tensor in self.tensors)


class LatentPages(KvPages):
    """Rows that are keys and, in their first values, values: `v_NPKD` is a view of `k_NPKD`.

    There is one head, and one scale for a row.
    """

    __slots__ = ()

    @classmethod
    def of_rows(
        cls,
        shape_NPD: tuple[int, int, int],
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LatentPages:
        """Allocate without initializing."""
        num_pages, page_size, row_dim = shape_NPD
        rows_NPKD = torch.empty(num_pages, page_size, 1, row_dim, dtype=dtype, device=device)
        scale_NPK = None
        if dtype is torch.int8:
            scale_NPK = torch.empty(rows_NPKD.shape[:3], dtype=_SCALE_TYPE, device=device)
        return cls(rows_NPKD, rows_NPKD[..., :value_dim], scale_NPK, scale_NPK)

    def single_rows(self) -> LatentPages:
        """The same memory as pages of one row each."""
        rows_NPKD, scale_NPK = self.k_NPKD.flatten(0, 1).unsqueeze(1), self.k_scale_NPK
        if scale_NPK is not None:
            scale_NPK = scale_NPK.flatten(0, 1).unsqueeze(1)
        return LatentPages(rows_NPKD, rows_NPKD[..., : self.v_NPKD.shape[3]], scale_NPK, scale_NPK)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that take memory."""
        rows = self.k_NPKD, self.k_scale_NPK
        return tuple(tensor for tensor in rows if tensor is not None)

    def check(self) -> None:
        """Assert that values are views, and that rows and scales match."""
        assert self.v_NPKD.stride() == self.k_NPKD.stride()
        assert self.k_NPKD.shape[2] == 1
        assert self.k_scale_NPK is self.v_scale_NPK
        KvPages(self.k_NPKD, self.k_NPKD, self.k_scale_NPK, self.k_scale_NPK).check()


def head_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one head of one token, for keys or for values."""
    scale_bytes = _SCALE_TYPE.itemsize if dtype is torch.int8 else 0
    return head_dim * dtype.itemsize + scale_bytes


def quantized(x_TKD: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantize to cells of a type, with scales if it has any: NaN or infinite if a value is."""
    if dtype is torch.float8_e4m3fn:
        return x_TKD.float().clamp(-_MAX_FLOAT8, _MAX_FLOAT8).to(dtype), None
    if dtype is not torch.int8:
        return x_TKD.to(dtype), None
    scale_TK = (x_TKD.float().abs().amax(2) / _MAX_INT8).to(_SCALE_TYPE)
    divisor_TK1 = scale_TK.float().unsqueeze(2)
    divides_TK1 = (divisor_TK1 > 0) & divisor_TK1.isfinite()
    multiples_TKD = torch.where(divides_TK1, x_TKD.float() / divisor_TK1, 0.0)
    return multiples_TKD.round().clamp(-_MAX_INT8, _MAX_INT8).to(dtype), scale_TK


def write_cells(
    x_TKD: torch.Tensor,
    cells_NPKD: torch.Tensor,
    scale_NPK: torch.Tensor | None,
    slots_T: torch.Tensor,
) -> None:
    """Store a step's keys or values at `slots_T`, which are `page * P + offset`."""
    cells_TKD, scale_TK = quantized(x_TKD, cells_NPKD.dtype)
    _addressable(cells_NPKD).flatten(0, 1).index_copy_(0, slots_T, _addressable(cells_TKD))
    if scale_NPK is not None:
        assert scale_TK is not None
        scale_NPK.flatten(0, 1).index_copy_(0, slots_T, scale_TK)


def read_cells(
    cells_NPKD: torch.Tensor,
    scale_NPK: torch.Tensor | None,
    slots_L: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Load the keys or values at some slots, `[L, K, D]`, as numbers of a type."""
    cells_LKD = _addressable(cells_NPKD).flatten(0, 1).index_select(0, slots_L)
    x_LKD = cells_LKD.view(cells_NPKD.dtype)
    if scale_NPK is None:
        return x_LKD.to(dtype)
    scale_LK1 = scale_NPK.flatten(0, 1).index_select(0, slots_L).unsqueeze(2)
    return (x_LKD.float() * scale_LK1.float()).to(dtype)


def _addressable(cells: torch.Tensor) -> torch.Tensor:
    """View as a type that torch copies by index, which float8 is not."""
    return cells.view(torch.uint8) if cells.dtype is torch.float8_e4m3fn else cells
