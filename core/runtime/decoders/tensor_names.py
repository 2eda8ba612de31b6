"""The places of a checkpoint's tensors in our decoder.

Owns the naming scheme that all our families share. The fused projections are filled slice by
slice, straight from the file; slices may be in blocks of integers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from triptych.core.errors import WeightsError
from triptych.core.runtime.decoders.expert_names import ExpertNames, names_of
from triptych.core.runtime.decoders.layer_names import LAYER_NAMES, LayerNames
from triptych.core.runtime.decoders.projection_targets import (
    AS_STORED,
    PartTarget,
    ProjectionTarget,
    fused_targets,
    norm_targets,
)
from triptych.core.runtime.decoders.recurrent_names import recurrent_names
from triptych.core.runtime.decoders.stream_names import layer_stream_targets, stream_targets
from triptych.core.runtime.layers.attention import Attention, QueryKeyNorm
from triptych.core.runtime.layers.decoder import Decoder, DecoderStack
from triptych.core.runtime.layers.decoder_layer import DecoderConfig, DecoderLayer, Mlp
from triptych.core.runtime.layers.key_index import KeyIndex
from triptych.core.runtime.layers.latent_attention import LatentAttention
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.mixers import MixerPart, mixer_parts, parts_of
from triptych.core.runtime.layers.moe import Expert, MoeMlp
from triptych.core.runtime.layers.norm import Norm
from triptych.core.runtime.layers.recurrent import RecurrentLayer
from triptych.core.runtime.layers.shards import HeadShards, Shard
from triptych.core.runtime.tensors.loading import Target, TensorTarget
from triptych.core.weights.encoding import PLAIN, WeightEncoding

_EMBEDDING = f"{LAYER_NAMES[''].embedding}.weight"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_PREDICTS = re.compile(r"(model\.)?mtp[._]")
_OF_KEYS = re.compile(r"\.self_attn\.[kv]_(proj|norm)\.")


@dataclass(frozen=True, slots=True)
class DecoderTensors:
    """The names of a decoder in a checkpoint: the prefix of its body, the name of its projection.

    A `body` of `None` is that of the family; embedding models are often stored without a prefix.
    """

    body: str | None = None
    head: str = "lm_head.weight"

    @classmethod
    def find(cls, names: Collection[str]) -> DecoderTensors:
        """Find the one decoder of a checkpoint. Raises `WeightsError` unless it has one."""
        end = f".{_EMBEDDING}"
        found = [name.removesuffix(end) for name in names if name.endswith(end)]
        # Layers that predict further tokens may have a copy of the embedding.
        bodies = [
            body for body in found if not (_LAYER.search(f"{body}.") or _PREDICTS.match(f"{body}."))
        ]
        if len(bodies) != 1:
            raise WeightsError(f"The checkpoint holds {len(bodies)} decoders, not one.")
        heads = [name for name in names if name.endswith("lm_head.weight")]
        return cls(bodies[0], *heads[:1])

    def holds(self, name: str) -> bool:
        """Whether the tensor `name` is the decoder's, which has been found, or predicts for it."""
        is_own = name == self.head or name.startswith(f"{self.body}.")
        return is_own or bool(_PREDICTS.match(name))

    def body_of(self, decoder: Decoder) -> str:
        """The prefix of a decoder's body."""
        return LAYER_NAMES[decoder.config.naming].body if self.body is None else self.body


WHOLE = DecoderTensors()
BARE = DecoderTensors("")


def decoder_targets(
    decoder: Decoder, part: DecoderTensors = WHOLE, encoding: WeightEncoding = AS_STORED
) -> Iterator[Target]:
    """Every tensor that the decoder needs, and its destination."""
    yield embedding_target(decoder, part, encoding)
    if not decoder.config.has_tied_embeddings:
        yield _vocabulary_target(decoder, part.head, decoder.head, encoding)
    yield from stack_targets(decoder, part.body_of(decoder), encoding)


def embedding_target(
    decoder: Decoder, part: DecoderTensors = WHOLE, encoding: WeightEncoding = AS_STORED
) -> ProjectionTarget:
    """The destination of the embedding, which may also be the head's."""
    own = LAYER_NAMES[decoder.config.naming].embedding
    name = f"{_below(part.body_of(decoder))}{own}.weight"
    return _vocabulary_target(decoder, name, decoder.embedding, encoding)


