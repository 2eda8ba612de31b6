"""Reading a model's `config.json`: allow-listed fields, checked, translated for the decoder.

Owns the vocabulary of configurations as the hub writes them (`CausalLmConfig`) and the checks that
every family shares. Fields not listed are ignored, values out of range are errors, and nothing in
a configuration ever names code to run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import msgspec

from triptych.core.errors import WeightsError
from triptych.core.process.typed import convert, describe_mismatch
from triptych.core.runtime.kernels.gated import Activation
from triptych.core.runtime.kernels.native.state_arguments import MAX_HEAD, MAX_WIDTH
from triptych.core.runtime.layers.attention import AttentionConfig
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.mixers import MixerConfig
from triptych.core.runtime.layers.rotary import ROPE_KINDS, RopeConfig

Reader = Callable[[Mapping[str, Any], int], DecoderConfig]
"""Translates a `config.json` for the context served; 0 means the model's own."""
Count = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
ConvolutionWidth = Annotated[int, msgspec.Meta(ge=2, le=MAX_WIDTH)]
StateHead = Annotated[int, msgspec.Meta(ge=1, le=MAX_HEAD)]
"""The sizes of a recurrent layer that native kernels take."""
Positive = Annotated[float, msgspec.Meta(gt=0)]
Factors = tuple[Positive, ...]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}
)
_WINDOW, _FULL = "sliding_attention", "full_attention"


