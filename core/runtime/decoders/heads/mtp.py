"""Layers that predict further tokens (MTP), which checkpoints have after their own.

Owns where families keep such a layer, and its computation: embedding and hidden state, each after
its norm, become one input of a decoder layer of the family (DeepSeek-V3, arXiv:2412.19437, section
2.2). Embedding and head are the model's, of which many files have copies. The normalized result is
also the next pass's hidden state, as in SGLang, so that one layer drafts several tokens. Of several
layers the first is used.

Shapes: T tokens, R rows of logits, C hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from triptych.core.errors import ConfigError
from triptych.core.runtime.decoders.causal_model import logits_bytes
from triptych.core.runtime.decoders.expert_names import names_of
from triptych.core.runtime.decoders.heads.protocol import FilledTokens
from triptych.core.runtime.decoders.heads.target_ends import HeadWithEnds
from triptych.core.runtime.decoders.native import (
    NativeBlueprint,
    gathered_values,
    position_values,
    score_bytes,
)
from triptych.core.runtime.decoders.projection_targets import ProjectionTarget, norm_targets
from triptych.core.runtime.decoders.tensor_names import layer_targets
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import AttentionConfig, KvLayout, PagedStep
from triptych.core.runtime.layers.decoder import Decoder, DecoderStack
from triptych.core.runtime.layers.decoder_layer import DecoderConfig, new_norm
from triptych.core.runtime.layers.hidden_rows import LAST
from triptych.core.runtime.layers.latent_attention import LatentConfig
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.shards import Shard
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.loading import Target, load_tensors
from triptych.core.runtime.tensors.stacked import split_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpNames:
    """The names of a family's modules; `{body}` and `{last}` stand for the body and its layers.

    `layer` has the tensors of a decoder layer. `joins_hidden_first`: the projection's first inputs
    are the hidden state's. Files without experts there have a dense layer.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    joins_hidden_first: bool = False

    def within(self, body: str, last: int) -> MtpNames:
        """The names in a checkpoint."""

        def filled(name: str) -> str:
            return name.format(body=body, last=last).lstrip(".")

        return MtpNames(
            layer=filled(self.layer),
            embedding_norm=filled(self.embedding_norm),
            hidden_norm=filled(self.hidden_norm),
            projection=filled(self.projection),
            final_norm=filled(self.final_norm),
            joins_hidden_first=self.joins_hidden_first,
        )


def _apart(module: str) -> MtpNames:
    return MtpNames(
        layer=f"{module}.layers.0",
        embedding_norm=f"{module}.pre_fc_norm_embedding",
        hidden_norm=f"{module}.pre_fc_norm_hidden",
        projection=f"{module}.fc",
        final_norm=f"{module}.norm",
    )


_IN_LAYER = "{body}.layers.{last}"
NAMES = (
    MtpNames(
        layer=_IN_LAYER,
        embedding_norm=f"{_IN_LAYER}.enorm",
        hidden_norm=f"{_IN_LAYER}.hnorm",
        projection=f"{_IN_LAYER}.eh_proj",
        final_norm=f"{_IN_LAYER}.shared_head.norm",
    ),
    _apart("mtp"),
    _apart("model.mtp"),
    MtpNames(
        layer="{body}.mtp_layers.0",
        embedding_norm="{body}.mtp_layers.0.token_layernorm",
        hidden_norm="{body}.mtp_layers.0.hidden_layernorm",
        projection="{body}.mtp_layers.0.input_proj",
        final_norm="{body}.mtp_layers.0.final_layernorm",
        joins_hidden_first=True,
    ),
    MtpNames(
        layer="{body}.mtp_block.0",
        embedding_norm="{body}.mtp_emb_norm.0",
        hidden_norm="{body}.mtp_hidden_norm.0",
        projection="{body}.mtp_linear_proj.0",
        final_norm="{body}.norm",
    ),
)
"""Those of DeepSeek and GLM; of Qwen and K-EXAONE, with two prefixes; of MiMo; of ERNIE 4.5, whose
final norm is the model's own, as in FastDeploy."""


def find_names(tensors: Collection[str], num_layers: int) -> MtpNames | None:
    """The names in a checkpoint of a model of so many layers, if it has such a layer."""
    body = _body(tensors)
    found = (names.within(body, num_layers) for names in NAMES)
    return next((names for names in found if f"{names.projection}.weight" in tensors), None)


def _body(tensors: Collection[str]) -> str:
    """The prefix of the decoder's body; that of a copy of its embedding is longer."""
    end = "embed_tokens.weight"
    bodies = [name.removesuffix(end).rstrip(".") for name in tensors if name.endswith(end)]
    return min(bodies, key=len, default="")


