"""A tiny model for every architecture that GGUF files are read of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from support.gguf_models import (
    WINDOWED,
    Family,
    by_kind_of_row,
    divided_pairs,
    gemma3n,
    gemma4,
    halved_experts,
    interleaved_experts,
    kimi,
    latent,
    mamba,
    plus_one,
    plus_one_but_inner,
    rotated,
    state_space,
    tiled_value_heads,
    transposed_experts,
)

HEAD = 8
FIELDS = {"head_dim": HEAD}
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}
NEAR_ROPE = {"rope.freq_base_swa": 1e4}
YARN = {"factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "original_max_position_embeddings": 32}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_beta_fast": 16.0,
    "rope.scaling.yarn_beta_slow": 2.0,
}
PATTERN = {"attention.sliding_window_pattern": [kind != "full_attention" for kind in WINDOWED]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
SHARED = {"shared_expert_intermediate_size": 24}
SHARED_KEY = {"expert_shared_feed_forward_length": 24}
ROUTED = {
    **EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
ROUTED_KEYS = {
    **EXPERT_KEYS,
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 2.5,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
LATENT_KEYS = {
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 16,
    "attention.q_lora_rank": 24,
    "attention.key_length": 20,
    "attention.value_length": 16,
    "attention.key_length_mla": 12,
    "attention.value_length_mla": 12,
    "rope.dimension_count": 4,
}
DELTA = {
    **FIELDS,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
DELTA_KEYS = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
    "rope.dimension_count": 4,
}
AXES = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.75,
        "mrope_section": [1, 1, 1],
        "mrope_interleaved": True,
    }
}
AXIS_KEYS = {"rope.dimension_sections": [1, 1, 1, 0], "rope.dimension_count": 6}
MAMBA_KEYS = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.25,
    "attention_multiplier": 0.125,
    "tie_word_embeddings": True,
}
GRANITE_KEYS = {
    "embedding_scale": 12.0,
    "logit_scale": 8.0,
    "residual_scale": 0.25,
    "attention.scale": 0.125,
}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
LOCAL_KEYS = {"expert_count": 4, "expert_used_count": 2}
GRANITE_HYBRID = {
    **GRANITE,
    "shared_intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "position_embedding_type": "nope",
}
GRANITE_HYBRID_KEYS = {
    **GRANITE_KEYS,
    **MAMBA_KEYS,
    "rope.scaling.finetuned": False,
    "attention.head_count_kv": [0, 2, 0, 2],
}
NEMOTRON = {
    **FIELDS,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "layer_norm_epsilon": 1e-5,
    "rms_norm_eps": None,
}
NEMOTRON_KEYS = {**MAMBA_KEYS, "rope.freq_base": None}
CONV = {"layer_types": ["conv", "full_attention"] * 2, "norm_eps": 1e-5}
CONV_KEYS = {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2, 0, 2]}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": 32,
}
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 272}
GEMMA4_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}
GEMMA4 = {
    **FIELDS,
    "global_head_dim": 16,
    "layer_types": WINDOWED,
    "sliding_window": 16,
    "rope_parameters": GEMMA4_ROPES,
    "final_logit_softcapping": 30.0,
}
GEMMA4_KEYS = {
    **NEAR_ROPE,
    **PATTERN,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.key_length_swa": HEAD,
    "attention.value_length_swa": HEAD,
    "final_logit_softcapping": 30.0,
}
UNROTATED = {"rope_freqs.weight": [1.0] * 2 + [1e30] * 6}

FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", FIELDS, {}, (rotated,)),
    "llama+experts": Family(
        "MixtralForCausalLM", {**FIELDS, **LOCAL, "sliding_window": None}, LOCAL_KEYS, (rotated,)
    ),
    "mistral3": Family(
        "Ministral3ForCausalLM",
        {
            **FIELDS,
            "rope_parameters": {
                **YARN,
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.125,
            },
        },
        {
            **YARN_KEYS,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.125,
        },
        (rotated,),
    ),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM", FIELDS),
    "smollm3": Family("SmolLM3ForCausalLM", {"tie_word_embeddings": True}, {}, (rotated,)),
    "phi3": Family(
        "Phi3ForCausalLM",
        {"rope_parameters": LONG, "original_max_position_embeddings": 32},
        {"rope.scaling.original_context_length": 32},
        extra={
            "rope_factors_short.weight": LONG["short_factor"],
            "rope_factors_long.weight": LONG["long_factor"],
        },
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        {**FIELDS, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope.dimension_count": 4},
    ),
    "glm4+axes": Family(
        "Glm4ForCausalLM",
        {**FIELDS, "attention_bias": True, "rope_parameters": {"partial_rotary_factor": 1.0}},
        {"rope.dimension_count": HEAD, "rope.dimension_sections": [1, 1, 2, 0]},
        (divided_pairs,),
    ),
    "granite": Family("GraniteForCausalLM", GRANITE, GRANITE_KEYS, (rotated,)),
    "olmo2": Family("Olmo2ForCausalLM"),
    "olmo2+window": Family(
        "Olmo3ForCausalLM", {"sliding_window": 16, "layer_types": WINDOWED}, PATTERN
    ),
    "exaone4": Family("Exaone4ForCausalLM", {"sliding_window": 16, "layer_types": WINDOWED}),
    "command-r": Family(
        "CohereForCausalLM",
        {"layer_norm_eps": 1e-5, "logit_scale": 0.5, "tie_word_embeddings": True},
        {"logit_scale": 0.5, "attention.layer_norm_epsilon": 1e-5},
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        {
            "logit_scale": 0.5,
            "tie_word_embeddings": True,
            "sliding_window": 16,
            "layer_types": WINDOWED,
        },
        {"logit_scale": 0.5, "attention.layer_norm_epsilon": 1e-5},
    ),
    "seed_oss": Family("SeedOssForCausalLM", FIELDS),
    "hunyuan-dense": Family("HunYuanDenseV1ForCausalLM", FIELDS),
    "ernie4_5": Family("Ernie4_5ForCausalLM", FIELDS),
    "arcee": Family("ArceeForCausalLM", FIELDS, {}, (rotated,)),
    "gemma": Family("GemmaForCausalLM", FIELDS, {}, (plus_one,)),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {**FIELDS, "query_pre_attn_scalar": HEAD, "sliding_window": 16},
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        (plus_one,),
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        {
            **FIELDS,
            "query_pre_attn_scalar": HEAD,
            "sliding_window": 16,
            "layer_types": ["sliding_attention"] * 4,
            "rope_parameters": {
                **TWO_ROPES,
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
        {**NEAR_ROPE, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        (plus_one,),
    ),
    "gemma3n": Family(
        "Gemma3nForCausalLM",
        {
            **FIELDS,
            **PER_LAYER,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
            "rope_parameters": TWO_ROPES,
        },
        {
            **NEAR_ROPE,
            "attention.sliding_window_pattern": [True, False] * 2,
            "attention.shared_kv_layers": 2,
            "embedding_length_per_layer_input": 8,
            "altup.active_idx": 0,
            "altup.num_inputs": 4,
            "activation_sparsity_scale": [1.6448535919, 1.6448535919, float("-inf"), float("-inf")],
            "final_logit_softcapping": 30.0,
        },
        (gemma3n,),
    ),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            **PER_LAYER,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
        {
            **GEMMA4_KEYS,
            "attention.sliding_window_pattern": [True, False] * 2,
            "attention.shared_kv_layers": 2,
            "embedding_length_per_layer_input": 8,
            "feed_forward_length": [64, 64, 128, 128],
        },
        (gemma4,),
        UNROTATED,
    ),
    "gemma4+experts": Family(
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 272,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        {**GEMMA4_KEYS, **EXPERT_KEYS, "attention.head_count_kv": [2, 2, 2, 1]},
        (gemma4,),
        UNROTATED,
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        {
            **FIELDS,
            **LOCAL,
            "sliding_window": 16,
            "rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 1e6, "truncate": False},
        },
        {**LOCAL_KEYS, **YARN_KEYS, "expert_feed_forward_length": 64},
        (interleaved_experts,),
    ),
    "qwen2moe": Family(
        "Qwen2MoeForCausalLM",
        {**EXPERTS, **SHARED, "num_experts": 4},
        {**EXPERT_KEYS, **SHARED_KEY},
    ),
    "qwen3moe": Family(
        "Qwen3MoeForCausalLM",
        {**FIELDS, **EXPERTS, "num_experts": 4, "norm_topk_prob": True},
        EXPERT_KEYS,
    ),
    "olmoe": Family("OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}, LOCAL_KEYS),
    "glm4moe": Family(
        "Glm4MoeForCausalLM",
        {
            **FIELDS,
            **ROUTED,
            "use_qk_norm": True,
            "num_mtp_layers": 0,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        {**ROUTED_KEYS, "expert_weights_norm": True, "rope.dimension_count": 4},
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        {**GRANITE, **LOCAL},
        {**GRANITE_KEYS, **LOCAL_KEYS},
        (rotated, halved_experts),
    ),
    "granitemoe+shared": Family(
        "GraniteMoeSharedForCausalLM",
        {**GRANITE, **LOCAL, "shared_intermediate_size": 24},
        {**GRANITE_KEYS, **LOCAL_KEYS, **SHARED_KEY},
        (rotated, halved_experts),
    ),
    "hunyuan-moe": Family(
        "HunYuanMoEV1ForCausalLM", {**FIELDS, "num_experts": 4, "moe_topk": 2}, LOCAL_KEYS
    ),
    "deepseek2": Family(
        "DeepseekV3ForCausalLM",
        {
            **ROUTED,
            **LATENT,
            "n_group": 2,
            "topk_group": 1,
            "num_mtp_layers": 0,
            "rope_parameters": {
                **YARN,
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "mscale": 0.7,
                "mscale_all_dim": 0.7,
            },
        },
        {
            **ROUTED_KEYS,
            **LATENT_KEYS,
            **YARN_KEYS,
            "rope.scaling.yarn_log_multiplier": 0.07,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
        },
        (latent,),
    ),
    "deepseek2+lite": Family(
        "DeepseekV2ForCausalLM",
        {**ROUTED, **LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
        {**ROUTED_KEYS, **LATENT_KEYS, "attention.q_lora_rank": None},
        (latent,),
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        {
            **FIELDS,
            **LOCAL,
            "intermediate_size": 32,
            "intermediate_size_mlp": 64,
            "interleave_moe_layer_step": 2,
        },
        {**EXPERT_KEYS, "feed_forward_length": 64, "interleave_moe_layer_step": 2},
        (transposed_experts,),
    ),
    "qwen35": Family(
        "Qwen3_5ForCausalLM",
        {**DELTA, **AXES},
        {**DELTA_KEYS, **AXIS_KEYS},
        (tiled_value_heads, plus_one_but_inner, state_space),
    ),
    "qwen35moe": Family(
        "Qwen3_5MoeForCausalLM",
        {**DELTA, **AXES, **EXPERTS, **SHARED, "num_experts": 4},
        {**DELTA_KEYS, **AXIS_KEYS, **EXPERT_KEYS, **SHARED_KEY},
        (tiled_value_heads, plus_one_but_inner, state_space),
    ),
    "qwen3next": Family(
        "Qwen3NextForCausalLM",
        {
            **DELTA,
            **EXPERTS,
            **SHARED,
            "num_experts": 4,
            "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
        {**DELTA_KEYS, **EXPERT_KEYS, **SHARED_KEY},
        (by_kind_of_row, plus_one_but_inner, state_space),
    ),
    "kimi-linear": Family(
        "KimiLinearForCausalLM",
        {
            **{name: size for name, size in LATENT.items() if name != "q_lora_rank"},
            **EXPERTS,
            "num_experts": 4,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "linear_conv_kernel_dim": 4,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
        {
            **{key: size for key, size in LATENT_KEYS.items() if key != "attention.q_lora_rank"},
            **ROUTED_KEYS,
            "attention.head_count_kv": [0, 0, 0, 1],
            "ssm.conv_kernel": 4,
            "kda.head_dim": 8,
        },
        (kimi,),
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM", {**CONV, "block_auto_adjust_ff_dim": False}, CONV_KEYS, (state_space,)
    ),
    "lfm2moe": Family(
        "Lfm2MoeForCausalLM",
        {**CONV, **EXPERTS, "num_experts": 4, "num_dense_layers": 2},
        {**CONV_KEYS, **EXPERT_KEYS, "leading_dense_block_count": 2, "expert_gating_func": 2},
        (state_space,),
    ),
    "granitehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        {**GRANITE_HYBRID, **LOCAL},
        {**GRANITE_HYBRID_KEYS, **LOCAL_KEYS, **SHARED_KEY},
        (rotated, mamba, halved_experts),
    ),
    "granitehybrid+dense": Family(
        "GraniteMoeHybridForCausalLM",
        {
            **GRANITE_HYBRID,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "intermediate_size": 24,
        },
        {**GRANITE_HYBRID_KEYS, "feed_forward_length": 24},
        (rotated, mamba, halved_experts),
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        {**NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
        {
            **NEMOTRON_KEYS,
            "feed_forward_length": [0, 64, 0, 64],
            "attention.head_count_kv": [0, 0, 2, 0],
        },
        (rotated, mamba),
    ),
    "nemotron_h_moe": Family(
        "NemotronHForCausalLM",
        {
            **NEMOTRON,
            **EXPERTS,
            "intermediate_size": 32,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 24,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        },
        {
            **NEMOTRON_KEYS,
            **EXPERT_KEYS,
            **SHARED_KEY,
            "expert_weights_norm": True,
            "feed_forward_length": [0, 32, 0, 32],
            "attention.head_count_kv": [0, 0, 2, 0],
        },
        (rotated, mamba),
    ),
    "falcon-h1": Family(
        "FalconH1ForCausalLM",
        {
            **FIELDS,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_n_groups": 2,
        },
        MAMBA_KEYS,
        (mamba,),
    ),
}
"""Families by architecture; what follows a plus sign tells several apart."""


def fields_of(config: Any) -> dict[str, Any]:
    """The fields of a configuration that say what a model computes."""
    ignored = {"initializer_range", "dtype", "architectures", "transformers_version", "use_cache"}
    return {name: value for name, value in config.to_dict().items() if name not in ignored}
