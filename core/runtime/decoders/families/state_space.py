"""Mamba 2 in other layers than attention's place: Nemotron-H and Falcon-H1.

A layer of Nemotron-H is attention, Mamba 2, an MLP or a mixture of experts, and nothing else. One
of Falcon-H1 adds up attention and Mamba 2, with a factor at each of their parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any

import msgspec

from triptych.core.errors import WeightsError
from triptych.core.runtime.decoders.families.mamba import (
    Mamba2Fields,
    mamba_of,
    parse_with_limits,
)
from triptych.core.runtime.decoders.families.mixtures import with_experts
from triptych.core.runtime.decoders.hf_config import (
    CausalLmConfig,
    ConvolutionWidth,
    Count,
    NotNativeError,
    Positive,
    Reader,
    StateHead,
    attention_of,
    decoder_of,
    parse,
)
from triptych.core.runtime.kernels.routing import Routing
from triptych.core.runtime.layers.decoder_layer import DecoderConfig, MlpScales
from triptych.core.runtime.layers.mamba2 import Mamba2Config
from triptych.core.runtime.layers.mixers import MixerConfig, PairConfig
from triptych.core.runtime.layers.moe import MoeConfig

_ATTENTION, _MAMBA, _MLP, _EXPERTS = "full_attention", "linear_attention", "mlp", "moe"
_KINDS = {"attention": _ATTENTION, "mamba": _MAMBA, "*": _ATTENTION, "M": _MAMBA, "-": _MLP}
_KINDS |= {"E": _EXPERTS} | {kind: kind for kind in (_ATTENTION, _MAMBA, _MLP, _EXPERTS)}
"""The kinds of Nemotron-H's layers, by the names and letters of its configurations."""
_OLDER_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}
"""Of its fields; transformers prefers them, too."""


class _NemotronHConfig(CausalLmConfig, frozen=True, kw_only=True):
    intermediate_size: Count = 21504
    num_attention_heads: Count = 32
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    hidden_act: str = "relu2"
    max_position_embeddings: Count = 4096
    layer_norm_epsilon: Positive = 1e-5
    mamba_num_heads: Count = 128
    mamba_head_dim: Count = 64
    mamba_hidden_act: str = "silu"
    n_groups: Count = 8
    ssm_state_size: StateHead = 128
    conv_kernel: ConvolutionWidth = 4
    time_step_min: Annotated[float, msgspec.Meta(ge=0)] = 0.001
    use_bias: bool = False
    use_conv_bias: bool = True
    n_routed_experts: Count = 8
    num_experts_per_tok: Count = 2
    moe_intermediate_size: Count = 7688
    moe_shared_expert_intermediate_size: Count = 7688
    moe_latent_size: Count | None = None
    n_group: Count = 1
    topk_group: Count = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: Positive = 1.0


