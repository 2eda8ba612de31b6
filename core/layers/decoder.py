"""The decoder: one config-driven stack for every family of decoder-only language models.

Owns the layers and their order. Reads no configuration file and no checkpoint: families translate
theirs into `DecoderConfig` and fill the parameters through views.

Shapes: T tokens, R rows of logits, C hidden, V vocabulary, F MLP features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from triptych.core.kernels.gated import gelu_and_mul, silu_and_mul
from triptych.core.kernels.native.library import NativeKernels
from triptych.core.layers.attention import Attention, AttentionConfig, KvLayout, PagedStep
from triptych.core.layers.linear import Linear
from triptych.core.layers.moe import MoeConfig, MoeMlp
from triptych.core.layers.native_layers import NativeLayers, can_fuse
from triptych.core.layers.norm import RMSNorm
from triptych.core.layers.parallel import row_parallel, vocab_parallel
from triptych.core.layers.rotary import RopeConfig, Rotary
from triptych.core.layers.shards import Shard

if TYPE_CHECKING:
    from triptych.core.devices.rank_group import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Everything in which decoders differ. `attention` has one entry per layer.

    `local_rope` turns the layers that use it. Embeddings are multiplied by `embedding_scale`.
    Weights of norms may be centred (see `core.layers.norm`), and there may be norms after
    attention and MLP, too. With `moe` most MLPs are mixtures of experts. In a model that is divided
    over ranks, `intermediate_size` and the heads are this one's: `features` and `vocabulary` say
    which of all it has.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    norm_eps: float
    attention: tuple[AttentionConfig, ...]
    rope: RopeConfig
    has_mlp_bias: bool = False
    has_tied_embeddings: bool = False
    local_rope: RopeConfig | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    has_centred_norms: bool = False
    has_post_norms: bool = False
    moe: MoeConfig | None = None
    features: Shard | None = None
    vocabulary: Shard | None = None

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The cache this model needs."""
        first = self.attention[0]
        return KvLayout(
            num_layers=len(self.attention),
            num_heads=max(layer.num_heads for layer in self.attention),
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            page_size=page_size,
            dtype=dtype,
        )


