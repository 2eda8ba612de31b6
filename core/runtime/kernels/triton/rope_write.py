"""Head norms, rotation and the write into the pages of the cache, in one pass over a projection.

Owns the kernel of `core.runtime.kernels.rope_write` and of `write_pages`, which is the same without
queries, norms and rotation. Intermediate values stay in float32; the reference rounds them to the
type of the projection.

Shapes: T tokens, H query heads, K key-value heads, X = H + K, D head dim, N pages, P page size, R
rotated dims.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.kv_pages import KvPages
from triptych.core.runtime.kernels.triton.float8 import (
    as_stored,
    divided,
    int8_scale,
    size_bits,
    to_stored,
)
from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.variant import Variant

_HEADS = 4
"""Heads of a program."""


def launch(
    qk_TXD: torch.Tensor,
    v_TKD: torch.Tensor,
    norm_XD: torch.Tensor | None,
    eps: float,
    cos_T1R: torch.Tensor | None,
    sin_T1R: torch.Tensor | None,
    is_interleaved: bool,
    k_pages_NPKD: torch.Tensor,
    v_pages_NPKD: torch.Tensor,
    k_scale_NPK: torch.Tensor | None,
    v_scale_NPK: torch.Tensor | None,
    write_slots_T: torch.Tensor,
) -> torch.Tensor:
    """Returns `q_THD`, contiguous. A token with a slot below 0 is not written."""
    pages = KvPages(k_pages_NPKD, v_pages_NPKD, k_scale_NPK, v_scale_NPK)
    _check(qk_TXD, v_TKD, norm_XD, cos_T1R, sin_T1R, pages, write_slots_T)
    num_tokens, num_qk_heads, head_dim = qk_TXD.shape
    num_kv_heads = v_TKD.shape[1]
    q_THD = _new_queries(qk_TXD, k_pages_NPKD)
    half = 0 if cos_T1R is None else cos_T1R.shape[2] // 2
    rest = head_dim - 2 * half
    grid = (num_tokens, triton.cdiv(num_qk_heads + num_kv_heads, _HEADS))
    if num_tokens:
        _kernel[grid](
            qk_TXD,
            v_TKD,
            norm_XD,
            cos_T1R,
            sin_T1R,
            q_THD,
            as_stored(k_pages_NPKD),
            as_stored(v_pages_NPKD),
            k_scale_NPK,
            v_scale_NPK,
            write_slots_T,
            *qk_TXD.stride()[:2],
            *v_TKD.stride()[:2],
            num_qk_heads - num_kv_heads,
            num_kv_heads,
            eps,
            HEAD_DIM=head_dim,
            HALF=half,
            BLOCK_HALF=triton.next_power_of_2(half) if half else 0,
            BLOCK_REST=triton.next_power_of_2(rest) if rest else 0,
            IS_INTERLEAVED=is_interleaved,
            HEADS=_HEADS,
            HAS_SCALES=k_scale_NPK is not None,
            num_warps=_HEADS,
            num_stages=2,
        )
    return q_THD


rope_write = define_operator(
    "rope_write", launch, mutates=("k_pages_NPKD", "v_pages_NPKD", "k_scale_NPK", "v_scale_NPK")
)


@fake_of(rope_write)
def _(
    qk_TXD: torch.Tensor,
    v_TKD: torch.Tensor,
    norm_XD: torch.Tensor | None,
    eps: float,
    cos_T1R: torch.Tensor | None,
    sin_T1R: torch.Tensor | None,
    is_interleaved: bool,
    k_pages_NPKD: torch.Tensor,
    v_pages_NPKD: torch.Tensor,
    k_scale_NPK: torch.Tensor | None,
    v_scale_NPK: torch.Tensor | None,
    write_slots_T: torch.Tensor,
) -> torch.Tensor:
    pages = KvPages(k_pages_NPKD, v_pages_NPKD, k_scale_NPK, v_scale_NPK)
    _check(qk_TXD, v_TKD, norm_XD, cos_T1R, sin_T1R, pages, write_slots_T)
    return _new_queries(qk_TXD, k_pages_NPKD)


def _new_queries(qk_TXD: torch.Tensor, k_pages_NPKD: torch.Tensor) -> torch.Tensor:
    num_tokens, num_qk_heads, head_dim = qk_TXD.shape
    return qk_TXD.new_empty(num_tokens, num_qk_heads - k_pages_NPKD.shape[2], head_dim)


def _check(
    qk_TXD: torch.Tensor,
    v_TKD: torch.Tensor,
    norm_XD: torch.Tensor | None,
    cos_T1R: torch.Tensor | None,
    sin_T1R: torch.Tensor | None,
    pages: KvPages,
    write_slots_T: torch.Tensor,
) -> None:
    assert qk_TXD.stride(2) == v_TKD.stride(2) == 1
    pages.check()
    assert v_TKD.shape == (len(qk_TXD), *pages.k_NPKD.shape[2:])
    assert write_slots_T.shape == qk_TXD.shape[:1]
    assert write_slots_T.is_contiguous()
    if norm_XD is not None:
        assert norm_XD.shape == qk_TXD.shape[1:]
        assert norm_XD.is_contiguous()
    if cos_T1R is not None:
        assert sin_T1R is not None
        assert cos_T1R.shape == sin_T1R.shape
        assert cos_T1R.shape[2] % 2 == 0
        assert cos_T1R.is_contiguous()
        assert sin_T1R.is_contiguous()


@triton.jit(
    do_not_specialize=["num_heads", "num_kv_heads"], do_not_specialize_on_alignment=["slots_ptr"]
)
def _kernel(
    qk_ptr, v_ptr, norm_ptr, cos_ptr, sin_ptr, q_ptr,
    k_pages_ptr, v_pages_ptr, k_scale_ptr, v_scale_ptr, slots_ptr,
    qk_token_stride, qk_head_stride, v_token_stride, v_head_stride, num_heads, num_kv_heads, eps,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Process some heads of one token; queries, keys and values are numbered consecutively.

    A head is held as the first and the second dims of its pairs, and the dims without rotation.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    slot = tl.load(slots_ptr + token)
    is_turned, is_value, stored = _kinds(heads, num_heads, num_kv_heads, slot >= 0)
    v_head = heads - num_heads - num_kv_heads
    from_qk = qk_ptr + token * qk_token_stride + heads * qk_head_stride
    from_v = v_ptr + token * v_token_stride + v_head * v_head_stride
    k_cell, v_cell = slot * num_kv_heads + heads - num_heads, slot * num_kv_heads + v_head
    norms = heads * HEAD_DIM

    squares, peak_bits = tl.zeros([HEADS, 1], tl.float32), tl.zeros([HEADS, 1], tl.int32)
    if BLOCK_HALF > 0:
        pairs = tl.arange(0, BLOCK_HALF)[None, :]
        is_pair = pairs < HALF
        firsts = 2 * pairs if IS_INTERLEAVED else pairs
        seconds = firsts + (1 if IS_INTERLEAVED else HALF)
        first = _loaded(from_qk, from_v, is_turned, is_value, firsts, is_pair)
        second = _loaded(from_qk, from_v, is_turned, is_value, seconds, is_pair)
        squares += tl.sum(first * first + second * second, axis=1, keep_dims=True)
    if BLOCK_REST > 0:
        rests = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        is_rest = rests < HEAD_DIM
        rest = _loaded(from_qk, from_v, is_turned, is_value, rests, is_rest)
        squares += tl.sum(rest * rest, axis=1, keep_dims=True)
    scale = tl.rsqrt(squares / HEAD_DIM + eps) if norm_ptr is not None else 1.0

    if BLOCK_HALF > 0:
        first = _normed(first, scale, norm_ptr, norms + firsts, is_turned & is_pair)
        second = _normed(second, scale, norm_ptr, norms + seconds, is_turned & is_pair)
        row = token * (2 * HALF) + pairs
        first, second = _turned_pairs(
            first, second, cos_ptr + row, sin_ptr + row, is_turned, is_pair, HALF
        )
        peak_bits = _larger_bits(_larger_bits(peak_bits, first), second)
    if BLOCK_REST > 0:
        rest = _normed(rest, scale, norm_ptr, norms + rests, is_turned & is_rest)
        peak_bits = _larger_bits(peak_bits, rest)
    cell_scale = int8_scale(peak_bits)
    if HAS_SCALES:
        tl.store(k_scale_ptr + k_cell, cell_scale, mask=stored[1])
        tl.store(v_scale_ptr + v_cell, cell_scale, mask=stored[2])

    into_q = q_ptr + (token * num_heads + heads) * HEAD_DIM
    places = into_q, k_pages_ptr + k_cell * HEAD_DIM, v_pages_ptr + v_cell * HEAD_DIM
    if BLOCK_HALF > 0:
        _store_dims(places, stored, firsts, is_pair, first, cell_scale, HAS_SCALES)
        _store_dims(places, stored, seconds, is_pair, second, cell_scale, HAS_SCALES)
    if BLOCK_REST > 0:
        _store_dims(places, stored, rests, is_rest, rest, cell_scale, HAS_SCALES)


@triton.jit
def _kinds(heads, num_heads, num_kv_heads, is_written):
    """Which heads are rotated, which are values, and which are stored as queries, keys, values."""
    num_qk_heads = num_heads + num_kv_heads
    is_turned = heads < num_qk_heads
    is_value = (heads >= num_qk_heads) & (heads < num_qk_heads + num_kv_heads)
    is_key = is_turned & (heads >= num_heads)
    return is_turned, is_value, (heads < num_heads, is_key & is_written, is_value & is_written)


@triton.jit
def _loaded(from_qk, from_v, is_turned, is_value, dims, is_dim):
    """Load some dims of the heads, each from its own source, in float32."""
    turned = tl.load(from_qk + dims, mask=is_turned & is_dim, other=0.0)
    value = tl.load(from_v + dims, mask=is_value & is_dim, other=0.0)
    return tl.where(is_value, value, turned).to(tl.float32)


@triton.jit
def _normed(values, scale, norm_ptr, offsets, is_turned):
    """Scale by the head's norm if there is one, except values: they have none."""
    if norm_ptr is None:
        return values
    else:
        weight = tl.load(norm_ptr + offsets, mask=is_turned, other=0.0)
        normed = (values * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
        return tl.where(is_turned, normed, values)


@triton.jit
def _turned(values, others, cos_ptrs, sin_ptrs, is_turned, is_pair):
    """One half of the pairs, rotated; that of values is unchanged."""
    cos = tl.load(cos_ptrs, mask=is_pair, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptrs, mask=is_pair, other=0.0).to(tl.float32)
    return tl.where(is_turned, values * cos + others * sin, values)


@triton.jit
def _turned_pairs(first, second, cos_ptrs, sin_ptrs, is_turned, is_pair, HALF: tl.constexpr):
    """Both halves of the pairs, rotated; sines and cosines of the second are `HALF` further."""
    turned_first = _turned(first, second, cos_ptrs, sin_ptrs, is_turned, is_pair)
    second = _turned(second, first, cos_ptrs + HALF, sin_ptrs + HALF, is_turned, is_pair)
    return turned_first, second


@triton.jit
def _larger_bits(peak_bits, values):
    """The larger of a head's largest magnitude and those of `values`, as bits."""
    return tl.maximum(peak_bits, tl.max(size_bits(values), axis=1, keep_dims=True))


@triton.jit
def _store_dims(places, stored, dims, is_dim, values, cell_scale, HAS_SCALES: tl.constexpr):
    """Store some dims of the heads, each at the place of its kind: queries, keys, values."""
    into_q, into_k, into_v = places
    is_query, is_key, is_value = stored
    tl.store(into_q + dims, values.to(into_q.dtype.element_ty), mask=is_query & is_dim)
    _store_cells(into_k + dims, values, cell_scale, is_key & is_dim, HAS_SCALES)
    _store_cells(into_v + dims, values, cell_scale, is_value & is_dim, HAS_SCALES)


@triton.jit
def _store_cells(into, values, cell_scale, is_stored, HAS_SCALES: tl.constexpr):
    """Store keys or values in the format of the pages."""
    if HAS_SCALES:
        values = divided(values, cell_scale)
    tl.store(into, to_stored(values, into.dtype.element_ty), mask=is_stored)


def variants() -> tuple[Variant, ...]:
    """Plain, with head norms over float8 and int8, partial and interleaved, and the write alone."""
    return tuple(
        _variant(name, pages, has_norm, half, rest, is_interleaved)
        for name, pages, has_norm, half, rest, is_interleaved in (
            ("rope", "*bf16", False, 64, 0, False),
            ("norm_rope_float8", "*u8", True, 64, 0, False),
            ("norm_rope_int8", "*i8", True, 64, 0, False),
            ("partial_interleaved_rope", "*bf16", False, 32, 64, True),
            ("write_float8", "*u8", False, 0, 128, False),
            ("write_int8", "*i8", False, 0, 128, False),
        )
    )


def _variant(
    name: str, pages: str, has_norm: bool, half: int, rest: int, is_interleaved: bool
) -> Variant:
    constants: dict[str, object] = {
        "HEAD_DIM": 2 * half + rest,
        "HALF": half,
        "BLOCK_HALF": half,
        "BLOCK_REST": rest,
        "IS_INTERLEAVED": is_interleaved,
        "HEADS": _HEADS,
        "HAS_SCALES": pages == "*i8",
    }
    constants |= {} if has_norm else {"norm_ptr": None}
    constants |= {} if half else {"cos_ptr": None, "sin_ptr": None}
    constants |= {} if pages == "*i8" else {"k_scale_ptr": None, "v_scale_ptr": None}
    values = ("qk_ptr", "v_ptr", "norm_ptr", "cos_ptr", "sin_ptr", "q_ptr")
    pointers = dict.fromkeys(values, "*bf16")
    pointers |= {"k_pages_ptr": pages, "v_pages_ptr": pages}
    pointers |= {"k_scale_ptr": "*bf16", "v_scale_ptr": "*bf16", "slots_ptr": "*i64"}
    strides = ("qk_token_stride", "qk_head_stride", "v_token_stride", "v_head_stride")
    counts = {"num_heads": "i32", "num_kv_heads": "i32", "eps": "fp32"}
    signature = {
        **pointers,
        **dict.fromkeys(strides, "i32"),
        **counts,
        **dict.fromkeys(constants, "constexpr"),
    }
    return Variant(
        name=name,
        kernel=_kernel,
        signature=signature,
        constants=constants,
        divisible=frozenset((*pointers, *strides)) - {"slots_ptr"} - constants.keys(),
        num_warps=_HEADS,
    )
