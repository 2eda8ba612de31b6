"""Any other image-text model of transformers, its language side run on our paged cache.

Owns the differences from `blueprint`: the whole model is transformers' own. Its encoder computes
features, and a step runs through its forward, which takes them as outputs of that encoder: what a
class does with an image's positions (embeddings per layer, late features, experts for images) is
its own work. Positions on several axes come from its function. Images of unknown families are
encoded one by one, in their processor's form. `proof` compares all of it with the class at load;
what differs is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from transformers.modeling_outputs import BaseModelOutputWithPooling, MoeCausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from triptych.core.engine_api.prompt_content import ContentSpan
from triptych.core.errors import WeightsError
from triptych.core.runtime.decoders.kept_weights import load_kept
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import PagedStep
from triptych.core.runtime.layers.block_layers import BlockDevice
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.whole import check_complete
from triptych.core.weights.encoding import PLAIN, WeightEncoding
from triptych.modalities.llm.engine.bridge import (
    ATTENTION,
    OWN_ATTENTION,
    STEP,
    BridgedStep,
    CachePlan,
    refusal,
)
from triptych.modalities.llm.engine.class_config import (
    can_bridge,
    check_text,
    with_common_fields,
)
from triptych.modalities.llm.engine.fallback import (
    FallbackBlueprint,
    FallbackModel,
    absorbed,
    body_of,
    pin_rope,
)
from triptych.modalities.llm.engine.proof import prove
from triptych.modalities.vlm.configs.config import read_config
from triptych.modalities.vlm.engine.blueprint import BaseVisionBlueprint
from triptych.modalities.vlm.engine.encoder import FeatureLayout, Features, ImageEncoder
from triptych.modalities.vlm.engine.head import PlaceholderTraits
from triptych.modalities.vlm.engine.places import ClassPlaces, Places
from triptych.modalities.vlm.engine.proof import SpanMasks, prove_images
from triptych.modalities.vlm.engine.vision_model import StepImages

_ENCODED = "mm_encoder_outputs"
"""The argument of a forward that takes features instead of images."""
_ROUTES = "moe_mm_token_type_ids"
"""The argument that sends an image's positions, and the tokens around it, to experts for images."""
_ROUTED = ("image_token_id", "image_start_token_id", "image_end_token_id")


# The class of Llama 4 reads this field of its language model's output, which has none
# (transformers 5.24).
if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
    MoeCausalLMOutputWithPast.image_outputs = None


class LanguagePart(FallbackBlueprint):
    """The language side of a vision model, as a part of its class."""

    def __init__(self, kind: Any, config: Any, **sizes: Any) -> None:
        self._whole_kind, self._whole_config = kind, config
        super().__init__({}, **sizes)

    def _read(self, config: Mapping[str, Any]) -> tuple[Any, Any]:
        text = with_common_fields(self._whole_config.get_text_config())
        check_text(self._whole_kind, text)
        is_bridged = can_bridge(self._whole_kind, text)
        text._attn_implementation = ATTENTION if is_bridged else OWN_ATTENTION
        return self._whole_kind, text

    @property
    def _class(self) -> tuple[Any, Any]:
        return self._whole_kind, self._whole_config

    def _body_of(self, model: Any) -> Any:
        return decoder_of(model)

    def weight_bytes(self) -> int:
        """Bytes of the language side's weights."""
        return super().weight_bytes() - self.encoder_bytes()

    def encoder_bytes(self) -> int:
        """Bytes of all other weights, as plain numbers."""
        parts = (self._sketched_body, self._sketch.get_output_embeddings())
        own = {id(p) for part in parts if part is not None for p in part.parameters()}
        others = (p for p in self._sketch.parameters() if id(p) not in own)
        num_values: int = sum(parameter.numel() for parameter in others)
        return num_values * self.dtype.itemsize


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
        encoding: WeightEncoding = PLAIN,
    ) -> None:
        config = read_config(checkpoint.config)
        kind = _kind_of(config.model_type)
        if not isinstance(getattr(config, "image_token_id", None), int):
            raise WeightsError("config.json has no image_token_id, which stands for images.")
        super().__init__(checkpoint, config, kind, dtype=dtype, device=device, native=native)
        sizes = {"max_length": max_length, "dtype": dtype, "device": device}
        self.text = LanguagePart(kind, config, **sizes, encoding=encoding)
        _encoding_part(self.text._sketch)
        self._encoding = encoding
        self._spans = SpanMasks()

    @property
    def traits(self) -> PlaceholderTraits:
        """How the head treats the positions that images fill; complete once the model is built."""
        return PlaceholderTraits(
            placeholder_id=self._placeholder_id(self.text.vocab_size),
            input_id=int(self._config.image_token_id),
            places=_places_of(self.text._sketch),
            whole_spans=self._spans.sees_whole,
            exceeds_windows=self._spans.exceeds_windows,
        )

    @property
    def num_late(self) -> int:
        """How many parts of the features follow later layers."""
        layers = feature_layers(self._config)
        return len(layers) - 1 if layers else super().num_late

    @property
    def feature_layout(self) -> FeatureLayout:
        """The memory layout of features; those of Llama 4 are projected in every step."""
        layout = super().feature_layout
        width = getattr(self._config.vision_config, "vision_output_dim", layout.hidden_size)
        return replace(layout, hidden_size=width)

    def encoder_bytes(self) -> int:
        """Device bytes of the model without its language model."""
        return self.text.encoder_bytes()

    def encoder_activation_bytes(self, num_patches: int) -> int:
        """An upper estimate: towers are about as wide as the language model."""
        return 16 * num_patches * self.feature_bytes

    def build(self, report: Callable[[float], None]) -> tuple[FallbackVisionModel, ImageEncoder]:
        """Load with transformers, check completeness, and compare it with its class."""
        plan = self.text.known_plan()  # before loading: it says which attention the model gets
        try:
            model, info = load_kept(
                self._kind,
                self.text._sketch,
                self._checkpoint,
                self._encoding,
                BlockDevice(device=self._device, dtype=self.dtype, native=self._native),
                config=self._config,
                dtype=self.dtype,
                attn_implementation={"text_config": self.text.attention},
            )
        except (RuntimeError, ValueError) as error:
            raise WeightsError(refusal("transformers cannot load it")) from error
        text = self._config.get_text_config()
        predicts = bool(getattr(text, "num_nextn_predict_layers", 0))
        check_complete(info, self._checkpoint, text.num_hidden_layers if predicts else 0)
        pin_rope(decoder_of(model), self.text.max_length)
        max_length, dtype = self.text.max_length, self.dtype
        with absorbed(model, plan, self._native):
            built = FallbackVisionModel(model.eval(), self.text.vocab_size, plan)
            prove(built, max_length=max_length, dtype=dtype, device=self._device)
            self._spans = prove_images(
                built, self.traits, self.feature_layout, max_length=max_length, dtype=dtype
            )
        report(1.0)
        return built, self._encoder(_encoding_part(model))


