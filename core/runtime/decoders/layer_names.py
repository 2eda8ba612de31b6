"""The names that families give to the tensors of a layer.

Owns the table. Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from triptych.core.runtime.tensors.renamed import StoredNames

_CONVOLUTIONS = {
    "conv1d.weight": ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"),
}
"""Of queries, keys and values; transformers divides them evenly where it saves them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """Names within a layer, and of the last norm.

    `qkv` and `gate_up` are projections that are stored as one tensor.

    Where each head has a tensor of its own, `{head}` stands for its number. The norm before the MLP
    has `mlp_norm` in a layer with norms after attention, and that of the norm after attention in
    others. `mlp` is the module of the MLP where no mixture has another name for it, `recurrent`
    that of a recurrent layer where its kind has another one. `body` is that of the whole stack.
    Files may have `stored` names, which become these.
    """

    stored: StoredNames | None = None
    body: str = "model"
    embedding: str = "embed_tokens"
    attention: str = "self_attn"
    recurrent: str = ""

    qkv: str = ""
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    out: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    sinks: str = "sinks"
    gate_up: str = ""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    input_norm: str = "input_layernorm"
    attention_post_norm: str = "post_attention_layernorm"
    mlp_norm: str = "pre_feedforward_layernorm"
    mlp_post_norm: str = "post_feedforward_layernorm"
    final_norm: str = "norm"
    mlp: str = ""


LAYER_NAMES: Mapping[str, LayerNames] = MappingProxyType(
    {
        "": LayerNames(),
        "phi": LayerNames(qkv="qkv_proj", gate_up="gate_up_proj"),
        "glm": LayerNames(gate_up="gate_up_proj"),
        "glm4": LayerNames(
            gate_up="gate_up_proj",
            attention_post_norm="post_self_attn_layernorm",
            mlp_norm="post_attention_layernorm",
            mlp_post_norm="post_mlp_layernorm",
        ),
        "hunyuan": LayerNames(query_norm="query_layernorm", key_norm="key_layernorm"),
        "lfm2": LayerNames(
            out="out_proj",
            query_norm="q_layernorm",
            key_norm="k_layernorm",
            gate="w1",
            up="w3",
            down="w2",
            input_norm="operator_norm",
            attention_post_norm="ffn_norm",
            final_norm="embedding_norm",
            mlp="feed_forward",
        ),
        "qwen3_next": LayerNames(),
        "granite_hybrid": LayerNames(
            gate_up="input_linear", down="output_linear", mlp="shared_mlp"
        ),
        "bamba": LayerNames(
            attention_post_norm="pre_ff_layernorm", final_norm="final_layernorm", mlp="feed_forward"
        ),
        "nemotron_h": LayerNames(
            body="backbone",
            embedding="embeddings",
            attention="mixer",
            recurrent="mixer",
            input_norm="norm",
            attention_post_norm="norm",
            final_norm="norm_f",
            mlp="mixer",
        ),
        "kimi_linear": LayerNames(
            recurrent="self_attn",
            mlp="mlp",
            stored=StoredNames(  # as transformers saves layers without experts
                renamed={r"\.block_sparse_moe\.(gate|up|down)_proj\.": r".mlp.\1_proj."},
                joined=_CONVOLUTIONS,
            ),
        ),
        "olmo_hybrid": LayerNames(
            stored=StoredNames(
                renamed={
                    r"\.attention_layer_norm\.": ".input_layernorm.",
                    r"\.feedforward_layer_norm\.": ".post_attention_layernorm.",
                },
                joined=_CONVOLUTIONS,
            )
        ),
        "apertus": LayerNames(
            input_norm="attention_layernorm", attention_post_norm="feedforward_layernorm"
        ),
        "starcoder2": LayerNames(up="c_fc", down="c_proj"),
        "stablelm": LayerNames(
            query_norm="q_layernorm.norms.{head}", key_norm="k_layernorm.norms.{head}"
        ),
    }
)
"""By the `naming` of a `DecoderConfig`; the first is that of most families."""
