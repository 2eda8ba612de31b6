"""Measurements of uncached runs of a model, for planning skips and tuning caches.

Owns the run and its measurements. Of the outputs of N steps it keeps the inner products, an N x N
matrix averaged over runs: the error of any plan along these runs is a quadratic form of it, for any
order of prediction and any sampler. Outputs are not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from triptych.core.errors import InvalidRequest
from triptych.modalities.diffusion.engine.caches.decisions import Gate, GateSignal
from triptych.modalities.diffusion.engine.caches.extrapolation import DividedDifferences
from triptych.modalities.diffusion.engine.caches.methods import CacheMethod, Level
from triptych.modalities.diffusion.engine.caches.row_cache import RowCache
from triptych.modalities.diffusion.engine.calibration.planning import ErrorModel
from triptych.modalities.diffusion.engine.denoise import Denoiser
from triptych.modalities.diffusion.engine.denoise_row import DenoiseRow
from triptych.modalities.diffusion.engine.families.span import SpanModel
from triptych.modalities.diffusion.engine.samplers.program import Vector
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools


@dataclass
class Calibration:
    """Sums over runs of one number of steps with one sampler.

    `gram[i, j]` is the mean over runs and elements of output i times output j. `input_distances`
    and `output_distances` are those of consecutive steps, for `methods.fit_rescaling`.
    """

    num_steps: int
    num_runs: int = 0
    input_distances: list[float] = field(default_factory=list)
    output_distances: list[float] = field(default_factory=list)
    _gram_NN: Vector = field(init=False)
    _ratios_N: Vector = field(init=False)

    def __post_init__(self) -> None:
        self._gram_NN = np.zeros((self.num_steps, self.num_steps))
        self._ratios_N = np.zeros(self.num_steps)

    @property
    def gram(self) -> Vector:
        """Inner products of the outputs, per element, averaged over the runs."""
        return self._gram_NN / max(1, self.num_runs)

    @property
    def magnitude_ratios(self) -> tuple[float, ...]:
        """MagCache's ratios: norm ratio to the last step, mean over tokens; the first is 1."""
        return tuple(float(ratio) for ratio in self._ratios_N / max(1, self.num_runs))

    def add(self, outputs: Sequence[Tensor], input_distances: Sequence[float] = ()) -> None:
        """Add one uncached run: each step's output, and each input's distance from the last.

        Raises `ValueError` for another number of steps.
        """
        if len(outputs) != self.num_steps or len(input_distances) not in {0, self.num_steps - 1}:
            raise ValueError(f"A run of {self.num_steps} steps was expected, not {len(outputs)}.")
        stacked = torch.stack([output.double() for output in outputs])
        flat, norms = stacked.flatten(1), stacked.norm(dim=-1)
        self._gram_NN += (flat @ flat.T / flat.shape[1]).cpu().numpy()
        self._ratios_N[0] += 1.0
        self._ratios_N[1:] += (norms[1:] / (norms[:-1] + 1e-8)).flatten(1).mean(1).cpu().numpy()
        self.num_runs += 1
        if input_distances:
            moved = (flat[1:] - flat[:-1]).abs().mean(1) / flat[:-1].abs().mean(1)
            self.input_distances += input_distances
            self.output_distances += moved.tolist()

    def merge(self, other: Calibration) -> None:
        """Add the runs of another calibration with the same number of steps."""
        assert other.num_steps == self.num_steps
        self._gram_NN += other._gram_NN
        self._ratios_N += other._ratios_N
        self.num_runs += other.num_runs
        self.input_distances += other.input_distances
        self.output_distances += other.output_distances


@dataclass
class _DistanceRecorder(Gate):
    """Always computes, and records the distances that TeaCache's gate would get."""

    signal: ClassVar[GateSignal | None] = GateSignal.MODULATED_INPUT
    distances: list[float] = field(default_factory=list)

    @override
    def wants_compute(self, step: int, distance: float) -> bool:
        if step > 0:
            self.distances.append(distance)
        return True


def calibrate(denoiser: Denoiser, rows: Sequence[DenoiseRow], pools: TensorPools) -> Calibration:
    """Run rows without caches to the end, in one batch, and measure every step.

    Outputs are measured after guidance, where a plan's errors act. Raises `InvalidRequest` unless
    all rows have the same number of steps and sampler.
    """
    num_steps = len(rows[0].sample.timesteps)
    if any(row.sample.timesteps != rows[0].sample.timesteps for row in rows):
        raise InvalidRequest("Calibration needs rows with the same steps and sampler.")
    recorders: list[_DistanceRecorder] = []
    if isinstance(denoiser.model, SpanModel):
        recorders = [_record_distances(row, num_steps, pools) for row in rows]
    outputs: dict[int, list[Tensor]] = {id(row): [] for row in rows}

    def on_velocities(members: Sequence[DenoiseRow], velocities: Tensor) -> None:
        for row, velocity in zip(members, velocities, strict=True):
            outputs[id(row)].append(velocity.clone())

    for _ in range(num_steps):
        denoiser.step(rows, on_velocities)
    calibration = Calibration(num_steps)
    for index, row in enumerate(rows):
        calibration.add(outputs[id(row)], recorders[index].distances if recorders else [])
    return calibration


def error_model(calibration: Calibration, row: DenoiseRow) -> ErrorModel:
    """The input of the plan search, from a calibration and any of its rows.

    Raises `InvalidRequest` for a sampler of diffusers, whose influence is unknown.
    """
    if row.sample.program is None:
        raise InvalidRequest("Plans need one of Triptych's own samplers: choose another scheduler.")
    return ErrorModel.of(calibration.gram, row.sample.program)


def _record_distances(row: DenoiseRow, num_steps: int, pools: TensorPools) -> _DistanceRecorder:
    """Give the positive branch a cache that only records, and the other branch none."""
    recorder = _DistanceRecorder()
    method = CacheMethod(
        open_gate=lambda _: recorder, extrapolator=DividedDifferences(), level=Level.VELOCITY
    )
    for branch in row.branches:
        if branch.cache is not None:
            branch.cache.release()
        branch.cache = None
    row.branches[0].cache = RowCache(method, num_steps, pools)
    return recorder