class Mlp:
    """`down(act(gate(x)) * up(x))`, gate and up as one projection."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
    ) -> None:
        hidden, features, bias = config.hidden_size, config.intermediate_size, config.has_mlp_bias
        self.features = config.features or Shard.whole(features)
        self.gate_up = Linear(hidden, 2 * features, has_bias=bias, dtype=dtype, device=device)
        self.down = row_parallel(
            group, (features, hidden), has_bias=bias, dtype=dtype, device=device
        )
        self._gate = silu_and_mul if config.activation == "silu" else gelu_and_mul

    def linears(self) -> Iterator[Linear]:
        """Its projections."""
        yield from (self.gate_up, self.down)

    def __call__(self, x_TC: torch.Tensor, residual_TC: torch.Tensor | None) -> torch.Tensor:
        """Adds to a residual where given."""
        return self.down(self._gate(self.gate_up(x_TC)), residual_TC)


class DecoderLayer:
    """Attention and MLP, each behind its norm; in some families each before one, too."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
    ) -> None:
        new_norm = partial(_norm, config, dtype=dtype, device=device)
        self.input_norm = new_norm()
        self.attention = Attention(
            config.attention[layer], layer=layer, dtype=dtype, device=device, group=group
        )
        self.mlp_norm = new_norm()
        self.mlp = _mlp(config, layer, dtype=dtype, device=device, group=group)
        self.post_norms = (new_norm(), new_norm()) if config.has_post_norms else None

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        self.attention.prepare(native)
        for norm in (self.input_norm, self.mlp_norm, *(self.post_norms or ())):
            norm.prepare()
        for linear in self.mlp.linears():
            linear.prepare(native)

    def linears(self) -> Iterator[Linear]:
        """Its projections."""
        yield from (self.attention.qkv, self.attention.out)
        yield from self.mlp.linears()

    def __call__(
        self,
        x_TC: torch.Tensor,
        pending_TC: torch.Tensor | None,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        step: PagedStep,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One layer of the residual stream, `x_TC` and what is pending to be added to it.

        A GPU adds in the norm that follows; elsewhere projections add at no cost.
        """
        adds_in_norm = x_TC.is_cuda or self.post_norms is not None
        normed_TC, x_TC = self.input_norm.of_sum(x_TC, pending_TC)
        if not adds_in_norm:
            x_TC = self.attention(normed_TC, x_TC, cos_sin, step)
            return self.mlp(self.mlp_norm(x_TC), x_TC), None
        y_TC = self.attention(normed_TC, None, cos_sin, step)
        after_attention, after_mlp = self.post_norms or (_unchanged, _unchanged)
        normed_TC, x_TC = self.mlp_norm.of_sum(x_TC, after_attention(y_TC))
        return x_TC, after_mlp(self.mlp(normed_TC, None))


def _unchanged(x_TC: torch.Tensor) -> torch.Tensor:
    return x_TC


def _mlp(
    config: DecoderConfig,
    layer: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: RankGroup | None,
) -> Mlp | MoeMlp:
    moe = config.moe
    if moe is None or layer in moe.dense_layers:
        return Mlp(config, dtype, device, group)
    return MoeMlp(
        moe, config.hidden_size, config.activation, dtype=dtype, device=device, group=group
    )


def _norm(config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    return RMSNorm(
        config.hidden_size,
        eps=config.norm_eps,
        dtype=dtype,
        device=device,
        is_centred=config.has_centred_norms,
    )


@dataclass(frozen=True, slots=True)
class LateInputs:
    """What is added to F positions after each of the first L layers."""

    index_F: torch.Tensor
    values_LFC: torch.Tensor


class DecoderStack:
    """Layers and final norm: from embedded positions to hidden states.

    Parameters are allocated uninitialised: fill them, then call `prepare` once. With a `group` this
    is one rank's part, and runs while the others run theirs.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.layers = [
            DecoderLayer(config, layer=layer, dtype=dtype, device=device, group=group)
            for layer in range(len(config.attention))
        ]
        self.norm = _norm(config, dtype=dtype, device=device)
        self._rotary = Rotary(config.rope, device)
        local = config.local_rope
        self._local_rotary = None if local is None else Rotary(local, device)
        self._is_divided = group is not None
        self._fused: NativeLayers | None = None

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses, one at a time.

        With `native` kernels that take them, all layers run in one call.
        """
        for layer in self.layers:
            layer.prepare(native)
        self.norm.prepare()
        if native is not None and not self._is_divided and can_fuse(self):
            self._fused = NativeLayers(self, native)

    def linears(self) -> Iterator[Linear]:
        """All projections."""
        for layer in self.layers:
            yield from layer.linears()

    def rotations(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine rows of a step's positions, for all layers."""
        return self._rotary.rows(positions, self.dtype)

    def run(
        self,
        x_TC: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        late: LateInputs | None = None,
    ) -> torch.Tensor:
        """The last hidden state of every position, normalised; `x_TC` may be overwritten.

        `positions` are [T], or [3, T] (see `core.layers.rotary`).
        """
        cos_sin = self.rotations(positions)
        local = self._local_rotary
        local_cos_sin = cos_sin if local is None else local.rows(positions, self.dtype)
        if self._fused is not None and step.kv.native is not None:
            return self._fused(x_TC, (cos_sin, local_cos_sin), step, late)
        pending_TC: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            is_local = layer.attention.config.uses_local_rope
            x_TC, pending_TC = layer(x_TC, pending_TC, local_cos_sin if is_local else cos_sin, step)
            if late is not None and index < len(late.values_LFC):
                x_TC = x_TC.index_add(0, late.index_F, late.values_LFC[index])
        return self.norm.of_sum(x_TC, pending_TC)[0]


class Decoder(DecoderStack):
    """Embedding, layers, final norm, and the projection onto the vocabulary."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
    ) -> None:
        super().__init__(config, dtype=dtype, device=device, group=group)
        self.vocabulary = config.vocabulary or Shard.whole(config.vocab_size)
        sizes = config.hidden_size, self.vocabulary
        new = partial(vocab_parallel, group, *sizes, dtype=dtype, device=device)
        self.head = new()
        self.embedding = self.head if config.has_tied_embeddings else new()

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.config.vocab_size

    def prepare(self, native: NativeKernels | None = None) -> None:
        """As for a stack; the projection too."""
        super().prepare(native)
        self.head.prepare(native, keeps_rows=self.embedding is self.head)

    def linears(self) -> Iterator[Linear]:
        """All projections."""
        yield from super().linears()
        yield self.head

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """What enters the layers: `x_TC`."""
        x_TC = self.embedding.rows(token_ids_T)
        scale = self.config.embedding_scale
        return x_TC if scale == 1.0 else x_TC * torch.tensor(scale, dtype=x_TC.dtype)

    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, step: PagedStep
    ) -> torch.Tensor:
        """The last hidden state of every token, normalised: `hidden_TC`."""
        return self.run(self.embed(token_ids_T), positions_T, step)

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """Scores of the whole vocabulary for each row: `logits_RV`, float32."""
        return self.head(hidden_RC, out_dtype=torch.float32)
