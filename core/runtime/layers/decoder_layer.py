"""One layer of a decoder, and the configuration of all of them.

Owns a layer's norms, attention and MLP and their order. Knows neither the stack nor files.

Shapes: T tokens, C hidden, F MLP features or positions, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from triptych.core.runtime.kernels.gated import Activation, gate_of
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import (
    Attention,
    AttentionConfig,
    KvLayout,
    PagedStep,
)
from triptych.core.runtime.layers.latent_attention import LatentAttention, LatentConfig
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.moe import MoeConfig, MoeMlp
from triptych.core.runtime.layers.norm import RMSNorm
from triptych.core.runtime.layers.parallel import row_parallel
from triptych.core.runtime.layers.rotary import RopeConfig
from triptych.core.runtime.layers.shards import Shard

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The differences between decoders. `attention` has one entry per layer.

    `local_rope` rotates the layers that use it. Embeddings are multiplied by `embedding_scale`.
    Weights of norms may be centred (see `core.runtime.layers.norm`), and there may also be norms
    after attention and MLP. With `moe` most MLPs are mixtures of experts. Checkpoints have
    `num_draft_layers` more, which are not used. In a model that is
    divided over ranks, `intermediate_size` and the heads are this rank's: `features` and
    `vocabulary` say which part of the whole it has.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    norm_eps: float
    attention: tuple[AttentionConfig | LatentConfig, ...]
    rope: RopeConfig
    has_mlp_bias: bool = False
    has_tied_embeddings: bool = False
    local_rope: RopeConfig | None = None
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    has_centred_norms: bool = False
    has_post_norms: bool = False
    moe: MoeConfig | None = None
    num_draft_layers: int = 0
    features: Shard | None = None
    vocabulary: Shard | None = None

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The shape of the model's cache."""
        shapes = tuple(layer.shape for layer in self.attention)
        return KvLayout(shapes=shapes, page_size=page_size, dtype=dtype)


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
        self._gate = gate_of(config.activation)

    def linears(self) -> Iterator[Linear]:
        """Iterate over its projections."""
        yield from (self.gate_up, self.down)

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        for linear in self.linears():
            linear.prepare(native)

    def __call__(self, x_TC: torch.Tensor, residual_TC: torch.Tensor | None) -> torch.Tensor:
        """Apply the MLP. Adds to the residual where given."""
        return self.down(self._gate(self.gate_up(x_TC)), residual_TC)


class DecoderLayer:
    """Attention and MLP, each after its norm; in some families also before another one."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
    ) -> None:
        make_norm = partial(new_norm, config, dtype=dtype, device=device)
        self.input_norm = make_norm()
        self.attention = _attention(
            config.attention[layer], layer=layer, dtype=dtype, device=device, group=group
        )
        self.mlp_norm = make_norm()
        self.mlp = _mlp(config, layer, dtype=dtype, device=device, group=group)
        self.post_norms = (make_norm(), make_norm()) if config.has_post_norms else None

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        self.attention.prepare(native)
        for norm in (self.input_norm, self.mlp_norm, *(self.post_norms or ())):
            norm.prepare()
        self.mlp.prepare(native)

    def linears(self) -> Iterator[Linear]:
        """Iterate over its projections."""
        yield from self.attention.linears()
        yield from self.mlp.linears()

    def __call__(
        self,
        x_TC: torch.Tensor,
        pending_TC: torch.Tensor | None,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        step: PagedStep,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One layer of the residual stream, `x_TC` and what is pending to be added to it.

        A GPU adds in the norm that follows; on a CPU projections add at no cost.
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


def _attention(
    config: AttentionConfig | LatentConfig,
    *,
    layer: int,
    dtype: torch.dtype,
    device: torch.device,
    group: RankGroup | None,
) -> Attention | LatentAttention:
    if isinstance(config, LatentConfig):
        return LatentAttention(config, layer=layer, dtype=dtype, device=device, group=group)
    return Attention(config, layer=layer, dtype=dtype, device=device, group=group)


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


def new_norm(config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    """Create a norm over the hidden size, of the family's kind."""
    return RMSNorm(
        config.hidden_size,
        eps=config.norm_eps,
        dtype=dtype,
        device=device,
        is_centred=config.has_centred_norms,
    )


@dataclass(frozen=True, slots=True)
class LateInputs:
    """Inputs added to F positions after each of the first L layers."""

    index_F: torch.Tensor
    values_LFC: torch.Tensor
