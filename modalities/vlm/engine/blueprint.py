"""A vision model before it is loaded: its decoder, its encoder, and their memory.

Owns reading a checkpoint that holds both. The decoder is ours (`core.runtime.decoders`), the
encoder transformers' (`encoder`). Knows nothing of ledgers or schedulers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from triptych.core.runtime.decoders.families.table import is_native as is_native_decoder
from triptych.core.runtime.decoders.native import NativeBlueprint
from triptych.core.runtime.decoders.projection_targets import AS_STORED
from triptych.core.runtime.decoders.tensor_names import DecoderTensors
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.block_layers import BlockDevice, block_places, hold_blocks
from triptych.core.runtime.layers.divided_layers import divide_layers
from triptych.core.runtime.layers.native_linear import pack_linears
from triptych.core.runtime.layers.shards import BLOCK_UNIT, PLAIN_UNIT
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.quantize import quantize_blocks
from triptych.core.weights.encoding import WeightEncoding
from triptych.modalities.llm.engine.class_config import CAUSAL_CLASSES
from triptych.modalities.vlm.configs.config import open_image_processor, read_config
from triptych.modalities.vlm.configs.families import FAMILIES, family_of
from triptych.modalities.vlm.engine.encoder import (
    FeatureLayout,
    ImageEncoder,
    Scaling,
    construct_encoder,
    load_encoder,
)
from triptych.modalities.vlm.engine.head import PlaceholderTraits
from triptych.modalities.vlm.engine.places import grid_places
from triptych.modalities.vlm.engine.slots.model import AdaptedCheckpoint, SlotModel
from triptych.modalities.vlm.engine.vision_model import SeeingDecoder

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup

_TEXT_MODELS = {
    "gemma": "GemmaModel",
    "glm_ocr_text": "GlmOcrTextModel",
    "gemma3_text": "Gemma3TextModel",
    "qwen2_vl_text": "Qwen2VLTextModel",
    "qwen2_5_vl_text": "Qwen2_5_VLTextModel",
    "qwen3_vl_text": "Qwen3VLTextModel",
    "qwen3_5_text": "Qwen3_5TextModel",
    "qwen3_5_moe_text": "Qwen3_5MoeTextModel",
}
_ENCODER_SHARE = 0.2  # of the reported progress


class BaseVisionBlueprint:
    """The common part of blueprints. `kind` is the transformers class that includes the encoder."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: Any,
        kind: Any,
        *,
        dtype: torch.dtype,
        device: torch.device,
        native: NativeKernels | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._kind = kind
        self._device = device
        self._native = native
        self._group: RankGroup | None = None
        self.family = family_of(config)
        self.dtype = dtype

    @property
    def shares_encoder(self) -> bool:
        """Whether this rank holds a part of a divided encoder."""
        return self._group is not None

    @property
    def num_late(self) -> int:
        """How many of the first layers are followed by more features."""
        return len(getattr(self._config.vision_config, "deepstack_visual_indexes", None) or ())

    @property
    def kernels(self) -> str:
        """The kernels that multiply by the encoder's weights: torch or native."""
        return "torch" if self._native is None else "native"

    @property
    def feature_layout(self) -> FeatureLayout:
        """The memory layout of features."""
        hidden = int(self._config.text_config.hidden_size)
        return FeatureLayout(num_parts=1 + self.num_late, hidden_size=hidden, dtype=self.dtype)

    @property
    def feature_bytes(self) -> int:
        """Bytes of one position's features."""
        return self.feature_layout.num_bytes

    def encoder_bytes(self) -> int:
        """Device bytes of the model without its language model."""
        module = construct_encoder(self._config, self._kind)
        num_values = sum(int(parameter.numel()) for parameter in module.parameters())
        return num_values * self.dtype.itemsize

    @cached_property
    def scaling(self) -> Scaling | None:
        """The encoder's first operation on images; none if they come scaled."""
        if not self.family.has_scaling:
            return None
        return Scaling.of(open_image_processor(self._checkpoint.folder))

    def _encoder(self, model: Any) -> ImageEncoder:
        return ImageEncoder(
            model,
            self.scaling,
            batch_axis=self.family.batch_axis,
            dtype=self.dtype,
            group=self._group,
        )

    def _placeholder_id(self, vocab_size: int) -> int:
        image_id = int(self._config.image_token_id)
        return image_id if image_id < vocab_size else 0


