"""The states of rows: what recurrent layers keep of a row in place of keys and values.

Owns their shapes, their storage, and the places where a step reads and writes them. A state has one
size, however long the row is. Knows no leases and no layers: a line is a number.

A line holds the state of one row in all layers. The first `num_slots` lines belong to the batch
slots of running rows; the rest hold snapshots (`core.kv.snapshots`). A step begins with the states
of its rows in their slots' lines and leaves their new states there. Where a snapshot falls within
a row's tokens (`StateCut`), the layer copies its state on the way.

Shapes: B rows, L lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

from triptych.core.runtime.devices.transfer import to_device
from triptych.core.runtime.kernels.native.state_arguments import NativeStateRows
from triptych.core.runtime.kernels.recurrent import StateWave

_ALIGNMENT_BYTES = 64  # a cache line of common CPUs, and more than GPUs need


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor of a layer's state: the shape and type of a row's part."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The bytes that it takes in a line."""
        num_bytes = prod(self.shape) * self.dtype.itemsize
        return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


LayerState = tuple[StateShape, ...]
"""The tensors of one recurrent layer."""


def state_bytes(layers: Sequence[LayerState]) -> int:
    """Bytes of a row's state in all layers: of one line."""
    return sum(part.num_bytes for layer in layers for part in layer)


class RowStates:
    """The states of all layers, allocated once: `layers[i]` are the tensors of layer i, `[L, ...]`.

    All parts of a line are adjacent in memory, so that a row's state is copied at once. The parts
    of one line are contiguous, the lines of a part are not.
    """

    __slots__ = ("_lines", "layers", "num_slots")

    def __init__(
        self, layers: Sequence[LayerState], num_slots: int, num_snapshots: int, device: torch.device
    ) -> None:
        self.num_slots = num_slots
        num_lines = num_slots + num_snapshots
        self._lines = torch.zeros(
            (num_lines, state_bytes(layers)), dtype=torch.uint8, device=device
        )
        ends = iter([*accumulate(part.num_bytes for layer in layers for part in layer)])
        self.layers = [tuple(self._part(part, next(ends)) for part in layer) for layer in layers]

    def _part(self, part: StateShape, end: int) -> torch.Tensor:
        first, num_values = end - part.num_bytes, prod(part.shape)
        own = self._lines[:, first : first + num_values * part.dtype.itemsize]
        return own.view(part.dtype).view(-1, *part.shape)

    @property
    def num_bytes(self) -> int:
        """The memory that all lines take."""
        return self._lines.nbytes

    @property
    def line_bytes(self) -> int:
        """The distance between lines."""
        return self._lines.stride(0)

    def line(self, line: int) -> torch.Tensor:
        """The bytes of a line."""
        return self._lines[line]

    @property
    def snapshots(self) -> torch.Tensor:
        """The lines of snapshots, as bytes."""
        return self._lines[self.num_slots :]

    def snapshot_line(self, snapshot: int) -> int:
        """The line of a snapshot."""
        return self.num_slots + snapshot

    def clear(self, lines: Sequence[int]) -> None:
        """Set lines to the state before the first token, which is all zeros."""
        if lines:
            self._lines.index_fill_(0, self._index(lines), 0)

    def copy(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy lines, each `(source, target)`; no target is a source."""
        if moves:
            sources, targets = (self._index(lines) for lines in zip(*moves, strict=True))
            self._lines.index_copy_(0, targets, self._lines.index_select(0, sources))

    def _index(self, lines: Sequence[int]) -> torch.Tensor:
        return to_device(torch.tensor(lines, dtype=torch.int64), self._lines.device)


class StateCut(NamedTuple):
    """A snapshot within a row's tokens: after `num_tokens` of them, the state goes to `line`."""

    row: int
    num_tokens: int
    line: int


class StateSegment(NamedTuple):
    """Tokens `start .. stop - 1` of a step, which belong to one row, and what follows them.

    After them the state goes to `line` as well, if that is not -1.
    """

    row: int
    start: int
    stop: int
    line: int


@dataclass(slots=True)
class StateBatch:
    """The states of a step's rows: `slots_B` and `host_slots_B` are the lines that they begin in.

    `cuts` are in order of rows and tokens, one at a place, and each leaves at least one token of
    its row after it: the runner copies the states that rows end with. `rows` and `native_rows` are
    found by the first layer that asks for them (`core.runtime.layers.recurrent`).
    """

    slots_B: torch.Tensor
    host_slots_B: Sequence[int]
    cuts: Sequence[StateCut] = ()
    rows: Sequence[StateWave] | None = None
    native_rows: NativeStateRows | None = None

    def segments(self, lengths_B: Sequence[int]) -> Iterator[StateSegment]:
        """The tokens of rows of these lengths, divided at the cuts, in order."""
        cuts = iter((*self.cuts, StateCut(len(lengths_B), 0, -1)))
        cut, first = next(cuts), 0
        for row, length in enumerate(lengths_B):
            start, stop = first, first + length
            while cut.row == row:
                yield StateSegment(row, start, first + cut.num_tokens, cut.line)
                start, cut = first + cut.num_tokens, next(cuts)
            yield StateSegment(row, start, stop, -1)
            first = stop
