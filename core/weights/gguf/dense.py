"""Rows of the table: architectures of attention and one MLP a layer."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.core.weights.gguf import fields as f
from triptych.core.weights.gguf.architecture import (
    BASE,
    BIASED,
    DENSE,
    HEAD_NORMS,
    LATE_NORMS,
    MERGED_MLP,
    MLP,
    NORMS,
    PROJECTIONS,
    ROTATED,
    WINDOW,
    Architecture,
    Names,
    Place,
)
from triptych.core.weights.gguf.fields import Fields, Rope
from triptych.core.weights.gguf.layouts import Interleaved
from triptych.core.weights.gguf.metadata import Metadata

_LLAMA: Names = {**DENSE, **ROTATED}
_OUTER_NORMS: Names = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GRANITE: Fields = {
    "attention_multiplier": lambda m: m.number("attention.scale", f.head_dim(m) ** -0.5),
    "embedding_multiplier": f.number("embedding_scale", 1.0),
    "residual_multiplier": f.number("residual_scale", 1.0),
    "logits_scaling": f.number("logit_scale", 1.0),
}
_BIASED_MLP: Fields = {**BIASED, "mlp_bias": f.has_tensor("ffn_up.bias")}
_COHERE: Fields = {
    **BIASED,
    "layer_norm_eps": f.number("attention.layer_norm_epsilon", 1e-5),
    "logit_scale": f.number("logit_scale"),
}


_GLM4: Names = {
    **PROJECTIONS,
    **MERGED_MLP,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}


def _rope_of_axes(m: Metadata) -> Rope:
    """The text of GLM-4.1V and GLM-OCR, whose positions are alike on all axes.

    They rotate another part of a head than GLM 4 does without a word.
    """
    return {"partial_rotary_factor": 1.0, **f.partial_rope(m)}


def _ministral_rope(m: Metadata) -> Rope:
    """Ministral 3: queries grow with their positions, and YaRN has no attention factor."""
    multiplier = m.number("rope.scaling.yarn_log_multiplier", 1.0)
    return {
        **f.rope(m),
        "mscale": multiplier,
        "mscale_all_dim": multiplier,
        "llama_4_scaling_beta": m.number("attention.temperature_scale"),
    }


_MINISTRAL = Architecture(
    "Ministral3ForCausalLM",
    "ministral3",
    {**BASE, "rope_parameters": _ministral_rope},
    _LLAMA,
    fits=lambda m: m.has("attention.temperature_scale"),
)
_MISTRAL = Architecture(
    "MistralForCausalLM",
    "mistral",
    {**BASE, "sliding_window": f.count_or_null("attention.sliding_window")},
    _LLAMA,
)

DENSE_ROWS: Mapping[str, tuple[Architecture, ...]] = {
    "llama": (
        Architecture(
            "MistralForCausalLM",
            "mistral",
            {**BASE, **WINDOW},
            _LLAMA,
            fits=lambda m: m.has("attention.sliding_window") and not m.has("expert_count"),
        ),
        Architecture(
            "LlamaForCausalLM",
            "llama",
            {**BASE, **_BIASED_MLP},
            _LLAMA,
            fits=lambda m: not m.has("expert_count"),
        ),
    ),
    "mistral3": (_MINISTRAL, _MISTRAL),
    "qwen2": (Architecture("Qwen2ForCausalLM", "qwen2", BASE, DENSE),),
    "qwen3": (Architecture("Qwen3ForCausalLM", "qwen3", {**BASE, **BIASED}, DENSE),),
    "smollm3": (Architecture("SmolLM3ForCausalLM", "smollm3", {**BASE, **_BIASED_MLP}, _LLAMA),),
    "phi3": (
        Architecture(
            "Phi3ForCausalLM",
            "phi3",
            {
                **BASE,
                "rope_parameters": f.partial_rope,
                "original_max_position_embeddings": f.count("rope.scaling.original_context_length"),
                "sliding_window": f.count_if_there("attention.sliding_window"),
            },
            {
                **NORMS,
                **MERGED_MLP,
                "attn_qkv": "self_attn.qkv_proj",
                "attn_output": "self_attn.o_proj",
            },
        ),
    ),
    "glm4": (
        Architecture(
            "Glm4ForCausalLM",
            "glm4",
            {**BASE, **BIASED, "rope_parameters": _rope_of_axes},
            {
                **_GLM4,
                "attn_q": Place("self_attn.q_proj", Interleaved("num_attention_heads")),
                "attn_k": Place("self_attn.k_proj", Interleaved("num_key_value_heads")),
            },
            fits=lambda m: m.has("rope.dimension_sections"),
        ),
        Architecture(
            "Glm4ForCausalLM",
            "glm4",
            {**BASE, **BIASED, "rope_parameters": f.partial_rope},
            _GLM4,
        ),
    ),
    "granite": (
        Architecture("GraniteForCausalLM", "granite", {**BASE, **_BIASED_MLP, **GRANITE}, _LLAMA),
    ),
    "olmo2": (
        Architecture(
            "Olmo3ForCausalLM",
            "olmo3",
            {
                **BASE,
                **BIASED,
                **WINDOW,
                "layer_types": f.layer_kinds(4),
                "rope_parameters": f.rope_by_kind(),
            },
            {**PROJECTIONS, **HEAD_NORMS, **MLP, **_OUTER_NORMS},
            fits=lambda m: m.has("attention.sliding_window"),
        ),
        Architecture(
            "Olmo2ForCausalLM",
            "olmo2",
            {**BASE, **BIASED},
            {**PROJECTIONS, **HEAD_NORMS, **MLP, **_OUTER_NORMS},
        ),
    ),
    "exaone4": (
        Architecture(
            "Exaone4ForCausalLM",
            "exaone4",
            {
                **BASE,
                "sliding_window": f.count_or_null("attention.sliding_window"),
                "layer_types": f.windowed_kinds(4),
            },
            {**PROJECTIONS, **HEAD_NORMS, **MLP, **_OUTER_NORMS},
        ),
    ),
    "command-r": (
        Architecture(
            "CohereForCausalLM",
            "cohere",
            {**BASE, **_COHERE, "use_qk_norm": f.has_tensor("attn_q_norm.weight")},
            DENSE,
        ),
    ),
    "cohere2": (
        Architecture(
            "Cohere2ForCausalLM",
            "cohere2",
            {**BASE, **_COHERE, **WINDOW, "layer_types": f.layer_kinds(4)},
            DENSE,
        ),
    ),
    "seed_oss": (
        Architecture(
            "SeedOssForCausalLM",
            "seed_oss",
            {**BASE, **_BIASED_MLP, "attention_out_bias": f.has_tensor("attn_output.bias")},
            {**PROJECTIONS, **LATE_NORMS, **MLP},
        ),
    ),
    "hunyuan-dense": (
        Architecture(
            "HunYuanDenseV1ForCausalLM",
            "hunyuan_v1_dense",
            {**BASE, **BIASED},
            {
                **DENSE,
                "attn_q_norm": "self_attn.query_layernorm",
                "attn_k_norm": "self_attn.key_layernorm",
            },
        ),
    ),
    "ernie4_5": (
        Architecture(
            "Ernie4_5ForCausalLM",
            "ernie4_5",
            {**BASE, "use_bias": f.has_tensor("attn_q.bias")},
            DENSE,
        ),
    ),
    "arcee": (
        Architecture(
            "ArceeForCausalLM",
            "arcee",
            {**BASE, **_BIASED_MLP, "hidden_act": f.always("relu2")},
            _LLAMA,
        ),
    ),
}
"""Rows by the name of the architecture in a file."""