class VisionBlueprint(BaseVisionBlueprint):
    """The blueprint of a family in `families.FAMILIES`. Raises `WeightsError` if unfit."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        native: NativeKernels | None = None,
        encoding: WeightEncoding = AS_STORED,
    ) -> None:
        config = read_config(checkpoint.config)
        if rank := getattr(config, "adapter_rank", 0):
            checkpoint = AdaptedCheckpoint(checkpoint, config.adapter_alpha / rank)
        kind = _kind_of(config.model_type)
        super().__init__(checkpoint, config, kind, dtype=dtype, device=device, native=native)
        self._part = DecoderTensors.find(checkpoint.tensors)
        self.text = NativeBlueprint(
            _text_fields(config, self._part.head in checkpoint.tensors),
            max_length=max_length,
            dtype=dtype,
            device=device,
            native=native,
            encoding=encoding,
        )
        self._encoding = encoding

    def share_encoder(self, group: RankGroup) -> bool:
        """Divide the encoder over `group`. Returns whether it can be divided."""
        if divide_layers(construct_encoder(self._config, self._kind), group, self._unit):
            self._group = group
        return self.shares_encoder

    def encoder_bytes(self) -> int:
        """Device bytes of the model without its language model."""
        module, num_bytes = construct_encoder(self._config, self._kind), 0
        if self._group is not None:
            divide_layers(module, self._group, self._unit)
        for place in block_places(module, self._encoding):
            num_bytes += place.num_bytes
            place.drop()
        num_values = sum(int(parameter.numel()) for parameter in module.parameters())
        return num_bytes + num_values * self.dtype.itemsize

    @property
    def traits(self) -> PlaceholderTraits:
        """How the head treats the positions that images fill."""
        placeholder_id = self._placeholder_id(self.text.vocab_size)
        return PlaceholderTraits(
            placeholder_id=placeholder_id,
            input_id=placeholder_id,
            places=grid_places if self.text.config.rope.sections else None,
            whole_spans=self.family.whole_spans,
            whole_prompts=self.family.whole_prompts,
        )

    @property
    def longest_span(self) -> int:
        """The most tokens of an image that attend to each other; 0 if none do."""
        return self._config.mm_tokens_per_image if self.family.whole_spans else 0

    def encoder_activation_bytes(self, num_patches: int) -> int:
        """An upper estimate of a step's memory: towers are widest in their MLPs."""
        vision = self._config.vision_config
        hidden = int(getattr(vision, "hidden_size", 0) or getattr(vision, "embed_dim", 1024))
        return num_patches * 16 * hidden * self.dtype.itemsize

    def build(self, report: Callable[[float], None]) -> tuple[SeeingDecoder, ImageEncoder]:
        """Load decoder and encoder."""
        encoder = self.build_encoder()
        report(_ENCODER_SHARE)
        share = 1 - _ENCODER_SHARE
        return self.build_decoder(lambda done: report(_ENCODER_SHARE + share * done)), encoder

    def build_encoder(self) -> ImageEncoder:
        """Load the encoder alone."""
        names = [name for name in self._checkpoint.tensors if not self._part.holds(name)]
        model = load_encoder(
            self._checkpoint, self._config, self._kind, dtype=self.dtype, names=names
        )
        if self._group is not None:
            divide_layers(model, self._group, self._unit)
        hold_blocks(
            model,
            block_places(model, self._encoding),
            lambda place, weight: quantize_blocks(weight, place.format),
            BlockDevice(device=self._device, dtype=self.dtype, native=self._native),
        )
        pack_linears(model, self._native)
        return self._encoder(model)

    def build_decoder(self, report: Callable[[float], None]) -> SeeingDecoder:
        """Load the decoder alone."""
        return SeeingDecoder(self.text.build(self._checkpoint, report, self._part))

    @property
    def _unit(self) -> int:
        return BLOCK_UNIT if self._encoding.has_blocks else PLAIN_UNIT


def is_native(config: Mapping[str, Any]) -> bool:
    """Whether our decoder supports the language side of a vision model."""
    if config.get("model_type") not in FAMILIES:
        return False
    return is_native_decoder(_text_fields(read_config(config), True))


def _kind_of(model_type: str) -> Any:
    """The class that includes the encoder: transformers', except for our own family."""
    if model_type == SlotModel.config_class.model_type:
        return SlotModel
    return getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type])


def _text_fields(config: Any, has_head: bool) -> dict[str, Any]:
    """The text part of a configuration, as a language model's `config.json`."""
    text = config.text_config
    kind = text.model_type
    architecture = _TEXT_MODELS.get(kind) or CAUSAL_CLASSES.get(kind, kind)
    fields = {name: value for name, value in text.to_dict().items() if value is not None}
    return {
        **fields,
        "architectures": [architecture],
        # Defaults of configurations differ; a checkpoint that stores a projection uses it.
        "tie_word_embeddings": not has_head,
    }
