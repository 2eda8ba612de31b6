"""Rows of the table: the architectures of Gemma."""

from __future__ import annotations

import math
from collections.abc import Mapping

from triptych.core.weights.gguf import fields as f
from triptych.core.weights.gguf.architecture import (
    BASE,
    GLOBALS,
    HEAD_NORMS,
    MLP,
    PROJECTIONS,
    WINDOW,
    Architecture,
    Names,
    Place,
    experts,
    shifted,
)
from triptych.core.weights.gguf.fields import Fields, Rope
from triptych.core.weights.gguf.layouts import HalvedExperts, per_expert
from triptych.core.weights.gguf.metadata import Metadata

_ACTIVATION: Fields = {
    "hidden_act": f.always("gelu_pytorch_tanh"),
    "hidden_activation": f.always("gelu_pytorch_tanh"),
    "final_logit_softcapping": f.number_if_there("final_logit_softcapping"),
}
_GEMMA: Fields = {**BASE, **_ACTIVATION, "tie_word_embeddings": f.always(True)}
_FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SHIFTED_GLOBALS: Names = {**GLOBALS, **shifted({"output_norm": "model.norm"})}
_PER_LAYER_GLOBALS: Names = {
    **GLOBALS,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_PER_LAYER: Names = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_NEAR_THETA = 10_000.0
"""Of layers with a window, which older files do not state."""
_SHARED_CACHE = {"attn_k", "attn_v", "attn_k_norm"}


def _shares_cache(m: Metadata, layer: int, stem: str) -> bool:
    """Whether a layer reads another one's cache, so that its own keys are never computed."""
    return stem in _SHARED_CACHE and layer >= m.num_layers - _num_shared(m)


def _num_shared(m: Metadata) -> int:
    return m.count("attention.shared_kv_layers", 0)


def _per_layer_words(m: Metadata) -> int:
    table = m.tensor("per_layer_token_embd.weight")
    return f.vocab_size(m) if table is None else table.shape[0]


def _attention_scale(largest: int) -> f.Field:
    """The number whose root divides scores: the size of a head.

    In the model of `largest` layers (27B) it is an even share of the hidden size, which no file
    has.
    """

    def read(m: Metadata) -> int:
        share = m.count("embedding_length") // m.count("attention.head_count")
        return share if m.num_layers == largest else f.head_dim(m)

    return read


def _sparsity(m: Metadata) -> list[float]:
    """The shares of inactive features, which the file has as multiples of a standard deviation."""
    scales = m.layers("activation_sparsity_scale") or []
    shares = (0.5 * (1 + math.erf(float(scale) / math.sqrt(2))) for scale in scales)
    return [round(share, 6) for share in shares]


def _gemma4_ropes(m: Metadata) -> dict[str, Rope]:
    """Layers without a window rotate a share of their pairs."""
    full = {
        "rope_type": "proportional",
        "partial_rotary_factor": f.rotated_share(m),
        "rope_theta": m.number("rope.freq_base", 1_000_000.0),
    }
    return {"full_attention": full, "sliding_attention": f.near_rope(m, _NEAR_THETA)}


def _kv_heads(m: Metadata, *, is_near: bool) -> int | None:
    """The heads of keys of layers with a window, or of those without."""
    heads = m.layers("attention.head_count_kv") or []
    near = m.layers("attention.sliding_window_pattern") or []
    found = {int(each) for each, own in zip(heads, near, strict=False) if bool(own) == is_near}
    return max(found, default=None)


def _reads_keys_as_values(m: Metadata) -> bool:
    """Whether layers without a window have no projection of values."""
    near = m.layers("attention.sliding_window_pattern") or []
    own = m.num_layers - _num_shared(m)
    has_values = m.in_layers("attn_v.weight")
    return not all(has or window for has, window in zip(has_values[:own], near, strict=False))


def _inner_sizes(m: Metadata) -> list[int]:
    return m.layers("feed_forward_length") or [0]


def _inner_size(m: Metadata) -> int:
    return min(_inner_sizes(m))


def _is_double_wide(m: Metadata) -> bool:
    return max(_inner_sizes(m)) > _inner_size(m)


_GEMMA4: Fields = {
    **_GEMMA,
    **WINDOW,
    "tie_word_embeddings": f.has_no("output.weight"),
    "intermediate_size": _inner_size,
    "use_double_wide_mlp": _is_double_wide,
    "head_dim": f.count("attention.key_length_swa"),
    "global_head_dim": f.count("attention.key_length"),
    "num_key_value_heads": lambda m: _kv_heads(m, is_near=True),
    "num_global_key_value_heads": lambda m: _kv_heads(m, is_near=False),
    "attention_k_eq_v": _reads_keys_as_values,
    "num_kv_shared_layers": _num_shared,
    "layer_types": f.layer_kinds(6),
    "rope_parameters": _gemma4_ropes,
    "hidden_size_per_layer_input": f.count("embedding_length_per_layer_input", 0),
    "vocab_size_per_layer_input": _per_layer_words,
    "enable_moe_block": lambda m: m.has("expert_count"),
    "num_experts": f.count_if_there("expert_count"),
    "top_k_experts": f.count_if_there("expert_used_count"),
    "moe_intermediate_size": f.count_if_there("expert_feed_forward_length"),
}

GEMMA_ROWS: Mapping[str, tuple[Architecture, ...]] = {
    "gemma": (
        Architecture(
            "GemmaForCausalLM",
            "gemma",
            _GEMMA,
            {
                **PROJECTIONS,
                **MLP,
                **shifted({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}),
            },
            _SHIFTED_GLOBALS,
        ),
    ),
    "gemma2": (
        Architecture(
            "Gemma2ForCausalLM",
            "gemma2",
            {
                **_GEMMA,
                **WINDOW,
                "attn_logit_softcapping": f.number_if_there("attn_logit_softcapping"),
                "query_pre_attn_scalar": _attention_scale(46),
                "layer_types": f.layer_kinds(2),
            },
            {**PROJECTIONS, **MLP, **shifted(_FOUR_NORMS)},
            _SHIFTED_GLOBALS,
        ),
    ),
    "gemma3": (
        Architecture(
            "Gemma3ForCausalLM",
            "gemma3_text",
            {
                **_GEMMA,
                "sliding_window": f.count_if_there("attention.sliding_window"),
                "query_pre_attn_scalar": _attention_scale(62),
                "layer_types": f.windowed_kinds(6),
                "rope_parameters": f.rope_by_kind(_NEAR_THETA),
            },
            {
                **PROJECTIONS,
                **MLP,
                **shifted({**_FOUR_NORMS, **{k: str(v) for k, v in HEAD_NORMS.items()}}),
            },
            _SHIFTED_GLOBALS,
        ),
    ),
    "gemma3n": (
        Architecture(
            "Gemma3nForCausalLM",
            "gemma3n_text",
            {
                **_GEMMA,
                **WINDOW,
                "layer_types": f.layer_kinds(5),
                "rope_parameters": f.rope_by_kind(_NEAR_THETA),
                "altup_active_idx": f.count("altup.active_idx", 0),
                "altup_num_inputs": f.count("altup.num_inputs"),
                "laurel_rank": f.rows_of("blk.0.laurel_l.weight"),
                "activation_sparsity_pattern": _sparsity,
                "num_kv_shared_layers": _num_shared,
                "hidden_size_per_layer_input": f.count("embedding_length_per_layer_input"),
                "vocab_size_per_layer_input": _per_layer_words,
            },
            {
                **PROJECTIONS,
                **HEAD_NORMS,
                **MLP,
                **_FOUR_NORMS,
                **_PER_LAYER,
                "altup_correct_scale.weight": "altup.correct_output_scale",
                "altup_correct_coef": "altup.correction_coefs",
                "altup_predict_coef": "altup.prediction_coefs",
                "altup_router": "altup.modality_router",
                "altup_router_norm": "altup.router_norm",
                "laurel_l": "laurel.linear_left",
                "laurel_r": "laurel.linear_right",
                "laurel_post_norm": "laurel.post_laurel_norm",
            },
            {
                **_PER_LAYER_GLOBALS,
                "altup_proj": Place("model.altup_projections.{}", per_expert),
                "altup_unembd_proj": Place("model.altup_unembed_projections.{}", per_expert),
            },
            unused=_shares_cache,
        ),
    ),
    "gemma4": (
        Architecture(
            "Gemma4ForCausalLM",
            "gemma4_text",
            _GEMMA4,
            {
                **PROJECTIONS,
                **HEAD_NORMS,
                **MLP,
                **_FOUR_NORMS,
                **_PER_LAYER,
                **experts(),
                "layer_output_scale.weight": "layer_scalar",
                "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
                "post_ffw_norm_1": "post_feedforward_layernorm_1",
                "post_ffw_norm_2": "post_feedforward_layernorm_2",
                "ffn_gate_inp": "router.proj",
                "ffn_gate_inp.scale": "router.scale",
                "ffn_down_exps.scale": "router.per_expert_scale",
                "ffn_gate_up_exps": Place("experts.{}", HalvedExperts(("gate_proj", "up_proj"))),
            },
            _PER_LAYER_GLOBALS,
            unused=_shares_cache,
        ),
    ),
}
"""Rows by the name of the architecture in a file."""
