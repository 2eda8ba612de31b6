"""Several skipped steps as one linear map.

A sampler's step is linear in its states and the output, and a predicted output is linear in the
outputs computed before. So consecutive skipped steps are one linear map, and cost as much as one
step. Owns that map. Knows no model.

Legend: R rows, S states of a sampler (the sample first), K kept outputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from triptych.modalities.diffusion.engine.caches.extrapolation import Point
from triptych.modalities.diffusion.engine.caches.row_cache import RowCache
from triptych.modalities.diffusion.engine.samplers.program import Vector
from triptych.modalities.diffusion.engine.samplers.rows import SampleRow, write_states


class FusedSkip:
    """A row's next steps, without the model.

    `shares`: the caches that predict, and the weight of each in the output.
    """

    def __init__(
        self, row: SampleRow, num_steps: int, shares: Sequence[tuple[RowCache, float]]
    ) -> None:
        self.row = row
        self.steps = range(row.step, row.step + num_steps)
        self._shares = shares

    @property
    def is_possible(self) -> bool:
        """Whether all steps are known to be skipped, by a `Program` without fresh noise."""
        program = self.row.program
        return (
            program is not None
            and not any(program.needs_noise(step) for step in self.steps)
            and all(cache.has_output_in(self.row.pool) for cache, _ in self._shares)
            and not any(any(cache.may_compute(self.steps)) for cache, _ in self._shares)
        )

    @property
    def cells(self) -> list[int]:
        """The cells of the columns: the states, then the outputs that each cache keeps."""
        kept = [cell for cache, _ in self._shares for cell in cache.known().cells]
        return [*self.row.cells, *kept]

    def weights(self) -> Vector:
        """Each new state as weights of the columns: `[S, S + K]`."""
        program = self.row.program
        assert program is not None
        num_states = len(self.row.cells)
        total = np.eye(num_states, len(self.cells))
        for step in self.steps:
            at = Point(step, self.row.noise_levels[step])
            weights_SC = program.weights_NSC[step]
            total = weights_SC[:, :num_states] @ total
            start = num_states
            for cache, share in self._shares:
                weights = cache.method.extrapolator.weights(cache.known().points, at)
                total[:, start : start + len(weights)] += share * np.outer(
                    weights_SC[:, num_states], weights
                )
                start += len(cache.known().cells)
        return total

    def take(self) -> None:
        """Record that the steps are taken."""
        for cache, _ in self._shares:
            for step in self.steps:
                cache.decisions.decide(step)
        self.row.step += len(self.steps)


def take_skips(skips: Sequence[FusedSkip]) -> None:
    """Take the steps of rows of one shape. If this raises, each row took all or none."""
    groups: defaultdict[int, list[FusedSkip]] = defaultdict(list)
    for each in skips:
        groups[len(each.row.cells)].append(each)
    for members in groups.values():
        _write_states(members)
        for each in members:
            each.take()


def _write_states(skips: Sequence[FusedSkip]) -> None:
    rows = [each.row for each in skips]
    cells_R, weights = [each.cells for each in skips], [each.weights() for each in skips]
    num_columns = max(map(len, cells_R))
    weights_RSI = np.zeros((len(rows), len(weights[0]), num_columns))
    for padded, weights_SI in zip(weights_RSI, weights, strict=True):
        padded[:, : weights_SI.shape[1]] = weights_SI
    # A row with fewer columns reads its sample instead, with weight zero.
    padded_R = [[*cells, *cells[:1] * (num_columns - len(cells))] for cells in cells_R]
    columns = rows[0].pool.read_columns(list(zip(*padded_R, strict=True)))
    write_states(rows, weights_RSI.tolist(), columns)
