"""Tiny decoders of every family, with random weights, saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

TINY = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 96,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT = {
    "head_dim": 8,
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "tie_word_embeddings": False,
    "attention_bias": True,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biased-tied": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 4}),
    "smollm3-window": (
        "SmolLM3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9},
    ),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-layer-types": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "youtu": ("Youtu", LATENT),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-of-all": ("Mixtral", {"num_local_experts": 2, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    "qwen3-moe-normed": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
}


VARIANTS = {
    "llama",
    "mistral-full",
    "mixtral-of-all",
    "qwen2-window",
    "qwen3-layer-types",
    "qwen3-moe-normed",
    "smollm3-window",
}
"""Families like another one but for a setting."""


def save_family(folder: Path, family: str, **extra: Any) -> Any:
    """Save a model in `folder`; returns transformers' own."""
    config = getattr(transformers, f"{family}Config")(**TINY | extra, attn_implementation="eager")
    torch.manual_seed(11)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    model.save_pretrained(folder)
    return model
