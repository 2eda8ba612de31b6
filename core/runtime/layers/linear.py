"""Linear projection, on a CPU packed for the native kernels.

Owns one weight and its bias. Several projections of one input are one `Linear` whose rows lie one
after the other; loaders fill them through views (`weight_OI`), or pass rows that stay in blocks of
integers (`hold`). Knows nothing of the meaning of its input.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import linear

from triptych.core.runtime.devices.device import has_fast_cpu_bfloat16
from triptych.core.runtime.kernels.dequantize import PackedTensor
from triptych.core.runtime.kernels.gelu_rows import quantize_gelu_rows
from triptych.core.runtime.kernels.library_products import prefers_library, scaled_product
from triptych.core.runtime.kernels.native.arguments import DTYPES, NativeWeights
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.packed_linear import (
    Float8Weight,
    HeldWeight,
    joined,
    moved,
    packed_linear,
)
from triptych.core.runtime.layers.adapters import ProjectionAdapters


class Linear:
    """`y_TO = x_TI @ weight_OI.T + bias_O (+ residual_TO)`.

    On a CPU, `prepare` reorders the weight: into the layout of our kernels, or, without them, of
    oneDNN's in bfloat16. Both add the residual in float32. With our kernels a row's result does not
    depend on other rows; on a GPU this needs `is_deterministic`, set before `prepare`.
    """

    __slots__ = (
        "_blocks",
        "_is_mapped",
        "_kernels",
        "_packed",
        "_parts",
        "_weight_OI",
        "adapters",
        "bias_O",
        "device",
        "dtype",
        "is_deterministic",
        "native",
        "num_inputs",
        "num_outputs",
    )

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_inputs, self.num_outputs = num_inputs, num_outputs
        self.bias_O = torch.empty(num_outputs, dtype=dtype, device=device) if has_bias else None
        self.is_deterministic = False
        self.native: NativeWeights | None = None
        self.adapters: ProjectionAdapters | None = None
        """Changes of some rows, if its decoder takes adapters; set before `prepare`."""
        self._kernels: NativeKernels | None = None
        self.dtype, self.device = dtype, device
        self._weight_OI: torch.Tensor | None = None
        self._is_mapped = False
        self._blocks: dict[int, HeldWeight] = {}
        self._parts: list[torch.Tensor | HeldWeight] = []
        self._packed: torch.Tensor | None = None

    @classmethod
    def of(cls, weight_OI: torch.Tensor) -> Linear:
        """Create a projection without bias over an existing weight."""
        num_outputs, num_inputs = weight_OI.shape
        dtype, device = weight_OI.dtype, weight_OI.device
        linear = cls(num_inputs, num_outputs, has_bias=False, dtype=dtype, device=device)
        linear._weight_OI = weight_OI
        return linear

    @classmethod
    def joining(cls, linears: Sequence[Linear]) -> Linear | None:
        """One projection in the place of several on the same input; `None` if they are not float8.

        Their weights become views of its weight.
        """
        parts = [part for each in linears for part in each._parts]
        whole = joined(parts)
        biases = [each.bias_O for each in linears if each.bias_O is not None]
        is_alike = len(parts) == len(linears) and len(biases) in (0, len(linears))
        weight, first = whole[0], linears[0]
        if len(whole) != 1 or not isinstance(weight, Float8Weight) or not is_alike:
            return None
        made = cls(
            first.num_inputs,
            weight.shape[0],
            has_bias=False,
            dtype=first.dtype,
            device=first.device,
        )
        made._keep([weight])
        made.bias_O = torch.cat(biases) if biases else None
        start = 0
        for each in linears:
            rows = slice(start, start := start + each.num_outputs)
            each._keep([weight.part(rows, slice(0, each.num_inputs))])
        return made

    @property
    def weight_OI(self) -> torch.Tensor:  # noqa: N802 - a shape
        """The plain weight, to be filled; allocated at its first use."""
        if self._weight_OI is None:
            shape = self.num_outputs, self.num_inputs
            self._weight_OI = torch.empty(shape, dtype=self.dtype, device=self.device)
        return self._weight_OI

    def map(self, weight_OI: torch.Tensor) -> bool:
        """Use a mapped tensor in place; false where it is not the whole weight as it is."""
        shape, is_new = (self.num_outputs, self.num_inputs), self._weight_OI is None
        is_alike = weight_OI.dtype is self.dtype and weight_OI.device == self.device
        if not (is_new and is_alike and weight_OI.shape == shape and weight_OI.is_contiguous()):
            return False
        self._weight_OI, self._is_mapped = weight_OI, True
        return True

    def keep_own(self) -> None:
        """Copy a mapped weight, so that it is in fast memory, whatever becomes of its file."""
        if self._is_mapped:
            self._weight_OI, self._is_mapped = self.weight_OI.clone(), False

    @property
    def takes_stored(self) -> bool:
        """Whether weights may be held as other programs' checkpoints store them."""
        return self.device.type == "cuda"

    def hold(self, first: int, weight: HeldWeight) -> None:
        """Keep the rows from `first` on in blocks, or as they are stored."""
        assert weight.shape[1] == self.num_inputs
        self._blocks[first] = weight.to(self.device)

    @property
    def has_blocks(self) -> bool:
        """Whether a part of the weight is in blocks of integers."""
        return bool(self._blocks) if self.native is None else self.native.has_blocks

    @property
    def num_bytes(self) -> int:
        """The bytes of the weight in memory."""
        if self.native is not None:
            return self.native.num_bytes
        plain = self._weight_OI if self._packed is None else self._packed
        numbers = [] if plain is None else [plain]
        return sum(map(_num_bytes, self._parts or [*numbers, *self._blocks.values()]))

    def adopt(self, native: NativeKernels, weights: NativeWeights) -> None:
        """Take weights that were packed before, in the place of loading and packing them."""
        assert (weights.num_outputs, weights.num_inputs) == (self.num_outputs, self.num_inputs)
        self._kernels, self.native = native, weights
        self._drop_plain()

    def prepare(self, native: NativeKernels | None = None, *, keeps_rows: bool = False) -> None:
        """Pack the loaded weight; the plain copy is dropped. One that is not packed is not mapped.

        With `keeps_rows`, `rows` can be called. A shared projection may be prepared again.
        """
        if self.native is not None or self._packed is not None or self._parts:
            return
        parts = self._find_parts()
        packable = [each for each in parts if isinstance(each, torch.Tensor | PackedTensor)]
        is_known = self.dtype in DTYPES and len(packable) == len(parts)
        if native is not None and is_known and all(map(native.can_pack, packable)):
            self._kernels, self.native = native, native.pack(*packable)
        elif self._blocks or self.is_deterministic:
            self._keep(joined(parts))
            return
        elif is_packable(self.dtype, self.device):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight_OI)
        else:
            self.keep_own()
            return
        self._blocks = {}
        if self.native is not None or not keeps_rows:
            self._drop_plain()

    def _drop_plain(self) -> None:
        self._weight_OI = torch.empty(0, dtype=self.dtype, device=self.device)
        self._is_mapped = False

    def _find_parts(self) -> list[torch.Tensor | HeldWeight]:
        """The parts of the weight, in order: plain rows, and rows in blocks."""
        parts: list[torch.Tensor | HeldWeight] = []
        end = 0
        for first, packed in sorted(self._blocks.items(), key=lambda item: item[0]):
            if first > end:
                parts.append(self.weight_OI[end:first])
            parts.append(packed)
            end = first + packed.shape[0]
        if end < self.num_outputs:
            parts.append(self.weight_OI[end:])
        return parts

    def _keep(self, parts: list[torch.Tensor | HeldWeight]) -> None:
        """Keep these parts, and release their sources."""
        if self._blocks and self._weight_OI is not None:  # most rows of which are in blocks
            parts = [each.clone() if isinstance(each, torch.Tensor) else each for each in parts]
            self._drop_plain()
        self._set_parts(parts)

    def move_weight(self, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the tensors of a weight that is prepared for a GPU, in one order."""
        if self._blocks:
            parts = [
                move(x) if isinstance(x, torch.Tensor) else moved(x, move) for x in self._parts
            ]
            self._set_parts(parts)
            return
        self._weight_OI = move(self.weight_OI)
        if self._parts:
            self._set_parts([self._weight_OI])

    def _set_parts(self, parts: list[torch.Tensor | HeldWeight]) -> None:
        self._parts, self._blocks, first = parts, {}, 0
        for part in parts:
            if not isinstance(part, torch.Tensor):
                self._blocks[first] = part
            first += part.shape[0]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The weights of some outputs, `[len(ids), I]`."""
        if self.native is not None:
            assert self._kernels is not None
            return self._kernels.rows(self.native, ids, self.dtype)
        if self._blocks:
            (packed,) = self._blocks.values()
            assert isinstance(packed, PackedTensor)
            return packed.rows(ids).dequantize(self.dtype)
        return self.weight_OI.index_select(0, ids)

    def __call__(
        self,
        x_TI: torch.Tensor,
        residual_TO: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Project, adding `residual_TO` where given. `x_TI` is contiguous.

        With `out_dtype`, our kernels return sums in that type without rounding to the weight's
        first.
        """
        y_TO = self._product(x_TI, residual_TO, out_dtype)
        if self.adapters is not None:
            self.adapters.add(x_TI, y_TO)
        return y_TO

    def _product(
        self,
        x_TI: torch.Tensor,
        residual_TO: torch.Tensor | None,
        out_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        if self.native is not None:
            assert self._kernels is not None
            return self._kernels.linear(x_TI, self.native, self.bias_O, residual_TO, out_dtype)
        if self._blocks or self.is_deterministic:
            return self._call_parts(x_TI, residual_TO, out_dtype or x_TI.dtype)
        y_TO = self._call_torch(x_TI, residual_TO)
        return y_TO if out_dtype is None else y_TO.to(out_dtype)

    def takes_gelu(self, x_TI: torch.Tensor) -> bool:
        """Whether `of_gelu` takes such rows: a library multiplies the float8 weight by them."""
        weight = self._parts[0] if len(self._parts) == 1 and not self.is_deterministic else None
        if not isinstance(weight, Float8Weight) or weight.scale.dim() == 2:
            return False
        return prefers_library(x_TI, weight.weight_OI, weight.scale, x_TI.dtype)

    def of_gelu(self, x_TF: torch.Tensor, left_TN: torch.Tensor | None = None) -> torch.Tensor:
        """Project GELU (the tanh kind) of `x_TF`, with inputs to its left.

        The activations are written in float8 alone.
        """
        (weight,) = self._parts
        assert isinstance(weight, Float8Weight)
        quantized_TI, scale_T1 = quantize_gelu_rows(x_TF, left_TN)
        stored = weight.weight_OI, weight.scale
        return scaled_product(quantized_TI, scale_T1, *stored, x_TF.dtype, self.bias_O)

    def _call_parts(
        self, x_TI: torch.Tensor, residual_TO: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        parts, first = [], 0
        for weight in self._parts:
            end = first + weight.shape[0]
            y_TO = packed_linear(
                x_TI,
                weight,
                out_dtype,
                bias_O=None if self.bias_O is None else self.bias_O[first:end],
                is_deterministic=self.is_deterministic,
            )
            parts.append(y_TO)
            first = end
        y_TO = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return y_TO if residual_TO is None else y_TO.add_(residual_TO)

    def _call_torch(self, x_TI: torch.Tensor, residual_TO: torch.Tensor | None) -> torch.Tensor:
        if self._packed is not None:
            return self._call_packed(x_TI, self._packed, residual_TO)
        if residual_TO is None:
            return linear(x_TI, self.weight_OI, self.bias_O)
        y_TO = torch.addmm(residual_TO, x_TI, self.weight_OI.t())
        return y_TO if self.bias_O is None else y_TO.add_(self.bias_O)

    def _call_packed(
        self, x_TI: torch.Tensor, packed: torch.Tensor, residual_TO: torch.Tensor | None
    ) -> torch.Tensor:
        pointwise = torch.ops.mkldnn._linear_pointwise
        if residual_TO is None:
            y_TO = pointwise.default(x_TI, packed, self.bias_O, "none", [], "")
        else:
            y_TO = pointwise.binary(x_TI, residual_TO, packed, self.bias_O, "add")
        assert isinstance(y_TO, torch.Tensor)
        return y_TO


def _num_bytes(held: torch.Tensor | HeldWeight) -> int:
    return held.nbytes if isinstance(held, torch.Tensor) else held.num_bytes


def is_packable(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN packs weights of this type on this device."""
    return device.type == "cpu" and dtype is torch.bfloat16 and has_fast_cpu_bfloat16()
