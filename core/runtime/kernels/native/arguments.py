"""What the native kernels are called with: the structures of native/kernels.h, for ctypes.

Owns their layout, and how the weights of a projection lie in them. Calls nothing.

Shapes: I inputs, O outputs; B rows of a sample, S slots, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from triptych.core.runtime.kernels.kv_pages import KvPages

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
PAGE_DTYPES = DTYPES | {torch.int8: 16, torch.float8_e4m3fn: 17}
"""Of cells in pages; the last two have no other use."""
FIRST_BLOCKS = 2  # the first number of a format in blocks


@dataclass(frozen=True, slots=True)
class RowEdits:
    """What the rows of a sample have beside their logits: see `SampleRows` in kernels.h.

    `penalties` are the counts of all slots (`[S, V]`, int32), their scales (`[S, 3]`) and the
    indexes of the rows that have any.
    """

    edited_BV: torch.Tensor | None = None
    masks: Sequence[bytes] = ()
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


class PackedWeight(NamedTuple):
    """Some outputs of a projection in the layout of `linear`."""

    data: torch.Tensor
    num_outputs: int
    format: int


class WeightPointers(ctypes.Structure):
    """`Weight` in kernels.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("format", ctypes.c_int32),
    )


class NativeWeights:
    """The weights of one projection, as `NativeKernels.pack` lays them out.

    `dtype` is that of those that are not in blocks.
    """

    __slots__ = ("_tensors", "dtype", "has_blocks", "num_inputs", "num_outputs", "pointers")

    def __init__(self, packed: Sequence[PackedWeight], num_inputs: int) -> None:
        self._tensors = tuple(each.data for each in packed)  # the pointers live no longer
        self.num_inputs = num_inputs
        self.num_outputs = sum(each.num_outputs for each in packed)
        self.has_blocks = any(each.format >= FIRST_BLOCKS for each in packed)
        plain = {each.data.dtype for each in packed if each.format < FIRST_BLOCKS}
        assert len(plain) <= 1
        self.dtype = next(iter(plain), None)
        self.pointers = (WeightPointers * len(packed))(
            *(
                WeightPointers(each.data.data_ptr(), each.num_outputs, each.format)
                for each in packed
            )
        )

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def projection(self, bias_O: torch.Tensor | None) -> ProjectionPointers:
        """As a decoder layer holds them."""
        return ProjectionPointers(self.pointers, pointer(bias_O), len(self.pointers))


PAGE_POINTERS = tuple(
    (name, ctypes.c_void_p) for name in ("k_pages", "v_pages", "k_scales", "v_scales")
)
"""In the order of `KvPages`."""


class AttentionArguments(ctypes.Structure):
    """`Attention` in kernels.h."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        *PAGE_POINTERS,
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("page_table", "context_lengths", "query_starts")),
        ("blocks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_tokens", "q_stride")),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("page_shift", "q_dtype", "kv_dtype", "window")),
        ("num_threads", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class LinearArguments(ctypes.Structure):
    """`Linear` in kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "bias", "residual")),
        ("weights", ctypes.POINTER(WeightPointers)),
        *((name, ctypes.c_void_p) for name in ("y", "quantized")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_inputs", "num_outputs")),
        *((name, ctypes.c_int32) for name in ("num_weights", "dtype", "y_dtype", "num_threads")),
    )


class SnakeArguments(ctypes.Structure):
    """`Snake` in kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "gamma", "beta", "alpha", "y")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_channels", "length")),
        *((name, ctypes.c_int32) for name in ("dtype", "num_threads")),
        ("eps", ctypes.c_float),
    )


class SampleArguments(ctypes.Structure):
    """`SampleRows` in kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "edited", "shapes", "penalties")),
        ("masks", ctypes.POINTER(ctypes.c_char_p)),
        *((name, ctypes.c_void_p) for name in ("counts", "is_penalized", "slots", "uniforms")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "is_finite")),
        *((name, ctypes.c_int64) for name in ("num_rows", "size", "stride")),
        ("num_threads", ctypes.c_int32),
    )


class ProjectionPointers(ctypes.Structure):
    """`Projection` in kernels.h."""

    _fields_ = (
        ("weights", ctypes.POINTER(WeightPointers)),
        ("bias", ctypes.c_void_p),
        ("num_weights", ctypes.c_int64),
    )


class LayerPointers(ctypes.Structure):
    """`Layer` in kernels.h: where one decoder layer's weights and pages lie."""

    _fields_ = (
        *((name, ProjectionPointers) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "qk_norm", "attention_post_norm")),
        *((name, ctypes.c_void_p) for name in ("mlp_norm", "mlp_post_norm")),
        *PAGE_POINTERS,
        *((name, ctypes.c_int32) for name in ("window", "rotation")),
    )


class StepArguments(ctypes.Structure):
    """`Step` in kernels.h. What `attention` has of one layer alone is left empty."""

    _fields_ = (
        ("layers", ctypes.POINTER(LayerPointers)),
        *((name, ctypes.c_void_p) for name in ("x", "scratch", "quantized", "final_norm")),
        *((name, ctypes.c_void_p * 2) for name in ("cos", "sin")),
        ("write_slots", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden", "intermediate")),
        ("num_rotated", ctypes.c_int64 * 2),
        *((name, ctypes.c_int32) for name in ("activation", "norm_dtype")),
        *((name, ctypes.c_float) for name in ("eps", "qk_eps")),
        ("attention", AttentionArguments),
    )


def point_to_pages(arguments: AttentionArguments | LayerPointers, pages: KvPages) -> None:
    """Have a structure point to the pages of a layer."""
    for (name, _), tensor in zip(PAGE_POINTERS, pages, strict=True):
        setattr(arguments, name, pointer(tensor))


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Address of a tensor that may be absent."""
    return None if tensor is None else tensor.data_ptr()
