"""Rows of the table: architectures with experts."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.core.weights.gguf import fields as f
from triptych.core.weights.gguf.architecture import (
    BASE,
    BIASED,
    DENSE,
    HEAD_NORMS,
    LATE_NORMS,
    MIXTURE,
    MLP,
    PREDICTING,
    PROJECTIONS,
    ROTATED,
    SHARED_EXPERT,
    SHARED_GATE,
    WINDOW,
    Architecture,
    Names,
    Place,
    experts,
    joined_from,
    shared_mlp,
)
from triptych.core.weights.gguf.dense import GRANITE
from triptych.core.weights.gguf.fields import Fields, Rope
from triptych.core.weights.gguf.layouts import exact, joined, latent_heads
from triptych.core.weights.gguf.metadata import Metadata

_SIGMOID = 2
"""The gating function of experts in files: 1 is softmax."""
_CHUNK = 8192
"""Positions that a layer of Llama 4 sees together; its files do not say so."""
LOCAL_MIXTURE: Fields = {
    "num_local_experts": f.count("expert_count"),
    "num_experts_per_tok": f.count("expert_used_count"),
}
_ROUTED: Fields = {
    "n_routed_experts": f.count("expert_count"),
    "num_experts_per_tok": f.count("expert_used_count"),
    "moe_intermediate_size": f.count("expert_feed_forward_length"),
    "n_shared_experts": f.count("expert_shared_count", 0),
    "n_group": f.count("expert_group_count", 1),
    "topk_group": f.count("expert_group_used_count", 1),
    "routed_scaling_factor": f.number("expert_weights_scale", 1.0),
    "norm_topk_prob": f.flag("expert_weights_norm", False),
    "first_k_dense_replace": f.count("leading_dense_block_count", 0),
    "num_nextn_predict_layers": f.count("nextn_predict_layers", 0),
}
_ROUTER: Names = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": Place("mlp.gate.e_score_correction_bias", exact),
}
_QWEN_EXPERTS: Names = {
    **experts("mlp"),
    **shared_mlp("mlp.shared_expert"),
    **SHARED_GATE,
    "ffn_gate_inp": "mlp.gate",
}
GRANITE_EXPERTS: Names = {
    **experts("block_sparse_moe"),
    **joined_from("ffn_gate_shexp", "ffn_up_shexp", into="shared_mlp.input_linear", layout=joined),
    "ffn_down_shexp": "shared_mlp.output_linear",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
}


def _gpt_oss_rope(m: Metadata) -> Rope:
    """YaRN with bounds that are not rounded to whole dimensions, unlike in other models."""
    rope = f.rope(m)
    return {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope


def _deepseek_rope(m: Metadata) -> Rope:
    """Settings for the rotated part of a head; the file has a tenth of the multiplier."""
    rope = f.plain_rope(m)
    if not m.has("rope.scaling.yarn_log_multiplier"):
        return rope
    multiplier = round(m.number("rope.scaling.yarn_log_multiplier") * 10, 6)
    return {**rope, "mscale": multiplier, "mscale_all_dim": multiplier}


def _latent_sizes(m: Metadata, part: str) -> int:
    """The size of a head's keys or values, which older files have under other names."""
    return m.count(f"attention.{part}_length_mla", m.count(f"attention.{part}_length"))


def _gates_by_sigmoid(m: Metadata) -> bool:
    has_bias = any(m.in_layers("exp_probs_b.bias"))
    return has_bias or m.get("expert_gating_func") == _SIGMOID


def _llama4_kinds(m: Metadata) -> list[str]:
    if m.get("attention.sliding_window") == 0:
        return ["full_attention"] * m.num_layers
    kinds: list[str] = f.layer_kinds(4, near="chunked_attention")(m)
    return kinds


def _llama4_uses_rope(m: Metadata) -> list[int]:
    """Layers that see everything have no positions, unless all of them do."""
    kinds = _llama4_kinds(m)
    return [int(kind != "full_attention" or "chunked_attention" not in kinds) for kind in kinds]


LATENT: Names = {
    **DENSE,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    **joined_from("attn_k_b", "attn_v_b", into="self_attn.kv_b_proj", layout=latent_heads),
}
"""Latent attention, norms and MLPs."""
LATENT_SIZES: Fields = {
    **{name: field for name, field in BASE.items() if name not in ("head_dim", "rope_parameters")},
    "num_key_value_heads": f.count("attention.head_count"),
    "kv_lora_rank": f.count("attention.kv_lora_rank"),
    "q_lora_rank": f.count_or_null("attention.q_lora_rank"),
    "qk_rope_head_dim": f.count("rope.dimension_count"),
    "qk_nope_head_dim": lambda m: _latent_sizes(m, "key") - m.count("rope.dimension_count"),
    "v_head_dim": lambda m: _latent_sizes(m, "value"),
}
_DEEPSEEK_LAYERS: Names = {
    **LATENT,
    **experts("mlp"),
    **shared_mlp("mlp.shared_experts"),
    **_ROUTER,
}
_DEEPSEEK: Fields = {**LATENT_SIZES, **BIASED, **_ROUTED, "rope_parameters": _deepseek_rope}


def _topk_method(m: Metadata) -> str:
    return "group_limited_greedy" if m.count("expert_group_count", 1) > 1 else "greedy"


