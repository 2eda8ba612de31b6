"""Rows of the table: architectures that keep recurrent state in some layers."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.core.weights.gguf import fields as f
from triptych.core.weights.gguf.architecture import (
    BASE,
    BIASED,
    DENSE,
    GLOBALS,
    HEAD_NORMS,
    LATE_NORMS,
    MIXTURE,
    MLP,
    NORMS,
    PROJECTIONS,
    ROTATED,
    SHARED_EXPERT,
    SHARED_GATE,
    Architecture,
    Names,
    Place,
    experts,
    joined_from,
    shared_mlp,
    shifted,
)
from triptych.core.weights.gguf.dense import GRANITE
from triptych.core.weights.gguf.fields import Fields, Rope
from triptych.core.weights.gguf.layouts import (
    Rotated,
    ValueHeads,
    by_key_head,
    convolution,
    exact,
    flat,
    joined,
    log_of_negative,
    log_of_negative_4d,
    value_columns,
)
from triptych.core.weights.gguf.metadata import Metadata
from triptych.core.weights.gguf.mixtures import GRANITE_EXPERTS, LATENT, LATENT_SIZES, LOCAL_MIXTURE

# Qwen: gated delta net

_VALUE_SIZE = "linear_value_head_dim"
_DELTA: Fields = {
    "linear_conv_kernel_dim": f.count("ssm.conv_kernel"),
    "linear_key_head_dim": f.count("ssm.state_size"),
    "linear_num_key_heads": f.count("ssm.group_count"),
    "linear_num_value_heads": f.count("ssm.time_step_rank"),
    _VALUE_SIZE: lambda m: m.count("ssm.inner_size") // m.count("ssm.time_step_rank"),
    "layer_types": f.kinds_by_tensor(
        linear_attention="ssm_out.weight", full_attention="attn_output.weight"
    ),
}
_QWEN_LAYERS: Names = {
    **PROJECTIONS,
    **MLP,
    **experts("mlp"),
    **shared_mlp("mlp.shared_expert"),
    **SHARED_GATE,
    **shifted({k: str(v) for k, v in {**LATE_NORMS, **HEAD_NORMS}.items()}),
    "ffn_gate_inp": "mlp.gate",
    "ssm_norm": "linear_attn.norm",
}
_QWEN35_LAYERS: Names = {
    **_QWEN_LAYERS,
    "attn_qkv": Place("linear_attn.in_proj_qkv", ValueHeads(_VALUE_SIZE, follows_keys=True)),
    "attn_gate": Place("linear_attn.in_proj_z", ValueHeads(_VALUE_SIZE)),
    "ssm_alpha": Place("linear_attn.in_proj_a", ValueHeads()),
    "ssm_beta": Place("linear_attn.in_proj_b", ValueHeads()),
    "ssm_conv1d": Place(
        "linear_attn.conv1d", ValueHeads(_VALUE_SIZE, follows_keys=True, layout=convolution)
    ),
    "ssm_a": Place("linear_attn.A_log", ValueHeads(layout=log_of_negative)),
    "ssm_dt.bias": Place("linear_attn.dt_bias", ValueHeads(layout=exact)),
    "ssm_out": Place("linear_attn.out_proj", value_columns),
}
_QWEN_NEXT_LAYERS: Names = {
    **_QWEN_LAYERS,
    **joined_from("attn_qkv", "attn_gate", into="linear_attn.in_proj_qkvz", layout=by_key_head),
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": Place("linear_attn.conv1d", convolution),
    "ssm_a": Place("linear_attn.A_log", log_of_negative),
    "ssm_dt.bias": Place("linear_attn.dt_bias", exact),
    "ssm_out": "linear_attn.out_proj",
}
_QWEN_GLOBALS: Names = {**GLOBALS, **shifted({"output_norm": "model.norm"})}
_QWEN_PREDICTING: Names = {
    "nextn.eh_proj": "fc",
    **shifted(
        {
            "nextn.enorm": "pre_fc_norm_embedding",
            "nextn.hnorm": "pre_fc_norm_hidden",
            "nextn.shared_head_norm": "norm",
        }
    ),
}


def _interleaved_axes(m: Metadata) -> Rope:
    """Three axes of positions, whose frequencies alternate; text has the same on each."""
    sections = m.get("rope.dimension_sections")
    axes = [] if sections is None else [int(each) for each in sections if each]
    axis_fields = {"mrope_section": axes, "mrope_interleaved": True} if axes else {}
    return {**f.partial_rope(m), **axis_fields}


_QWEN35: Fields = {**BASE, **_DELTA, "rope_parameters": _interleaved_axes}

# Mamba 2


def _mamba_names(module: str) -> Names:
    return {
        "ssm_in": f"{module}.in_proj",
        "ssm_out": f"{module}.out_proj",
        "ssm_norm": Place(f"{module}.norm", flat),
        "ssm_conv1d.weight": Place(f"{module}.conv1d.weight", convolution),
        "ssm_conv1d.bias": f"{module}.conv1d.bias",
        "ssm_a": Place(f"{module}.A_log", log_of_negative),
        "ssm_d": Place(f"{module}.D", exact),
        "ssm_dt.bias": Place(f"{module}.dt_bias", exact),
    }


def _mamba_fields(**names: str) -> Fields:
    """The sizes of Mamba 2, under the names of a family."""
    readers: dict[str, f.Field] = {
        "num_heads": f.count("ssm.time_step_rank"),
        "head_dim": lambda m: m.count("ssm.inner_size") // m.count("ssm.time_step_rank"),
        "state_size": f.count("ssm.state_size"),
        "num_groups": f.count("ssm.group_count", 1),
        "kernel": f.count("ssm.conv_kernel"),
        "expand": lambda m: m.count("ssm.inner_size") // m.count("embedding_length"),
        "inner_size": f.count("ssm.inner_size"),
    }
    return {name: readers[size] for size, name in names.items()}


_GRANITE_MAMBA = _mamba_fields(
    num_heads="mamba_n_heads",
    head_dim="mamba_d_head",
    state_size="mamba_d_state",
    num_groups="mamba_n_groups",
    kernel="mamba_d_conv",
)
_GRANITE_HYBRID: Fields = {
    **BASE,
    **BIASED,
    **GRANITE,
    **_GRANITE_MAMBA,
    **_mamba_fields(expand="mamba_expand"),
    "mamba_conv_bias": f.has_tensor("ssm_conv1d.bias"),
    "position_embedding_type": lambda m: (
        "rope" if m.scalar("rope.scaling.finetuned", True) else "nope"
    ),
    "layer_types": f.kinds_by_tensor(mamba="ssm_out.weight", attention="attn_output.weight"),
}
_NEMOTRON: Fields = {
    **BASE,
    "hidden_act": f.always(None),
    "rms_norm_eps": f.always(None),
    "rope_parameters": f.always(None),
    "layer_norm_epsilon": lambda m: m.number(
        "attention.layer_norm_rms_epsilon", m.number("attention.layer_norm_epsilon", 1e-5)
    ),
    "attention_bias": f.has_tensor("attn_q.bias"),
    "use_conv_bias": f.has_tensor("ssm_conv1d.bias"),
    **_mamba_fields(
        num_heads="mamba_num_heads",
        head_dim="mamba_head_dim",
        state_size="ssm_state_size",
        num_groups="n_groups",
        kernel="conv_kernel",
        expand="expand",
    ),
    "layers_block_type": f.kinds_by_tensor(
        mamba="ssm_out.weight",
        attention="attn_output.weight",
        moe="ffn_gate_inp.weight",
        mlp="ffn_up.weight",
    ),
    "intermediate_size": f.count("feed_forward_length", 1),
    "mlp_bias": f.has_tensor("ffn_up.bias"),
}
_NEMOTRON_EXPERTS: Fields = {
    "n_routed_experts": f.count("expert_count"),
    "num_experts_per_tok": f.count("expert_used_count"),
    "moe_intermediate_size": f.count("expert_feed_forward_length"),
    "moe_shared_expert_intermediate_size": f.count("expert_shared_feed_forward_length"),
    "n_shared_experts": f.count("expert_shared_count", 1),
    "n_group": f.count("expert_group_count", 1),
    "topk_group": f.count("expert_group_used_count", 1),
    "norm_topk_prob": f.flag("expert_weights_norm", True),
    "routed_scaling_factor": f.number("expert_weights_scale", 1.0),
    "moe_latent_size": f.count_if_there("moe_latent_size"),
}
_NEMOTRON_LAYERS: Names = {
    **_mamba_names("mixer"),
    **experts("mixer"),
    **shared_mlp("mixer.shared_experts"),
    "attn_norm": "norm",
    "attn_q": Place("mixer.q_proj", Rotated("num_attention_heads")),
    "attn_k": Place("mixer.k_proj", Rotated("num_key_value_heads")),
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": Place("mixer.gate.e_score_correction_bias", exact),
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_NEMOTRON_GLOBALS: Names = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
}
_MULTIPLIERS = (
    *("attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier"),
    *("key_multiplier", "lm_head_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)
"""Of Falcon-H1: the converter multiplies the weights by them."""

# Short convolutions

_CONV: Fields = {
    **BASE,
    "norm_eps": f.number("attention.layer_norm_rms_epsilon", 1e-5),
    "conv_L_cache": f.count("shortconv.l_cache"),
    "conv_bias": f.has_tensor("shortconv.in_proj.bias"),
    "layer_types": f.kinds_by_tensor(
        conv="shortconv.conv.weight", full_attention="attn_output.weight"
    ),
}
_CONV_LAYERS: Names = {
    **PROJECTIONS,
    "attn_output": "self_attn.out_proj",
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "shortconv.conv.weight": Place("conv.conv.weight", convolution),
    "shortconv.conv.bias": "conv.conv.bias",
}
_CONV_GLOBALS: Names = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.embedding_norm",
    "output": "lm_head",
}

# Kimi Delta Attention

_KIMI: Fields = {
    **LATENT_SIZES,
    "linear_conv_kernel_dim": f.count("ssm.conv_kernel"),
    "linear_head_dim": f.count("kda.head_dim"),
    "linear_num_heads": f.count("attention.head_count"),
    "layer_types": f.kinds_by_tensor(
        linear_attention="ssm_f_a.weight", full_attention="attn_kv_a_mqa.weight"
    ),
    "mlp_layer_types": f.kinds_by_tensor(sparse="ffn_gate_inp.weight", dense="ffn_up.weight"),
    "num_experts": f.count("expert_count"),
    "num_experts_per_token": f.count("expert_used_count"),
    "moe_intermediate_size": f.count("expert_feed_forward_length"),
    "num_shared_experts": f.count("expert_shared_count", 1),
    "num_expert_group": f.count("expert_group_count", 1),
    "topk_group": f.count("expert_group_used_count", 1),
    "routed_scaling_factor": f.number("expert_weights_scale", 1.0),
    "moe_renormalize": f.flag("expert_weights_norm", True),
}
_KIMI_LAYERS: Names = {
    **LATENT,
    **experts("block_sparse_moe", ("w1", "w3", "w2")),
    **shared_mlp("block_sparse_moe.shared_experts"),
    "ffn_gate_inp": "block_sparse_moe.gate",
    "exp_probs_b.bias": Place("block_sparse_moe.gate.e_score_correction_bias", exact),
    **{
        f"ssm_conv1d_{part}": Place(f"self_attn.{part}_conv1d", convolution)
        for part in ("q", "k", "v")
    },
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
    "ssm_a": Place("self_attn.A_log", log_of_negative_4d),
    "ssm_dt.bias": Place("self_attn.dt_bias", exact),
}

HYBRID_ROWS: Mapping[str, tuple[Architecture, ...]] = {
    "qwen35": (
        Architecture(
            "Qwen3_5ForCausalLM",
            "qwen3_5_text",
            _QWEN35,
            _QWEN35_LAYERS,
            _QWEN_GLOBALS,
            predicting=_QWEN_PREDICTING,
            predicts_apart=True,
        ),
    ),
    "qwen35moe": (
        Architecture(
            "Qwen3_5MoeForCausalLM",
            "qwen3_5_moe_text",
            {**_QWEN35, **MIXTURE, **SHARED_EXPERT},
            _QWEN35_LAYERS,
            _QWEN_GLOBALS,
            predicting=_QWEN_PREDICTING,
            predicts_apart=True,
        ),
    ),
    "qwen3next": (
        Architecture(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            {
                **BASE,
                **_DELTA,
                **MIXTURE,
                **SHARED_EXPERT,
                "rope_parameters": f.partial_rope,
                "norm_topk_prob": f.always(True),
            },
            _QWEN_NEXT_LAYERS,
            _QWEN_GLOBALS,
            predicting=_QWEN_PREDICTING,
            predicts_apart=True,
        ),
    ),
    "kimi-linear": (Architecture("KimiLinearForCausalLM", "kimi_linear", _KIMI, _KIMI_LAYERS),),
    "lfm2": (
        Architecture(
            "Lfm2ForCausalLM",
            "lfm2",
            {**_CONV, "block_auto_adjust_ff_dim": f.always(False)},
            _CONV_LAYERS,
            _CONV_GLOBALS,
        ),
    ),
    "lfm2moe": (
        Architecture(
            "Lfm2MoeForCausalLM",
            "lfm2_moe",
            {
                **_CONV,
                **MIXTURE,
                "num_dense_layers": f.count("leading_dense_block_count", 0),
                "use_expert_bias": f.has_tensor("exp_probs_b.bias"),
                "norm_topk_prob": f.always(True),
                "routed_scaling_factor": f.number("expert_weights_scale", 1.0),
            },
            {
                **_CONV_LAYERS,
                **experts("feed_forward", ("w1", "w3", "w2")),
                "ffn_gate_inp": "feed_forward.gate",
                "exp_probs_b.bias": Place("feed_forward.expert_bias", exact),
            },
            _CONV_GLOBALS,
        ),
    ),
    "granitehybrid": (
        Architecture(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            {
                **_GRANITE_HYBRID,
                **LOCAL_MIXTURE,
                "shared_intermediate_size": f.count("expert_shared_feed_forward_length"),
            },
            {**NORMS, **ROTATED, **GRANITE_EXPERTS, **_mamba_names("mamba")},
            fits=lambda m: m.has("expert_count"),
        ),
        Architecture(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            {
                **_GRANITE_HYBRID,
                "num_local_experts": f.always(0),
                "num_experts_per_tok": f.always(0),
                "shared_intermediate_size": f.mlp_size,
            },
            {
                **NORMS,
                **ROTATED,
                **_mamba_names("mamba"),
                **joined_from("ffn_gate", "ffn_up", into="shared_mlp.input_linear", layout=joined),
                "ffn_down": "shared_mlp.output_linear",
            },
        ),
    ),
    "nemotron_h": (
        Architecture(
            "NemotronHForCausalLM",
            "nemotron_h",
            _NEMOTRON,
            _NEMOTRON_LAYERS,
            _NEMOTRON_GLOBALS,
            "backbone",
        ),
    ),
    "nemotron_h_moe": (
        Architecture(
            "NemotronHForCausalLM",
            "nemotron_h",
            {**_NEMOTRON, **_NEMOTRON_EXPERTS},
            _NEMOTRON_LAYERS,
            _NEMOTRON_GLOBALS,
            "backbone",
        ),
    ),
    "falcon-h1": (
        Architecture(
            "FalconH1ForCausalLM",
            "falcon_h1",
            {
                **BASE,
                **BIASED,
                **dict.fromkeys(_MULTIPLIERS, f.always(1.0)),
                "mlp_multipliers": f.always([1.0, 1.0]),
                "ssm_multipliers": f.always([1.0] * 5),
                **_GRANITE_MAMBA,
                **_mamba_fields(inner_size="mamba_d_ssm"),
                "mamba_rms_norm": f.has_tensor("ssm_norm.weight"),
            },
            {
                **DENSE,
                **_mamba_names("mamba"),
                "ffn_norm": "pre_ff_layernorm.weight",
                **{f"ffn_{p}": f"feed_forward.{p}_proj" for p in ("gate", "up", "down")},
            },
            {**GLOBALS, "output_norm": "model.final_layernorm"},
        ),
    ),
}
"""Rows by the name of the architecture in a file."""
