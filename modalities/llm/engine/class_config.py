"""A `config.json` as the class and the configuration of the installed transformers.

Owns the choice of the class by its name, the reduction of the configuration to the fields that the
class declares, and the refusal of models that are no language models, or none that can be served.
No code of a checkpoint is ever executed. Knows neither weights nor caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from triptych.core.errors import WeightsError
from triptych.core.weights.config_fields import LEGACY, KnownFields
from triptych.core.weights.library_errors import library_errors
from triptych.core.weights.unserved import check_served
from triptych.modalities.llm.engine.bridge import refusal

CAUSAL_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        name: kind if isinstance(kind, str) else kind[0]
        for names in (
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        )
        for name, kind in names.items()
        if names is modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind.endswith("ForCausalLM")
    }
)
"""The class of each causal type. Transformers lists Mistral 4, which is text alone, with images."""
_OTHER_KINDS = (
    (
        {
            **modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
            **modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        },
        "it recognizes speech, but not as the models do that docs/models.md lists for it.",
    ),
    (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        "it sees images, but not as the models do that are served: those have a text_config and"
        " a vision_config.",
    ),
    (
        {
            **modeling_auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES,
            **modeling_auto.MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES,
        },
        "it is a speech model of no family in docs/speech_models.md.",
    ),
    (
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "its decoder reads an encoder's states; those that chat here are decoders alone.",
    ),
    (
        {
            **modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
            **modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
            **modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
            **modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
        },
        "it is an encoder or a classifier of no family that docs/models.md lists for embeddings.",
    ),
)
"""Kinds of models in transformers that are not language models, and what to use instead."""
_PARTS = {
    "vision_config": "images",
    "vq_config": "images",
    "audio_config": "sound",
    "audio_encoder": "sound",
    "text_encoder": "an encoder",
    "patcher_config": "patches of bytes",
    "text_config": "another model around its text",
}
"""Parts of a model by their configuration, and what they are for."""
_PER_LAYER = "per_layer_config"
_BLOCKS = ("window", "compress", "pool", "stride")
"""Parts of the names of numbers of tokens that a class keeps together."""
_COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers")
_RECURRENT_LAYERS = {"linear_attention", "conv"}
_BRIDGED_LAYERS = {
    *("full_attention", "sliding_attention", "chunked_attention", "hybrid", "hybrid_sliding"),
    *(*_RECURRENT_LAYERS, "mlp", "moe"),
}


def read_class(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The class of a causal language model, and its configuration. Raises `WeightsError`."""
    family = config.get("model_type")
    check_served(family)
    kind = _class_of(family)
    _check_architecture(config, kind)
    _check_parts(kind, CONFIG_MAPPING[family])
    parsed = parse_config(config)
    check_text(kind, parsed)
    return kind, parsed


def parse_config(config: Mapping[str, Any]) -> Any:
    """A `config.json` as transformers' class, reduced to its fields. Raises `WeightsError`."""
    family = config.get("model_type")
    if family not in CONFIG_MAPPING:
        raise WeightsError(f"model_type {family!r} in config.json is not known to transformers.")
    if config.get("quantization_config"):
        raise WeightsError("config.json asks for a quantization_config, which is not supported.")
    kind = CONFIG_MAPPING[family]
    known = KnownFields.of(kind) | LEGACY
    fields = known.of_file(config)
    with library_errors(f"config.json is not usable as {family}"):
        if layers := fields.get(_PER_LAYER):
            fields[_PER_LAYER] = _known_per_layer(layers, known)
        return with_common_fields(kind(**fields))


def with_common_fields(config: Any) -> Any:
    """A configuration whose common fields can be read where some layers have others."""
    config.allow_global_per_layer_attribute_access = True
    return config


def _class_of(family: object) -> Any:
    """The class of a model type. Raises `WeightsError` for one that is no language model."""
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        raise WeightsError(_other_kind(family))
    if family not in CAUSAL_CLASSES:
        raise WeightsError(_other_kind(family))
    kind = getattr(transformers, CAUSAL_CLASSES[family])
    if kind.__name__.endswith("AssistantForCausalLM"):
        raise WeightsError(
            f"model_type {family!r} in config.json: it drafts tokens for another model and does not"
            " chat by itself."
        )
    return kind


