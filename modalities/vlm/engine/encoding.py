"""Encodes images for other engines: the staged model of an engine of role encode.

Owns converting features before they are sent: one tensor per image, in the type of their page
format. Implements `core.runtime.engine.staged_runner.StagedModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from triptych.core.engine_api.prompt_content import PromptContent
from triptych.core.engine_api.staged_plan import Stage
from triptych.core.errors import TriptychError
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.modalities.vlm.engine.encoder import Features, ImageEncoder, not_finite


@dataclass(slots=True)
class ImageWork:
    """An image that is encoded in one stage."""

    image: PromptContent
    next_stage: Stage | None = None


class EncodingModel:
    """Encodes the images of a step, together if the encoder supports it."""

    def __init__(self, encoder: ImageEncoder, dtype: torch.dtype) -> None:
        self._encoder = encoder
        self._dtype = dtype

    def begin(self, request: PromptContent, unit: int) -> ImageWork:
        """Begin an image's work."""
        return ImageWork(request)

    def advance(
        self, works: Sequence[ImageWork]
    ) -> list[Callable[[], torch.Tensor | TriptychError] | TriptychError]:
        """Encode all images of the step."""
        encoded = self._encoder.encode([work.image for work in works])
        return [part if isinstance(part, TriptychError) else self._whole(part) for part in encoded]

    def _whole(self, features: Features) -> Callable[[], torch.Tensor | TriptychError]:
        """`features_DNC`, after the check that they are finite."""
        hidden_1NC = features.hidden_NC.unsqueeze(0)
        late_LNC = features.late_LNC
        whole_DNC = hidden_1NC if late_LNC is None else torch.cat([hidden_1NC, late_LNC])
        whole_DNC = whole_DNC.to(self._dtype).clone(memory_format=torch.contiguous_format)
        is_finite = HostCopy(whole_DNC.isfinite().all())
        return lambda: whole_DNC if is_finite.get().item() else not_finite()
