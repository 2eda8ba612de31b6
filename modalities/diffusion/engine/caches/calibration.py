"""What an uncached run tells about a model: enough to plan skips, and to tune every cache.

Owns the measurements. Of the outputs of N steps it keeps their inner products, an N x N matrix
averaged over runs: every error that a plan can make along these runs is a quadratic form of it, for
any order of prediction and any sampler. No output is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from triptych.modalities.diffusion.engine.samplers.program import Vector


@dataclass
class Calibration:
    """Sums over runs of one number of steps with one sampler.

    `gram[i, j]` is the mean over runs and elements of output i times output j. `input_distances`
    and `output_distances` are of neighbouring steps, for `rescaling.fit_rescaling`.
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
        """MagCache's: mean over tokens of the ratio of norms to the step before; the first is 1."""
        return tuple(float(ratio) for ratio in self._ratios_N / max(1, self.num_runs))

    def add(self, outputs: Sequence[Tensor], input_distances: Sequence[float] = ()) -> None:
        """One uncached run: each step's output, and how far each step's input is from the last's.

        Raises `ValueError` for another number of steps.
        """
        if len(outputs) != self.num_steps or len(input_distances) not in {0, self.num_steps - 1}:
            raise ValueError(f"A run of {self.num_steps} steps was expected, not {len(outputs)}.")
        flat = torch.stack([output.double().flatten() for output in outputs])
        self._gram_NN += (flat @ flat.T / flat.shape[1]).cpu().numpy()
        self._ratios_N += self._ratios(outputs)
        self.num_runs += 1
        if input_distances:
            self.input_distances += input_distances
            self.output_distances += _neighbour_distances(outputs)

    def merge(self, other: Calibration) -> None:
        """Add the runs that another calibration measured. Both are of as many steps."""
        assert other.num_steps == self.num_steps
        self._gram_NN += other._gram_NN
        self._ratios_N += other._ratios_N
        self.num_runs += other.num_runs
        self.input_distances += other.input_distances
        self.output_distances += other.output_distances

    def _ratios(self, outputs: Sequence[Tensor]) -> Vector:
        norms = torch.stack([output.double().norm(dim=-1) for output in outputs])
        ratios = (norms[1:] / (norms[:-1] + 1e-8)).flatten(1).mean(1)
        return np.concatenate([[1.0], ratios.cpu().numpy()])


def _neighbour_distances(tensors: Sequence[Tensor]) -> list[float]:
    stacked = torch.stack([tensor.double().flatten() for tensor in tensors])
    moved = (stacked[1:] - stacked[:-1]).abs().mean(1) / stacked[:-1].abs().mean(1)
    return [float(distance) for distance in moved]
