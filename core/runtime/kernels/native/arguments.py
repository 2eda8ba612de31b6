"""Arguments of the native kernels: the structures of native/kernels.h, for ctypes.

Owns their layout, and the layout of a projection's weights in them. Calls nothing.

Shapes: I inputs, O outputs; B rows of a sample, S slots, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING, NamedTuple

import torch

from triptych.core.runtime.kernels.gated import Activation, SwigluClamp
from triptych.core.runtime.kernels.kv_pages import KvPages, LatentPages
from triptych.core.runtime.kernels.native.adapter_arguments import (
    AdaptedRowPointers,
    LowRankPointers,
)
from triptych.core.runtime.kernels.native.state_arguments import (
    RecurrentArguments,
    StateRowArguments,
)

if TYPE_CHECKING:
    from triptych.core.runtime.kernels.paged_attention import AttentionBatch

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
PAGE_DTYPES = DTYPES | {torch.int8: 16, torch.float8_e4m3fn: 17}
"""Types of cells in pages; the last two have no other use."""
FIRST_BLOCKS = 2  # the first number of a format in blocks
_PANEL = 32
_UNIT = {torch.float32: 1, torch.bfloat16: 32}  # inputs of a packed weight are padded to a multiple


@dataclass(frozen=True, slots=True)
class RowEdits:
    """The edits of a sample's rows in addition to their logits: see `SampleRows` in kernels.h.

    `penalties` are the counts of all slots (`[S, V]`, int32), their scales (`[S, 3]`) and the
    indexes of the rows that have penalties.
    """

    edited_BV: torch.Tensor | None = None
    masks: Sequence[bytes] = ()
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


class PackedWeight(NamedTuple):
    """Consecutive outputs of a projection in the layout of `linear`; `owner` keeps its memory."""

    address: int
    num_bytes: int
    num_outputs: int
    format: int
    owner: object

    @property
    def content(self) -> memoryview:
        """Its bytes, valid as long as `owner`."""
        return memoryview((ctypes.c_char * self.num_bytes).from_address(self.address)).cast("B")


class WeightPointers(ctypes.Structure):
    """The structure `Weight` in kernels.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("format", ctypes.c_int32),
    )


class NativeWeights:
    """The weights of one projection, as `NativeKernels.pack` lays them out.

    `dtype` is that of the weights that are not in blocks.
    """

    __slots__ = ("dtype", "has_blocks", "num_inputs", "num_outputs", "parts", "pointers")

    def __init__(self, parts: Sequence[PackedWeight], num_inputs: int) -> None:
        self.parts = tuple(parts)
        self.num_inputs = num_inputs
        self.num_outputs = sum(each.num_outputs for each in parts)
        self.has_blocks = any(each.format >= FIRST_BLOCKS for each in parts)
        plain = {each.format for each in parts if each.format < FIRST_BLOCKS}
        assert len(plain) <= 1
        self.dtype = next((dtype for dtype, code in DTYPES.items() if code in plain), None)
        self.pointers = (WeightPointers * len(parts))(
            *(WeightPointers(each.address, each.num_outputs, each.format) for each in parts)
        )

    @property
    def num_bytes(self) -> int:
        """The bytes in memory."""
        return sum(each.num_bytes for each in self.parts)

    def move_to(self, parts: Sequence[PackedWeight]) -> None:
        """Read equal weights elsewhere, between steps; structures made before follow."""
        for pointers, part in zip(self.pointers, parts, strict=True):
            pointers.data = part.address
        self.parts = tuple(parts)

    def projection(
        self,
        bias_O: torch.Tensor | None,
        adapters: ctypes.Array[LowRankPointers] | None = None,
    ) -> ProjectionPointers:
        """The structure of the projection in a decoder layer."""
        return ProjectionPointers(self.pointers, pointer(bias_O), adapters, len(self.pointers))


