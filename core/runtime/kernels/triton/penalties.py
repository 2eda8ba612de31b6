"""Repetition, frequency and presence penalties over token counts, in one pass.

Owns the kernel of `core.runtime.sampling.processors.Penalties`, which defines the counts.

Shapes: R rows, S slots, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.variant import Variant

_BLOCK_V = 1024
_NUM_WARPS = 4


def launch(
    logits_RV: torch.Tensor,
    counts_SV: torch.Tensor,
    scales_S3: torch.Tensor,
    slots_R: torch.Tensor,
    count_mask: int,
) -> torch.Tensor:
    """Penalize logits, in float32; the bits of `count_mask` count output tokens."""
    out_RV = _new_output(logits_RV, counts_SV, scales_S3, slots_R)
    num_rows, vocab_size = logits_RV.shape
    if num_rows:
        _kernel[(num_rows, triton.cdiv(vocab_size, _BLOCK_V))](
            logits_RV,
            counts_SV,
            scales_S3,
            slots_R,
            out_RV,
            logits_RV.stride(0),
            vocab_size,
            COUNT_MASK=count_mask,
            BLOCK_V=_BLOCK_V,
            num_warps=_NUM_WARPS,
            num_stages=2,
        )
    return out_RV


penalized = define_operator("penalized", launch)


@fake_of(penalized)
def _(
    logits_RV: torch.Tensor,
    counts_SV: torch.Tensor,
    scales_S3: torch.Tensor,
    slots_R: torch.Tensor,
    count_mask: int,
) -> torch.Tensor:
    return _new_output(logits_RV, counts_SV, scales_S3, slots_R)


def _new_output(
    logits_RV: torch.Tensor,
    counts_SV: torch.Tensor,
    scales_S3: torch.Tensor,
    slots_R: torch.Tensor,
) -> torch.Tensor:
    assert logits_RV.stride(1) == 1
    assert counts_SV.shape[1] == logits_RV.shape[1]
    assert counts_SV.dtype is torch.int32
    assert counts_SV.is_contiguous()
    assert scales_S3.shape == (len(counts_SV), 3)
    assert scales_S3.is_contiguous()
    assert slots_R.shape == logits_RV.shape[:1]
    assert slots_R.is_contiguous()
    return logits_RV.new_empty(logits_RV.shape, dtype=torch.float32)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _kernel(
    logits_ptr,
    counts_ptr,
    scales_ptr,
    slots_ptr,
    out_ptr,
    logits_stride,
    vocab_size,
    COUNT_MASK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Penalize some tokens of one row."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_token = tokens < vocab_size
    slot = tl.load(slots_ptr + row)
    repetition = tl.load(scales_ptr + slot * 3)
    frequency = tl.load(scales_ptr + slot * 3 + 1)
    presence = tl.load(scales_ptr + slot * 3 + 2)
    logits = tl.load(logits_ptr + row * logits_stride + tokens, mask=is_token, other=0.0)
    logits = logits.to(tl.float32)
    counts = tl.load(counts_ptr + slot * vocab_size + tokens, mask=is_token, other=0)
    num_output = counts & COUNT_MASK
    scaled = tl.where(logits > 0, logits / repetition, logits * repetition)
    logits = tl.where(counts > 0, scaled, logits)
    logits -= frequency * num_output + presence * (num_output > 0).to(tl.float32)
    tl.store(out_ptr + row * vocab_size + tokens, logits, mask=is_token)


def variants() -> tuple[Variant, ...]:
    """Logits of both types."""
    return tuple(
        Variant(
            name=name,
            kernel=_kernel,
            signature={
                "logits_ptr": logits,
                "counts_ptr": "*i32",
                "scales_ptr": "*fp32",
                "slots_ptr": "*i64",
                "out_ptr": "*fp32",
                "logits_stride": "i32",
                "vocab_size": "i32",
                "COUNT_MASK": "constexpr",
                "BLOCK_V": "constexpr",
            },
            constants={"COUNT_MASK": 2**30 - 1, "BLOCK_V": _BLOCK_V},
            divisible=frozenset(
                {
                    "logits_ptr",
                    "counts_ptr",
                    "scales_ptr",
                    "out_ptr",
                    "logits_stride",
                    "vocab_size",
                }
            ),
            num_warps=_NUM_WARPS,
        )
        for name, logits in (("fp32", "*fp32"), ("bf16", "*bf16"))
    )
