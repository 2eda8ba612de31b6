"""Any other image-text model of transformers, its language side run on our paged cache.

Owns the differences from `blueprint`: the whole model is transformers' own, one class for tower,
projector and decoder. Images of unknown families are encoded one by one, in their processor's form.
Models that need more than a plain paged cache are refused rather than served wrongly: positions on
several axes, bidirectional attention, late features (see `modalities.llm.engine.fallback`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from triptych.core.errors import WeightsError
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import PagedStep
from triptych.core.runtime.layers.decoder_layer import LateInputs
from triptych.core.runtime.layers.native_linear import pack_linears
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.llm.engine.bridge import ATTENTION, BridgedStep, CachePlan, refusal
from triptych.modalities.llm.engine.fallback import (
    FallbackBlueprint,
    FallbackModel,
    check_complete,
    load_whole,
    pin_rope,
)
from triptych.modalities.llm.engine.proof import prove
from triptych.modalities.vlm.configs.config import read_config
from triptych.modalities.vlm.engine.blueprint import BaseVisionBlueprint
from triptych.modalities.vlm.engine.encoder import ImageEncoder
from triptych.modalities.vlm.engine.head import PlaceholderTraits

_BOTH_WAYS = ("token_type_ids", "mm_token_type_ids")


class FallbackVisionBlueprint(BaseVisionBlueprint):
    """The blueprint of models whose family is not in `families.FAMILIES`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        native: NativeKernels | None = None,
    ) -> None:
        config = read_config(checkpoint.config)
        name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type, "")
        kind: Any = getattr(transformers, name, None)
        if kind is None or not hasattr(kind, "get_image_features"):
            raise WeightsError(f"{config.model_type!r} is not a vision model type.")
        if any(word in inspect.signature(kind.forward).parameters for word in _BOTH_WAYS):
            raise WeightsError(refusal("its positions see each other, or lie on several axes"))
        super().__init__(checkpoint, config, kind, dtype=dtype, device=device, native=native)
        text = config.text_config
        self.text = FallbackBlueprint(
            {**text.to_dict(), "model_type": text.model_type},
            max_length=max_length,
            dtype=dtype,
            device=device,
        )

    @property
    def traits(self) -> PlaceholderTraits:
        """How the head treats the positions that images fill."""
        return PlaceholderTraits(placeholder_id=self._placeholder_id(self.text.vocab_size))

    def encoder_activation_bytes(self, num_patches: int) -> int:
        """An upper estimate: towers are about as wide as the language model."""
        return 16 * num_patches * self.feature_bytes

    def build(self, report: Callable[[float], None]) -> tuple[FallbackVisionModel, ImageEncoder]:
        """Load with transformers, check completeness, and try two tokens."""
        try:
            model, info = load_whole(
                self._kind,
                self._checkpoint,
                config=self._config,
                dtype=self.dtype,
                attn_implementation={"text_config": ATTENTION, "": "sdpa"},
            )
        except (RuntimeError, ValueError) as error:
            raise WeightsError(refusal("transformers cannot load it")) from error
        check_complete(info, self._checkpoint)
        pin_rope(model.get_decoder(), self.text.max_length)
        pack_linears(model.to(self._device), self._native)
        built = FallbackVisionModel(model.eval(), self.text.vocab_size, self.text.plan)
        prove(built, max_length=self.text.max_length, dtype=self.dtype, device=self._device)
        report(1.0)
        return built, self._encoder(model)


class FallbackVisionModel(FallbackModel):
    """Implements `head.VisionTextModel` around a transformers model."""

    def __init__(self, model: Any, vocab_size: int, plan: CachePlan) -> None:
        super().__init__(model, vocab_size, plan)
        self.body = model.get_decoder()
        self._embedding = model.get_input_embeddings()

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Embed token ids: `x_TC`."""
        x_TC: torch.Tensor = self._embedding(token_ids_T)
        return x_TC

    def run(
        self,
        x_TC: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        late: LateInputs | None = None,
    ) -> torch.Tensor:
        """Run the layers: `hidden_TC`."""
        assert late is None, "models with late features are refused"
        bridged = BridgedStep(step, self.plan)
        return self.run_step(bridged, positions, inputs_embeds=x_TC.unsqueeze(0))
