"""One layer of a decoder, and the configuration of all of them.

Owns a layer's norms, attention and MLP and their order. Knows neither the stack nor files.

Shapes: T tokens, C hidden, F MLP features or positions, L layers, P values of a layer's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from triptych.core.runtime.kernels.gated import Activation, activation_of, gate_of
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.row_moments import relu_above
from triptych.core.runtime.layers.altup import AltUpConfig
from triptych.core.runtime.layers.attention import (
    AttentionConfig,
    KvLayout,
    KvShape,
    PagedStep,
    StepPositions,
)
from triptych.core.runtime.layers.key_index import KeyIndexConfig
from triptych.core.runtime.layers.latent_attention import LatentConfig
from triptych.core.runtime.layers.layer_inputs import InputGate, LayerInputConfig
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.mixers import (
    Mixer,
    MixerConfig,
    MixerPair,
    PartConfig,
    is_recurrent,
    new_part,
    parts_of,
)
from triptych.core.runtime.layers.moe import MoeConfig, MoeMlp
from triptych.core.runtime.layers.norm import LayerNorm, Norm, NormKind, RMSNorm
from triptych.core.runtime.layers.parallel import row_parallel
from triptych.core.runtime.layers.rotary import QueryScaling, RopeConfig
from triptych.core.runtime.layers.shards import Shard
from triptych.core.runtime.layers.xielu import Xielu

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup


@dataclass(frozen=True, slots=True)
class MlpScales:
    """Factors of an MLP: of the gate before its activation, and of what `down` projects."""

    gate: float = 1.0
    product: float = 1.0


UNSCALED = MlpScales()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The differences between decoders. `attention` has the mixer of each layer, if it has one.

    `local_rope` rotates the layers that use it; `query_scaling` scales the queries of layers that
    ask for it. Embeddings are multiplied by `embedding_scale`, logits by `logit_scale` and then
    limited to `logit_cap` by tanh. Outputs of attention and MLP are multiplied by
    `residual_scale`.

    Weights of norms may be centred (see `core.runtime.layers.norm`). There are norms before
    attention and MLP (`has_pre_norms`), after them (`has_post_norms`) or both, but in the layers
    `pre_normed` before them alone; in a parallel block the MLP reads the same normed input as
    attention. An MLP has a gate, or only an activation between its two projections, which may be
    xIELU; `mlp_scales` are its factors. `mlp_sizes` are the intermediate sizes of all layers where
    they differ; 0: no MLP. With `moe` most MLPs are mixtures of experts. `layer_inputs` are
    additional inputs of each layer, and `has_layer_scales`: a layer's result is multiplied by a
    weight. With `altup` there are several residual streams. Gates of sparse layers count from
    `gate_deviations` standard deviations over their mean on; 0: all of them count. Checkpoints have
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
    has_xielu: bool = False
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
    pre_normed: frozenset[int] = frozenset()
    is_parallel: bool = False
    mlp_scales: MlpScales = UNSCALED
    mlp_sizes: tuple[int, ...] = ()
    moe: MoeConfig | None = None
    num_draft_layers: int = 0
    layer_inputs: LayerInputConfig | None = None
    has_layer_scales: bool = False
    altup: AltUpConfig | None = None
    gate_deviations: tuple[float, ...] = ()
    features: tuple[Shard, ...] = ()
    vocabulary: Shard | None = None
    naming: str = ""

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The shape of the model's cache."""
        return KvLayout(
            shapes=self._shapes(),
            page_size=page_size,
            dtype=dtype,
            states=tuple(part.state for part in self.parts() if is_recurrent(part)),
        )

    def _shapes(self) -> tuple[KvShape, ...]:
        """The cells of all layers that store any, with the longest window of their readers."""
        shapes: list[KvShape] = []
        for layer, mixer in enumerate(self.attention):
            for part in parts_of(mixer):
                if is_recurrent(part):
                    continue
                if part.reads_layer is None:
                    shapes += part.shapes
                    continue
                cells = self.cells_of(layer, part)
                windows = shapes[cells].window, part.shape.window
                longest = None if None in windows else max(window or 0 for window in windows)
                shapes[cells] = replace(shapes[cells], window=longest)
        return tuple(shapes)

    def parts(self, num_layers: int | None = None) -> list[PartConfig]:
        """The parts of the mixers of all layers, or of the first ones."""
        return [part for mixer in self.attention[:num_layers] for part in parts_of(mixer)]

    @property
    def attending(self) -> list[AttentionConfig | LatentConfig]:
        """The parts that attend."""
        return [part for part in self.parts() if not is_recurrent(part)]

    @property
    def key_index(self) -> KeyIndexConfig | None:
        """The first layer's index of keys, if there is one; those of others are alike."""
        indexes = (each.index for each in self.attending if isinstance(each, LatentConfig))
        return next((index for index in indexes if index is not None), None)

    def cells_of(self, layer: int, part: PartConfig) -> int:
        """The place, in the cache, of the cells that a part of a layer reads, or of its states.

        Those of an index follow those of its layer.
        """
        if is_recurrent(part):
            return sum(map(is_recurrent, self.parts(layer)))
        owner = layer if part.reads_layer is None else part.reads_layer
        earlier = (each for each in self.parts(owner) if not is_recurrent(each))
        return sum(len(each.shapes) for each in earlier if each.reads_layer is None)

    def features_of(self, layer: int) -> Shard:
        """The features that a layer's MLP has on this rank."""
        if self.features:
            return self.features[layer]
        return Shard.whole(self.mlp_sizes[layer] if self.mlp_sizes else self.intermediate_size)


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
        self.xielu = Xielu(device) if config.has_xielu else None
        own = (gate_of if self.has_gate else activation_of)(config.activation)
        self._activate = own if self.xielu is None else self.xielu
        self._scales = config.mlp_scales
        self.deviations = config.gate_deviations[layer] if config.gate_deviations else 0.0

    def linears(self) -> Iterator[Linear]:
        """Iterate over its projections."""
        yield from (self.gate_up, self.down)

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        for linear in self.linears():
            linear.prepare(native)
        if self.xielu is not None:
            self.xielu.prepare()

    def __call__(self, x_TC: torch.Tensor, residual_TC: torch.Tensor | None) -> torch.Tensor:
        """Apply the MLP. Adds to the residual where given."""
        hidden_TF, scales = self.gate_up(x_TC), self._scales
        if scales.gate != 1.0:
            hidden_TF[:, : self.features.length] *= scales.gate
        if self.deviations:
            relu_above(hidden_TF[:, : self.features.length], self.deviations)
        hidden_TF = self._activate(hidden_TF)
        if scales.product != 1.0:
            hidden_TF *= scales.product
        return self.down(hidden_TF, residual_TC)


