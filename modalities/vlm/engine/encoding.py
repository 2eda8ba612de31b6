"""Encodes images for other engines: the model behind the plans of an engine of role encode.

Owns what becomes of features before they leave: one tensor for each image, in the type that the
format of their pages says. Implements `core.runtime.engine.staged_runner.StagedModel`.
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
    """Encodes the images of a step together, as far as their encoder does."""

    def __init__(self, encoder: ImageEncoder, dtype: torch.dtype) -> None:
        self._encoder = encoder
        self._dtype = dtype

    def begin(self, request: PromptContent, unit: int) -> ImageWork:
        """Take up an image."""
        return ImageWork(request)

    def advance(
        self, works: Sequence[ImageWork]
    ) -> list[Callable[[], torch.Tensor | TriptychError] | TriptychError]:
        """All that there is to do."""
        encoded = self._encoder.encode([work.image for work in works])
        return [part if isinstance(part, TriptychError) else self._whole(part) for part in encoded]

    def _whole(self, features: Features) -> Callable[[], torch.Tensor | TriptychError]:
        """`features_DNC`, once they are known to be sound."""
        hidden_1NC = features.hidden_NC.unsqueeze(0)
        late_LNC = features.late_LNC
        whole_DNC = hidden_1NC if late_LNC is None else torch.cat([hidden_1NC, late_LNC])
        whole_DNC = whole_DNC.to(self._dtype).clone(memory_format=torch.contiguous_format)
        is_finite = HostCopy(whole_DNC.isfinite().all())
        return lambda: whole_DNC if is_finite.get().item() else not_finite()
