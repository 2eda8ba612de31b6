"""Where the tensors of a checkpoint go in our decoder.

Owns the naming scheme that all our families share. The fused projections are filled slice by
slice, straight from the file; slices may be in blocks of integers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from triptych.core.block_formats import BlockFormat
from triptych.core.errors import WeightsError
from triptych.core.kernels.packed_linear import HeldWeight
from triptych.core.layers.attention import Attention
from triptych.core.layers.decoder import Decoder, DecoderLayer, DecoderStack, Mlp
from triptych.core.layers.linear import Linear
from triptych.core.layers.moe import MoeMlp
from triptych.core.layers.norm import RMSNorm
from triptych.core.weights.encoding import WeightEncoding
from triptych.core.weights.tensors.checkpoint import Checkpoint, TensorSource
from triptych.core.weights.tensors.loading import Target, TensorTarget
from triptych.core.weights.tensors.quantise import quantise

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


AS_STORED = WeightEncoding()
WHOLE = DecoderTensors()
BARE = DecoderTensors("")


@dataclass(frozen=True, slots=True)
class _ExpertNames:
    """What a layer calls its mixture, and an expert its projections."""

    module: str
    gate: str
    up: str
    down: str


_EXPERTS = _ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
_MIXTRAL = _ExpertNames("block_sparse_moe", "w1", "w3", "w2")


@dataclass(frozen=True, slots=True)
class ProjectionTarget:
    """Rows of a projection, from `first` on; in blocks of integers as `encoding` says."""

    name: str
    linear: Linear
    first: int
    num_rows: int
    encoding: WeightEncoding
    is_vocabulary: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape it must have."""
        return self.num_rows, self.linear.num_inputs

    @property
    def into(self) -> torch.Tensor:
        """The rows as plain numbers."""
        return self.linear.weight_OI[self.first : self.first + self.num_rows]

    @property
    def format(self) -> BlockFormat | None:
        """The blocks in which the rows are held; `None`: plain numbers."""
        num_inputs = self.linear.num_inputs
        return self.encoding.format_of(self.name, num_inputs, is_vocabulary=self.is_vocabulary)

    def fill(self, source: TensorSource) -> None:
        """Put the tensor into the projection."""
        form = self.format
        if form is None:
            self.into.copy_(source.read(self.name))
            return
        self.linear.hold(
            self.first, self._read_held(source) or quantise(source.read(self.name), form)
        )

    def _read_held(self, source: TensorSource) -> HeldWeight | None:
        """What the source has in small numbers. Rows of a vocabulary are looked up in blocks."""
        if not isinstance(source, Checkpoint):
            return None
        is_stored = self.linear.takes_stored and not self.is_vocabulary
        stored = source.read_stored(self.name) if is_stored else None
        return stored or source.read_packed(self.name)

    def num_bytes(self, item_bytes: int) -> int:
        """The most bytes in memory, plain numbers having so many each."""
        form, num_inputs = self.format, self.linear.num_inputs
        return self.num_rows * (form.row_bytes(num_inputs) if form else num_inputs * item_bytes)


def decoder_targets(
    decoder: Decoder, part: DecoderTensors = WHOLE, encoding: WeightEncoding = AS_STORED
) -> Iterator[Target]:
    """Every tensor the decoder needs, and where it goes."""
    yield embedding_target(decoder, part, encoding)
    if not decoder.config.has_tied_embeddings:
        yield _vocabulary_target(part.head, decoder.head, encoding)
    yield from stack_targets(decoder, part.body, encoding)


def embedding_target(
    decoder: Decoder, part: DecoderTensors = WHOLE, encoding: WeightEncoding = AS_STORED
) -> ProjectionTarget:
    """The embedding's, which may be the head's, too."""
    return _vocabulary_target(_below(part.body) + _EMBEDDING, decoder.embedding, encoding)


def _vocabulary_target(name: str, linear: Linear, encoding: WeightEncoding) -> ProjectionTarget:
    return ProjectionTarget(name, linear, 0, linear.num_outputs, encoding, is_vocabulary=True)


def stack_targets(
    stack: DecoderStack, prefix: str, encoding: WeightEncoding = AS_STORED
) -> Iterator[Target]:
    """The tensors of layers and final norm, under `prefix` if it is not empty."""
    yield TensorTarget(f"{_below(prefix)}norm.weight", stack.norm.weight_C)
    for index, layer in enumerate(stack.layers):
        name = f"{_below(prefix)}layers.{index}"
        for norm_name, norm in _norms(layer).items():
            yield TensorTarget(f"{name}.{norm_name}.weight", norm.weight_C)
        yield from _attention_targets(f"{name}.self_attn", layer.attention, encoding)
        yield from mlp_targets(f"{name}.mlp", layer.mlp, encoding)


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


def _attention_targets(
    prefix: str, attention: Attention, encoding: WeightEncoding
) -> Iterator[Target]:
    config = attention.config
    num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {"q_proj": num_q, "k_proj": num_kv, "v_proj": num_kv}
    yield from _fused_targets(prefix, attention.qkv, sizes, encoding)
    yield from _fused_targets(prefix, attention.out, {"o_proj": config.hidden_size}, encoding)
    if attention.qk_norm_2D is not None:
        yield TensorTarget(f"{prefix}.q_norm.weight", attention.qk_norm_2D[0])
        yield TensorTarget(f"{prefix}.k_norm.weight", attention.qk_norm_2D[1])


def mlp_targets(
    prefix: str, mlp: Mlp | MoeMlp, encoding: WeightEncoding = AS_STORED
) -> Iterator[Target]:
    """The tensors of one MLP, or of a mixture in its place."""
    if isinstance(mlp, MoeMlp):
        yield from _moe_targets(prefix, mlp, encoding)
        return
    num_features = mlp.down.num_inputs
    sizes = {"gate_proj": num_features, "up_proj": num_features}
    yield from _fused_targets(prefix, mlp.gate_up, sizes, encoding)
    yield from _fused_targets(prefix, mlp.down, {"down_proj": mlp.down.num_outputs}, encoding)


def _moe_targets(prefix: str, moe: MoeMlp, encoding: WeightEncoding) -> Iterator[Target]:
    """The tensors of a router and of all experts, by the names of the family."""
    names = _MIXTRAL if moe.config.has_mixtral_names else _EXPERTS
    prefix = f"{prefix.rpartition('.')[0]}.{names.module}"
    yield TensorTarget(f"{prefix}.gate.weight", moe.router.weight_OI)
    features = moe.config.intermediate_size
    for number, expert in enumerate(moe.experts):
        place = f"{prefix}.experts.{number}"
        sizes = {names.gate: features, names.up: features}
        yield from _fused_targets(place, expert.gate_up, sizes, encoding)
        sizes = {names.down: expert.down.num_outputs}
        yield from _fused_targets(place, expert.down, sizes, encoding)


def _fused_targets(
    prefix: str, linear: Linear, sizes: dict[str, int], encoding: WeightEncoding
) -> Iterator[Target]:
    """Targets of projections whose rows lie one after the other in `linear`."""
    first = 0
    for name, num_rows in sizes.items():
        yield ProjectionTarget(f"{prefix}.{name}.weight", linear, first, num_rows, encoding)
        if linear.bias_O is not None:
            bias = linear.bias_O[first : first + num_rows]
            yield TensorTarget(f"{prefix}.{name}.bias", bias)
        first += num_rows