def _nemotron_h(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Layers of one half each, without rotation, gates or biases of attention."""
    kinds = _kinds_of(config)
    renamed = {new: config[old] for old, new in _OLDER_NAMES.items() if old in config}
    renamed |= {"hidden_act": config.get("mlp_hidden_act") or "relu2", "layer_types": None}
    fields = parse({**config, **renamed, "num_hidden_layers": len(kinds)}, _NemotronHConfig)
    if fields.mamba_hidden_act != "silu":
        raise NotNativeError("config.json: mamba_hidden_act is silu alone.")
    if fields.moe_latent_size is not None:
        raise NotNativeError("config.json: experts of a moe_latent_size are not supported.")
    attention = replace(
        attention_of(fields), uses_rope=False, has_qkv_bias=False, has_out_bias=False
    )
    mixers: dict[str, MixerConfig] = {_ATTENTION: attention, _MAMBA: _nemotron_mamba(fields)}
    layers = tuple(mixers.get(kind) for kind in kinds)
    sizes = tuple(fields.intermediate_size * (kind == _MLP) for kind in kinds)
    decoder = replace(
        decoder_of(fields, layers, max_length),
        norm_eps=fields.layer_norm_epsilon,
        has_gate=False,
        mlp_sizes=sizes,
        naming="nemotron_h",
    )
    if _EXPERTS not in kinds:
        return decoder
    sparse = {layer for layer, kind in enumerate(kinds) if kind == _EXPERTS}
    return with_experts(decoder, _nemotron_experts(fields, frozenset(range(len(kinds))) - sparse))


def _kinds_of(config: Mapping[str, Any]) -> list[str]:
    fields = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    field = next((name for name in fields if config.get(name)), fields[-1])
    named = config.get(field) or "ME*-"
    is_sequence = isinstance(named, list | str)
    if not (is_sequence and all(isinstance(name, str) and name in _KINDS for name in named)):
        raise WeightsError(f"config.json: {field} {named!r} is not supported.")
    kinds = [_KINDS[name] for name in named]
    if _ATTENTION not in kinds:
        raise WeightsError(f"config.json: {field} has no layer with attention.")
    return kinds


def _nemotron_mamba(fields: _NemotronHConfig) -> Mamba2Config:
    if fields.mamba_num_heads % fields.n_groups:
        raise WeightsError("config.json: n_groups does not divide mamba_num_heads.")
    return Mamba2Config(
        hidden_size=fields.hidden_size,
        num_heads=fields.mamba_num_heads,
        num_groups=fields.n_groups,
        head_dim=fields.mamba_head_dim,
        state_dim=fields.ssm_state_size,
        width=fields.conv_kernel,
        norm_eps=fields.layer_norm_epsilon,
        step_limits=(fields.time_step_min, float("inf")),
        has_bias=fields.use_bias,
        has_convolution_bias=fields.use_conv_bias,
    )


def _nemotron_experts(fields: _NemotronHConfig, others: frozenset[int]) -> MoeConfig:
    if fields.mlp_bias:
        raise NotNativeError("config.json: experts with biases are not supported.")
    return MoeConfig(
        num_experts=fields.n_routed_experts,
        routing=Routing(
            num_chosen=fields.num_experts_per_tok,
            scoring="sigmoid",
            renormalizes=fields.norm_topk_prob,
            scale=fields.routed_scaling_factor,
            num_groups=fields.n_group,
            num_chosen_groups=fields.topk_group,
            num_group_scores=2,
        ),
        intermediate_size=fields.moe_intermediate_size,
        shared_size=fields.moe_shared_expert_intermediate_size,
        has_correction=True,
        has_gate=False,
        dense_layers=others,
        naming="nemotron_h",
    )


_Two = tuple[float, float]
_Five = tuple[float, float, float, float, float]


class _FalconH1Fields(Mamba2Fields, frozen=True, kw_only=True):
    rms_norm_eps: Positive = 1e-5
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 8192
    mamba_d_ssm: Count | None = 1024
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    projectors_bias: bool = False
    embedding_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0
    key_multiplier: Positive = 1.0
    attention_in_multiplier: Positive = 1.0
    attention_out_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    ssm_multipliers: _Five | None = None
    mlp_multipliers: _Two | None = None


def _falcon_h1(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Attention and Mamba 2 of the same input in every layer, with factors at all parts."""
    fields: _FalconH1Fields = parse_with_limits(config, _FalconH1Fields)
    _refuse_other_falcons(fields)
    before, after = fields.attention_in_multiplier, fields.attention_out_multiplier
    attention = attention_of(fields)
    attention = replace(
        attention,
        scale=attention.head_dim**-0.5 * before**2 * fields.key_multiplier,
        out_scale=before * after,
    )
    inner = fields.mamba_d_ssm or fields.mamba_expand * fields.hidden_size
    scales = [fields.ssm_in_multiplier * each for each in fields.ssm_multipliers or (1.0,) * 5]
    mamba = replace(
        mamba_of(fields, inner),
        has_norm=fields.mamba_rms_norm,
        input_scales=(scales[0], scales[1], scales[2], scales[3], scales[4]),
        out_scale=fields.ssm_out_multiplier,
    )
    layers = (PairConfig(attention, mamba),) * fields.num_hidden_layers
    return replace(
        decoder_of(fields, layers, max_length),
        embedding_scale=fields.embedding_multiplier,
        logit_scale=fields.lm_head_multiplier,
        mlp_scales=MlpScales(*(fields.mlp_multipliers or ())),
        naming="bamba",
    )


def _refuse_other_falcons(fields: _FalconH1Fields) -> None:
    """Raise `NotNativeError` for a norm before the gate, and for biases that would be scaled."""
    if fields.mamba_rms_norm and fields.mamba_norm_before_gate:
        raise NotNativeError("config.json: mamba_norm_before_gate is not supported.")
    mlp, ssm = fields.mlp_multipliers or (1.0, 1.0), fields.ssm_multipliers or ()
    factors = {fields.attention_in_multiplier, fields.attention_out_multiplier, mlp[1]}
    factors |= {fields.ssm_in_multiplier, fields.ssm_out_multiplier, *ssm}
    has_bias = fields.attention_bias or fields.mlp_bias or fields.mamba_proj_bias
    is_scaled = has_bias and factors != {1.0}
    if is_scaled or fields.mamba_proj_bias != fields.projectors_bias:
        raise NotNativeError("config.json: biases of these projections are not supported.")


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "FalconH1ForCausalLM": _falcon_h1,
        "NemotronHForCausalLM": _nemotron_h,
    }
)
