"""Tiny mixtures of experts of every family, with random weights, saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from support.decoder_families import TINY
from support.every_path import LONG

SMALL = TINY | LONG | {"num_hidden_layers": 3, "tie_word_embeddings": False}
GROUPED = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "rope_parameters": YARN,
            "swiglu_limit": 0.3,
        },
    ),
    "glm-4.5": ("Glm4Moe", GROUPED | {"use_qk_norm": True, "attention_bias": True}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "head_dim": None,
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "head_dim": None}),
    "minimax-m2": (
        "MiniMaxM2",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 6},
    ),
    "ernie-4.5": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "granite": (
        "GraniteMoeShared",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
            "head_dim": None,
        },
    ),
    "dots1": ("Dots1", GROUPED | {"sliding_window": 64, "max_window_layers": 1}),
    "solar-open": ("SolarOpen", GROUPED | {"head_dim": 12}),
    "exaone": (
        "ExaoneMoe",
        {k: v for k, v in GROUPED.items() if k not in ("n_routed_experts", "n_shared_experts")}
        | {"num_experts": 8, "num_shared_experts": 1, "sliding_window": 64, "head_dim": 12},
    ),
    "llama-4": (
        "Llama4",
        {
            "intermediate_size_mlp": 56,
            "num_experts_per_tok": 1,
            "num_local_experts": 5,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 64,
            "floor_scale": 50,
            "attn_scale": 0.4,
        },
    ),
    "hunyuan": ("HunYuanMoEV1", {"num_experts": 5, "moe_topk": 2}),
}
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk")
NUMBERS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def save_mixture(folder: Path, name: str, **more: Any) -> Any:
    """Save a tiny random model in `folder`; returns transformers' own."""
    family, extra = MIXTURES[name]
    fields = {key: value for key, value in (SMALL | extra | more).items() if value is not None}
    kind = f"{family}TextConfig" if family == "Llama4" else f"{family}Config"
    config = getattr(transformers, kind)(**fields, attn_implementation="eager")
    torch.manual_seed(11)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for key, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in key or key.endswith(("bias", "sinks")):
            torch.nn.init.normal_(tensor, mean=float("norm" in key), std=0.2)
    model.save_pretrained(folder)
    return model
