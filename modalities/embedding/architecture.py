"""Encoder families as data: tensor names and configuration fields.

Owns the differences between BERT's descendants, including ModernBERT: names of tensors and of
configuration fields, the first position, attention windows. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from triptych.core.errors import WeightsError


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Tensor names of one family, below an optional `prefix`. `layer` has a slot for its number.

    Names with `score_` are those of a cross-encoder's two projections, without the prefix. In a
    family without `key` and `value`, the `query` tensor holds all three.
    """

    prefix: str
    layer: str
    query: str
    key: str = ""
    value: str = ""
    output: str
    output_norm: str
    up: str
    down: str
    down_norm: str
    relative_bias: str = ""
    has_segments: bool = True
    offsets_positions: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)
    score_dense: str = "classifier.dense"
    score_activation: str = "Tanh"
    score_norm: str = ""
    score_output: str = "classifier.out_proj"


_BERT = TensorNames(
    prefix="bert.",
    layer="encoder.layer.{}",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    output="attention.output.dense",
    output_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    down_norm="output.LayerNorm",
    score_dense="bert.pooler.dense",
    score_output="classifier",
)
_ROBERTA = replace(
    _BERT,
    prefix="roberta.",
    offsets_positions=True,
    score_dense="classifier.dense",
    score_output="classifier.out_proj",
)

FAMILIES: Mapping[str, TensorNames] = MappingProxyType(
    {
        "bert": _BERT,
        "camembert": _ROBERTA,
        "roberta": _ROBERTA,
        "xlm-roberta": _ROBERTA,
        "distilbert": TensorNames(
            prefix="distilbert.",
            layer="transformer.layer.{}",
            query="attention.q_lin",
            key="attention.k_lin",
            value="attention.v_lin",
            output="attention.out_lin",
            output_norm="sa_layer_norm",
            up="ffn.lin1",
            down="ffn.lin2",
            down_norm="output_layer_norm",
            has_segments=False,
            score_dense="pre_classifier",
            score_activation="ReLU",
            score_output="classifier",
            fields=MappingProxyType(
                {
                    "hidden_size": "dim",
                    "intermediate_size": "hidden_dim",
                    "num_attention_heads": "n_heads",
                    "num_hidden_layers": "n_layers",
                    "hidden_act": "activation",
                }
            ),
        ),
        "modernbert": TensorNames(
            prefix="model.",
            layer="layers.{}",
            query="attn.Wqkv",
            output="attn.Wo",
            output_norm="mlp_norm",
            up="mlp.Wi",
            down="mlp.Wo",
            down_norm="",
            has_segments=False,
            score_dense="head.dense",
            score_norm="head.norm",
            score_output="classifier",
            fields=MappingProxyType(
                {"hidden_act": "hidden_activation", "layer_norm_eps": "norm_eps"}
            ),
        ),
        "mpnet": TensorNames(
            prefix="mpnet.",
            layer="encoder.layer.{}",
            query="attention.attn.q",
            key="attention.attn.k",
            value="attention.attn.v",
            output="attention.attn.o",
            output_norm="attention.LayerNorm",
            up="intermediate.dense",
            down="output.dense",
            down_norm="output.LayerNorm",
            relative_bias="encoder.relative_attention_bias.weight",
            has_segments=False,
            offsets_positions=True,
        ),
    }
)
ACTIVATIONS = ("gelu", "relu", "gelu_new", "gelu_pytorch_tanh", "silu")


_SCORE_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {"gelu": "GELU", "relu": "ReLU", "tanh": "Tanh"}
)