MIXTURE_ROWS: Mapping[str, tuple[Architecture, ...]] = {
    "llama": (
        Architecture(
            "MixtralForCausalLM",
            "mixtral",
            {
                **BASE,
                **LOCAL_MIXTURE,
                "sliding_window": f.count_if_there("attention.sliding_window"),
            },
            {
                **DENSE,
                **ROTATED,
                **experts("block_sparse_moe", ("w1", "w3", "w2")),
                "ffn_gate_inp": "block_sparse_moe.gate",
            },
            fits=lambda m: m.has("expert_count"),
        ),
    ),
    "gpt-oss": (
        Architecture(
            "GptOssForCausalLM",
            "gpt_oss",
            {
                **BASE,
                **BIASED,
                **LOCAL_MIXTURE,
                **WINDOW,
                "intermediate_size": f.count("expert_feed_forward_length"),
                "layer_types": f.layer_kinds(2),
                "rope_parameters": _gpt_oss_rope,
            },
            {
                **PROJECTIONS,
                **LATE_NORMS,
                **experts("mlp"),
                "attn_sinks.weight": "self_attn.sinks",
                "ffn_gate_inp": "mlp.router",
            },
        ),
    ),
    "qwen2moe": (
        Architecture(
            "Qwen2MoeForCausalLM",
            "qwen2_moe",
            {**BASE, **MIXTURE, **SHARED_EXPERT, "norm_topk_prob": f.always(False)},
            {**DENSE, **_QWEN_EXPERTS},
        ),
    ),
    "qwen3moe": (
        Architecture(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            {**BASE, **MIXTURE, "norm_topk_prob": f.always(True)},
            {**DENSE, **_QWEN_EXPERTS},
        ),
    ),
    "olmoe": (
        Architecture(
            "OlmoeForCausalLM",
            "olmoe",
            {
                **BASE,
                "num_experts": f.count("expert_count"),
                "num_experts_per_tok": f.count("expert_used_count"),
                "norm_topk_prob": f.always(False),
            },
            {**DENSE, **_QWEN_EXPERTS},
        ),
    ),
    "glm4moe": (
        Architecture(
            "Glm4MoeForCausalLM",
            "glm4_moe",
            {
                **BASE,
                **BIASED,
                **_ROUTED,
                "rope_parameters": f.partial_rope,
                "use_qk_norm": f.has_tensor("attn_q_norm.weight"),
            },
            {
                **PROJECTIONS,
                **HEAD_NORMS,
                **LATE_NORMS,
                **MLP,
                **experts("mlp"),
                **shared_mlp("mlp.shared_experts"),
                **_ROUTER,
            },
            predicting=PREDICTING,
        ),
    ),
    "granitemoe": (
        Architecture(
            "GraniteMoeSharedForCausalLM",
            "granitemoeshared",
            {
                **BASE,
                **BIASED,
                **GRANITE,
                **LOCAL_MIXTURE,
                "shared_intermediate_size": f.count("expert_shared_feed_forward_length"),
            },
            {**DENSE, **ROTATED, **GRANITE_EXPERTS},
            fits=lambda m: m.has("expert_shared_feed_forward_length"),
        ),
        Architecture(
            "GraniteMoeForCausalLM",
            "granitemoe",
            {**BASE, **BIASED, **GRANITE, **LOCAL_MIXTURE},
            {**DENSE, **ROTATED, **GRANITE_EXPERTS},
        ),
    ),
    "hunyuan-moe": (
        Architecture(
            "HunYuanMoEV1ForCausalLM",
            "hunyuan_v1_moe",
            {
                **BASE,
                **BIASED,
                "num_experts": f.count("expert_count"),
                "moe_topk": f.count("expert_used_count"),
            },
            {
                **DENSE,
                **experts("mlp"),
                **shared_mlp("mlp.shared_mlp"),
                "ffn_gate_inp": "mlp.gate.wg",
                "attn_q_norm": "self_attn.query_layernorm",
                "attn_k_norm": "self_attn.key_layernorm",
            },
        ),
    ),
    "deepseek2": (
        Architecture(
            "DeepseekV3ForCausalLM",
            "deepseek_v3",
            {**_DEEPSEEK, "scoring_func": f.always("sigmoid")},
            _DEEPSEEK_LAYERS,
            fits=_gates_by_sigmoid,
            predicting=PREDICTING,
        ),
        Architecture(
            "DeepseekV2ForCausalLM",
            "deepseek_v2",
            {**_DEEPSEEK, "topk_method": _topk_method},
            _DEEPSEEK_LAYERS,
        ),
    ),
    "llama4": (
        Architecture(
            "Llama4ForCausalLM",
            "llama4_text",
            {
                **BASE,
                **BIASED,
                **LOCAL_MIXTURE,
                "intermediate_size": f.count("expert_feed_forward_length"),
                "intermediate_size_mlp": f.count("feed_forward_length"),
                "interleave_moe_layer_step": f.count("interleave_moe_layer_step"),
                "moe_layers": lambda m: f.layers_with(m, "ffn_gate_inp.weight"),
                "attention_chunk_size": f.always(_CHUNK),
                "layer_types": _llama4_kinds,
                "no_rope_layers": _llama4_uses_rope,
                "attn_temperature_tuning": lambda m: 0 in _llama4_uses_rope(m),
                "use_qk_norm": lambda m: m.count("expert_count") != 128,
            },
            {
                **{k: v for k, v in DENSE.items() if k not in MLP},
                **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
                **experts("feed_forward"),
                **shared_mlp("feed_forward.shared_expert"),
                "ffn_gate_inp": "feed_forward.router",
            },
        ),
    ),
}
"""Rows by the name of the architecture in a file."""
