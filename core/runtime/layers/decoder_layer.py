"""One layer of a decoder, and the configuration of all of them.

Owns a layer's norms, attention and MLP and their order. Knows neither the stack nor files.

Shapes: T tokens, C hidden, F MLP features or positions, L layers, P values of a layer's input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from typing_extensions import TypeIs

from triptych.core.runtime.kernels.gated import Activation, activation_of, gate_of
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import (
    Attention,
    AttentionConfig,
    KvLayout,
    PagedStep,
    StepPositions,
)
from triptych.core.runtime.layers.delta_net import DeltaNetConfig, GatedDeltaNet
from triptych.core.runtime.layers.latent_attention import LatentAttention, LatentConfig
from triptych.core.runtime.layers.layer_inputs import InputGate, LayerInputConfig
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.mamba2 import Mamba2, Mamba2Config
from triptych.core.runtime.layers.moe import MoeConfig, MoeMlp
from triptych.core.runtime.layers.norm import LayerNorm, Norm, NormKind, RMSNorm
from triptych.core.runtime.layers.parallel import row_parallel
from triptych.core.runtime.layers.rotary import QueryScaling, RopeConfig
from triptych.core.runtime.layers.shards import Shard
from triptych.core.runtime.layers.short_convolution import ShortConvConfig, ShortConvolution

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup

RecurrentConfigs = DeltaNetConfig | Mamba2Config | ShortConvConfig
MixerConfig = AttentionConfig | LatentConfig | RecurrentConfigs
"""What a layer has for tokens to read earlier ones: attention, or a recurrent layer."""
Mixer = Attention | LatentAttention | GatedDeltaNet | Mamba2 | ShortConvolution


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The differences between decoders. `attention` has one entry per layer, some recurrent.

    `local_rope` rotates the layers that use it; `query_scaling` scales the queries of layers that
    ask for it. Embeddings are multiplied by `embedding_scale`, logits by `logit_scale` and then
    limited to `logit_cap` by tanh. Outputs of attention and MLP are multiplied by
    `residual_scale`.

    Weights of norms may be centred (see `core.runtime.layers.norm`). There are norms before
    attention and MLP (`has_pre_norms`), after them (`has_post_norms`) or both; in a parallel block
    the MLP reads the same normed input as attention. An MLP has a gate, or only an activation
    between its two projections. `mlp_sizes` are the intermediate sizes of all layers where they
    differ. With `moe` most MLPs are mixtures of experts. `layer_inputs` are additional inputs of
    each layer, and `has_layer_scales`: a layer's result is multiplied by a weight. Checkpoints have
    `num_draft_layers` more, which are not used.

    In a model that is divided over ranks, `intermediate_size`, `mlp_sizes` and the heads are this
    rank's: `features`, of each layer, and `vocabulary` say which part of the whole it has. `naming`
    is the family's entry in `decoders.layer_names`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    norm_eps: float
    attention: tuple[MixerConfig, ...]
    rope: RopeConfig
    has_mlp_bias: bool = False
    has_tied_embeddings: bool = False
    local_rope: RopeConfig | None = None
    query_scaling: QueryScaling | None = None
    activation: Activation = "silu"
    has_gate: bool = True
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    norm_kind: NormKind = "rms"
    has_norm_bias: bool = False
    has_centred_norms: bool = False
    has_pre_norms: bool = True
    has_post_norms: bool = False
    is_parallel: bool = False
    mlp_sizes: tuple[int, ...] = ()
    moe: MoeConfig | None = None
    num_draft_layers: int = 0
    layer_inputs: LayerInputConfig | None = None
    has_layer_scales: bool = False
    features: tuple[Shard, ...] = ()
    vocabulary: Shard | None = None
    naming: str = ""

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The shape of the model's cache."""
        return KvLayout(
            shapes=tuple(layer.shape for layer in self.attending if layer.reads_layer is None),
            page_size=page_size,
            dtype=dtype,
            states=tuple(layer.state for layer in self.attention if is_recurrent(layer)),
        )

    @property
    def attending(self) -> list[AttentionConfig | LatentConfig]:
        """The layers that attend."""
        return [layer for layer in self.attention if not is_recurrent(layer)]

    def cells_of(self, layer: int) -> int:
        """The index, in the cache, of the cells that a layer reads, or of its states."""
        own = self.attention[layer]
        if is_recurrent(own):
            return sum(map(is_recurrent, self.attention[:layer]))
        owner = layer if own.reads_layer is None else own.reads_layer
        earlier = (each for each in self.attention[:owner] if not is_recurrent(each))
        return sum(each.reads_layer is None for each in earlier)

    def features_of(self, layer: int) -> Shard:
        """The features that a layer's MLP has on this rank."""
        if self.features:
            return self.features[layer]
        return Shard.whole(self.mlp_sizes[layer] if self.mlp_sizes else self.intermediate_size)


def is_recurrent(layer: MixerConfig) -> TypeIs[RecurrentConfigs]:
    """Whether a layer keeps states in place of keys and values."""
    return isinstance(layer, RecurrentConfigs)


