"""One projection of all experts of a layer on a GPU: plain numbers, or weights as they are stored.

Owns the weights, and for each expert a `Linear` that loaders fill. Stored weights are copied to the
device when those of the last expert have arrived: until then they are where they were read. Knows
neither routing nor the product.

Shapes: E experts, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from triptych.core.errors import WeightsError
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.packed_linear import HeldWeight
from triptych.core.runtime.kernels.stacked_weights import StackedWeight, stack_experts
from triptych.core.runtime.layers.linear import Linear


class ExpertWeights:
    """The weights `[E, O, I]` and biases of a projection; `linears` has that of each expert."""

    def __init__(
        self,
        num_experts: int,
        num_inputs: int,
        num_outputs: int,
        *,
        has_bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shape = num_experts, num_outputs, num_inputs
        self.bias_EO: torch.Tensor | None = None
        if has_bias:
            self.bias_EO = torch.empty(num_experts, num_outputs, dtype=dtype, device=device)
        self._dtype, self._device = dtype, device
        self._plain_EOI: torch.Tensor | None = None
        self._parts: list[dict[int, HeldWeight]] = [{} for _ in range(num_experts)]
        self._num_missing = num_experts * num_outputs
        self._stacked: StackedWeight | None = None
        self.linears = [_ExpertLinear(self, number) for number in range(num_experts)]

    @property
    def plain_EOI(self) -> torch.Tensor:  # noqa: N802 - a shape
        """The plain weights, to be filled; allocated at their first use."""
        if self._plain_EOI is None:
            self._plain_EOI = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return self._plain_EOI

    @property
    def value(self) -> torch.Tensor | StackedWeight:
        """All weights, loaded."""
        return self.plain_EOI if self._stacked is None else self._stacked

    @property
    def num_bytes(self) -> int:
        """The bytes of the weights in memory."""
        plain = 0 if self._plain_EOI is None else self._plain_EOI.nbytes
        return plain if self._stacked is None else self._stacked.num_bytes

    def hold(self, expert: int, first: int, weight: HeldWeight) -> None:
        """Keep the rows of an expert from `first` on as they are stored.

        Raises `WeightsError` with the last rows unless all are stored alike.
        """
        self._parts[expert][first] = weight
        self._num_missing -= weight.shape[0]
        if not self._num_missing:
            in_order = [[parts[first] for first in sorted(parts)] for parts in self._parts]
            self._stacked = stack_experts(in_order, self._device)
            self._parts = []

    def move(self, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the tensors of the loaded weights, in one order."""
        if self._stacked is None:
            self._plain_EOI = move(self.plain_EOI)
        else:
            tensors = tuple(map(move, self._stacked.tensors))
            self._stacked = replace(self._stacked, tensors=tensors)

    def check(self) -> None:
        """Raise `WeightsError` if some rows are plain and others as they are stored."""
        if any(self._parts):
            raise WeightsError(
                "Some of a layer's experts are quantized and others are not, which a GPU's kernels"
                " do not take; use --quantization-encoding bfloat16."
            )


class _ExpertLinear(Linear):
    """The projection of one expert. It is computed with all others, never alone."""

    __slots__ = ("_all", "_number")

    def __init__(self, weights: ExpertWeights, number: int) -> None:
        _, num_outputs, num_inputs = weights._shape
        super().__init__(
            num_inputs, num_outputs, has_bias=False, dtype=weights._dtype, device=weights._device
        )
        self._all, self._number = weights, number
        self.bias_O = None if weights.bias_EO is None else weights.bias_EO[number]

    @property
    def weight_OI(self) -> torch.Tensor:  # noqa: N802 - a shape
        return self._all.plain_EOI[self._number]

    def map(self, weight_OI: torch.Tensor) -> bool:
        return False  # one tensor holds those of all experts

    @property
    def num_bytes(self) -> int:
        return self._all.num_bytes // len(self._all.linears)

    def hold(self, first: int, weight: HeldWeight) -> None:
        self._all.hold(self._number, first, weight)

    def move_weight(self, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if not self._number:  # those of all experts are moved together
            self._all.move(move)

    def prepare(self, native: NativeKernels | None = None, *, keeps_rows: bool = False) -> None:
        self._all.check()