PAGE_POINTERS = tuple(
    (name, ctypes.c_void_p) for name in ("k_pages", "v_pages", "k_scales", "v_scales")
)
"""The pointers in the order of `KvPages`."""


class AttentionArguments(ctypes.Structure):
    """The structure `Attention` in kernels.h."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        *PAGE_POINTERS,
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("page_table", "context_lengths", "query_starts")),
        *((name, ctypes.c_void_p) for name in ("blocks", "sinks")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_tokens", "q_stride")),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("value_dim", "page_shift", "q_dtype", "kv_dtype")),
        *((name, ctypes.c_int32) for name in ("window", "num_threads")),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap", "out_scale")),
    )


class LinearArguments(ctypes.Structure):
    """The structure `Linear` in kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "bias", "residual")),
        ("weights", ctypes.POINTER(WeightPointers)),
        *((name, ctypes.c_void_p) for name in ("y", "quantized")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_inputs", "num_outputs")),
        *((name, ctypes.c_int64) for name in ("x_stride", "y_stride")),
        *((name, ctypes.c_int32) for name in ("num_weights", "dtype", "y_dtype", "num_threads")),
    )


class SnakeArguments(ctypes.Structure):
    """The structure `Snake` in kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "gamma", "beta", "alpha", "y")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_channels", "length")),
        *((name, ctypes.c_int32) for name in ("dtype", "num_threads")),
        ("eps", ctypes.c_float),
    )


class SampleArguments(ctypes.Structure):
    """The structure `SampleRows` in kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "edited", "shapes", "penalties")),
        ("masks", ctypes.POINTER(ctypes.c_char_p)),
        *((name, ctypes.c_void_p) for name in ("counts", "is_penalized", "slots", "uniforms")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "is_finite")),
        *((name, ctypes.c_int64) for name in ("num_rows", "size", "stride")),
        ("num_threads", ctypes.c_int32),
    )


class ProjectionPointers(ctypes.Structure):
    """The structure `Projection` in kernels.h."""

    _fields_ = (
        ("weights", ctypes.POINTER(WeightPointers)),
        ("bias", ctypes.c_void_p),
        ("adapters", ctypes.POINTER(LowRankPointers)),
        ("num_weights", ctypes.c_int64),
    )