def _vocabulary_target(
    decoder: Decoder, name: str, linear: Linear, encoding: WeightEncoding
) -> ProjectionTarget:
    return ProjectionTarget(name, linear, 0, decoder.vocabulary, encoding, is_vocabulary=True)


def stack_targets(
    stack: DecoderStack, prefix: str, encoding: WeightEncoding = AS_STORED
) -> Iterator[Target]:
    """The destinations of layers and final norm, with `prefix` before the names if not empty."""
    names = LAYER_NAMES[stack.config.naming]
    yield from norm_targets(f"{_below(prefix)}{names.final_norm}", stack.norm)
    yield from stream_targets(_below(prefix), stack, encoding)
    for index, layer in enumerate(stack.layers):
        name = f"{_below(prefix)}layers.{index}"
        yield from layer_targets(name, layer, stack.config, encoding)


def layer_targets(
    name: str, layer: DecoderLayer, config: DecoderConfig, encoding: WeightEncoding = AS_STORED
) -> Iterator[Target]:
    """The destinations of one layer, whose tensors have `name` before their own names."""
    names, expert_names = LAYER_NAMES[config.naming], names_of(config.moe)
    for norm_name, norm in _norms(layer, names):
        yield from norm_targets(f"{name}.{norm_name}", norm)
    for mixer in mixer_parts(layer.attention):
        yield from _mixer_targets(name, mixer, encoding, config.naming)
    if isinstance(layer.mlp, MoeMlp):
        yield from _moe_targets(name, layer.mlp, encoding, expert_names)
    elif layer.mlp is not None:
        module = names.mlp or expert_names.module
        yield from mlp_targets(f"{name}.{module}", layer.mlp, encoding, names)
    yield from layer_stream_targets(name, layer, encoding)


def _below(prefix: str) -> str:
    return f"{prefix}." if prefix else ""


def _norms(layer: DecoderLayer, names: LayerNames) -> Iterator[tuple[str, Norm]]:
    """The norms around attention and MLP."""
    yield names.input_norm, layer.input_norm
    if layer.post_norms is None:
        yield names.attention_post_norm, layer.mlp_norm
        return
    after_attention, after_mlp = layer.post_norms
    yield names.mlp_norm, layer.mlp_norm
    yield names.attention_post_norm, after_attention
    yield names.mlp_post_norm, after_mlp


def is_unused(name: str) -> bool:
    """Whether checkpoints hold `name` without any decoder of ours needing it.

    Old files store the rotary frequencies, and some repeat a tied embedding as the head: `lm_head`
    is a target of every decoder with a separate head, so it is only unused when tied. Some families
    store layers that predict further tokens apart, as `mtp` (see `decoders.heads.mtp`). An index of
    keys changes nothing in contexts that are no longer than its choice, nor in layers that share
    another's.
    """
    ends = ("rotary_emb.inv_freq", "lm_head.weight")
    return bool(_PREDICTS.match(name)) or name.endswith(ends) or ".self_attn.indexer." in name


def is_surplus(name: str, config: DecoderConfig) -> bool:
    """Whether `name` is of a part that the model's files have, and the model has not.

    That is a layer after the model's, which predicts a further token, or keys of a layer that reads
    those of an earlier one.
    """
    found, num_layers = _LAYER.search(name), len(config.attention)
    if found is None:
        return False
    layer = int(found[1])
    if layer >= num_layers:
        return layer < num_layers + config.num_draft_layers
    reads = any(part.reads_layer is not None for part in parts_of(config.attention[layer]))
    return reads and bool(_OF_KEYS.search(name))


def _mixer_targets(
    layer: str, mixer: MixerPart, encoding: WeightEncoding, naming: str
) -> Iterator[Target]:
    names = LAYER_NAMES[naming]
    if isinstance(mixer, RecurrentLayer):
        return _recurrent_targets(layer, mixer, encoding, naming)
    return _attention_targets(f"{layer}.{names.attention}", mixer, encoding, names)


