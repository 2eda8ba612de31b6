"""Any other image-text model that transformers knows, its language side run on our paged cache.

Owns what differs from `blueprint`: the whole model is transformers' own, one class for tower,
projector and decoder. Pictures of no known family are encoded one by one, as their processor left
them. What does not fit a plain paged cache is refused rather than served wrongly: positions on
several axes, positions that see each other, features that enter late (see
`modalities.llm.engine.fallback`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from triptych.core.errors import WeightsError
from triptych.core.kernels.native.library import NativeKernels
from triptych.core.layers.attention import PagedStep
from triptych.core.layers.decoder import LateInputs
from triptych.core.layers.native_linear import pack_linears
from triptych.core.weights.quiet import without_progress_bar
from triptych.core.weights.tensors.checkpoint import Checkpoint
from triptych.modalities.llm.engine.fallback import (
    ATTENTION,
    FallbackBlueprint,
    FallbackModel,
    check_complete,
    pin_rope,
)
from triptych.modalities.vlm.engine.encoder import PictureEncoder, Scaling, encoder_sketch
from triptych.modalities.vlm.engine.head import PlaceholderTraits
from triptych.modalities.vlm.processing.config import open_image_processor, read_config
from triptych.modalities.vlm.processing.families import family_of

_BOTH_WAYS = ("token_type_ids", "mm_token_type_ids")


class FallbackVisionBlueprint:
    """As `blueprint.VisionBlueprint`, for models of no family in `families.FAMILIES`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        native: NativeKernels | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = read_config(checkpoint.config)
        self.family = family_of(self._config)
        name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(self._config.model_type, "")
        self._kind: Any = getattr(transformers, name, None)
        if self._kind is None or not hasattr(self._kind, "get_image_features"):
            raise WeightsError(f"{self._config.model_type!r} is no model with pictures.")
        if any(word in inspect.signature(self._kind.forward).parameters for word in _BOTH_WAYS):
            raise WeightsError(_refusal("its positions see each other, or lie on several axes"))
        text = self._config.text_config
        self.text = FallbackBlueprint(
            {**text.to_dict(), "model_type": text.model_type},
            max_length=max_length,
            dtype=dtype,
            device=device,
        )
        self.dtype = dtype
        self._device = device
        self._native = native

    @property
    def traits(self) -> PlaceholderTraits:
        """What becomes of the positions that pictures fill."""
        image_id = int(self._config.image_token_id)
        return PlaceholderTraits(placeholder_id=image_id if image_id < self.text.vocab_size else 0)

    @property
    def feature_bytes(self) -> int:
        """Bytes of one position's features."""
        return int(self._config.text_config.hidden_size * self.dtype.itemsize)

    def encoder_bytes(self) -> int:
        """Device bytes of all but the language model."""
        sketch = encoder_sketch(self._config, self._kind)
        num_values = sum(int(parameter.numel()) for parameter in sketch.parameters())
        return num_values * self.dtype.itemsize

    def encoder_activation_bytes(self, num_patches: int) -> int:
        """A generous guess: towers are about as wide as the language model."""
        return 16 * num_patches * self.feature_bytes

    def build(self, report: Callable[[float], None]) -> tuple[FallbackVisionModel, PictureEncoder]:
        """Load through transformers, prove completeness, and try two tokens."""
        try:
            with without_progress_bar():
                model, info = self._kind.from_pretrained(
                    self._checkpoint.folder,
                    config=self._config,
                    dtype=self.dtype,
                    attn_implementation={"text_config": ATTENTION, "": "sdpa"},
                    use_safetensors=True,
                    local_files_only=True,
                    trust_remote_code=False,
                    ignore_mismatched_sizes=True,  # they are reported, and refused below
                    output_loading_info=True,
                )
        except (RuntimeError, ValueError) as error:
            raise WeightsError(_refusal("transformers cannot load it")) from error
        check_complete(info, self._checkpoint)
        pin_rope(model.get_decoder(), self.text.max_length)
        pack_linears(model.to(self._device), self._native)
        built = FallbackVisionModel(model.eval(), self.text.vocab_size)
        built.prove(self.text.kv_layout(2, self.dtype), self._device)
        report(1.0)
        scaling = None
        if self.family.has_scaling:
            scaling = Scaling.of(open_image_processor(self._checkpoint.folder))
        axis = self.family.batch_axis
        return built, PictureEncoder(model, scaling, batch_axis=axis, dtype=self.dtype)


class FallbackVisionModel(FallbackModel):
    """Implements `head.SeeingModel` around a transformers model."""

    def __init__(self, model: Any, vocab_size: int) -> None:
        super().__init__(model, vocab_size)
        self._body = model.get_decoder()
        self._embedding = model.get_input_embeddings()

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """`x_TC`."""
        x_TC: torch.Tensor = self._embedding(token_ids_T)
        return x_TC

    def run(
        self,
        x_TC: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        late: LateInputs | None = None,
    ) -> torch.Tensor:
        """`hidden_TC`."""
        assert late is None, "models whose features enter late are refused"
        return self._run(step, positions, inputs_embeds=x_TC.unsqueeze(0))


def _refusal(reason: str) -> str:
    return f"This model cannot run on the paged cache: {reason}. Choose a model of another family."