@dataclass(frozen=True, slots=True)
class LayerWindow:
    """The attention window of a rotary layer to either side (0: unlimited), and the rotary base."""

    window: int
    theta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSizes:
    """An encoder's config.json. With rotary positions, `layer_windows` has one entry per layer."""

    names: TensorNames
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    first_position: int
    num_segments: int
    norm_eps: float
    activation: str
    num_buckets: int = 0
    layer_windows: tuple[LayerWindow, ...] = ()
    has_attention_bias: bool = True
    has_mlp_bias: bool = True
    has_norm_bias: bool = True
    has_score_bias: bool = True
    score_activation: str = "Tanh"

    @property
    def max_length(self) -> int:
        """The most tokens of a text."""
        return self.num_positions - self.first_position

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> EncoderSizes:
        """Raises `WeightsError` for an unknown family, position scheme or activation."""
        names = family_of(config)

        def value(name: str, default: Any = None) -> Any:
            found = config.get(names.fields.get(name, name), default)
            if found is None:
                raise WeightsError(f"config.json has no {name}.")
            return found

        activation = str(value("hidden_act", "gelu"))
        if activation not in ACTIVATIONS:
            raise WeightsError(f"The encoder's activation {activation!r} is not supported.")
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise WeightsError("Only encoders with absolute positions are supported.")
        padding = int(config.get("pad_token_id") or 0)
        return cls(
            names=names,
            vocab_size=int(value("vocab_size")),
            hidden_size=int(value("hidden_size")),
            intermediate_size=int(value("intermediate_size")),
            num_layers=int(value("num_hidden_layers")),
            num_heads=int(value("num_attention_heads")),
            num_positions=int(value("max_position_embeddings", 512)),
            first_position=padding + 1 if names.offsets_positions else 0,
            num_segments=int(config.get("type_vocab_size", 2)) if names.has_segments else 0,
            norm_eps=float(value("layer_norm_eps", 1e-12)),
            activation=activation,
            num_buckets=int(config.get("relative_attention_num_buckets", 32))
            if names.relative_bias
            else 0,
            **_rotary(config, int(value("num_hidden_layers")))
            if config.get("model_type") == "modernbert"
            else {"score_activation": names.score_activation},
        )


def _rotary(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """ModernBERT's additional configuration fields, in their current and older forms."""
    activation = str(config.get("classifier_activation", "gelu"))
    if activation not in _SCORE_ACTIVATIONS:
        raise WeightsError(f"The classifier's activation {activation!r} is not supported.")
    return {
        "layer_windows": tuple(_reaches(config, num_layers)),
        "has_attention_bias": bool(config.get("attention_bias", False)),
        "has_mlp_bias": bool(config.get("mlp_bias", False)),
        "has_norm_bias": bool(config.get("norm_bias", False)),
        "has_score_bias": bool(config.get("classifier_bias", False)),
        "score_activation": _SCORE_ACTIVATIONS[activation],
    }


def _reaches(config: Mapping[str, Any], num_layers: int) -> Iterator[LayerWindow]:
    every = int(config.get("global_attn_every_n_layers", 3))
    kinds = config.get("layer_types") or [
        "sliding_attention" if number % every else "full_attention" for number in range(num_layers)
    ]
    rotary = config.get("rope_parameters") or {}
    window = int(config.get("local_attention", 128)) // 2
    known = {
        "full_attention": (0, config.get("global_rope_theta", 160_000.0)),
        "sliding_attention": (window, config.get("local_rope_theta", 10_000.0)),
    }
    is_plain = all(_is_unscaled(part) for part in rotary.values() if part)
    if (
        config.get("rope_scaling")
        or not is_plain
        or len(kinds) != num_layers
        or set(kinds) - set(known)
    ):
        raise WeightsError("The encoder's rotary positions or layer types are not supported.")
    for kind in kinds:
        window, theta = known[kind]
        yield LayerWindow(window, float((rotary.get(kind) or {}).get("rope_theta", theta)))


def _is_unscaled(rotary: Any) -> bool:
    """Whether the rotary positions of one layer type are the default ones."""
    return isinstance(rotary, Mapping) and rotary.get("rope_type") == "default"


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a known encoder family, and not of a decoder of that family."""
    return config.get("model_type") in FAMILIES and config.get("is_decoder") is not True


def is_cross_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a model scores pairs of texts: it is a classifier with a single label."""
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else ""
    labels, num_labels = config.get("id2label"), config.get("num_labels", 2)
    if isinstance(labels, Mapping | list):
        num_labels = len(labels)
    return str(first).endswith("ForSequenceClassification") and num_labels == 1


def family_of(config: Mapping[str, Any]) -> TensorNames:
    """The tensor names of a config's family. Raises `WeightsError` naming the known families."""
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise WeightsError(
            f"{kind!r} is not a supported encoder; supported are {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[kind]
