"""The form of a row of the table of architectures, and what many rows share.

Owns the shared names and fields. A row is data: the fields of a configuration of transformers and
their readers, the names of tensors and their layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from triptych.core.weights.gguf import fields as f
from triptych.core.weights.gguf.fields import Fields
from triptych.core.weights.gguf.layouts import (
    Layout,
    Rotated,
    minus_one,
    one_row,
    per_expert,
    plain,
)
from triptych.core.weights.gguf.metadata import Metadata


@dataclass(frozen=True, slots=True)
class Place:
    """A name of transformers, and how the file's tensors become it.

    `sources` are the names in the file where several tensors become one.
    """

    name: str
    layout: Layout = plain
    sources: tuple[str, ...] = ()


Names: TypeAlias = Mapping[str, str | Place]
"""Names in the file, and of transformers. A name that ends in `.weight` or `.bias`, or has neither
in the file, is mapped to a whole name; another one to a module, whose tensors keep their ending."""


NEXTN = "nextn."
"""The beginning of names that layers have which predict further tokens."""
PARTS = ("gate_proj", "up_proj", "down_proj")


def _always(metadata: Metadata) -> bool:
    return True


def _never(metadata: Metadata, layer: int, stem: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row: the class of transformers, its configuration and its tensors.

    Of several rows for one name the first that `fits` a file is used. Names of `layers` are below
    `body`. Tensors that are `unused` are left out. The layer after the model's own, which predicts
    a further token, has `predicting` besides, in itself or apart in `mtp`; without names it is left
    out.
    """

    model: str
    model_type: str
    fields: Fields
    layers: Names
    globals: Names = field(default_factory=lambda: GLOBALS)
    body: str = "model"
    fits: Callable[[Metadata], bool] = _always
    unused: Callable[[Metadata, int, str], bool] = _never
    predicting: Names = field(default_factory=dict)
    predicts_apart: bool = False

    def prefix_of(self, layer: int, num_layers: int, name: str) -> str:
        """The beginning of a name of `layer` in a model of `num_layers`; `name` is the file's."""
        if layer < num_layers or not self.predicts_apart:
            return f"{self.body}.layers.{layer}."
        return "mtp." if name.startswith(NEXTN) else "mtp.layers.0."


def joined_from(*sources: str, into: str, layout: Layout) -> Names:
    """The entries of tensors that become one together."""
    place = Place(into, layout, sources)
    return dict.fromkeys(sources, place)


def shifted(names: Mapping[str, str]) -> Names:
    """Norms whose weights the file has with 1 added."""
    return {source: Place(name, minus_one) for source, name in names.items()}


def experts(module: str = "", names: tuple[str, str, str] = PARTS) -> Names:
    """The stacked weights and biases of a layer's experts: gate, up and down."""
    place = f"{module}.experts.{{}}.".lstrip(".")
    parts = zip(("gate", "up", "down"), names, strict=True)
    return {f"ffn_{part}_exps": Place(place + name, per_expert) for part, name in parts}


def shared_mlp(module: str) -> Names:
    """The expert that every token goes through."""
    return {f"ffn_{part}_shexp": f"{module}.{part}_proj" for part in ("gate", "up", "down")}


GLOBALS: Names = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
PROJECTIONS: Names = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
ROTATED: Names = {
    **PROJECTIONS,
    "attn_q": Place("self_attn.q_proj", Rotated("num_attention_heads")),
    "attn_k": Place("self_attn.k_proj", Rotated("num_key_value_heads")),
}
"""Projections of architectures whose rotated halves llama.cpp interleaves."""
HEAD_NORMS: Names = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
NORMS: Names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
LATE_NORMS: Names = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}
"""The same two, as llama.cpp names them in its later architectures."""
PREDICTING: Names = {
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.eh_proj": "eh_proj",
    "nextn.shared_head_norm": "shared_head.norm",
}
"""Without copies of embedding and projection, which are the model's."""
MLP: Names = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
MERGED_MLP: Names = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
DENSE: Names = {**NORMS, **PROJECTIONS, **HEAD_NORMS, **MLP}
SHARED_GATE: Names = {"ffn_gate_inp_shexp": Place("mlp.shared_expert_gate", one_row)}

BASE: Fields = {
    "hidden_act": f.always("silu"),
    "hidden_size": f.count("embedding_length"),
    "intermediate_size": f.mlp_size,
    "num_hidden_layers": lambda m: m.num_layers,
    "num_attention_heads": f.count("attention.head_count"),
    "num_key_value_heads": f.num_kv_heads,
    "head_dim": f.head_dim,
    "max_position_embeddings": f.count("context_length"),
    "rms_norm_eps": f.number("attention.layer_norm_rms_epsilon", 1e-5),
    "rope_parameters": f.rope,
    "vocab_size": f.vocab_size,
    "tie_word_embeddings": f.has_no("output.weight"),
    "bos_token_id": f.token_id("bos"),
    "eos_token_id": f.token_id("eos"),
    "pad_token_id": f.token_id("padding"),
}
BIASED: Fields = {"attention_bias": f.has_tensor("attn_q.bias")}
WINDOW: Fields = {"sliding_window": f.count("attention.sliding_window")}
MIXTURE: Fields = {
    "num_experts": f.count("expert_count"),
    "num_experts_per_tok": f.count("expert_used_count"),
    "moe_intermediate_size": f.count("expert_feed_forward_length"),
}
SHARED_EXPERT: Fields = {
    "shared_expert_intermediate_size": f.count("expert_shared_feed_forward_length"),
}