class MtpHead(HeadWithEnds):
    """Implements `heads.protocol.ChainHead`. Fill it, then call `prepare` once."""

    def __init__(
        self,
        config: DecoderConfig,
        target: Decoder | None = None,
        *,
        joins_hidden_first: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(target)
        self.stack = DecoderStack(config, dtype=dtype, device=device)
        self.embedding_norm, self.hidden_norm = (
            new_norm(config, dtype=dtype, device=device) for _ in range(2)
        )
        self.row_size = size = config.hidden_size
        self.has_axes = bool(config.rope.sections)
        self.projection = Linear(2 * size, size, has_bias=False, dtype=dtype, device=device)
        self._joins_hidden_first = joins_hidden_first

    def linears(self) -> Iterator[Linear]:
        """Iterate over its own projections."""
        yield from (self.projection, *self.stack.linears())

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        self.stack.prepare(native)
        self.projection.prepare(native)
        for norm in (self.embedding_norm, self.hidden_norm):
            norm.prepare()

    def fuse(self, states_TC: Sequence[torch.Tensor]) -> torch.Tensor:
        """The target's normalized states are the rows."""
        (last_TC,) = states_TC
        return last_TC

    def forward(
        self,
        token_ids_T: torch.Tensor,
        rows_TW: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        filled: FilledTokens | None = None,
    ) -> torch.Tensor:
        """Compute `hidden_TC`; see `ChainHead.forward`."""
        embedded_TC = self.ends.embed(token_ids_T)
        token_TC = self.embedding_norm(embedded_TC if filled is None else filled.fill(embedded_TC))
        pair = [token_TC, self.hidden_norm(rows_TW)]
        x_TC = self.projection(torch.cat(pair[::-1] if self._joins_hidden_first else pair, dim=1))
        return self.stack.run(x_TC, positions, step)


class MtpBlueprint:
    """Implements `heads.protocol.HeadBlueprint` for the layer of a target's own checkpoint.

    `max_length` and `name` are the target's. Raises `ConfigError` for a checkpoint without such a
    layer.
    """

    hidden_layers: tuple[int, ...] = (LAST,)
    block_size = 0

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: NativeBlueprint,
        native: NativeKernels | None,
        name: str,
    ) -> None:
        names = find_names(checkpoint.tensors, len(target.config.attention))
        if names is None:
            raise ConfigError(
                f"--speculative-algorithm mtp: {name} has no layer that predicts further tokens,"
                " or one that is not read here; write ngram, or name a model that drafts."
            )
        self.names, self.config = names, _layer_config(target.config, names, checkpoint)
        self.dtype, self._device = target.dtype, target.device
        self.max_length, self.vocab_size = target.max_length, target.vocab_size
        self.row_size = self.config.hidden_size
        self._native, self._encoding = native, target.encoding

    def weight_bytes(self) -> int:
        """Bytes of its own parameters."""
        head = self._new(torch.device("meta"))
        return sum(target.num_bytes(self.dtype.itemsize) for target in self._targets(head))

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """The most bytes that a step holds in addition to weights and cache."""
        config = self.config
        values = num_tokens * (position_values(config) + 4 * config.hidden_size)
        if self._device.type == "cpu" and self._native is None:
            values += gathered_values(config, num_tokens, num_rows)
        layer_bytes = values * self.dtype.itemsize + score_bytes(config, num_tokens)
        return max(layer_bytes, logits_bytes(num_rows, self.vocab_size))

    def target_bytes(self, num_tokens: int) -> int:
        """The bytes that a step of the target holds for it: none, as rows are its last states."""
        return 0

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The shape of its cells."""
        return self.config.kv_layout(page_size, dtype)

    def build(
        self, checkpoint: Checkpoint, target: Decoder, report: Callable[[float], None]
    ) -> MtpHead:
        """Load it from the target's checkpoint. Raises `WeightsError` naming tensor and file."""
        checkpoint = split_experts(checkpoint, names_of(self.config.moe).stacked)
        head = self._new(self._device, target)
        load_tensors(checkpoint, self._targets(head), ignored=lambda name: True, report=report)
        head.prepare(self._native)
        return head

    def _new(self, device: torch.device, target: Decoder | None = None) -> MtpHead:
        return MtpHead(
            self.config,
            target,
            joins_hidden_first=self.names.joins_hidden_first,
            dtype=self.dtype,
            device=device,
        )

    def _targets(self, head: MtpHead) -> Iterator[Target]:
        names, stack, encoding = self.names, head.stack, self._encoding
        yield from norm_targets(names.embedding_norm, head.embedding_norm)
        yield from norm_targets(names.hidden_norm, head.hidden_norm)
        rows, weight = Shard.whole(self.config.hidden_size), f"{names.projection}.weight"
        yield ProjectionTarget(weight, head.projection, 0, rows, encoding)
        yield from layer_targets(names.layer, stack.layers[0], self.config, encoding)
        yield from norm_targets(names.final_norm, stack.norm)


def _layer_config(config: DecoderConfig, names: MtpNames, checkpoint: Checkpoint) -> DecoderConfig:
    """A decoder of that layer alone, which attends as those of the model with the widest view do.

    K-EXAONE may say otherwise, in `mtp_layer_types`. An index of keys is there if the file has it.
    """
    tensors = checkpoint.tensors
    kinds = checkpoint.config.get("mtp_layer_types") or ("full_attention",)
    choose = min if kinds[0] == "sliding_attention" else max
    mixer = choose(config.attending, key=_reach)
    has_index = any(name.startswith(f"{names.layer}.self_attn.indexer.") for name in tensors)
    if isinstance(mixer, LatentConfig) and not has_index:
        mixer = replace(mixer, index=None)
    experts = f"{names.layer}.{names_of(config.moe).module}.experts."
    has_experts = any(name.startswith(experts) for name in tensors)
    moe = config.moe if has_experts else None
    return replace(
        config,
        attention=(mixer,),
        moe=None if moe is None else replace(moe, dense_layers=frozenset()),
        mlp_sizes=(),
        num_draft_layers=0,
        gate_deviations=(),
    )


def _reach(mixer: AttentionConfig | LatentConfig) -> float:
    """The tokens that a layer sees."""
    window = mixer.shape.window
    return math.inf if window is None else window
