"""The weights of all experts of a layer as they are stored, for one product on a GPU.

Owns the kinds of such weights, and their making of the weights of each expert, which must be alike.
Knows nothing of files, and of kernels only that they read four bits along the inputs.

Shapes: E experts, O outputs, I inputs, R groups of inputs, B bytes of a row of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triptych.core.block_formats import FORMATS
from triptych.core.errors import WeightsError
from triptych.core.runtime.kernels.dequantize import PackedTensor
from triptych.core.runtime.kernels.int4_words import WEIGHTS_PER_WORD, packed_words, unpacked_words
from triptych.core.runtime.kernels.packed_linear import (
    Float8Weight,
    HeldWeight,
    Int4Weight,
    joined,
)

FLOAT8 = "float8"
PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """The weights `[E, O, I]` of a `form`; each tensor has the experts first.

    - "plain": numbers `[E, O, I]`.
    - "float8": e4m3 `[E, O, I]`, and float32 scales `[E, O]` or of squares of 128.
    - "gptq" or "gptq_v2": words `[E, I / 8, O]`, scales `[E, R, O]`, and zeros `[E, R, O / 8]`
      unless they are 8; see `core.runtime.kernels.triton.gptq_linear`.
    - the name of a format of `core.block_formats`: blocks `[E, O, B]`.
    """

    form: str
    tensors: tuple[torch.Tensor, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of experts, outputs and inputs."""
        num_experts, rows, columns = self.tensors[0].shape
        if self.form in (FLOAT8, PLAIN):
            return num_experts, rows, columns
        if (form := FORMATS.get(self.form)) is not None:
            return num_experts, rows, columns // form.num_bytes * form.num_inputs
        return num_experts, columns, WEIGHTS_PER_WORD * rows

    @property
    def num_bytes(self) -> int:
        """The bytes in memory."""
        return sum(each.nbytes for each in self.tensors)


def stack_experts(experts: Sequence[Sequence[HeldWeight]], device: torch.device) -> StackedWeight:
    """Copy the experts to a device. The parts of each are its consecutive outputs.

    Raises `WeightsError` unless all experts and all parts are stored alike.
    """
    form, first = _as_stacked(experts[0])
    stacked = [torch.empty(len(experts), *x.shape, dtype=x.dtype, device=device) for x in first]
    for number, parts in enumerate(experts):
        own_form, tensors = _as_stacked(parts)
        if own_form != form or [x.shape for x in tensors] != [x.shape for x in first]:
            raise _unlike()
        for into_E, tensor in zip(stacked, tensors, strict=True):
            into_E[number].copy_(tensor)
    return StackedWeight(form, tuple(stacked))


def _as_stacked(parts: Sequence[HeldWeight]) -> tuple[str, list[torch.Tensor]]:
    """The form of one expert's weight, and its tensors."""
    if any(isinstance(each, Int4Weight) and each.group_of_input_I is not None for each in parts):
        raise WeightsError(
            "The experts' groups are in the order of activations (desc_act), which experts may not"
            " have; use a checkpoint without it."
        )
    weight, *others = joined(parts)
    if others or isinstance(weight, torch.Tensor):
        raise _unlike()
    if isinstance(weight, PackedTensor):
        return weight.format.name, [weight.blocks_OB]
    if isinstance(weight, Float8Weight):
        has_squares = weight.scale.dim() == 2
        scale = weight.scale if has_squares else weight.scale.expand(weight.shape[0])
        return FLOAT8, [weight.weight_OI, scale]
    weight = _along_inputs(weight) if weight.layout == "awq" else weight
    zeros = [] if weight.zeros is None else [weight.zeros]
    return weight.layout, [weight.qweight, weight.scales_RO, *zeros]


def _unlike() -> WeightsError:
    return WeightsError(
        "The experts of a layer are not all quantized alike, which a GPU needs; use"
        " --quantization-encoding bfloat16."
    )


def _along_inputs(awq: Int4Weight) -> Int4Weight:
    """AWQ's weight, with eight inputs in a word in the place of eight outputs."""
    assert awq.zeros is not None
    codes_OI = unpacked_words(awq.qweight, "awq").t()
    zeros = packed_words(unpacked_words(awq.zeros, "awq"))
    return Int4Weight(packed_words(codes_OI).t(), awq.scales_RO, zeros, None, "gptq_v2")