class GateArguments(ctypes.Structure):
    """The structure `Gate` in kernels.h."""

    _fields_ = (
        ("activation", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("alpha", "limit", "negative", "beta", "eps")),
        *((name, ctypes.c_float) for name in ("in_scale", "out_scale")),
    )

    @classmethod
    def of(
        cls,
        activation: Activation,
        clamp: SwigluClamp | None = None,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> GateArguments:
        """The gate of these fields of a configuration; `scales` are of its input and its result."""
        own = cls({"silu": 0, "gelu_tanh": 1, "relu2": 3}[activation])
        if clamp is not None:
            own = cls(2, clamp.alpha, clamp.limit)
        own.in_scale, own.out_scale = scales
        return own

    @classmethod
    def xielu(cls, positive: float, negative: float, beta: float, eps: float) -> GateArguments:
        """The activation xIELU of these rates."""
        return cls(4, positive, 0.0, negative, beta, eps, 1.0, 1.0)


class MixturePointers(ctypes.Structure):
    """The structure `Mixture` in kernels.h: the weights of a mixture, and its rules."""

    _fields_ = (
        *((name, ProjectionPointers) for name in ("router", "shared_gate")),
        *((name, ProjectionPointers) for name in ("shared_gate_up", "shared_down")),
        *((name, ctypes.POINTER(ProjectionPointers)) for name in ("gate_up", "down")),
        ("correction", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_experts", "intermediate")),
        ("shared_intermediate", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_chosen", "scoring", "renormalizes")),
        *((name, ctypes.c_int32) for name in ("scales_inputs", "has_blocks", "has_gate")),
        *((name, ctypes.c_int32) for name in ("num_groups", "num_chosen_groups")),
        ("num_group_scores", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("gate", GateArguments),
    )


class MixArguments(ctypes.Structure):
    """The structure `Mix` in kernels.h."""

    _fields_ = (
        ("mixture", ctypes.POINTER(MixturePointers)),
        *((name, ctypes.c_void_p) for name in ("x", "residual", "y", "scratch")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "hidden")),
        ("shared_gate", GateArguments),
        *((name, ctypes.c_int32) for name in ("dtype", "num_threads")),
        ("out_scale", ctypes.c_float),
    )


class NormPointers(ctypes.Structure):
    """The structure `Norm` in kernels.h."""

    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p))


class LayerFlags(IntFlag):
    """The properties of a layer in kernels.h."""

    READS_CELLS = 1
    ADJACENT_PAIRS = 2
    JOINT_NORM = 4
    NORM_AFTER_ROTATION = 8
    LAYER_NORM_OF_HEADS = 16
    SCALED_QUERIES = 32
    GATED_OUTPUT = 64
    WINDOW_PAGES = 128


class ChoiceArguments(ctypes.Structure):
    """The structure `Choice` in kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "ranks", "slots", "lengths", "starts")),
        *((name, ctypes.c_int64) for name in ("num_chosen", "num_ranked", "rank_stride")),
    )


class KeyIndexPointers(ctypes.Structure):
    """The structure `KeyIndex` in kernels.h."""

    _fields_ = (
        *((name, ProjectionPointers) for name in ("key", "queries", "weights")),
        ("key_norm", NormPointers),
        *((name, ctypes.c_void_p) for name in ("k_pages", "k_scales")),
        *((name, ctypes.c_int32) for name in ("num_heads", "head_dim", "has_adjacent_pairs")),
        *((name, ctypes.c_float) for name in ("scale", "eps")),
    )


class LatentPointers(ctypes.Structure):
    """The structure `Latents` in kernels.h."""

    _fields_ = (
        *((name, ProjectionPointers) for name in ("down", "q_up", "absorb", "expand")),
        *((name, NormPointers) for name in ("q_norm", "kv_norm")),
        ("index", ctypes.POINTER(KeyIndexPointers)),
        *((name, ctypes.c_int64) for name in ("query_inputs", "kv_rank")),
        *((name, ctypes.c_int32) for name in ("nope_dim", "rope_dim", "value_dim")),
        ("eps", ctypes.c_float),
    )


class AltUpPointers(ctypes.Structure):
    """The structure `AltUp` in kernels.h."""

    _fields_ = (
        *((name, ProjectionPointers) for name in ("laurel_left", "laurel_right")),
        ("laurel_norm", NormPointers),
        *((name, ctypes.c_void_p) for name in ("router", "predict", "correct", "scale")),
        ("laurel_rank", ctypes.c_int64),
    )


class LayerPointers(ctypes.Structure):
    """The structure `Layer` in kernels.h: the places of one decoder layer's weights and pages."""

    _fields_ = (
        *((name, ProjectionPointers) for name in ("qkv", "out", "recurrent_in", "recurrent_out")),
        *((name, ProjectionPointers) for name in ("decays", "gates", "gate_up", "down")),
        *((name, ProjectionPointers) for name in ("input_gate", "input_projection")),
        *((name, NormPointers) for name in ("input_norm", "attention_post_norm", "mlp_norm")),
        *((name, NormPointers) for name in ("mlp_post_norm", "input_post_norm")),
        *((name, ctypes.c_void_p) for name in ("head_norms", "value_norm", "sinks")),
        *PAGE_POINTERS,
        ("mixture", ctypes.POINTER(MixturePointers)),
        ("gate", ctypes.POINTER(GateArguments)),
        ("latents", ctypes.POINTER(LatentPointers)),
        ("recurrent", ctypes.POINTER(RecurrentArguments)),
        ("altup", ctypes.POINTER(AltUpPointers)),
        *((name, ctypes.c_int32) for name in ("number", "num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("window", "rotation", "intermediate", "flags")),
        *((name, ctypes.c_float) for name in ("scale", "attention_scale", "soft_cap")),
        *((name, ctypes.c_float) for name in ("head_eps", "value_eps", "scale_of_result")),
        ("gate_deviations", ctypes.c_float),
    )


class StepArguments(ctypes.Structure):
    """The structure `Step` in kernels.h. Fields of `attention` for a single layer are empty."""

    _fields_ = (
        ("layers", ctypes.POINTER(LayerPointers)),
        *((name, ctypes.c_void_p) for name in ("x", "scratch", "quantized")),
        *((name, ctypes.c_void_p) for name in ("mixture_scratch", "layer_inputs", "streams")),
        *((name, NormPointers) for name in ("final_norm", "inputs_norm")),
        *((name, ProjectionPointers) for name in ("input_projection", "spread")),
        ("gather", ctypes.POINTER(ProjectionPointers)),
        *((name, ctypes.c_void_p * 2) for name in ("cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("query_scales", "write_slots")),
        *((name, ctypes.c_void_p) for name in ("window_table", "window_slots")),
        ("state_rows", ctypes.POINTER(StateRowArguments)),
        ("adapted_rows", ctypes.POINTER(AdaptedRowPointers)),
        ("choice", ctypes.POINTER(ChoiceArguments)),
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden")),
        ("num_rotated", ctypes.c_int64 * 2),
        *((name, ctypes.c_int64) for name in ("num_inputs", "input_size", "num_streams")),
        *((name, ctypes.c_int64) for name in ("qkv_width", "mixed_width", "gate_up_width")),
        ("gate", GateArguments),
        *((name, ctypes.c_int32) for name in ("norm_kind", "norm_dtype", "has_gate")),
        ("is_parallel", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("eps", "inputs_eps", "residual_scale")),
        ("attention", AttentionArguments),
    )


def attention_arguments(
    batch: AttentionBatch,
    pages: KvPages,
    shape_THD: torch.Size | tuple[int, int, int],
    dtype: torch.dtype,
) -> AttentionArguments:
    """The arguments that all layers of a step share. `dtype` is that of queries and result."""
    num_tokens, num_heads, head_dim = shape_THD
    _, page_size, num_kv_heads, _ = pages.k_NPKD.shape
    table_BM = batch.page_table_BM
    return AttentionArguments(
        page_table=table_BM.data_ptr(),
        context_lengths=batch.context_lengths_B.data_ptr(),
        query_starts=batch.query_starts_B.data_ptr(),
        blocks=pointer(batch.blocks_2T),
        num_rows=len(table_BM),
        num_tokens=num_tokens,
        table_stride=table_BM.stride(0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=pages.v_NPKD.shape[3],
        page_shift=page_size.bit_length() - 1,
        q_dtype=DTYPES[dtype],
        kv_dtype=PAGE_DTYPES[pages.k_NPKD.dtype],
        num_threads=torch.get_num_threads(),
        out_scale=1.0,
    )


def point_to_pages(arguments: AttentionArguments | LayerPointers, pages: KvPages) -> None:
    """Point a structure to the pages of a layer; latents have no pages of values."""
    for (name, _), tensor in zip(PAGE_POINTERS, pages, strict=True):
        setattr(arguments, name, pointer(tensor))
    if isinstance(pages, LatentPages):
        arguments.v_pages = None


def pointer(tensor: torch.Tensor | None) -> int | None:
    """The address of a tensor that may be absent."""
    return None if tensor is None else tensor.data_ptr()


def packed_shape(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> tuple[int, int]:
    """The shape of a packed weight."""
    unit = _UNIT[dtype]
    return -(-num_outputs // _PANEL) * _PANEL, -(-num_inputs // unit) * unit
