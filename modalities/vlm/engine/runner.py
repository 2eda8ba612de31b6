"""Turns the plans of a vision model into device work: tokens, and features of images.

Owns the dispatch, and how features get into the cache. Tokens are the business of
`core.runtime.engine.token_runner`, images that of an encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triptych.core.engine_api.plan import PendingStep, Plan, RankPlan, Runner, StepResult
from triptych.core.errors import OutOfMemory, TriptychError
from triptych.core.runtime.devices.stream import StepStream
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.modalities.vlm.engine.encoder import (
    FeatureCache,
    Features,
    ImageEncoder,
    not_finite,
)
from triptych.modalities.vlm.engine.shared_room import SharedRoom
from triptych.modalities.vlm.plan import EncodePlan, SharedPlan

_NO_ROOM = "The images did not fit in device memory."


def told(plan: Plan) -> RankPlan:
    """What the other ranks of a model are told, whose encoder is divided, too."""
    return RankPlan(SharedPlan.of(plan) if isinstance(plan, EncodePlan) else plan)


class VisionRunner:
    """A `Runner` for the plans of `modalities.vlm.scheduling.prompts`."""

    room: SharedRoom | None = None
    """Where the encoder is divided: what ranks find out together before they encode."""

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
        """Start `plan`; on a CPU the work is done when this returns. Raises `OutOfMemory`."""
        if isinstance(plan, SharedPlan):
            plan = plan.received()
        if not isinstance(plan, EncodePlan):
            return self._tokens.launch(plan)
        try:
            with torch.inference_mode(), self._stream.current():
                if self.room is not None and not self.room.holds(plan.images):
                    return RefusedStep(OutOfMemory(_NO_ROOM))
                encoded = self._encoder.encode(plan.images)
                unfit = torch.zeros((), dtype=torch.bool, device=self._device)
                flags = [
                    unfit if isinstance(part, TriptychError) else part.hidden_NC.isfinite().all()
                    for part in encoded
                ]
                is_finite = HostCopy(torch.stack(flags))
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(_NO_ROOM) from error
        return PendingFeatures(plan, encoded, is_finite, self._features)

    def close(self) -> None:
        """Let go of models and caches; there is no launching after this."""
        self._tokens.close()
        self._features.clear()
        del self._encoder


@dataclass(frozen=True, slots=True)
class RefusedStep:
    """A `PendingStep` that every rank refused alike, so that none began."""

    error: TriptychError

    def result(self) -> StepResult:
        """Raises the error, which ends the step and not the engine."""
        raise self.error


@dataclass(frozen=True, slots=True)
class PendingFeatures:
    """Implements `core.engine_api.plan.PendingStep`."""

    plan: EncodePlan
    encoded: Sequence[Features | TriptychError]
    is_finite: HostCopy
    cache: FeatureCache

    def result(self) -> StepResult:
        """Wait for the features, and keep those that are sound."""
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
