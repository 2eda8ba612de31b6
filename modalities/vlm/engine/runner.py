"""Turns the plans of a vision model into device work: tokens, and features of pictures.

Owns the dispatch, and how features get into the cache. Tokens are the business of
`core.engine.token_runner`, pictures that of an encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from triptych.core.engine.token_runner import TokenRunner
from triptych.core.errors import NonFinite, OutOfMemory, TriptychError
from triptych.core.plan import PendingStep, Plan, StepResult
from triptych.core.sampling.host_copy import HostCopy
from triptych.modalities.vlm.engine.encoder import FeatureCache, Features, PictureEncoder
from triptych.modalities.vlm.plan import EncodePlan

if TYPE_CHECKING:
    from triptych.core.engine.ranks import LeadingRunner


class VisionRunner:
    """Implements `core.plan.Runner` for the plans of `modalities.vlm.scheduling`."""

    def __init__(
        self,
        tokens: TokenRunner | LeadingRunner,
        encoder: PictureEncoder,
        features: FeatureCache,
        device: torch.device,
    ) -> None:
        self._tokens = tokens
        self._encoder = encoder
        self._features = features
        self._device = device

    def launch(self, plan: Plan) -> PendingStep:
        """Start `plan`; on a CPU the work is done when this returns. Raises `OutOfMemory`."""
        if not isinstance(plan, EncodePlan):
            return self._tokens.launch(plan)
        try:
            with torch.inference_mode(), self._tokens.stream.current():
                encoded = self._encoder.encode(plan.pictures)
                unfit = torch.zeros((), dtype=torch.bool, device=self._device)
                flags = [
                    unfit if isinstance(part, TriptychError) else part.hidden_NC.isfinite().all()
                    for part in encoded
                ]
                is_finite = HostCopy(torch.stack(flags))
        except torch.OutOfMemoryError as error:
            raise OutOfMemory("The pictures did not fit in device memory.") from error
        return PendingFeatures(plan, encoded, is_finite, self._features)

    def close(self) -> None:
        """Let go of models and caches; there is no launching after this."""
        self._tokens.close()
        self._features.clear()
        del self._encoder


@dataclass(frozen=True, slots=True)
class PendingFeatures:
    """Implements `core.plan.PendingStep`."""

    plan: EncodePlan
    encoded: Sequence[Features | TriptychError]
    is_finite: HostCopy
    cache: FeatureCache

    def result(self) -> StepResult:
        """Wait for the features, and keep those that are sound."""
        errors: list[TriptychError | None] = []
        flags = self.is_finite.get().tolist()
        for picture, part, is_finite in zip(self.plan.pictures, self.encoded, flags, strict=True):
            if isinstance(part, TriptychError):
                errors.append(part)
            elif not is_finite:
                errors.append(NonFinite("The model computed no finite values for a picture."))
            else:
                self.cache.insert(picture.span.digest, part, part.num_bytes)
                errors.append(None)
        return StepResult(rows=errors)