class DecoderLayer:
    """A mixer and an MLP, each after its norm, before another one, or both; or one of the two."""

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
        is_pre_normed = layer in config.pre_normed
        has_pre_norms = config.has_pre_norms or is_pre_normed
        has_mlp_norm = has_pre_norms and not config.is_parallel
        self.attention = _mixer(config, layer, dtype=dtype, device=device, group=group)
        self.mlp = _mlp(config, layer, dtype=dtype, device=device, group=group)
        has_input_norm = has_pre_norms and self.attention is not None
        self.input_norm = make_norm() if has_input_norm else Norm()
        self.mlp_norm = make_norm() if has_mlp_norm and self.mlp is not None else Norm()
        has_post_norms = config.has_post_norms and not is_pre_normed
        self.post_norms = (make_norm(), make_norm()) if has_post_norms else None
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
        for norm in self.norms:
            norm.prepare()
        for part in (self.attention, self.mlp, self.input_gate):
            if part is not None:
                part.prepare(native)

    def move_weights(self, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the tensors of all projections, prepared for a GPU, in one order."""
        for linear in self.linears():
            linear.move_weight(move)

    def linears(self) -> Iterator[Linear]:
        """Iterate over its projections."""
        for part in (self.attention, self.mlp, self.input_gate):
            if part is not None:
                yield from part.linears()

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
            if self.attention is not None:
                x_TC = self.attention(normed_TC, x_TC, positions, step)
            if self.mlp is None:
                return x_TC, None
            y_TC = normed_TC if self._is_parallel else self.mlp_norm(x_TC)
            return self.mlp(y_TC, x_TC), None
        after_attention, after_mlp = self.post_norms or (self._scaled, self._scaled)
        mixed_TC: torch.Tensor | None = None
        if self.attention is not None:
            mixed_TC = after_attention(self.attention(normed_TC, None, positions, step))
        if self.mlp is None:
            return x_TC, mixed_TC
        if self._is_parallel:
            assert mixed_TC is not None
            return x_TC, mixed_TC + after_mlp(self.mlp(normed_TC, None))
        normed_TC, x_TC = self.mlp_norm.of_sum(x_TC, mixed_TC)
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


def _mixer(
    config: DecoderConfig,
    layer: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: RankGroup | None,
) -> Mixer | None:
    parts = [
        new_part(part, config.cells_of(layer, part), dtype=dtype, device=device, group=group)
        for part in parts_of(config.attention[layer])
    ]
    return MixerPair(*parts) if len(parts) > 1 else next(iter(parts), None)


def _mlp(
    config: DecoderConfig,
    layer: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: RankGroup | None,
) -> Mlp | MoeMlp | None:
    moe = config.moe
    if moe is None or layer in moe.dense_layers:
        has_mlp = config.features_of(layer).length > 0
        return Mlp(config, layer, dtype, device, group) if has_mlp else None
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
