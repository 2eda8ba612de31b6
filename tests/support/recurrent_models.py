"""Tiny models of transformers with recurrent layers, whose states neither fade nor grow at once."""

from __future__ import annotations

from typing import Any

import torch
import transformers

ALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
}
_CONV = {"layer_types": ["conv", "full_attention", "conv", "conv"]}
_FEED_FORWARD = {"intermediate_size": 48}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_GATED = {"shared_expert_intermediate_size": 16, "head_dim": 16}
_MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_MAMBA_1 = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_dt_rank": 8}
_PURE_MAMBA = {"state_size": 8, "intermediate_size": 64, "expand": 2, "conv_kernel": 4}

RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5Text", _DELTA_NET | _LINEAR | _FEED_FORWARD | {"head_dim": 16}),
    "qwen3.5-moe": (
        "Qwen3_5MoeText",
        _DELTA_NET | _LINEAR | _EXPERTS | _GATED,
    ),
    "qwen3-next": (
        "Qwen3Next",
        _DELTA_NET | _LINEAR | _EXPERTS | _FEED_FORWARD | _GATED,
    ),
    "olmo-hybrid": ("OlmoHybrid", _DELTA_NET | _LINEAR | _FEED_FORWARD),
    "kimi-linear": (
        "KimiLinear",
        _LINEAR
        | _EXPERTS
        | _FEED_FORWARD
        | {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 8,
            "num_experts_per_token": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "linear_conv_kernel_dim": 4,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "minimax, lightning attention": (
        "MiniMax",
        _LINEAR | _FEED_FORWARD | {"num_local_experts": 4, "block_size": 16},
    ),
    "lfm2": (
        "Lfm2",
        _CONV | _FEED_FORWARD | {"conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        _CONV | _EXPERTS | _FEED_FORWARD | {"conv_L_cache": 3, "num_dense_layers": 1},
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        _MAMBA_2
        | _LINEAR
        | _FEED_FORWARD
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
    ),
    "nemotron-h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "mlp"],
            "intermediate_size": 48,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 8,
            "conv_kernel": 4,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
            "num_experts_per_tok": 2,
            "head_dim": 8,
        },
    ),
    "falcon-h1": (
        "FalconH1",
        _MAMBA_2
        | _FEED_FORWARD
        | {
            "mamba_d_ssm": 48,
            "mamba_n_heads": 6,
            "head_dim": 8,
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.8,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.6,
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.9,
            "ssm_multipliers": [0.5, 1.1, 1.4, 0.7, 1.6],
            "mlp_multipliers": [0.6, 1.3],
        },
    ),
    "falcon-h1, with norms": (
        "FalconH1",
        _MAMBA_2
        | _FEED_FORWARD
        | {"mamba_d_ssm": 64, "head_dim": 8, "mamba_rms_norm": True}
        | {"mamba_norm_before_gate": False, "ssm_out_multiplier": 0.7},
    ),
    "bamba": ("Bamba", _MAMBA_2 | _FEED_FORWARD | {"attn_layer_indices": [1]}),
    "jamba": (
        "Jamba",
        _MAMBA_1
        | _FEED_FORWARD
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4},
    ),
    "mamba": ("Mamba", _PURE_MAMBA | {"time_step_rank": 8}),
    "mamba-2": (
        "Mamba2",
        {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16},
    ),
}


OWN_CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v4, compressed blocks": (
        "DeepseekV4",
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "sliding_window": 24,
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
            "compress_rates": {
                "compressed_sparse_attention": 4,
                "heavily_compressed_attention": 32,
            },
            "index_n_heads": 16,
            "index_head_dim": 8,
            "index_topk": 16,
            "q_lora_rank": 24,
            "o_groups": 2,
            "o_lora_rank": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "qwen4-exp, an index and n-grams": (
        "Qwen4ExpText",
        _DELTA_NET
        | _GATED
        | _EXPERTS
        | {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "indexed_attention"],
            "hc_lowrank": 8,
            "ple_layer_ids": [1],
            "ngram_vocab_size_base": 50,
            "heads_per_ngram": 2,
            "split_ngram_parts": 2,
            "indexer_n_heads": 16,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 32,
            "indexer_compress_ratio": 4,
        },
    ),
}
"""Models whose own cache is taken apart, with a window or blocks of tokens."""


def recurrent_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of `RECURRENT` or `OWN_CACHES`, as transformers makes it, with random weights."""
    family, extra = (RECURRENT | OWN_CACHES)[name]
    config = getattr(transformers, f"{family}Config")(**ALL | extra, attn_implementation="eager")
    torch.manual_seed(3)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("A_log", "dt_bias")):
            parameter.data.normal_(0.0, 0.5)
    return model.to(dtype)
