"""Calls the hook of an image after each of its steps.

Owns the tensors that a hook sees: copies outside of inference mode, which a caller may keep, change
in place and differentiate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triptych.core.errors import InvalidRequest
from triptych.modalities.diffusion.engine.denoise_row import DenoiseRow
from triptych.modalities.diffusion.engine.samplers.rows import overwrite
from triptych.modalities.diffusion.step_hook import StepHook


def install_hook(hook: StepHook, row: DenoiseRow, image: int) -> None:
    """Call `hook` after each step of a row, which is image number `image` of its request."""
    first = row.sample.step

    def on_step_end(row: DenoiseRow) -> None:
        with torch.inference_mode(False), torch.no_grad():
            hook(RowStepEnd(row, image, first))

    row.on_step_end = on_step_end


@dataclass(frozen=True, slots=True)
class RowStepEnd:
    """Implements `step_hook.StepEnd` for a row that has just taken a step."""

    row: DenoiseRow
    image: int
    first: int

    @property
    def step(self) -> int:
        """The number of steps before this one."""
        return self.row.sample.step - 1 - self.first

    @property
    def timestep(self) -> float:
        """The scheduler's time of this step."""
        return self.row.sample.timesteps[self.row.sample.step - 1]

    @property
    def num_steps(self) -> int:
        """The number of steps of the image."""
        return self.row.num_steps - self.first

    def tensors(self, names: Collection[str]) -> dict[str, Any]:
        """Copies of the latents, `[1, ...]` in float32, as the model takes them."""
        return {name: self.row.sample.sample.clone()[None] for name in names}

    def replace(self, tensors: Mapping[str, Any]) -> None:
        """Continue with other latents. Raises `InvalidRequest`."""
        sample = self.row.sample.sample
        is_mapping, shape = isinstance(tensors, Mapping), (1, *sample.shape)
        if is_mapping and not tensors:
            return
        latents = tensors.get("latents") if is_mapping and len(tensors) == 1 else None
        if not isinstance(latents, Tensor) or latents.shape != shape:
            raise InvalidRequest(
                "A callback may return a mapping with latents alone, as a tensor of shape"
                f" {list(shape)}.",
                param="callback_on_step_end",
            )
        with torch.inference_mode():  # as the row's storage was made
            overwrite(self.row.sample, latents[0].to(sample))

    def interrupt(self) -> None:
        """Take no further step of the row."""
        self.row.interrupt()
