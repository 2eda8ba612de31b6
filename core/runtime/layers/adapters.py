"""Low-rank adapters of a decoder, chosen per row of a step.

Owns the adapters of each projection by slot, and the slots of the rows whose products are computed.
A slot is filled and cleared while steps run that do not use it. Knows no file, no name and no
request. On a CPU the native step adds the changes, or one native call after a product; elsewhere
the adapters of a projection are stacked, and on a GPU one operation adds them.

Shapes: T rows, I inputs, O outputs, R rank, S slots.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.functional import linear

from triptych.core.runtime.kernels.native.adapter_arguments import (
    AdaptedRowBlocks,
    LowRankPointers,
    NativeLowRank,
)
from triptych.core.runtime.kernels.native.arguments import DTYPES, LinearArguments
from triptych.core.runtime.kernels.native.library import NativeKernels

if TYPE_CHECKING:
    from triptych.core.runtime.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """The change of one module by an adapter, at full strength: `down_RI`, then `up_OR`.

    `outputs` are the parts of a projection that the module's outputs fill: first output of the
    projection, and rows of `up_OR`.
    """

    module: str
    down_RI: torch.Tensor
    up_OR: torch.Tensor
    outputs: Sequence[tuple[int, slice]]


class AdapterRows:
    """The slot of the adapter of each row; -1: none. All projections of a decoder share it."""

    __slots__ = ("blocks", "scales_T", "slots_T")

    def __init__(self) -> None:
        self.slots_T: torch.Tensor | None = None
        """On the device, int32; `None` where no row has an adapter."""
        self.scales_T = torch.empty(0)
        """On a GPU, ones in float32: adapters are stored at their strength."""
        self.blocks: AdaptedRowBlocks | None = None
        """On a CPU."""

    def select(self, slots_T: torch.Tensor) -> None:
        """Compute products for rows with these slots from now on."""
        self.slots_T, self.blocks = slots_T.to(torch.int32), None
        if not slots_T.is_cpu:
            self.scales_T = torch.ones(slots_T.shape, dtype=torch.float32, device=slots_T.device)
            return
        if bool((slots_T < 0).all()):
            self.slots_T = None
        else:
            self.blocks = AdaptedRowBlocks(slots_T.numpy())


class ProjectionAdapters(Protocol):
    """The adapters of one projection."""

    def put(self, slot: int, changes: Sequence[ModuleChange]) -> None:
        """Fill a slot; without changes, clear it. No step in flight may use it."""

    def add(self, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        """Add the rows' changes to `y_TO`, the projection of `x_TI`, in place."""


