"""Where the tensors of a checkpoint go in our decoder.

Owns the naming scheme that all our families share. The fused projections are filled slice by
slice, straight from the file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from triptych.core.errors import WeightsError
from triptych.core.layers.attention import Attention
from triptych.core.layers.decoder import Decoder, DecoderLayer, DecoderStack, Mlp
from triptych.core.layers.linear import Linear
from triptych.core.layers.norm import RMSNorm
from triptych.core.weights.tensors.loading import TensorTarget

_EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class DecoderTensors:
    """Where in a checkpoint a decoder is: the prefix of its body, the name of its projection.

    Models of embeddings are often stored as a body alone, without a prefix.
    """

    body: str = "model"
    head: str = "lm_head.weight"

    @classmethod
    def find(cls, names: Collection[str]) -> DecoderTensors:
        """The decoder in a checkpoint that holds more. Raises `WeightsError` if it has not one."""
        end = f".{_EMBEDDING}"
        bodies = [name.removesuffix(end) for name in names if name.endswith(end)]
        if len(bodies) != 1:
            raise WeightsError(f"The checkpoint holds {len(bodies)} decoders, not one.")
        heads = [name for name in names if name.endswith("lm_head.weight")]
        return cls(bodies[0], *heads[:1])

    def holds(self, name: str) -> bool:
        """Whether the tensor `name` is the decoder's."""
        return name == self.head or name.startswith(f"{self.body}.")


WHOLE = DecoderTensors()
BARE = DecoderTensors("")


def decoder_targets(decoder: Decoder, part: DecoderTensors = WHOLE) -> Iterator[TensorTarget]:
    """Every tensor the decoder needs, and the view it goes to."""
    yield TensorTarget(_below(part.body) + _EMBEDDING, decoder.embedding_VC)
    if not decoder.config.has_tied_embeddings:
        yield TensorTarget(part.head, decoder.head.weight_OI)
    yield from stack_targets(decoder, part.body)


def stack_targets(stack: DecoderStack, prefix: str) -> Iterator[TensorTarget]:
    """The tensors of layers and final norm, under `prefix` if it is not empty."""
    yield TensorTarget(f"{_below(prefix)}norm.weight", stack.norm.weight_C)
    for index, layer in enumerate(stack.layers):
        name = f"{_below(prefix)}layers.{index}"
        for norm_name, norm in _norms(layer).items():
            yield TensorTarget(f"{name}.{norm_name}.weight", norm.weight_C)
        yield from _attention_targets(f"{name}.self_attn", layer.attention)
        yield from mlp_targets(f"{name}.mlp", layer.mlp)


def _below(prefix: str) -> str:
    return f"{prefix}." if prefix else ""


def _norms(layer: DecoderLayer) -> dict[str, RMSNorm]:
    """The second name means another norm where a layer has four."""
    norms = {"input_layernorm": layer.input_norm, "post_attention_layernorm": layer.mlp_norm}
    if layer.post_norms is not None:
        norms["pre_feedforward_layernorm"] = layer.mlp_norm
        norms["post_attention_layernorm"], norms["post_feedforward_layernorm"] = layer.post_norms
    return norms


def is_unused(name: str) -> bool:
    """Whether checkpoints hold `name` without any decoder of ours needing it.

    Old files store the rotary frequencies, and some repeat a tied embedding as the head: `lm_head`
    is a target of every decoder that has a head of its own, so it is only unused when tied.
    """
    return name.endswith(("rotary_emb.inv_freq", "lm_head.weight"))


def _attention_targets(prefix: str, attention: Attention) -> Iterator[TensorTarget]:
    config = attention.config
    num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {"q_proj": num_q, "k_proj": num_kv, "v_proj": num_kv}
    yield from _fused_targets(prefix, attention.qkv, sizes)
    yield from _fused_targets(prefix, attention.out, {"o_proj": config.hidden_size})
    if attention.qk_norm_2D is not None:
        yield TensorTarget(f"{prefix}.q_norm.weight", attention.qk_norm_2D[0])
        yield TensorTarget(f"{prefix}.k_norm.weight", attention.qk_norm_2D[1])


def mlp_targets(prefix: str, mlp: Mlp) -> Iterator[TensorTarget]:
    """The tensors of one MLP."""
    num_outputs, num_features = mlp.down.weight_OI.shape
    sizes = {"gate_proj": num_features, "up_proj": num_features}
    yield from _fused_targets(prefix, mlp.gate_up, sizes)
    yield from _fused_targets(prefix, mlp.down, {"down_proj": num_outputs})


def _fused_targets(prefix: str, linear: Linear, sizes: dict[str, int]) -> Iterator[TensorTarget]:
    """Targets of projections whose rows lie one after the other in `linear`."""
    names, rows = tuple(sizes), tuple(sizes.values())
    for name, weight in zip(names, linear.weight_OI.split(rows), strict=True):
        yield TensorTarget(f"{prefix}.{name}.weight", weight)
    if linear.bias_O is not None:
        for name, bias in zip(names, linear.bias_O.split(rows), strict=True):
            yield TensorTarget(f"{prefix}.{name}.bias", bias)