class Mlp:
    """`down(act(gate(x)) * up(x))`, gate and up as one projection; or `down(act(up(x)))`."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
    ) -> None:
        self.features, self.has_gate = config.features_of(layer), config.has_gate
        hidden, features, bias = config.hidden_size, self.features.length, config.has_mlp_bias
        num_outputs = (1 + config.has_gate) * features
        self.gate_up = Linear(hidden, num_outputs, has_bias=bias, dtype=dtype, device=device)
        self.down = row_parallel(
            group, (features, hidden), has_bias=bias, dtype=dtype, device=device
        )
        self._activate = (gate_of if self.has_gate else activation_of)(config.activation)

    def linears(self) -> Iterator[Linear]:
        """Iterate over its projections."""
        yield from (self.gate_up, self.down)

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        for linear in self.linears():
            linear.prepare(native)

    def __call__(self, x_TC: torch.Tensor, residual_TC: torch.Tensor | None) -> torch.Tensor:
        """Apply the MLP. Adds to the residual where given."""
        return self.down(self._activate(self.gate_up(x_TC)), residual_TC)


class DecoderLayer:
    """Attention and MLP, each after its norm, before another one, or both."""

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
        has_mlp_norm = config.has_pre_norms and not config.is_parallel
        self.input_norm = make_norm() if config.has_pre_norms else Norm()
        self.attention = _attention(config, layer, dtype=dtype, device=device, group=group)
        self.mlp_norm = make_norm() if has_mlp_norm else Norm()
        self.mlp = _mlp(config, layer, dtype=dtype, device=device, group=group)
        self.post_norms = (make_norm(), make_norm()) if config.has_post_norms else None
        self.input_gate: InputGate | None = None
        if config.layer_inputs is not None:
            self.input_gate = InputGate(
                config.layer_inputs, config.activation, make_norm(), dtype=dtype, device=device
            )
        self.scale_1: torch.Tensor | None = None
        if config.has_layer_scales:
            self.scale_1 = torch.empty(1, dtype=dtype, device=device)
        self._residual_scale, self._is_parallel = config.residual_scale, config.is_parallel

    @property
    def norms(self) -> tuple[Norm, ...]:
        """All norms over the hidden size."""
        gate = () if self.input_gate is None else (self.input_gate.norm,)
        return (self.input_norm, self.mlp_norm, *(self.post_norms or ()), *gate)

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        self.attention.prepare(native)
        for norm in self.norms:
            norm.prepare()
        self.mlp.prepare(native)
        if self.input_gate is not None:
            self.input_gate.prepare(native)

    def linears(self) -> Iterator[Linear]:
        """Iterate over its projections."""
        yield from self.attention.linears()
        yield from self.mlp.linears()
        if self.input_gate is not None:
            yield from self.input_gate.linears()

    def __call__(
        self,
        x_TC: torch.Tensor,
        pending_TC: torch.Tensor | None,
        positions: StepPositions,
        step: PagedStep,
        input_TP: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One layer of the residual stream, `x_TC` and what is pending to be added to it.

        A GPU adds in the norm that follows; on a CPU projections add at no cost. `input_TP` are the
        layer's additional inputs.
        """
        normed_TC, x_TC = self.input_norm.of_sum(x_TC, pending_TC)
        is_scaled = self._residual_scale != 1.0
        if not x_TC.is_cuda and self.post_norms is None and not is_scaled:
            x_TC = self.attention(normed_TC, x_TC, positions, step)
            y_TC = normed_TC if self._is_parallel else self.mlp_norm(x_TC)
            return self.mlp(y_TC, x_TC), None
        after_attention, after_mlp = self.post_norms or (self._scaled, self._scaled)
        y_TC = after_attention(self.attention(normed_TC, None, positions, step))
        if self._is_parallel:
            return x_TC, y_TC + after_mlp(self.mlp(normed_TC, None))
        normed_TC, x_TC = self.mlp_norm.of_sum(x_TC, y_TC)
        return self._closed(x_TC, after_mlp(self.mlp(normed_TC, None)), input_TP)

    def _closed(
        self, x_TC: torch.Tensor, pending_TC: torch.Tensor, input_TP: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the layer's inputs and its scale, if it has them."""
        if self.input_gate is None and self.scale_1 is None:
            return x_TC, pending_TC
        x_TC = x_TC + pending_TC
        if self.input_gate is not None:
            assert input_TP is not None
            x_TC = x_TC + self.input_gate(x_TC, input_TP)
        return x_TC if self.scale_1 is None else x_TC * self.scale_1, None

    def _scaled(self, x_TC: torch.Tensor) -> torch.Tensor:
        return x_TC if self._residual_scale == 1.0 else x_TC * self._residual_scale


def _attention(
    config: DecoderConfig,
    layer: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: RankGroup | None,
) -> Mixer:
    own, cells = config.attention[layer], config.cells_of(layer)
    if isinstance(own, DeltaNetConfig):
        return GatedDeltaNet(own, cells=cells, dtype=dtype, device=device)
    if isinstance(own, Mamba2Config):
        return Mamba2(own, cells=cells, dtype=dtype, device=device)
    if isinstance(own, ShortConvConfig):
        return ShortConvolution(own, cells=cells, dtype=dtype, device=device)
    if isinstance(own, LatentConfig):
        return LatentAttention(own, cells=cells, dtype=dtype, device=device, group=group)
    return Attention(own, cells=cells, dtype=dtype, device=device, group=group)


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
        return Mlp(config, layer, dtype, device, group)
    return MoeMlp(
        moe, config.hidden_size, config.activation, dtype=dtype, device=device, group=group
    )


def new_norm(config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> Norm:
    """Create a norm over the hidden size, of the family's kind."""
    make = partial(RMSNorm if config.norm_kind == "rms" else LayerNorm, config.hidden_size)
    has_bias = {"has_bias": True} if config.has_norm_bias else {}
    return make(
        eps=config.norm_eps,
        dtype=dtype,
        device=device,
        is_centred=config.has_centred_norms,
        **has_bias,
    )


@dataclass(frozen=True, slots=True)
class LateInputs:
    """Inputs added to F positions after each of the first L layers."""

    index_F: torch.Tensor
    values_LFC: torch.Tensor
