"""The step cache of one row, and batched tensor work on many of them.

Owns the cells of computed outputs and compared signals, and the row's decisions. Knows no model and
no sampler. All state belongs to the row and is dropped with it.

Legend: R caches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.modalities.diffusion.engine.caches.decisions import Decisions, GateSignal
from triptych.modalities.diffusion.engine.caches.extrapolation import Point
from triptych.modalities.diffusion.engine.caches.methods import CacheMethod, Level
from triptych.modalities.diffusion.engine.tensor_pool import (
    SumRanks,
    TensorPool,
    TensorPools,
    select_rows,
)


@dataclass
class _Memory:
    """Cells of one pool, and the points they belong to, newest first."""

    pool: TensorPool
    points: list[Point] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)

    def make_room(self, point: Point, capacity: int) -> int:
        """The cell for a point's value: a new one, the oldest, or its own for a repeated step."""
        if self.points and self.points[0] == point:
            return self.cells[0]
        if len(self.cells) < capacity:
            cell = self.pool.take(1)[0]
        else:
            cell = self.cells.pop()
            self.points.pop()
        self.cells.insert(0, cell)
        self.points.insert(0, point)
        return cell


class RowCache:
    """The cache of a row over one trajectory of `num_steps` evaluations, in order.

    At each step: `decisions.decide`, then either `record` the computed output or `predict` one; a
    failed step may be repeated. `release` must be called once, however the row ends.
    """

    def __init__(self, method: CacheMethod, num_steps: int, pools: TensorPools) -> None:
        self.method = method
        self.decisions = Decisions(method.open_gate, method.bounds, num_steps)
        self._pools = pools
        self._outputs: _Memory | None = None
        self._reference: _Memory | None = None

    @property
    def signal(self) -> GateSignal | None:
        """The signal that the gate compares, if any."""
        return self.decisions.signal

    @property
    def keeps_hidden(self) -> bool:
        """Whether hidden states or signals are kept between steps, not only outputs."""
        return self.signal is not None or self.method.level is Level.SPAN

    def may_compute(self, steps: Sequence[int]) -> list[bool]:
        """Which of the row's next steps may need a run of the model. Changes nothing."""
        if self.method.level is Level.SPAN:  # the layers around the blocks run at every step
            return [True] * len(steps)
        return self.decisions.may_compute(steps)

    def follow(self, at: Point, velocity: Tensor, *, computes: bool) -> None:
        """Record another rank's step as if taken here, except for hidden states.

        `computes` is that rank's decision if it depends on a signal.
        """
        if self.signal is None:
            computes = self.decisions.decide(at.step)
        else:
            self.decisions.take_over(at.step, computes=computes)
        if computes and self.method.level is Level.VELOCITY:
            record([self], velocity[None], [at])

    def release(self) -> None:
        """Give all cells back and start over."""
        for memory in (self._outputs, self._reference):
            if memory is not None:
                memory.pool.give_back(memory.cells)
        self._outputs = self._reference = None
        self.decisions.start_over()

    def has_output_in(self, pool: TensorPool) -> bool:
        """Whether computed outputs are kept in this pool."""
        return self._outputs is not None and self._outputs.pool is pool

    def known(self) -> _Memory:
        """The computed outputs, newest first."""
        assert self._outputs is not None, "nothing was computed yet"
        return self._outputs

    def room_for_output(self, like: Tensor, point: Point) -> tuple[TensorPool, int]:
        """The pool and cell for the newest output."""
        memory = self._outputs or _Memory(_pool_like(self._pools, like))
        cell = memory.make_room(point, self.method.extrapolator.num_kept)
        self._outputs = memory  # only once it has a cell: pools without any are dropped
        return memory.pool, cell

    def room_for_reference(self, like: Tensor, point: Point) -> tuple[TensorPool, int]:
        """The pool and cell for the signal that later steps are compared with."""
        memory = self._reference or _Memory(_pool_like(self._pools, like))
        cell = memory.make_room(point, 1)
        self._reference = memory
        return memory.pool, cell

    def reference_cell(self) -> tuple[TensorPool, int] | None:
        """The pool and cell of the signal to compare with, if any."""
        if self._reference is None:
            return None
        return self._reference.pool, self._reference.cells[0]


def distances(
    caches: Sequence[RowCache], signals_R: Tensor, sum_ranks: SumRanks | None = None
) -> list[float]:
    """The distance of each row's signal, `[R, ...]`, from its reference; infinite without one.

    Mean |signal - reference| over mean |reference|, in float32, per row. Waits for one transfer to
    the host for all rows: the next run depends on it.
    """
    found = [cache.reference_cell() for cache in caches]
    rows = [index for index, place in enumerate(found) if place is not None]
    measured = [math.inf] * len(caches)
    if not rows:
        return measured
    places = [place for place in found if place is not None]
    cells = [cell for _, cell in places]
    relative = places[0][0].distances(cells, select_rows(signals_R, rows), sum_ranks)
    for index, distance in zip(rows, HostCopy(relative).get().tolist(), strict=True):
        measured[index] = distance
    return measured


def keep_signals(
    caches: Sequence[RowCache], signals_R: Tensor, at: Sequence[Point], computes: Sequence[bool]
) -> None:
    """Store signals, `[R, ...]`, as references for later steps, as each gate requires."""
    rows = [
        index
        for index, cache in enumerate(caches)
        if computes[index] or cache.signal is not GateSignal.FIRST_RESIDUAL
    ]
    if rows:
        places = [caches[index].room_for_reference(signals_R[index], at[index]) for index in rows]
        places[0][0].write([cell for _, cell in places], select_rows(signals_R, rows))


def record(caches: Sequence[RowCache], outputs_R: Tensor, at: Sequence[Point]) -> None:
    """Keep computed outputs, `[R, ...]`."""
    places = [
        cache.room_for_output(output, point)
        for cache, output, point in zip(caches, outputs_R, at, strict=True)
    ]
    places[0][0].write([cell for _, cell in places], outputs_R)


def predict(caches: Sequence[RowCache], at: Sequence[Point]) -> Tensor:
    """Predict the outputs of rows that skip, `[R, ...]` in float32.

    The outputs must have one shape; each row has its own number of kept outputs and weights.
    """
    memories = [cache.known() for cache in caches]
    num_columns = max(len(memory.cells) for memory in memories)
    weights_RK = []
    for cache, memory, point in zip(caches, memories, at, strict=True):
        weights = cache.method.extrapolator.weights(memory.points, point)
        weights_RK.append([*weights, *[0.0] * (num_columns - len(weights))])
    # A row that keeps fewer reads its newest instead, with weight zero.
    cells_KR = [
        [memory.cells[k if k < len(memory.cells) else 0] for memory in memories]
        for k in range(num_columns)
    ]
    return memories[0].pool.weighted(cells_KR, weights_RK)


def _pool_like(pools: TensorPools, like: Tensor) -> TensorPool:
    return pools.pool(like.shape, like.dtype, like.device)
