"""Tiny dense decoders of the families that differ from Llama in more than names."""

from __future__ import annotations

from typing import Any

WINDOW = 64
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 100,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 4.0],
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_ALTERNATING = [_SLIDING, _FULL] * 2
_GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 10, "sliding_window": WINDOW}
_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": WINDOW,
    "num_hidden_layers": 5,
    "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
    "vocab_size_per_layer_input": 199,
    "hidden_size_per_layer_input": 20,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 20.0,
}
_GEMMA3N = {
    "head_dim": 16,
    "intermediate_size": [80, 80, 80, 80, 96],
    "sliding_window": WINDOW,
    "num_hidden_layers": 5,
    "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
    "vocab_size_per_layer_input": 199,
    "hidden_size_per_layer_input": 20,
    "num_kv_shared_layers": 2,
    "laurel_rank": 12,
    "altup_num_inputs": 3,
    "activation_sparsity_pattern": [0.7, 0.0, 0.95, 0.0, 0.6],
}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {}),
    "gemma2": (
        "Gemma2",
        {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    "gemma3": ("Gemma3Text", {**_GEMMA, "layer_types": _ALTERNATING}),
    "gemma4": ("Gemma4Text", _GEMMA4),
    "gemma4-large": (
        "Gemma4Text",
        {
            **_GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
    ),
    "gemma3n": ("Gemma3nText", _GEMMA3N),
    "phi3": (
        "Phi3",
        {
            "hidden_size": 96,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "rope_parameters": _LONG,
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 512,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": WINDOW}),
    "cohere": ("Cohere", {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": ("Cohere2", {"hidden_size": 72, "sliding_window": WINDOW}),
    "ministral": ("Ministral", {"sliding_window": WINDOW, "layer_types": _ALTERNATING}),
    "ministral3": ("Ministral3", {"rope_parameters": _YARN}),
    "seed-oss": ("SeedOss", {"attention_out_bias": True, "mlp_bias": True}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 3.0,
        },
    ),
    "glm": ("Glm", {"attention_bias": True}),
    "glm4": ("Glm4", {"attention_bias": True}),
    "exaone4": ("Exaone4", {"sliding_window": WINDOW, "layer_types": _ALTERNATING}),
    "hunyuan": (
        "HunYuanDenseV1",
        {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    ),
    "apertus": ("Apertus", {}),
    "arcee": ("Arcee", {"mlp_bias": True}),
    "helium": ("Helium", {"hidden_size": 72}),
    "starcoder2": ("Starcoder2", {"sliding_window": WINDOW}),
    "stablelm": (
        "StableLm",
        {"hidden_size": 96, "head_dim": 16, "qk_layernorm": True, "use_qkv_bias": True},
    ),
    "stablelm-parallel": (
        "StableLm",
        {"hidden_size": 96, "head_dim": 16, "use_parallel_residual": True},
    ),
    "nemotron": ("Nemotron", {"head_dim": 16}),
}
"""The class of transformers, and what its configuration has beside `decoder_families.TINY`."""