class NativeAdapters:
    """Adapters of a projection whose weight our CPU kernels have."""

    def __init__(self, rows: AdapterRows, num_slots: int, native: NativeKernels) -> None:
        self._rows, self._native = rows, native
        self._held: list[NativeLowRank | None] = [None] * num_slots  # kept for the pointers
        self.pointers = (LowRankPointers * num_slots)()

    def put(self, slot: int, changes: Sequence[ModuleChange]) -> None:
        """Fill or clear a slot; see `ProjectionAdapters.put`."""
        if not changes:
            self.pointers[slot], self._held[slot] = LowRankPointers(), None
            return
        offset, parts = 0, list[tuple[int, int, torch.Tensor]]()
        for change in changes:
            parts += [(first, offset, change.up_OR[rows]) for first, rows in change.outputs]
            offset += len(change.down_RI)
        held = NativeLowRank(torch.cat([change.down_RI for change in changes]), parts)
        self._held[slot], self.pointers[slot] = held, held.pointers

    def add(self, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        """Add the changes; see `ProjectionAdapters.add`."""
        blocks = self._rows.blocks
        if blocks is None:
            return
        assert x_TI.is_contiguous()
        assert y_TO.is_contiguous()
        product = LinearArguments(
            x=x_TI.data_ptr(),
            y=y_TO.data_ptr(),
            num_rows=len(x_TI),
            num_inputs=x_TI.shape[1],
            num_outputs=y_TO.shape[1],
            dtype=DTYPES[x_TI.dtype],
            y_dtype=DTYPES[y_TO.dtype],
            num_threads=torch.get_num_threads(),
        )
        self._native.add_low_rank(product, self.pointers, blocks.pointers)


class StackedAdapters:
    """Adapters of a projection in one tensor for each module, with room for `max_rank`.

    Its memory is taken at once, so that captured steps find every adapter at the same place.
    """

    def __init__(
        self,
        rows: AdapterRows,
        num_slots: int,
        max_rank: int,
        outputs: Mapping[str, Sequence[tuple[int, slice]]],
        projection: Linear,
    ) -> None:
        new = partial(torch.zeros, dtype=projection.dtype, device=projection.device)
        self._rows = rows
        self._downs = {name: new(num_slots, max_rank, projection.num_inputs) for name in outputs}
        self._ups = [
            _StackedPart(name, first, part, new(num_slots, size, max_rank))
            for name, parts in outputs.items()
            for first, part in parts
            for size in [part.stop - part.start]
        ]

    def put(self, slot: int, changes: Sequence[ModuleChange]) -> None:
        """Fill or clear a slot; see `ProjectionAdapters.put`."""
        by_module = {change.module: change for change in changes}
        for name, down_SRI in self._downs.items():
            down_SRI[slot].zero_()
            if name in by_module:
                down_RI = by_module[name].down_RI
                down_SRI[slot, : len(down_RI)] = down_RI
        for part in self._ups:
            part.up_SOR[slot].zero_()
            if part.module in by_module:
                up_OR = by_module[part.module].up_OR[part.rows]
                part.up_SOR[slot, :, : up_OR.shape[1]] = up_OR

    def add(self, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        """Add the changes; see `ProjectionAdapters.add`."""
        slots_T = self._rows.slots_T
        if slots_T is None:
            return
        for part in self._ups:
            y_TN = y_TO[:, part.first : part.first + part.up_SOR.shape[1]]
            down_SRI = self._downs[part.module]
            if x_TI.is_cuda:
                from triptych.core.runtime.kernels.triton.lora import lora_add

                lora_add(y_TN, x_TI, down_SRI, part.up_SOR, self._rows.scales_T, slots_T)
            else:
                _add_by_torch(y_TN, x_TI, down_SRI, part.up_SOR, slots_T)


@dataclass(frozen=True, slots=True)
class _StackedPart:
    """A part of the outputs of a module, from `first` on in the projection."""

    module: str
    first: int
    rows: slice
    up_SOR: torch.Tensor


def _add_by_torch(
    y_TO: torch.Tensor,
    x_TI: torch.Tensor,
    down_SRI: torch.Tensor,
    up_SOR: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    for slot in slots_T.unique().tolist():
        if slot >= 0:
            rows = (slots_T == slot).nonzero().flatten()
            low_NR = linear(x_TI[rows], down_SRI[slot])
            y_TO.index_add_(0, rows, linear(low_NR, up_SOR[slot]).to(y_TO.dtype))


@dataclass(frozen=True, slots=True)
class VocabularyChange:
    """The change of embedding and head by an adapter.

    Tokens are embedded by `table_VC` in place of the model's, or `down_VR @ up_RC` is added. `head`
    is in place of the model's.
    """

    table_VC: torch.Tensor | None = None
    down_VR: torch.Tensor | None = None
    up_RC: torch.Tensor | None = None
    head: Linear | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes in memory."""
        tensors = (self.table_VC, self.down_VR, self.up_RC)
        head = 0 if self.head is None else self.head.num_bytes
        return head + sum(tensor.nbytes for tensor in tensors if tensor is not None)


class VocabularyAdapters:
    """The changes of a decoder's embedding and head, by slot. For a CPU.

    Rows do not depend on each other: numbers are added one rank after the other.
    """

    def __init__(self, rows: AdapterRows) -> None:
        self._rows = rows
        self._changes: dict[int, VocabularyChange] = {}

    def put(self, slot: int, change: VocabularyChange | None) -> None:
        """Fill or clear a slot. No step in flight may use it."""
        self._changes.pop(slot, None)
        if change is not None:
            self._changes[slot] = change

    def change_embedded(self, token_ids_T: torch.Tensor, x_TC: torch.Tensor) -> None:
        """Change the embedded tokens of rows with such adapters, in place."""
        for change, rows_N in self._used():
            ids_N = token_ids_T[rows_N]
            if change.table_VC is not None:
                x_TC[rows_N] = change.table_VC[ids_N]
            if change.down_VR is not None and change.up_RC is not None:
                low_NR, up_RC = change.down_VR[ids_N].float(), change.up_RC.float()
                added_NC = torch.zeros(len(rows_N), x_TC.shape[1])
                for low_N, up_C in zip(low_NR.t(), up_RC, strict=True):
                    added_NC += low_N[:, None] * up_C
                x_TC[rows_N] = (x_TC[rows_N].float() + added_NC).to(x_TC.dtype)

    def change_logits(self, hidden_RC: torch.Tensor, logits_RV: torch.Tensor) -> None:
        """Replace the logits of rows whose adapter has a head of its own, in place."""
        for change, rows_N in self._used():
            if change.head is not None:
                logits_RV[rows_N] = change.head(hidden_RC[rows_N], out_dtype=torch.float32)

    def _used(self) -> Iterator[tuple[VocabularyChange, torch.Tensor]]:
        slots_T = self._rows.slots_T
        if not self._changes or slots_T is None:
            return
        for slot, change in tuple(self._changes.items()):
            rows_N = (slots_T == slot).nonzero().flatten()
            if len(rows_N):
                yield change, rows_N


def pointers_of(adapters: ProjectionAdapters | None) -> ctypes.Array[LowRankPointers] | None:
    """The structures of a projection's adapters for the native step, if it has any."""
    return adapters.pointers if isinstance(adapters, NativeAdapters) else None
