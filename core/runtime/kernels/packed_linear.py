"""Linear projections over weights as they are stored, on any device except with our CPU kernels.

Owns the kinds of such weights, their joining, and the choice of kernel. On a GPU weights are
dequantized inside the product; elsewhere they become a plain matrix first, which only blocks can.
Knows nothing of files.

Shapes: T tokens, I inputs, O outputs, R groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch
from torch.nn.functional import linear

from triptych.core.errors import WeightsError
from triptych.core.runtime.kernels.dequantize import PackedTensor
from triptych.core.runtime.kernels.int4_words import WEIGHTS_PER_WORD
from triptych.core.runtime.kernels.library_products import prefers_library, scaled_linear

_SQUARE = 128
"""Side of the squares that share a scale in blockwise float8."""


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Four bits in words, with a scale and a zero for each group, for a GPU.

    The layouts are defined in `core.runtime.kernels.triton.gptq_linear`.
    """

    qweight: torch.Tensor
    scales_RO: torch.Tensor
    zeros: torch.Tensor | None
    group_of_input_I: torch.Tensor | None
    layout: str

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        inputs_per_word = 1 if self.layout == "awq" else WEIGHTS_PER_WORD
        return self.scales_RO.shape[1], inputs_per_word * len(self.qweight)

    @property
    def num_bytes(self) -> int:
        """The bytes in memory."""
        held = self.qweight, self.scales_RO, self.zeros, self.group_of_input_I
        return sum(each.nbytes for each in held if each is not None)

    def part(self, rows: slice, inputs: slice) -> Int4Weight:
        """Slice its outputs and inputs. Raises `WeightsError` where that cuts words or groups."""
        num_outputs, num_inputs = self.shape
        words = _units(rows, WEIGHTS_PER_WORD, num_outputs)
        along_inputs = inputs, words
        if self.layout != "awq":
            along_inputs = _units(inputs, WEIGHTS_PER_WORD, num_inputs), rows
        groups, table_I = slice(None), self.group_of_input_I
        if table_I is not None:
            table_I = table_I[inputs]
        elif (num_groups := len(self.scales_RO)) > 1:
            groups = _units(inputs, num_inputs // num_groups, num_inputs)
        zeros = None if self.zeros is None else self.zeros[groups, words]
        scales_RO = self.scales_RO[groups, rows]
        return Int4Weight(self.qweight[along_inputs], scales_RO, zeros, table_I, self.layout)

    def to(self, device: torch.device) -> Int4Weight:
        """Copy the weight to a device."""
        zeros, groups = (
            None if each is None else each.to(device)
            for each in (self.zeros, self.group_of_input_I)
        )
        qweight, scales = self.qweight.to(device), self.scales_RO.to(device)
        return Int4Weight(qweight, scales, zeros, groups, self.layout)


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """Float8 (e4m3) with float32 scales for all, each output, or squares of 128; for a GPU."""

    weight_OI: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        num_outputs, num_inputs = self.weight_OI.shape
        return num_outputs, num_inputs

    @property
    def num_bytes(self) -> int:
        """The bytes in memory."""
        return self.weight_OI.nbytes + self.scale.nbytes

    def part(self, rows: slice, inputs: slice) -> Float8Weight:
        """Slice its outputs and inputs. Raises `WeightsError` where that cuts squares."""
        scale, (num_outputs, num_inputs) = self.scale, self.shape
        if scale.dim() == 2:
            squares = _units(rows, _SQUARE, num_outputs), _units(inputs, _SQUARE, num_inputs)
            scale = scale[squares]
        elif scale.numel() > 1:
            scale = scale[rows]
        return Float8Weight(self.weight_OI[rows, inputs].contiguous(), scale)

    def to(self, device: torch.device) -> Float8Weight:
        """Copy the weight to a device."""
        return Float8Weight(self.weight_OI.to(device), self.scale.to(device))


StoredWeight: TypeAlias = Int4Weight | Float8Weight
HeldWeight: TypeAlias = PackedTensor | StoredWeight


def _units(part: slice, size: int, total: int) -> slice:
    """A part of `total`, counted in units of `size`; the last unit may be smaller."""
    if part.start % size or (part.stop % size and part.stop != total):
        raise WeightsError(
            f"A part from {part.start} to {part.stop} of {total} cuts a group of the"
            f" checkpoint, of size {size}; use another number of ranks, or plain weights."
        )
    return slice(part.start // size, -(-part.stop // size))


def packed_linear(
    x_TI: torch.Tensor,
    weight: torch.Tensor | HeldWeight,
    out_dtype: torch.dtype,
    *,
    bias_O: torch.Tensor | None = None,
    is_deterministic: bool = False,
) -> torch.Tensor:
    """Compute `x_TI @ weight_OI.T + bias_O`.

    `is_deterministic` makes sums on a GPU independent of the number of rows. Otherwise plain
    weights are multiplied by torch.
    """
    if isinstance(weight, Float8Weight) and not is_deterministic:
        stored = weight.weight_OI, weight.scale
        if prefers_library(x_TI, *stored, out_dtype):
            return scaled_linear(x_TI, *stored, out_dtype, bias_O)
    if x_TI.is_cuda and (is_deterministic or not isinstance(weight, torch.Tensor)):
        y_TO = _on_gpu(x_TI, weight, out_dtype, is_deterministic)
        return y_TO if bias_O is None else y_TO.add_(bias_O)
    if isinstance(weight, PackedTensor):
        weight = weight.dequantize(x_TI.dtype)
    assert isinstance(weight, torch.Tensor), "weights as stored need a GPU"
    return linear(x_TI, weight, bias_O).to(out_dtype)


def _on_gpu(
    x_TI: torch.Tensor,
    weight: torch.Tensor | HeldWeight,
    out_dtype: torch.dtype,
    is_deterministic: bool,
) -> torch.Tensor:
    """Multiply by the kernel of the weight's kind; all kernels need Triton."""
    y_TO: torch.Tensor
    if isinstance(weight, torch.Tensor):
        from triptych.core.runtime.kernels.triton.linear import linear as plain_linear

        y_TO = plain_linear(x_TI, weight, out_dtype, is_deterministic)
    elif isinstance(weight, PackedTensor):
        from triptych.core.runtime.kernels.triton.gguf_linear import gguf_linear

        blocks_OB, name = weight.blocks_OB, weight.format.name
        y_TO = gguf_linear(x_TI, blocks_OB, name, out_dtype, is_deterministic)
    elif isinstance(weight, Int4Weight):
        from triptych.core.runtime.kernels.triton.gptq_linear import gptq_linear

        tensors = weight.qweight, weight.scales_RO, weight.zeros, weight.group_of_input_I
        y_TO = gptq_linear(x_TI, *tensors, weight.layout, out_dtype, is_deterministic)
    else:
        from triptych.core.runtime.kernels.triton.fp8_linear import fp8_linear

        stored = weight.weight_OI, weight.scale
        y_TO = fp8_linear(x_TI, *stored, out_dtype, is_deterministic)
    return y_TO


def moved(weight: HeldWeight, move: Callable[[torch.Tensor], torch.Tensor]) -> HeldWeight:
    """The weight with its tensors replaced, in one order."""
    values: dict[str, Any] = {each.name: getattr(weight, each.name) for each in fields(weight)}
    tensors = {n: move(value) for n, value in values.items() if isinstance(value, torch.Tensor)}
    return type(weight)(**values | tensors)


def joined(parts: Sequence[torch.Tensor | HeldWeight]) -> list[torch.Tensor | HeldWeight]:
    """The parts of a projection, with neighbours of one kind joined: each part is one product."""
    found: list[torch.Tensor | HeldWeight] = []
    for part in parts:
        both = _join(found[-1], part) if found else None
        if both is None:
            found.append(part)
        else:
            found[-1] = both
    return found


def _join(first: torch.Tensor | HeldWeight, second: torch.Tensor | HeldWeight) -> HeldWeight | None:
    """Join two consecutive weights if possible."""
    if isinstance(first, PackedTensor) and isinstance(second, PackedTensor):
        if first.format == second.format:
            return PackedTensor(torch.cat((first.blocks_OB, second.blocks_OB)), first.format)
    elif isinstance(first, Int4Weight) and isinstance(second, Int4Weight):
        return _join_int4(first, second)
    elif isinstance(first, Float8Weight) and isinstance(second, Float8Weight):
        return _join_float8(first, second)
    return None


def _join_int4(first: Int4Weight, second: Int4Weight) -> Int4Weight | None:
    has_table = first.group_of_input_I is not None or second.group_of_input_I is not None
    is_alike = first.layout == second.layout and len(first.scales_RO) == len(second.scales_RO)
    if has_table or not is_alike or (first.zeros is None) != (second.zeros is None):
        return None
    zeros = None
    if first.zeros is not None and second.zeros is not None:
        zeros = torch.cat((first.zeros, second.zeros), 1)
    qweight = torch.cat((first.qweight, second.qweight), 1)
    scales_RO = torch.cat((first.scales_RO, second.scales_RO), 1)
    return Int4Weight(qweight, scales_RO, zeros, None, first.layout)


def _join_float8(first: Float8Weight, second: Float8Weight) -> Float8Weight | None:
    """Join float8 weights: scales of squares need an aligned start; others become per output."""
    has_squares = first.scale.dim() == 2
    if has_squares != (second.scale.dim() == 2) or (has_squares and first.shape[0] % _SQUARE):
        return None
    scales = [
        each.scale if has_squares else each.scale.expand(each.shape[0]) for each in (first, second)
    ]
    as_bytes = [each.weight_OI.view(torch.uint8) for each in (first, second)]
    return Float8Weight(torch.cat(as_bytes).view(first.weight_OI.dtype), torch.cat(scales))
