"""The native CPU kernels as Python calls: tensors in, tensors out.

Owns the loaded library and the choice of its instruction level. The creator of a step's
`AttentionBatch` decides whether the step uses it. Every call releases the GIL and runs on the
library's own threads, as many as torch has. A row's result depends neither on other rows nor on the
number of threads.

Shapes: see `core.runtime.kernels.paged_attention`.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from triptych.core.errors import BundleError, DeviceError
from triptych.core.process.lookups import record_miss, timed_lookup
from triptych.core.runtime.kernels.dequantize import PackedTensor
from triptych.core.runtime.kernels.kv_pages import KvPages, LatentPages
from triptych.core.runtime.kernels.native.adapter_arguments import (
    AdaptedRowPointers,
    LowRankPointers,
)
from triptych.core.runtime.kernels.native.arena import Arena
from triptych.core.runtime.kernels.native.arguments import (
    DTYPES,
    FIRST_BLOCKS,
    PAGE_DTYPES,
    LinearArguments,
    MixArguments,
    MixturePointers,
    NativeWeights,
    PackedWeight,
    RowEdits,
    SampleArguments,
    SnakeArguments,
    StepArguments,
    attention_arguments,
    packed_shape,
    point_to_pages,
    pointer,
)
from triptych.core.runtime.kernels.native.build import (
    BuildError,
    build,
    bundled_library,
    supported_levels,
)
from triptych.core.runtime.kernels.native.choice import NativeChoice
from triptych.core.runtime.kernels.native.functions import FUNCTIONS
from triptych.core.runtime.kernels.native.state_arguments import NativeStateRows, RecurrentArguments

if TYPE_CHECKING:
    from triptych.core.bundle.store import Bundle
    from triptych.core.runtime.kernels.key_index import ChoiceRule
    from triptych.core.runtime.kernels.paged_attention import AttentionBatch, AttentionRule

_log = logging.getLogger(__name__)

_MAX_HEAD_DIM = 512
_MAX_GROUP = 64
_MAX_ROW_DIM = 576


class NativeKernels:
    """The loaded library. Threads may share it.

    `level` is the instruction level it was compiled for; see `core.runtime.kernels.native.build`.
    `path` is its file.
    """

    __slots__ = ("_arena", "_library", "level", "path")

    def __init__(self, path: Path, level: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        if not self._library.allow_level():
            raise BuildError(f"the system does not let programs use {level}")
        self.level = level
        self._arena = Arena()
        for name, (result, *arguments) in FUNCTIONS.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments

    @classmethod
    def open(
        cls, mode: str, folder: Path, isa: str = "auto", bundle: Bundle | None = None
    ) -> NativeKernels | None:
        """Build or find the library. `mode` is the option `cpu_kernels`: auto, native or torch.

        `torch` gives `None`; so does `auto` where nothing can be built, with the reason in the log.
        `native` raises `DeviceError` then. `isa` is an instruction level, or auto for the highest;
        a level that this machine lacks raises `DeviceError`. A library of the `bundle` for this
        processor is used if there is one.
        """
        if mode == "torch":
            if isa != "auto":
                raise DeviceError("--cpu-isa has no effect with --cpu-kernels torch.")
            return None
        with timed_lookup("native kernels", isa) as search:
            if bundle is not None and bundle.manifest.kernels is not None:
                search.is_promised = True
                try:
                    return cls(*bundled_library(bundle, isa))
                except (BundleError, BuildError, OSError) as error:
                    record_miss(str(error))
            return cls._build(mode, folder, isa)

    @classmethod
    def _build(cls, mode: str, folder: Path, isa: str) -> NativeKernels | None:
        levels = supported_levels()
        if isa != "auto" and levels and isa not in levels:
            raise DeviceError(f"This machine lacks {isa}: use --cpu-isa {' or '.join(levels)}.")
        reasons = []
        for level in (isa,) if isa != "auto" else levels or ("portable",):
            try:
                return cls(build(folder, level), level)
            except (BuildError, OSError) as error:
                reasons.append(str(error))
        if mode == "native" or isa != "auto":
            raise DeviceError(
                f"No native kernels: {reasons[-1]}. Use --cpu-kernels torch without --cpu-isa."
            )
        record_miss("they cannot be built")
        _log.warning("no native kernels (%s); using torch, which is slower", reasons[-1])
        return None

    def can_hold(self, num_heads: int, shape_PKD: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether pages of this shape and type, for so many query heads, are within the limits."""
        page_size, num_kv_heads, head_dim = shape_PKD
        return (
            dtype in PAGE_DTYPES
            and head_dim <= _MAX_HEAD_DIM
            and num_heads // num_kv_heads <= _MAX_GROUP
            and page_size.bit_count() == 1
        )

    def can_hold_latents(self, row_dim: int, page_size: int, dtype: torch.dtype) -> bool:
        """Whether pages of such rows are within the limits, for any number of heads."""
        return dtype in PAGE_DTYPES and row_dim <= _MAX_ROW_DIM and page_size.bit_count() == 1

    def write_pages(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        pages: KvPages,
        batch: AttentionBatch,
    ) -> None:
        """`core.runtime.kernels.paged_attention.write_pages`, in the order of native/pages.h."""
        k_TKD, v_TKD = (_readable(x).contiguous() for x in (k_TKD, v_TKD))
        arguments = attention_arguments(batch, pages, k_TKD.shape, k_TKD.dtype)
        point_to_pages(arguments, pages)
        slots_T = batch.write_slots_T
        self._library.write_pages(arguments, slots_T.data_ptr(), k_TKD.data_ptr(), v_TKD.data_ptr())

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        pages: KvPages,
        batch: AttentionBatch,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Attend as `kernels.paged_attention.paged_attention`, over pages from `write_pages`.

        Or as `kernels.latent_attention`, over its pages.
        """
        dtype, q_THD = q_THD.dtype, _readable(q_THD)
        if q_THD.stride(1) != q_THD.shape[2]:
            q_THD = q_THD.contiguous()
        out_THD = torch.empty(*q_THD.shape[:2], pages.v_NPKD.shape[3], dtype=q_THD.dtype)
        arguments = attention_arguments(batch, pages, q_THD.shape, q_THD.dtype)
        point_to_pages(arguments, pages)
        arguments.q, arguments.out = q_THD.data_ptr(), out_THD.data_ptr()
        arguments.q_stride = q_THD.stride(0)
        sinks_H = None if rule.sinks_H is None else rule.sinks_H.float().contiguous()
        arguments.window, arguments.soft_cap = rule.span or 0, rule.soft_cap or 0.0
        arguments.scale = rule.scale * rule.k_scale
        arguments.sinks = pointer(sinks_H)
        arguments.out_scale = rule.v_scale
        _check(self._library.paged_attention(arguments))
        return out_THD.to(dtype)

    def write_latents(
        self, rows_TD: torch.Tensor, pages: LatentPages, batch: AttentionBatch
    ) -> None:
        """`core.runtime.kernels.latent_attention.write_latents`; rows keep their order."""
        self.write_pages(rows_TD.unsqueeze(1), rows_TD.unsqueeze(1), pages, batch)

    def choose_keys(
        self,
        q_THD: torch.Tensor,
        weights_TH: torch.Tensor,
        pages: LatentPages,
        batch: AttentionBatch,
        rule: ChoiceRule,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`core.runtime.kernels.key_index.reference`, which says what the result is."""
        q_THD = _readable(q_THD).contiguous()
        choice = NativeChoice(batch, rule.num_chosen, weights_TH.contiguous())
        arguments = attention_arguments(batch, pages, q_THD.shape, q_THD.dtype)
        point_to_pages(arguments, pages)
        arguments.q, arguments.q_stride = q_THD.data_ptr(), q_THD.stride(0)
        arguments.scale = rule.scale
        self._library.choose_keys(arguments, choice.arguments)
        return choice.slots_TC, choice.lengths_T

    def can_pack(self, weight_OI: torch.Tensor | PackedTensor) -> bool:
        """Whether `linear` supports this weight."""
        if isinstance(weight_OI, PackedTensor):
            return weight_OI.blocks_OB.device.type == "cpu"
        return weight_OI.dtype in DTYPES and weight_OI.device.type == "cpu"

    def pack(self, *weights_OI: torch.Tensor | PackedTensor) -> NativeWeights:
        """Pack the weights of one projection, in the order of its outputs, for `linear`.

        Plain ones must have the type of the input. They are padded with zeros to whole panels and
        units of inputs.
        """
        num_inputs = weights_OI[0].shape[1]
        assert all(weight.shape[1] == num_inputs for weight in weights_OI)
        return NativeWeights([self._pack(weight) for weight in weights_OI], num_inputs)

    def packed_bytes(self, num_outputs: int, num_inputs: int, code: int) -> int:
        """The bytes of a packed weight in a format, by its number."""
        if code >= FIRST_BLOCKS:
            return int(self._library.packed_block_bytes(num_outputs, num_inputs, code))
        dtype = next(dtype for dtype, number in DTYPES.items() if number == code)
        return math.prod(packed_shape(num_outputs, num_inputs, dtype)) * dtype.itemsize

    def copy(self, weights: NativeWeights) -> NativeWeights:
        """Packed weights in memory of their own."""
        copies = []
        for part in weights.parts:
            data = self._arena.empty((part.num_bytes,), torch.uint8)
            ctypes.memmove(data.data_ptr(), part.address, part.num_bytes)
            copies.append(part._replace(address=data.data_ptr(), owner=data))
        return NativeWeights(copies, weights.num_inputs)

    def _pack(self, weight_OI: torch.Tensor | PackedTensor) -> PackedWeight:
        num_outputs, num_inputs = weight_OI.shape
        if isinstance(weight_OI, PackedTensor):
            pack, source = self._library.pack_blocks, weight_OI.blocks_OB.contiguous()
            code = weight_OI.format.native
        else:
            pack, source = self._library.pack_weight, weight_OI.contiguous()
            code = DTYPES[source.dtype]
        num_bytes = self.packed_bytes(num_outputs, num_inputs, code)
        data = self._arena.empty((num_bytes,), torch.uint8)
        sizes = num_outputs, num_inputs, code
        pack(source.data_ptr(), *sizes, data.data_ptr(), torch.get_num_threads())
        return PackedWeight(data.data_ptr(), num_bytes, num_outputs, code, data)

    def dequantize(self, packed: PackedTensor, dtype: torch.dtype) -> torch.Tensor:
        """Compute `PackedTensor.dequantize`, bit-identical, for matrices that `can_dequantize`."""
        num_outputs, num_inputs = packed.shape
        blocks_OB = packed.blocks_OB.contiguous()
        values_OI = torch.empty(num_outputs, num_inputs, dtype=dtype)
        self._library.unpack_blocks(
            blocks_OB.data_ptr(),
            num_outputs,
            num_inputs,
            packed.format.native,
            values_OI.data_ptr(),
            DTYPES[dtype],
            torch.get_num_threads(),
        )
        return values_OI

    def can_dequantize(self, packed: PackedTensor, dtype: torch.dtype) -> bool:
        """Whether `dequantize` supports this matrix and this type."""
        return dtype in DTYPES and packed.blocks_OB.device.type == "cpu"

    def quantized(self, num_rows: int, num_inputs: int) -> torch.Tensor:
        """Allocate the quantized inputs of weights in blocks, for `num_rows` rows."""
        num_bytes = self._library.quantized_bytes(num_inputs)
        return torch.empty(num_rows * num_bytes, dtype=torch.uint8)

    def linear(
        self,
        x_TI: torch.Tensor,
        weights: NativeWeights,
        bias_O: torch.Tensor | None = None,
        residual_TO: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """`x_TI @ weight_OI.T (+ bias_O) (+ residual_TO)`, summed in float32.

        The result has the type of `x_TI` unless `out_dtype` is given; a residual must have the
        same. Inputs of weights in blocks are quantized, 32 at a time (see native/quantized.c).
        """
        num_rows, num_inputs = x_TI.shape
        assert x_TI.is_contiguous()
        assert num_inputs == weights.num_inputs
        assert weights.dtype in (None, x_TI.dtype)
        assert bias_O is None or bias_O.dtype == x_TI.dtype
        y_TO = torch.empty(num_rows, weights.num_outputs, dtype=out_dtype or x_TI.dtype)
        assert residual_TO is None or residual_TO.is_contiguous()
        assert residual_TO is None or residual_TO.dtype == y_TO.dtype
        room = self.quantized(num_rows, num_inputs) if weights.has_blocks else None
        self._library.linear(
            LinearArguments(
                x=x_TI.data_ptr(),
                bias=pointer(bias_O),
                residual=pointer(residual_TO),
                weights=weights.pointers,
                y=y_TO.data_ptr(),
                quantized=pointer(room),
                num_rows=num_rows,
                num_inputs=num_inputs,
                num_outputs=weights.num_outputs,
                num_weights=len(weights.pointers),
                dtype=DTYPES[x_TI.dtype],
                y_dtype=DTYPES[y_TO.dtype],
                num_threads=torch.get_num_threads(),
            )
        )
        return y_TO

    def add_low_rank(
        self,
        product: LinearArguments,
        adapters: ctypes.Array[LowRankPointers],
        rows: AdaptedRowPointers,
    ) -> None:
        """Add the rows' changes to a product; see `core.runtime.layers.adapters`."""
        self._library.add_low_rank(product, adapters, rows)

    def head_linear(self, x_THI: torch.Tensor, weights: NativeWeights) -> torch.Tensor:
        """`y_THO`: each head times its own one of `weights`, which are plain."""
        num_rows, num_heads, num_inputs = x_THI.shape
        assert (len(weights.pointers), weights.num_inputs) == (num_heads, num_inputs)
        assert x_THI.stride(2) == 1
        y_THO = x_THI.new_empty(num_rows, num_heads, weights.num_outputs // num_heads)
        heads = (
            LinearArguments(
                x=x_TI.data_ptr(),
                weights=ctypes.pointer(weight),
                y=y_TO.data_ptr(),
                num_rows=num_rows,
                num_inputs=num_inputs,
                num_outputs=weight.num_outputs,
                x_stride=x_TI.stride(0),
                y_stride=y_TO.stride(0),
                num_weights=1,
                dtype=DTYPES[x_THI.dtype],
                y_dtype=DTYPES[x_THI.dtype],
                num_threads=torch.get_num_threads(),
            )
            for x_TI, y_TO, weight in zip(
                x_THI.unbind(1), y_THO.unbind(1), weights.pointers, strict=True
            )
        )
        self._library.linears((LinearArguments * num_heads)(*heads), num_heads)
        return y_THO

    def rows(self, weights: NativeWeights, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weights of some outputs of one matrix, `[len(ids), I]`; plain ones in their type."""
        (weight,) = weights.pointers
        rows = torch.empty(len(ids), weights.num_inputs, dtype=dtype)
        ids = ids.to(torch.int64).contiguous()
        places = weight.data, weights.num_inputs, weight.format, ids.data_ptr(), len(ids)
        if weights.has_blocks:
            types = DTYPES[dtype], torch.get_num_threads()
            self._library.read_rows(*places, rows.data_ptr(), *types)
        else:
            assert weights.dtype is dtype
            self._library.read_packed_rows(*places, rows.data_ptr(), torch.get_num_threads())
        return rows

    def sample_rows(
        self,
        logits_BV: torch.Tensor,
        edits: RowEdits,
        shape_S4: torch.Tensor,
        slots_B: torch.Tensor,
        uniforms_B: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample as `kernels.triton.sampling.launch`: float32 logits, penalties and masks."""
        (num_rows, vocab_size), edited_BV = logits_BV.shape, edits.edited_BV
        token_ids_B = torch.empty(num_rows, dtype=torch.int64)
        is_finite_B = torch.empty(num_rows, dtype=torch.bool)
        arguments = SampleArguments(
            logits=logits_BV.data_ptr(),
            edited=pointer(edited_BV),
            shapes=shape_S4.data_ptr(),
            slots=slots_B.data_ptr(),
            uniforms=pointer(uniforms_B),
            token_ids=token_ids_B.data_ptr(),
            is_finite=is_finite_B.data_ptr(),
            num_rows=num_rows,
            size=vocab_size,
            stride=logits_BV.stride(0),
            num_threads=torch.get_num_threads(),
        )
        assert logits_BV.stride(1) == 1
        assert edited_BV is None or edited_BV.is_contiguous()
        assert {logits_BV.dtype, shape_S4.dtype} == {torch.float32}
        assert (slots_B.is_contiguous(), slots_B.dtype) == (True, torch.int64)
        if uniforms_B is not None:
            assert (uniforms_B.is_contiguous(), uniforms_B.dtype) == (True, torch.float64)
        if edits.masks:
            num_bytes = 4 * -(-vocab_size // 32)
            assert all(not mask or len(mask) >= num_bytes for mask in edits.masks)
            arguments.masks = (ctypes.c_char_p * num_rows)(*(mask or None for mask in edits.masks))
        if edits.penalties is not None:
            counts_SV, scales_S3, index_R = edits.penalties
            assert counts_SV.dtype is torch.int32
            is_penalized_B = torch.zeros(num_rows, dtype=torch.bool).index_fill_(0, index_R, True)
            arguments.counts = counts_SV.data_ptr()
            arguments.penalties = scales_S3.data_ptr()
            arguments.is_penalized = is_penalized_B.data_ptr()
        _check(self._library.sample_rows(arguments))
        return token_ids_B, is_finite_B

    def styled_snake(
        self,
        x_BCT: torch.Tensor,
        style_BC: tuple[torch.Tensor, torch.Tensor],
        alpha_C: torch.Tensor,
        *,
        eps: float,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Instance norm over T, times 1 + gamma, plus beta; then y + sin(alpha y)^2 / alpha.

        `style_BC` are gamma and beta; everything is float32 except the result, [B, C, T] in
        `dtype`. Snake: arXiv:2006.08195.
        """
        gamma_BC, beta_BC = (part.contiguous() for part in style_BC)
        x_BCT, alpha_C = x_BCT.contiguous(), alpha_C.contiguous()
        assert {t.dtype for t in (x_BCT, gamma_BC, beta_BC, alpha_C)} == {torch.float32}
        assert gamma_BC.shape == beta_BC.shape == x_BCT.shape[:2]
        y_BCT = torch.empty(x_BCT.shape, dtype=dtype)
        self._library.snake(
            SnakeArguments(
                x_BCT.data_ptr(),
                gamma_BC.data_ptr(),
                beta_BC.data_ptr(),
                alpha_C.data_ptr(),
                y_BCT.data_ptr(),
                gamma_BC.numel(),
                len(alpha_C),
                x_BCT.shape[2],
                DTYPES[dtype],
                torch.get_num_threads(),
                eps,
            )
        )
        return y_BCT

    def mixture_scratch(
        self, mixture: MixturePointers, num_tokens: int, hidden_size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Allocate the memory of a mixture, for so many tokens."""
        num_bytes = self._library.mixture_bytes(mixture, num_tokens, hidden_size, DTYPES[dtype])
        return torch.empty(num_bytes, dtype=torch.uint8)

    def mix(self, arguments: MixArguments) -> None:
        """Run a mixture; see `core.runtime.layers.native_mixture`."""
        self._library.mix(arguments)

    def recur(
        self,
        arguments: RecurrentArguments,
        rows: NativeStateRows,
        in_TI: torch.Tensor,
        out_TO: torch.Tensor,
    ) -> None:
        """Run a recurrent layer between its projections; see `core.runtime.layers.recurrent`."""
        assert in_TI.is_contiguous()
        self._library.recur(arguments, rows.arguments, in_TI.data_ptr(), out_TO.data_ptr())

    def decoder_step(self, arguments: StepArguments) -> None:
        """Run every layer; see `core.runtime.layers.native_layers`."""
        _check(self._library.decoder_step(arguments))


def _readable(x: torch.Tensor) -> torch.Tensor:
    """Convert to a type that the kernels support."""
    return x if x.dtype in DTYPES else x.float()


def _check(status: int) -> None:
    if status:
        raise MemoryError("no memory for a native kernel")