def _other_kind(family: object) -> str:
    """The refusal of a model without a language model class in transformers."""
    for names, reason in _OTHER_KINDS:
        if isinstance(family, str) and family in names:
            return f"model_type {family!r} in config.json: {reason}"
    return (
        f"model_type {family!r} in config.json is no language model that transformers knows, and of"
        " no other kind that is served."
    )


def _check_architecture(config: Mapping[str, Any], kind: Any) -> None:
    """Raise `WeightsError` where a file names a class of transformers that is for another task."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name == kind.__name__:
        return
    for classes, reason in _OTHER_KINDS:
        if name in classes.values():
            raise WeightsError(f"{name} in config.json: {reason}")


def _check_parts(kind: Any, config_kind: Any) -> None:
    """Raise `WeightsError` for a class with parts that are not text."""
    found = sorted({_PARTS[name] for name in config_kind.sub_configs if name in _PARTS})
    if found:
        raise WeightsError(refusal(f"{kind.__name__} has parts for {' and '.join(found)}"))


def check_text(kind: Any, config: Any) -> None:
    """Raise `WeightsError` for a language model without the numbers of one."""
    has_states = keeps_states(kind, config)
    for name in _COUNTS if has_states else (*_COUNTS, "num_attention_heads"):
        count = getattr(config, name, None)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise WeightsError(f"config.json: {name} is {count!r}, not a number above 0.")


def check_direction(model: Any) -> None:
    """Raise `WeightsError` for an encoder, given as a sketch of its language model."""
    config = model.config
    is_encoder = config.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if is_encoder and getattr(config, "is_decoder", True) is False:
        raise WeightsError(
            "config.json: is_decoder is false, and the tokens of an encoder see those after them;"
            " it is for embeddings, and only decoders chat."
        )


def keeps_states(kind: Any, config: Any) -> bool:
    """Whether a class has recurrent layers."""
    return bool(kind._is_stateful or _layer_types(config) & _RECURRENT_LAYERS)


def can_bridge(kind: Any, config: Any) -> bool:
    """Whether our attention may replace that of a class; its first pass decides."""
    has_interface = kind._supports_attention_backend or kind._is_stateful
    return bool(has_interface) and _layer_types(config) <= _BRIDGED_LAYERS


def longest_block(config: Any) -> int:
    """The most tokens that a configuration names for a window, or that are kept together."""
    named = (
        value
        for name, value in vars(config).items()
        if any(word in name for word in _BLOCKS)
        for value in (value.values() if isinstance(value, Mapping) else (value,))
    )
    return max((n for n in named if isinstance(n, int) and not isinstance(n, bool)), default=0)


def _layer_types(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or ())


def _known_per_layer(layers: object, known: KnownFields) -> dict[int, dict[str, Any]]:
    """The exceptions of single layers, reduced to known fields."""
    if not isinstance(layers, Mapping):
        raise WeightsError(f"config.json: {_PER_LAYER} is not an object.")
    return {int(layer): known.of_file(dict(fields)) for layer, fields in layers.items()}


def fit_context(config: Any, max_length: int) -> None:
    """Refuse contexts for which Llama 4's attention is chunked, or scaled by position.

    Its class scales queries by their place in a step, not by their positions. The scale is 1 below
    the first step of the floor function, so it is switched off there.
    """
    limits = list[int]()
    if "chunked_attention" in _layer_types(config):
        limits.append(_limit(config, "attention_chunk_size"))
    if getattr(config, "attn_temperature_tuning", False):
        limits.append(_limit(config, "floor_scale") - 1)
        config.attn_temperature_tuning = False
    if max_length > min(limits, default=max_length):
        raise WeightsError(
            "config.json: attention in chunks, or scaled by position, is served for contexts of"
            f" {min(limits)} tokens; give --max-length {min(limits)}."
        )


def _limit(config: Any, name: str) -> int:
    """A number of tokens in a configuration. Raises `WeightsError` if it is none."""
    value = getattr(config, name, None)
    if not isinstance(value, int | float) or value < 2:
        raise WeightsError(f"config.json: {name} is {value!r}, not a number above 1.")
    return int(value)