def _attention_targets(
    prefix: str,
    attention: Attention | LatentAttention,
    encoding: WeightEncoding,
    names: LayerNames,
) -> Iterator[Target]:
    if isinstance(attention, LatentAttention):
        yield from _latent_targets(prefix, attention, encoding)
        return
    config = attention.config
    shards = config.shards or HeadShards.whole(config.num_heads, config.num_kv_heads)
    queries, keys = shards.queries.times(config.head_dim), shards.keys.times(config.head_dim)
    rows, gates = [(names.query, queries)], list[tuple[str, Shard]]()
    if config.has_output_gate:
        rows, gates = _halves(names.query, shards.queries, config.head_dim)
    if config.reads_layer is None:
        value = names.key if config.values_are_keys else names.value
        rows += [(names.key, keys), (value, keys)]
    rows += gates
    if names.qkv:
        rows = _within(names.qkv, [shard for _, shard in rows])
    yield from fused_targets(prefix, attention.qkv, rows, encoding)
    outputs = [(names.out, Shard.whole(config.hidden_size))]
    yield from fused_targets(prefix, attention.out, outputs, encoding, queries)
    if attention.norm is not None:
        yield from _head_norm_targets(prefix, attention.norm, shards, names)
    if attention.sinks_H is not None:
        yield PartTarget(f"{prefix}.{names.sinks}", attention.sinks_H, shards.queries)


def _halves(
    name: str, heads: Shard, head_dim: int
) -> tuple[list[tuple[str, Shard]], list[tuple[str, Shard]]]:
    """The queries in a projection that has each head's query and then its gate; and the gates."""
    total = 2 * heads.total * head_dim
    first, second = (
        [
            (name, Shard((2 * head + half) * head_dim, head_dim, total))
            for head in range(heads.first, heads.first + heads.length)
        ]
        for half in (0, 1)
    )
    return first, second


def _recurrent_targets(
    prefix: str, layer: RecurrentLayer, encoding: WeightEncoding, naming: str
) -> Iterator[Target]:
    """The destinations of a recurrent layer."""
    names = recurrent_names(layer, naming)
    place = f"{prefix}.{names.module}"
    yield from fused_targets(place, layer.into, names.into, encoding)
    outputs = [(names.out, Shard.whole(layer.out.num_outputs))]
    yield from fused_targets(place, layer.out, outputs, encoding)
    for name, linear in names.later.items():
        rows = [(name, Shard.whole(linear.num_outputs))]
        yield from fused_targets(place, linear, rows, encoding)
    yield TensorTarget(f"{place}.{names.convolution}.weight", layer.convolution_X1K)
    if layer.convolution_bias_X is not None:
        yield TensorTarget(f"{place}.{names.convolution}.bias", layer.convolution_bias_X)
    for name, tensor in names.tensors.items():
        yield TensorTarget(f"{place}.{name}", tensor)


def _head_norm_targets(
    prefix: str, norm: QueryKeyNorm, shards: HeadShards, names: LayerNames
) -> Iterator[Target]:
    """The destinations of weights that heads share, or of a row for each head, if any."""
    if not norm.config.has_weights:
        return
    parts = [(names.query_norm, norm.query, shards.queries)]
    if len(norm.key):
        parts.append((names.key_norm, norm.key, shards.keys))
    for name, into, heads in parts:
        if "{head}" in name:
            for number, row_D in enumerate(into, heads.first):
                yield TensorTarget(f"{prefix}.{name.format(head=number)}.weight", row_D)
        elif into.dim() == 1:
            yield TensorTarget(f"{prefix}.{name}.weight", into)
        elif norm.is_joint:
            shard = heads.times(into.shape[1])
            yield PartTarget(f"{prefix}.{name}.weight", into.view(-1), shard)
        else:
            yield PartTarget(f"{prefix}.{name}.weight", into, heads)


def _latent_targets(
    prefix: str, attention: LatentAttention, encoding: WeightEncoding
) -> Iterator[Target]:
    """The destinations of latent attention; the matrix that becomes two is read as numbers."""
    config, heads = attention.config, attention.heads
    queries, is_direct = heads.times(config.key_dim), attention.q_up is None
    row = ("kv_a_proj_with_mqa", Shard.whole(config.row_dim))
    first = ("q_proj", queries) if is_direct else ("q_a_proj", Shard.whole(config.query_inputs))
    for target in fused_targets(prefix, attention.down, (first, row), encoding):
        if target.name != f"{prefix}.q_proj.bias":
            yield target
    if attention.q_up is not None and attention.q_norm is not None:
        yield TensorTarget(f"{prefix}.q_a_layernorm.weight", attention.q_norm.weight_C)
        yield from fused_targets(prefix, attention.q_up, [("q_b_proj", queries)], encoding)
    yield TensorTarget(f"{prefix}.kv_a_layernorm.weight", attention.kv_norm.weight_C)
    assert attention.kv_up is not None, "it is loaded before `prepare`"
    made = [("kv_b_proj", heads.times(config.nope_dim + config.value_dim))]
    yield from fused_targets(prefix, attention.kv_up, made, PLAIN)
    outputs = [("o_proj", Shard.whole(config.hidden_size))]
    inputs = heads.times(config.value_dim)
    yield from fused_targets(prefix, attention.out, outputs, encoding, inputs)
    if attention.index is not None:
        yield from _index_targets(f"{prefix}.indexer", attention.index, encoding)


