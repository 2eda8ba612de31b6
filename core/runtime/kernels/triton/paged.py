"""Common parts of the kernels of decode rows and of prompt chunks: contract and key addresses.

Owns the address of a position in the pages. Knows nothing of grids.

Shapes: T tokens, M pages per row, N pages of storage (of a block: keys), P tokens per page, H query
heads, K key-value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.kv_pages import KvPages
from triptych.core.runtime.kernels.triton.attention_tiles import TILES, Rows, heads_of, latents_of
from triptych.core.runtime.kernels.triton.variant import Variant

_CONSTANTS = ("HAS_", "IS_")
_FLOATS = ("scale", "soft_cap", "v_scale")
_TYPES = {"table_ptr": "*i64", "lengths_ptr": "*i64", "starts_ptr": "*i64", "blocks_ptr": "*i64"}
UPLOADED = tuple(_TYPES)
"""Arguments uploaded with a step, one after the other: their alignments differ between steps."""
_OPTIONAL = {"sinks_ptr": "HAS_SINKS", "blocks_ptr": "HAS_BLOCKS"}
_OPTIONAL |= dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), "HAS_SCALES")
_NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
_TYPES |= {"partial_ptr": "*fp32", "log_sums_ptr": "*fp32"}


def check_paged(
    q_THD: torch.Tensor,
    pages: KvPages,
    out_THD: torch.Tensor,
    sinks_H: torch.Tensor | None,
    scale: float,
) -> None:
    """Check the arguments of both kinds of rows."""
    pages.check()
    k_pages_NPKD = pages.k_NPKD
    assert q_THD.shape[2] == k_pages_NPKD.shape[3]
    assert q_THD.shape[1] % k_pages_NPKD.shape[2] == 0
    assert q_THD.stride(2) == 1
    assert out_THD.shape == q_THD.shape
    assert out_THD.is_contiguous()
    assert sinks_H is None or sinks_H.shape == q_THD.shape[1:2]
    assert scale > 0


def block_d(head_dim: int) -> int:
    """The head dim of a tile."""
    return 1 << max((head_dim - 1).bit_length(), 4)


@triton.jit
def pages_of(table_ptr, position_N, is_read_N, PAGE_SIZE: tl.constexpr):
    """Load the pages that hold a row's positions, as the table has them.

    A loop loads them one block ahead: loads of keys then depend on no other load of their block,
    and the compiler issues them as many blocks ahead as the loop has stages.
    """
    return tl.load(table_ptr + position_N // PAGE_SIZE, mask=is_read_N, other=0)


@triton.jit
def cells_of(page_N, position_N, kv_head, NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The places of the keys at a row's positions, counted in heads, in int64."""
    slot_N = page_N.to(tl.int64) * PAGE_SIZE + position_N % PAGE_SIZE
    return slot_N * NUM_KV_HEADS + kv_head


@triton.jit
def load_cells(k_ptr, v_ptr, cell_N, is_read_N, dim_D, HEAD_DIM: tl.constexpr):
    """Load the keys and the values at `cell_N`, as they are stored."""
    cell_ND = cell_N[:, None] * HEAD_DIM + dim_D
    is_read_ND = is_read_N[:, None] & (dim_D < HEAD_DIM)
    k_ND = tl.load(k_ptr + cell_ND, mask=is_read_ND, other=0)
    v_ND = tl.load(v_ptr + cell_ND, mask=is_read_ND, other=0)
    return k_ND, v_ND


@triton.jit
def cell_scales(scale_ptr, cell_N, is_seen_N, HAS_SCALES: tl.constexpr):
    """Load the scales of keys, or of values, at `cell_N`; 1 without scales."""
    if HAS_SCALES:
        return tl.load(scale_ptr + cell_N, mask=is_seen_N, other=0.0).to(tl.float32)
    else:
        return tl.full([1], 1.0, tl.float32)


def tiled_variants(
    name: str,
    rows: Rows,
    kernel: Any,
    constants: dict[str, Any],
    *flags: str,
    cache: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Variant]:
    """The kernel with some flags switched on: one variant for each tile in use."""
    is_latent = "VALUE_DIM" in constants
    heads = latents_of(dtype) if is_latent else heads_of(constants["HEAD_DIM"], dtype)
    types = {"q_ptr": _NAMES[dtype], "k_ptr": cache or _NAMES[dtype]}
    for (tile_rows, units, tile_heads), tile in TILES.items():
        if (tile_rows, tile_heads) == (rows, heads):
            sizes = {"BLOCK_M": tile.num_queries, "BLOCK_N": tile.num_keys, **constants}
            sizes |= {} if is_latent else {"BLOCK_D": block_d(constants["HEAD_DIM"])}
            yield replace(
                _variant(name, kernel, sizes, flags, types),
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                matrix_units=units,
            )


def _variant(
    name: str,
    kernel: Any,
    constants: dict[str, Any],
    flags: tuple[str, ...],
    types: Mapping[str, str],
) -> Variant:
    signature: dict[str, str] = {}
    values: dict[str, Any] = {}
    for argument in kernel.arg_names:
        if argument.startswith(_CONSTANTS):
            values[argument] = argument in flags
        elif argument in constants:
            values[argument] = constants[argument]
        elif _OPTIONAL.get(argument, argument) not in {argument, *flags}:
            values[argument] = None
        elif argument in {"k_ptr", "v_ptr"}:
            signature[argument] = types["k_ptr"]
        elif argument.endswith("_ptr"):
            signature[argument] = _TYPES.get(argument, types["q_ptr"])
        else:
            signature[argument] = "fp32" if argument in _FLOATS else "i32"
    return Variant(
        name=name,
        kernel=kernel,
        signature={each: signature.get(each, "constexpr") for each in kernel.arg_names},
        constants=values,
        divisible=frozenset(signature) - set(UPLOADED),
    )
