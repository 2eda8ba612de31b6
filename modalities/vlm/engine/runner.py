"""Runs the plans of a vision model on the device: tokens, and features of images.

Owns the dispatch, and inserting features into the cache. Token steps are
`core.runtime.engine.token_runner`'s, images the encoder's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from triptych.core.engine_api.plan import PendingStep, Plan, RankPlan, Runner, StepResult
from triptych.core.errors import OutOfMemory, TriptychError
from triptych.core.runtime.devices.device import end_of_work
from triptych.core.runtime.devices.stream import StepStream
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.modalities.vlm.engine.encoder import (
    FeatureCache,
    Features,
    ImageEncoder,
    not_finite,
)
from triptych.modalities.vlm.engine.memory_check import SharedMemoryCheck
from triptych.modalities.vlm.plan import EncodePlan, SharedPlan

_NO_ROOM = "The images did not fit in device memory."


def plan_message(plan: Plan) -> RankPlan:
    """The message to the follower ranks of a model whose encoder is also divided."""
    return RankPlan(SharedPlan.of(plan) if isinstance(plan, EncodePlan) else plan)


class VisionRunner:
    """A `Runner` for the plans of `modalities.vlm.scheduling.prompts`."""

    memory_check: SharedMemoryCheck | None = None
    """The ranks' common memory check before a step, if the encoder is divided."""

    def __init__(
        self,
        tokens: Runner,
        encoder: ImageEncoder,
        features: FeatureCache,
        device: torch.device,
        stream: StepStream,
    ) -> None:
        self._tokens = tokens
        self._stream = stream
        self._encoder = encoder
        self._features = features
        self._device = device

    def launch(self, plan: Plan) -> PendingStep:
        """Start `plan`; on a CPU the work is done on return. Raises `OutOfMemory`."""
        if isinstance(plan, SharedPlan):
            plan = plan.received()
        if not isinstance(plan, EncodePlan):
            return self._tokens.launch(plan)
        try:
            with torch.inference_mode(), self._stream.current():
                if self.memory_check is not None and not self.memory_check.has_memory(plan.images):
                    return RefusedStep(OutOfMemory(_NO_ROOM))
                encoded = self._encoder.encode(plan.images)
                unfit = torch.zeros((), dtype=torch.bool, device=self._device)
                flags = [
                    unfit if isinstance(part, TriptychError) else part.hidden_NC.isfinite().all()
                    for part in encoded
                ]
                is_finite = HostCopy(torch.stack(flags))
                wait = end_of_work(self._device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(_NO_ROOM) from error
        return PendingFeatures(plan, encoded, is_finite, wait, self._features)

    def close(self) -> None:
        """Release models and caches. No launches after this."""
        self._tokens.close()
        self._features.clear()
        del self._encoder


@dataclass(frozen=True, slots=True)
class RefusedStep:
    """A `PendingStep` that all ranks refused before it began."""

    error: TriptychError

    def result(self) -> StepResult:
        """Raise the error, which ends the step and not the engine."""
        raise self.error


@dataclass(frozen=True, slots=True)
class PendingFeatures:
    """Implements `core.engine_api.plan.PendingStep` for encoded images."""

    plan: EncodePlan
    encoded: Sequence[Features | TriptychError]
    is_finite: HostCopy
    wait: Callable[[], None]
    cache: FeatureCache

    def result(self) -> StepResult:
        """Wait for the features, and cache those that are finite."""
        self.wait()
        errors: list[TriptychError | None] = []
        flags = self.is_finite.get().tolist()
        for image, part, is_finite in zip(self.plan.images, self.encoded, flags, strict=True):
            if isinstance(part, TriptychError):
                errors.append(part)
            elif not is_finite:
                errors.append(not_finite())
            else:
                self.cache.insert(image.span.digest, part, part.num_bytes)
                errors.append(None)
        return StepResult(rows=errors)
