"""An uncached run of some rows, measured: what plans, TeaCache's polynomials and MagCache need.

Owns the running; `caches.calibration` owns the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from triptych.core.errors import InvalidRequest
from triptych.modalities.diffusion.caches.extrapolation import DividedDifferences
from triptych.modalities.diffusion.caches.gates import Gate, GateSignal
from triptych.modalities.diffusion.caches.methods import CacheMethod, Level
from triptych.modalities.diffusion.caches.planning import Measured
from triptych.modalities.diffusion.engine.caches.calibration import Calibration
from triptych.modalities.diffusion.engine.caches.slot import CacheSlot
from triptych.modalities.diffusion.engine.denoise import Denoiser, DenoiseRow
from triptych.modalities.diffusion.engine.families.span import SpanModel
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools


@dataclass
class _DistanceRecorder(Gate):
    """Always computes, and writes down the distances TeaCache's rule would be told."""

    signal: ClassVar[GateSignal | None] = GateSignal.MODULATED_INPUT
    heard: list[float] = field(default_factory=list)

    @override
    def wants_compute(self, step: int, distance: float) -> bool:
        if step > 0:
            self.heard.append(distance)
        return True


def calibrate(denoiser: Denoiser, rows: Sequence[DenoiseRow], pools: TensorPools) -> Calibration:
    """Run rows without caches to their ends, in one batch, and measure every step.

    Outputs are measured after guidance, since that is what a plan's errors act on. The rows must
    have one number of steps and one sampler; raises `InvalidRequest` otherwise.
    """
    num_steps = len(rows[0].sample.timesteps)
    if any(row.sample.timesteps != rows[0].sample.timesteps for row in rows):
        raise InvalidRequest("Calibration needs rows with the same steps and sampler.")
    listeners = [_listen(row, num_steps, pools) for row in rows] if _has_parts(denoiser) else []
    outputs: dict[int, list[Tensor]] = {id(row): [] for row in rows}

    def watch(members: list[DenoiseRow], velocities: Tensor) -> None:
        for row, velocity in zip(members, velocities, strict=True):
            outputs[id(row)].append(velocity.clone())

    for _ in range(num_steps):
        denoiser.step(rows, watch)
    calibration = Calibration(num_steps)
    for index, row in enumerate(rows):
        heard = listeners[index].heard if listeners else []
        calibration.add(outputs[id(row)], heard)
    return calibration


def measured(calibration: Calibration, row: DenoiseRow) -> Measured:
    """What a search for plans needs, of a calibration and any of its rows.

    Raises `InvalidRequest` if the sampler is one whose influence is not known.
    """
    if row.sample.program is None:
        raise InvalidRequest("Plans need one of Triptych's own samplers: choose another scheduler.")
    return Measured.of(calibration.gram, row.sample.program)


def _has_parts(denoiser: Denoiser) -> bool:
    return isinstance(denoiser.model, SpanModel)


def _listen(row: DenoiseRow, num_steps: int, pools: TensorPools) -> _DistanceRecorder:
    """Give the row's prompt a cache that only listens; the other branch none."""
    listener = _DistanceRecorder()
    method = CacheMethod(
        open_gate=lambda _: listener, extrapolator=DividedDifferences(), level=Level.VELOCITY
    )
    for branch in row.branches:
        if branch.slot is not None:
            branch.slot.release()
        branch.slot = None
    row.branches[0].slot = CacheSlot(method, num_steps, pools)
    return listener