def _kind_of(model_type: str) -> Any:
    """The class of a model type. Raises `WeightsError` unless it takes features."""
    name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type, "")
    kind = getattr(transformers, name, None)
    if kind is None:
        raise WeightsError(
            f"model_type {model_type!r} in config.json: transformers has no class for it that"
            " writes text about images."
        )
    if _ENCODED not in inspect.signature(kind.forward).parameters:
        raise WeightsError(refusal("its class takes no features that were computed before"))
    return kind


def _encoding_part(model: Any) -> Any:
    """The part of a model that encodes images. Raises `WeightsError` if none does so alone.

    The inner part names its arguments, which the whole may hand on without names.
    """
    for part in (model.base_model, model):
        if hasattr(part, "get_image_features"):
            return part
    raise WeightsError(refusal("its class does not encode images apart from a prompt"))


def _places_of(model: Any) -> Places | None:
    """The positions of prompts with images, if they lie on several axes."""
    inner = model.base_model
    if not hasattr(inner, "get_rope_index"):
        return None
    return ClassPlaces(inner, _merge_size(model.config))


def _merge_size(config: Any) -> int:
    """Patches along one side of a feature's square, for models that count in patches."""
    return int(getattr(config.vision_config, "spatial_merge_size", 1))


def feature_layers(config: Any) -> tuple[int, ...]:
    """The layers before which features are added, where a class takes them by layer alone."""
    by_tower_layer = getattr(config, "deepstack_layer_map", None) or ()
    by_corner = getattr(config, "spatial_target_layers", None) or ()
    return (*(layer for _, layer in by_tower_layer), *by_corner)


def decoder_of(model: Any) -> Any:
    """The layers of a model's language side, without a head."""
    decoder = model.get_decoder()
    return decoder if decoder.get_output_embeddings() is None else body_of(decoder)