_SAME_NAMES = (
    *("attention_factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "short_factor", "long_factor"),
)
"""Fields that a `RopeConfig` also has, with the defaults of transformers."""


class RopeFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `rope_parameters`, or of `rope_scaling` in older files."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    original_max_position_embeddings: Count | None = None
    attention_factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: Factors = ()
    long_factor: Factors = ()
    partial_rotary_factor: Share | None = None
    mrope_section: tuple[Count, ...] = ()
    alpha: Positive | None = None
    llama_4_scaling_beta: Positive | None = None


class CausalLmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that our families read. A family overrides its own defaults."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    hidden_act: str = "silu"
    max_position_embeddings: Count = 2048
    original_max_position_embeddings: Count | None = None
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: Positive = 10_000.0
    rope_parameters: RopeFields | None = None
    rope_scaling: RopeFields | None = None
    partial_rotary_factor: Share | None = None
    sliding_window: Count | None = None
    use_sliding_window: bool = False
    max_window_layers: Annotated[int, msgspec.Meta(ge=0)] = 28
    layer_types: tuple[str, ...] | None = None
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: Count = 4


C = TypeVar("C", bound=CausalLmConfig)


class NotNativeError(WeightsError):
    """A variant of one of our families that our decoder does not run."""


def parse(config: Mapping[str, Any], kind: type[C]) -> C:
    """Check `config` against `kind`. Raises `WeightsError` naming the field."""
    if config.get("quantization_config"):
        raise WeightsError("config.json asks for a quantization_config, which is not supported.")
    try:
        fields = convert(dict(config), kind)
    except msgspec.ValidationError as error:
        reason = describe_mismatch(error, config)
        raise WeightsError(f"config.json is not usable: {reason}.") from None
    _check(fields)
    return fields


def _check(fields: CausalLmConfig) -> None:
    if fields.hidden_act not in _ACTIVATIONS:
        raise NotNativeError(
            f"config.json: hidden_act {fields.hidden_act!r} is not supported:"
            f" {', '.join(_ACTIVATIONS)}."
        )
    heads, kv_heads = fields.num_attention_heads, fields.num_key_value_heads
    if kv_heads and heads % kv_heads:
        raise WeightsError(
            f"config.json: {heads} heads cannot share {kv_heads} key-value heads evenly."
        )
    if fields.head_dim is None and fields.hidden_size % heads:
        raise WeightsError(
            f"config.json: hidden_size {fields.hidden_size} does not split into {heads} heads."
        )
    for name in ("layer_types", "no_rope_layers"):
        values = getattr(fields, name)
        if values is not None and len(values) < fields.num_hidden_layers:
            raise WeightsError(f"config.json: {name} has fewer entries than there are layers.")


def check_silu(fields: CausalLmConfig) -> None:
    """Raise `NotNativeError` for another activation, which would also follow convolutions."""
    if fields.hidden_act not in ("silu", "swish"):
        raise NotNativeError("config.json: hidden_act is silu alone where layers are recurrent.")


def head_dim(fields: CausalLmConfig) -> int:
    """The number of dims per head."""
    return fields.head_dim or fields.hidden_size // fields.num_attention_heads


def attention_of(fields: CausalLmConfig) -> AttentionConfig:
    """The attention that all layers share; families replace the fields that differ."""
    return AttentionConfig(
        hidden_size=fields.hidden_size,
        num_heads=fields.num_attention_heads,
        num_kv_heads=fields.num_key_value_heads or fields.num_attention_heads,
        head_dim=head_dim(fields),
        has_qkv_bias=fields.attention_bias,
        has_out_bias=fields.attention_bias,
    )


def parse_by_layer_type(config: Mapping[str, Any], kind: type[C]) -> tuple[C, C]:
    """Check a `config` with `rope_parameters` for full attention and for layers with windows.

    Returns its fields with either. Older files have one set, and `rope_local_base_freq`.
    """
    ropes = config.get("rope_parameters") or {}
    if not isinstance(ropes, Mapping) or not ropes.keys() & {_WINDOW, _FULL}:
        local = config.get("rope_local_base_freq", config.get("rope_theta"))
        ropes = {_FULL: ropes or config.get("rope_scaling"), _WINDOW: {"rope_theta": local}}
    full, sliding = (
        parse({**config, "rope_scaling": None, "rope_parameters": ropes.get(name)}, kind)
        for name in (_FULL, _WINDOW)
    )
    return full, sliding


def layer_windows(fields: CausalLmConfig, default: tuple[bool, ...]) -> tuple[int | None, ...]:
    """The window of each layer: from `layer_types`, or else where `default` says "sliding"."""
    kinds = fields.layer_types
    is_sliding = default if kinds is None else tuple(kind == _WINDOW for kind in kinds)
    if kinds is not None and not set(kinds) <= {_WINDOW, _FULL}:
        raise NotNativeError(f"config.json: layer_types {sorted(set(kinds))} are not supported.")
    layers = is_sliding[: fields.num_hidden_layers]
    return tuple(fields.sliding_window if sliding else None for sliding in layers)


def sliding_except(fields: CausalLmConfig, every: int) -> tuple[bool, ...]:
    """The default of `layer_windows` where one in `every` layers sees all; 0: all of them."""
    return tuple(bool(every and (layer + 1) % every) for layer in range(fields.num_hidden_layers))


def decoder_of(
    fields: CausalLmConfig, attention: tuple[MixerConfig, ...], max_length: int
) -> DecoderConfig:
    """Translate the rest. `max_length` is the context served; 0 means the model's own."""
    return DecoderConfig(
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        norm_eps=fields.rms_norm_eps,
        attention=attention,
        rope=rope_of(fields, max_length),
        has_mlp_bias=fields.mlp_bias,
        has_tied_embeddings=fields.tie_word_embeddings,
        activation=_ACTIVATIONS[fields.hidden_act],
    )


def rope_of(fields: CausalLmConfig, max_length: int) -> RopeConfig:
    """The rotary frequencies for the context served; 0 means the model's own."""
    rope = fields.rope_parameters or fields.rope_scaling or RopeFields()
    kind = rope.rope_type or rope.type or "default"
    kind = "default" if kind == "mrope" else kind  # as transformers reads it
    if kind not in ROPE_KINDS:
        supported = ", ".join(sorted(ROPE_KINDS))
        raise NotNativeError(f"config.json: rope_type {kind!r} is not supported: {supported}.")
    own_length = fields.max_position_embeddings
    trained_length = own_length
    if kind != "dynamic":
        stated = fields.original_max_position_embeddings or rope.original_max_position_embeddings
        trained_length = stated or own_length
    share = rope.partial_rotary_factor or fields.partial_rotary_factor or 1.0
    turned = 1.0 if kind == "proportional" else share
    num_rotated_dims = int(head_dim(fields) * turned)
    _check_rope(kind, rope, num_rotated_dims)
    return RopeConfig(
        kind=kind,
        theta=rope.rope_theta or fields.rope_theta,
        num_rotated_dims=num_rotated_dims,
        share=share / turned,
        max_length=max_length or own_length,
        trained_length=trained_length,
        factor=rope.factor or own_length / trained_length,
        is_truncated=rope.truncate,
        **{name: value for name in _SAME_NAMES if (value := getattr(rope, name))},
    )


def _check_rope(kind: str, rope: RopeFields, num_rotated_dims: int) -> None:
    if num_rotated_dims < 4 or num_rotated_dims % 2:
        raise WeightsError(f"config.json: {num_rotated_dims} rotated dims are not supported.")
    if kind in ("linear", "dynamic", "llama3") and rope.factor is None:
        raise WeightsError(f"config.json: rope_type {kind!r} needs a factor.")
    lengths = {len(rope.short_factor), len(rope.long_factor)}
    if kind == "longrope" and lengths != {num_rotated_dims // 2}:
        raise WeightsError(
            f"config.json: longrope needs {num_rotated_dims // 2} short and long factors."
        )
