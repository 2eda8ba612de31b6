"""Velocities of a batch of rows, each through its own step cache.

Owns the order of events: probe the rows whose gate needs it, decide for every row, run the model
for rows that compute, predict the others. Knows no sampler and no request.

Legend: R rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.modalities.diffusion.engine.caches.decisions import GateSignal
from triptych.modalities.diffusion.engine.caches.extrapolation import Point
from triptych.modalities.diffusion.engine.caches.methods import Level
from triptych.modalities.diffusion.engine.caches.row_cache import (
    RowCache,
    distances,
    keep_signals,
    predict,
    record,
)
from triptych.modalities.diffusion.engine.families.model import Batch, DenoiseModel
from triptych.modalities.diffusion.engine.families.span import Probed, SpanModel
from triptych.modalities.diffusion.engine.tensor_pool import merge_rows, select_rows


def evaluate(
    model: DenoiseModel, batch: Batch, caches: Sequence[RowCache | None], points: Sequence[Point]
) -> Tensor:
    """Velocities of all rows, `[R, ...]`, float32. A row without a cache always computes.

    A cache that probes, or works on the span, needs a `SpanModel`.
    """
    cached = [row for row, cache in enumerate(caches) if cache is not None]
    if not cached:
        return model.velocity(batch)
    return _Evaluation(model, batch, {row: s for row, s in enumerate(caches) if s}, points).run()


@dataclass(frozen=True, slots=True)
class _ProbeRows:
    """Rows probed together, and the result, in their order."""

    rows: list[int]
    found: Probed


class _Evaluation:
    """One step of a batch. `caches` are by row; rows without a cache are absent."""

    def __init__(
        self,
        model: DenoiseModel,
        batch: Batch,
        caches: dict[int, RowCache],
        points: Sequence[Point],
    ) -> None:
        self._model = model
        self._batch = batch
        self._caches = caches
        self._points = points
        self._probes = self._probe()
        self._bases = {
            row: probe.found.base[index]
            for probe in self._probes
            for index, row in enumerate(probe.rows)
        }

    def run(self) -> Tensor:
        computing = self._decide()
        skipping = [row for row in range(len(self._batch)) if row not in computing]
        parts = [(computing, self._compute(computing))] if computing else []
        if rows := self._of(Level.VELOCITY, skipping):
            parts.append((rows, predict(self._caches_of(rows), self._points_of(rows))))
        if rows := self._of(Level.SPAN, skipping):
            parts.append((rows, self._predict_span(rows)))
        return merge_rows(parts)

    def _probe(self) -> list[_ProbeRows]:
        """One pass for each signal, and one for span rows whose gate needs none."""
        groups: dict[GateSignal | None, list[int]] = {}
        for row, cache in self._caches.items():
            if cache.signal or cache.method.level is Level.SPAN:
                groups.setdefault(cache.signal, []).append(row)
        probes = []
        for signal, rows in groups.items():
            assert isinstance(self._model, SpanModel), "the cache needs a `SpanModel`"
            probes.append(_ProbeRows(rows, self._model.probe(self._batch.select(rows), signal)))
        return probes

    def _decide(self) -> list[int]:
        """Decide which rows compute, and store the signals that later steps compare with."""
        signals = [(p.rows, p.found.signal) for p in self._probes if p.found.signal is not None]
        moved: dict[int, float] = {}
        sequence = self._model.sequence
        sum_ranks = None if sequence is None else sequence.sum
        for rows, signal in signals:
            found = distances(self._caches_of(rows), signal, sum_ranks)
            moved.update(zip(rows, found, strict=True))
        computing = [
            row
            for row in range(len(self._batch))
            if row not in self._caches
            or self._caches[row].decisions.decide(self._points[row].step, moved.get(row, math.inf))
        ]
        for rows, signal in signals:
            computes = [row in computing for row in rows]
            keep_signals(self._caches_of(rows), signal, self._points_of(rows), computes)
        return computing

    def _compute(self, rows: list[int]) -> Tensor:
        velocities, hidden = self._run_model(rows)
        if kept := self._of(Level.VELOCITY, rows):
            values = select_rows(velocities, [rows.index(row) for row in kept])
            record(self._caches_of(kept), values, self._points_of(kept))
        if kept := self._of(Level.SPAN, rows):
            assert hidden is not None
            values = select_rows(hidden, [rows.index(row) for row in kept]) - self._base(kept)
            record(self._caches_of(kept), values, self._points_of(kept))
        return velocities

    def _run_model(self, rows: list[int]) -> tuple[Tensor, Tensor | None]:
        """Velocities, and the hidden states after the blocks if a cache may need them."""
        chosen = self._batch.select(rows)
        if not isinstance(self._model, SpanModel) or not self._probes:
            return self._model.velocity(chosen), None
        for probe in self._probes:
            if set(rows) <= set(probe.rows):  # continue from the end of the probe
                found = [probe.rows.index(row) for row in rows]
                return self._model.span(chosen, probe.found.select(found))
        return self._model.span(chosen)

    def _predict_span(self, rows: list[int]) -> Tensor:
        """Velocities from this step's hidden states plus the predicted residual of the blocks."""
        assert isinstance(self._model, SpanModel)
        added = predict(self._caches_of(rows), self._points_of(rows))
        return self._model.head(self._batch.select(rows), self._base(rows).float() + added)

    def _base(self, rows: list[int]) -> Tensor:
        return torch.stack([self._bases[row] for row in rows])

    def _of(self, level: Level, rows: list[int]) -> list[int]:
        return [
            row for row in rows if row in self._caches and self._caches[row].method.level is level
        ]

    def _caches_of(self, rows: list[int]) -> list[RowCache]:
        return [self._caches[row] for row in rows]

    def _points_of(self, rows: list[int]) -> list[Point]:
        return [self._points[row] for row in rows]