def _index_targets(prefix: str, index: KeyIndex, encoding: WeightEncoding) -> Iterator[Target]:
    """The destinations of an index of keys, which every rank has.

    The weights of its heads stay plain, as a router's do: they are few, and they decide.
    """
    projections = (
        ("wk", index.key, encoding),
        ("wq_b", index.queries, encoding),
        ("weights_proj", index.weights, PLAIN),
    )
    for name, linear, own in projections:
        rows = [(name, Shard.whole(linear.num_outputs))]
        yield from fused_targets(prefix, linear, rows, own)
    yield from norm_targets(f"{prefix}.k_norm", index.norm)


def mlp_targets(
    prefix: str,
    mlp: Mlp,
    encoding: WeightEncoding = AS_STORED,
    names: LayerNames = LAYER_NAMES[""],
) -> Iterator[Target]:
    """The destinations of one MLP."""
    rows = [(names.gate, mlp.features)] if mlp.has_gate else []
    rows.append((names.up, mlp.features))
    if names.gate_up:
        rows = _within(names.gate_up, [shard for _, shard in rows])
    yield from fused_targets(prefix, mlp.gate_up, rows, encoding)
    rows = [(names.down, Shard.whole(mlp.down.num_outputs))]
    yield from fused_targets(prefix, mlp.down, rows, encoding, mlp.features)
    for name, tensor in {} if mlp.xielu is None else mlp.xielu.tensors.items():
        yield TensorTarget(f"{prefix}.act_fn.{name}", tensor)


def _within(name: str, shards: Sequence[Shard]) -> list[tuple[str, Shard]]:
    """Parts of tensors that are stored one after the other in the tensor `name`."""
    totals = [shard.total for shard in shards]
    firsts = accumulate(totals[:-1], initial=0)
    return [
        (name, Shard(first + shard.first, shard.length, sum(totals)))
        for first, shard in zip(firsts, shards, strict=True)
    ]


def _moe_targets(
    layer: str, moe: MoeMlp, encoding: WeightEncoding, names: ExpertNames
) -> Iterator[Target]:
    """The destinations of a router, of this rank's experts and of the shared one."""
    yield _plain_target(f"{layer}.{names.router}", moe.router)
    if moe.router.bias_O is not None:
        yield TensorTarget(f"{layer}.{names.router}.bias", moe.router.bias_O)
    if moe.correction_E is not None:
        correction = moe.correction_E[None] if names.has_correction_row else moe.correction_E
        yield TensorTarget(f"{layer}.{names.correction}", correction)
    for number, expert in enumerate(moe.experts, moe.shard.first):
        place, shard = f"{layer}.{names.module}.experts.{number}", moe.features
        rows = [(names.gate, shard), (names.up, shard)][not moe.config.has_gate :]
        yield from fused_targets(place, expert.gate_up, rows, encoding)
        yield from _down_targets(place, names.down, expert, shard, encoding)
    if moe.shared is not None:
        place, shard = f"{layer}.{names.shared}", moe.shared_features
        rows = [("gate_proj", shard), ("up_proj", shard)][not moe.config.has_gate :]
        if names.shared_gate_up:
            rows = _within(names.shared_gate_up, [shard, shard])
        yield from fused_targets(place, moe.shared.gate_up, rows, encoding)
        yield from _down_targets(place, names.shared_down, moe.shared, shard, encoding)
    if moe.shared_gate is not None:
        yield _plain_target(f"{layer}.{names.shared_gate}", moe.shared_gate)


def _plain_target(name: str, linear: Linear) -> Target:
    """The destination of a whole projection that is never quantized."""
    return ProjectionTarget(f"{name}.weight", linear, 0, Shard.whole(linear.num_outputs), PLAIN)


def _down_targets(
    prefix: str, name: str, expert: Expert, features: Shard, encoding: WeightEncoding
) -> Iterator[Target]:
    rows = [(name, Shard.whole(expert.down.num_outputs))]
    return fused_targets(prefix, expert.down, rows, encoding, features)