class FallbackVisionModel(FallbackModel):
    """Implements `vision_model.VisionTextModel` around a transformers model."""

    def __init__(self, model: Any, vocab_size: int, plan: CachePlan) -> None:
        super().__init__(model, vocab_size, plan)
        self.body = decoder_of(model)
        takes_encoded = _ENCODED in inspect.signature(model.base_model.forward).parameters
        self._outer = model.base_model if takes_encoded else model
        self._inputs = frozenset(inspect.signature(self._outer.forward).parameters)
        self.wrap: Callable[[torch.Tensor], Any] = _itself
        """How the class takes a feature tensor: alone, or in a list."""
        self._image_id = int(model.config.image_token_id)
        routed = (getattr(model.config, name, None) for name in _ROUTED)
        self._routed_ids = [token_id for token_id in routed if token_id is not None]
        self._has_axes = hasattr(model.base_model, "get_rope_index")
        self._found: Any = None
        self.body.register_forward_hook(self._keep)

    @property
    def text(self) -> FallbackVisionModel:
        """Itself: its language side is no model of its own."""
        return self

    def _parts(self, model: Any) -> tuple[Any, Any]:
        """The module with the head, and its body: either may be a language model within."""
        if model.base_model is not model:
            return model, model.base_model
        owner = model.get_decoder()
        return owner, body_of(owner)

    def _layers_of(self, model: Any) -> Any:
        """The layers of the language side."""
        return decoder_of(model)

    def _keep(self, module: Any, given: Any, output: Any) -> None:
        self._found = output

    def class_inputs(
        self, ids_1T: torch.Tensor, spans: Sequence[ContentSpan], features: Features
    ) -> dict[str, Any]:
        """The arguments of the class's own forward on a prompt with images."""
        is_image_1T = (ids_1T == self._image_id).long()
        merge_size = _merge_size(self.whole.config)
        grids = [[1, *(merge_size * side for side in span.grid)] for span in spans]
        known = {
            "token_type_ids": is_image_1T,
            "mm_token_type_ids": is_image_1T,
            "image_grid_thw": ids_1T.new_tensor(grids),
        }
        given = {name: value for name, value in known.items() if name in self._inputs}
        return {**given, "use_cache": False, **self._step_inputs(ids_1T, features)}

    def _step_inputs(self, ids_1T: torch.Tensor, features: Features | None) -> dict[str, Any]:
        given: dict[str, Any] = {"input_ids": ids_1T}
        if features is not None:
            given[_ENCODED] = {"image": self._encoded(features)}
        if _ROUTES in self._inputs:
            given[_ROUTES] = torch.isin(ids_1T, ids_1T.new_tensor(self._routed_ids))
        return given

    def _encoded(self, features: Features) -> Any:
        """Features as the output of the class's encoder."""
        hidden_NC = features.hidden_NC
        output = BaseModelOutputWithPooling(hidden_NC, self.wrap(hidden_NC))
        late = [] if features.late_LNC is None else [self.wrap(x_NC) for x_NC in features.late_LNC]
        if layers := feature_layers(self.whole.config):
            late = list(zip(layers, [output.pooler_output, *late], strict=True))
        if late:
            output.deepstack_features = late
        return output

    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, step: PagedStep
    ) -> torch.Tensor:
        """Compute `hidden_TC` of a step without images."""
        return self.see(token_ids_T, positions_T, step, None)

    def see(
        self,
        token_ids_T: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        images: StepImages | None,
    ) -> torch.Tensor:
        """Compute `hidden_TC` of a step."""
        bridged = BridgedStep(step, self.plan)
        features = None if images is None else self._features_of(token_ids_T, images)
        return self.run_step(bridged, positions, input_ids=token_ids_T[None], features=features)

    def _features_of(self, token_ids_T: torch.Tensor, images: StepImages) -> Features:
        """Features of all image tokens of a step; one that no image fills has its embedding."""
        is_image_T, given = token_ids_T == self._image_id, images.features
        own_1C = self.whole.get_input_embeddings()(token_ids_T.new_full((1,), self._image_id))
        if own_1C.shape[1] != given.hidden_NC.shape[1]:  # features are projected in the forward
            own_1C = given.hidden_NC.new_zeros(1, given.hidden_NC.shape[1])
        x_TC = own_1C.to(given.hidden_NC.dtype).repeat(len(token_ids_T), 1)
        late_LFC = None
        if given.late_LNC is not None:
            late_LTC = given.late_LNC.new_zeros(len(given.late_LNC), *x_TC.shape)
            late_LFC = late_LTC.index_copy_(1, images.index_F, given.late_LNC)[:, is_image_T]
        return Features(x_TC.index_copy_(0, images.index_F, given.hidden_NC)[is_image_T], late_LFC)

    def run_step(self, step: BridgedStep, positions: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Run the class's forward on a step: `hidden_TC`."""
        ids_1T, features = inputs["input_ids"], inputs.get("features")
        if self.plan.by_rows:
            run = partial(self._run_row_of, ids_1T, positions, features)
            return self._run_rows(run, step.step)
        given = self._step_inputs(ids_1T, features)
        position_ids = positions.unsqueeze(-2)
        with self.recurrence.over(step.step):
            return self.hidden(position_ids=position_ids, use_cache=False, **{STEP: step}, **given)

    def _run_row_of(
        self,
        ids_1T: torch.Tensor,
        positions: torch.Tensor,
        features: Features | None,
        tokens: slice,
        cache: Mapping[str, Any],
    ) -> Any:
        """Run the class's forward on some tokens of a step, all of one row."""
        row_1T = ids_1T[:, tokens]
        if features is not None:
            is_image_1T = ids_1T == self._image_id
            first = int(is_image_1T[:, : tokens.start].sum())
            features = features.part(first, first + int(is_image_1T[:, tokens].sum()))
        given = self._step_inputs(row_1T, features)
        if self._has_axes:
            given["position_ids"] = positions[..., tokens].unsqueeze(-2)
        return self._decoded(**given, **cache)

    def hidden(self, **given: Any) -> torch.Tensor:
        """Run the class's forward: the hidden states of its decoder, `hidden_TC`."""
        hidden_TC: torch.Tensor = self._decoded(**given).last_hidden_state[0]
        return hidden_TC

    def _decoded(self, **given: Any) -> Any:
        """Run the class's forward: the output of its decoder."""
        self._outer(**given)
        found, self._found = self._found, None
        return found


def _itself(features_NC: torch.Tensor) -> torch.Tensor:
    return features_NC
