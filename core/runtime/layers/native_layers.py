"""All layers of a decoder in one native call: on a CPU, Python between operations costs too much.

Owns the addresses that the call needs. The arithmetic is that of `core.runtime.layers.decoder`, in
core/runtime/kernels/native/decoder.c; intermediate results are rounded less often there.

Shapes: T tokens, C hidden, L layers, P values of a layer's input, X heads, D head dim.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import astuple
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

import torch

from triptych.core.runtime.kernels.native.arguments import (
    DTYPES,
    GateArguments,
    LayerPointers,
    ProjectionPointers,
    StepArguments,
    attention_arguments,
    pointer,
)
from triptych.core.runtime.kernels.native.choice import NativeChoice
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.adapters import AdapterRows
from triptych.core.runtime.layers.altup import Streams
from triptych.core.runtime.layers.altup_layer import AltUpLayer
from triptych.core.runtime.layers.attention import (
    KvCache,
    PagedStep,
    StepPositions,
)
from triptych.core.runtime.layers.decoder_layer import (
    DecoderConfig,
    DecoderLayer,
    LateInputs,
    Mlp,
)
from triptych.core.runtime.layers.hidden_rows import TakenStates
from triptych.core.runtime.layers.layer_inputs import LayerInputs
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.moe import MoeMlp
from triptych.core.runtime.layers.native_altup import NativeAltUp
from triptych.core.runtime.layers.native_attention import (
    native_mixer,
    norm_pointers,
    projection_pointers,
)
from triptych.core.runtime.layers.native_mixture import projection
from triptych.core.runtime.layers.norm import Norm
from triptych.core.runtime.layers.recurrent import native_rows_of

_NORMS = MappingProxyType({"rms": 0, "layer": 1})


def can_fuse(config: DecoderConfig, layers: Sequence[DecoderLayer]) -> bool:
    """Whether the call has all parts of prepared layers, and all weights are packed for it."""
    mixtures = [layer.mlp for layer in layers if isinstance(layer.mlp, MoeMlp)]
    has_biases = config.has_mlp_bias or any(each.has_out_bias for each in config.parts())
    return (
        all(linear.native is not None for layer in layers for linear in _projections(layer))
        and all(moe.fused is not None for moe in mixtures)
        and (config.residual_scale == 1.0 or not has_biases)
    )


def _projections(layer: DecoderLayer) -> list[Linear]:
    """The projections of a layer, except those of a mixture."""
    laurel = layer.altup.laurel if isinstance(layer, AltUpLayer) else None
    parts = [layer.attention, layer.mlp, layer.input_gate, laurel]
    return [
        linear
        for part in parts
        if part is not None and not isinstance(part, MoeMlp)
        for linear in part.linears()
    ]


class StackEnds(NamedTuple):
    """The parts of a stack before and after its layers."""

    norm: Norm
    inputs: LayerInputs | None = None
    streams: Streams | None = None


class NativeLayers:
    """Runs a decoder's layers and its final norm, after making their inputs if they have any."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: Sequence[DecoderLayer],
        ends: StackEnds,
        native: NativeKernels,
        adapter_rows: AdapterRows | None = None,
    ) -> None:
        norm, inputs, streams = ends
        self._native, self._config, self._norm, self._inputs = native, config, norm, inputs
        self._index = config.key_index
        self._adapter_rows, self._streams = adapter_rows, streams
        gather = [] if streams is None else [projection(each) for each in streams.gather]
        self._gather = (ProjectionPointers * len(gather))(*gather)
        assert norm.weight_C is not None
        self._norm_dtype = norm.weight_C.dtype
        self._owners = tuple(layers)  # the pointers live no longer than these
        self._parts = [_LayerParts(layer, self._norm_dtype) for layer in layers]
        pointers = (part.pointers(index) for index, part in enumerate(self._parts))
        self._layers = (LayerPointers * len(self._owners))(*pointers)
        self._kv: KvCache | None = None
        linears = list(chain.from_iterable(map(_projections, layers)))
        for part in (inputs, streams):
            linears += [] if part is None else part.linears()
        blocks = [linear.num_inputs for linear in linears if linear.has_blocks]
        self._widest_blocks = max(blocks, default=0)
        self._widths = _widths(config, self._parts)
        mixtures = [part.mixture for part in self._parts if part.mixture is not None]
        self._largest_mixture = max(  # they differ in the form of their weights alone
            mixtures, key=lambda each: bool(each.pointers.has_blocks), default=None
        )

    def __call__(
        self,
        x_TC: torch.Tensor,
        positions: StepPositions,
        paged: PagedStep,
        late: LateInputs | None,
        rows_TLP: torch.Tensor | None,
        taken: TakenStates,
    ) -> torch.Tensor:
        """The normalized hidden state; `x_TC` is overwritten by it.

        `rows_TLP` are the tokens' rows of the table of layer inputs, which are overwritten. The
        call is divided where inputs are added, and where states are taken.
        """
        if paged.kv is not self._kv:
            self._bind(paged.kv)
        step, kept_alive = self._arguments(x_TC, positions, paged)
        if self._inputs is not None:
            assert rows_TLP is not None
            assert rows_TLP.is_contiguous()
            step.layer_inputs = rows_TLP.data_ptr()
            step.input_projection = projection(self._inputs.projection)
        streams_TNC = self._point_to_streams(step, x_TC)
        num_late, start = 0 if late is None else len(late.values_LFC), 0
        for end in sorted({*range(1, num_late + 1), *taken.cuts}):
            if end > start:
                self._run(step, start, end)
            if late is not None and 0 < end <= num_late:
                x_TC.index_add_(0, late.index_F, late.values_LFC[end - 1])
            taken.take(end, x_TC)
            start = end
        self._run(step, start, len(self._layers), self._norm)
        del kept_alive, streams_TNC
        return x_TC

    def _point_to_streams(self, step: StepArguments, x_TC: torch.Tensor) -> torch.Tensor | None:
        """Memory for the residual streams of a model that has several."""
        if self._streams is None:
            return None
        num_streams = self._streams.config.num_streams
        streams_TNC = x_TC.new_empty(len(x_TC), num_streams, x_TC.shape[1])
        step.streams, step.num_streams = streams_TNC.data_ptr(), num_streams
        step.spread = projection(self._streams.spread)
        step.gather = self._gather
        return streams_TNC

    def _bind(self, kv: KvCache) -> None:
        """Point the layers at a cache; usually it stays the same."""
        for pointers, part in zip(self._layers, self._parts, strict=True):
            part.mixer.bind(pointers, kv)
        self._kv = kv

    def _run(self, step: StepArguments, first: int, end: int, norm: Norm | None = None) -> None:
        """Layers [first, end), and the final norm where one is given."""
        size = ctypes.sizeof(LayerPointers)
        address = ctypes.addressof(self._layers) + first * size
        step.layers = ctypes.cast(address, ctypes.POINTER(LayerPointers))
        step.num_layers = end - first
        step.final_norm = norm_pointers(norm)
        if first:
            step.input_projection = step.spread = ProjectionPointers()
        self._native.decoder_step(step)

    def _arguments(
        self, x_TC: torch.Tensor, positions: StepPositions, paged: PagedStep
    ) -> tuple[StepArguments, tuple[object, ...]]:
        """The arguments that all layers share, and the memory that they point into."""
        config, num_tokens, inputs = self._config, len(x_TC), self._inputs
        assert x_TC.is_contiguous()
        shape = (num_tokens, 1, 1)
        attention = attention_arguments(paged.batch, paged.kv.pages[0], shape, x_TC.dtype)
        scratch = x_TC.new_empty(num_tokens * sum(self._widths.values()))
        quantized = self._native.quantized(num_tokens, self._widest_blocks)
        mixture = self._largest_mixture
        mixture_scratch = None if mixture is None else mixture.scratch(x_TC)
        rows = None if paged.states is None else native_rows_of(paged)
        windowed = paged.batch.windowed
        adapted = None if self._adapter_rows is None else self._adapter_rows.blocks
        choice = self._new_choice(num_tokens, paged)
        cos_pair, sin_pair = zip(positions.full, positions.local, strict=True)
        for table in (*cos_pair, *sin_pair):
            assert table.dtype == x_TC.dtype
            assert table.is_contiguous()
        return StepArguments(
            x=x_TC.data_ptr(),
            scratch=scratch.data_ptr(),
            quantized=quantized.data_ptr(),
            mixture_scratch=pointer(mixture_scratch),
            cos=tuple(cos.data_ptr() for cos in cos_pair),
            sin=tuple(sin.data_ptr() for sin in sin_pair),
            query_scales=pointer(positions.query_scale_T),
            write_slots=paged.batch.write_slots_T.data_ptr(),
            window_table=None if windowed is None else windowed.page_table_BM.data_ptr(),
            window_slots=None if windowed is None else windowed.write_slots_T.data_ptr(),
            state_rows=None if rows is None else ctypes.pointer(rows.arguments),
            adapted_rows=None if adapted is None else ctypes.pointer(adapted.pointers),
            choice=None if choice is None else ctypes.pointer(choice.arguments),
            hidden=config.hidden_size,
            num_rotated=tuple(cos.shape[2] for cos in cos_pair),
            num_inputs=0 if inputs is None else inputs.config.num_layers,
            input_size=0 if inputs is None else inputs.config.size,
            inputs_norm=norm_pointers(None if inputs is None else inputs.norm),
            inputs_eps=0.0 if inputs is None else inputs.norm.eps,
            qkv_width=self._widths["qkv"],
            mixed_width=self._widths["mixed"],
            gate_up_width=self._widths["gate_up"],
            gate=GateArguments.of(config.activation, scales=astuple(config.mlp_scales)),
            norm_kind=_NORMS[config.norm_kind],
            norm_dtype=DTYPES[self._norm_dtype],
            has_gate=config.has_gate,
            is_parallel=config.is_parallel,
            eps=config.norm_eps,
            residual_scale=1.0 if config.has_post_norms else config.residual_scale,
            attention=attention,
        ), (scratch, quantized, mixture_scratch, rows, adapted, choice)

    def _new_choice(self, num_tokens: int, paged: PagedStep) -> NativeChoice | None:
        """Memory for the choice of keys, if layers have an index and the step has too many."""
        index = self._index
        if index is None or not index.rule.is_needed(paged.batch):
            return None
        weights_TH = torch.empty(num_tokens, index.num_heads)
        return NativeChoice(paged.batch, index.num_chosen, weights_TH)


def _widths(config: DecoderConfig, parts: Sequence[_LayerParts]) -> dict[str, int]:
    """Values of each part of the scratch memory, for a token of the widest layer."""
    widths = [part.mixer.widths for part in parts]
    size = max(part.num_features for part in parts)
    inputs = config.layer_inputs
    gated = max(size, 0 if inputs is None else inputs.size)
    found = {
        "hidden": config.hidden_size,
        "qkv": max(qkv for qkv, _ in widths),
        "mixed": max(mixed for _, mixed in widths),
        "gate_up": (1 + config.has_gate) * size,
        "gated": gated,
    }
    if (altup := config.altup) is not None:  # the low-rank path lies there before heads do
        found["qkv"] = max(found["qkv"], config.hidden_size)
        found["gated"] = max(gated, altup.laurel_rank)
    if inputs is not None:  # their projection lies where those of layers will lie
        missing = inputs.num_layers * inputs.size + config.hidden_size - sum(found.values())
        found["gated"] += max(missing, 0)
    return found


class _LayerParts:
    """One layer, and the tensors that are made for the call alone."""

    def __init__(self, layer: DecoderLayer, norm_dtype: torch.dtype) -> None:
        self._layer = layer
        self.mixer = native_mixer(layer.attention, norm_dtype)
        self._mlp = layer.mlp if isinstance(layer.mlp, Mlp) else None
        self.num_features = 0 if self._mlp is None else self._mlp.features.length
        xielu = None if self._mlp is None else self._mlp.xielu
        self._gate = None if xielu is None else xielu.arguments()
        self.mixture = layer.mlp.fused if isinstance(layer.mlp, MoeMlp) else None
        self._altup = NativeAltUp(layer.altup) if isinstance(layer, AltUpLayer) else None

    def pointers(self, number: int) -> LayerPointers:
        """The structure of the layer; pages are added for each cache."""
        layer, gate, mlp = self._layer, self._layer.input_gate, self._mlp
        after_attention, after_mlp = layer.post_norms or (None, None)
        return LayerPointers(
            **self.mixer.fields(),
            gate_up=projection_pointers(None if mlp is None else mlp.gate_up),
            down=projection_pointers(None if mlp is None else mlp.down),
            gate=None if self._gate is None else ctypes.pointer(self._gate),
            mixture=None if self.mixture is None else ctypes.pointer(self.mixture.pointers),
            input_gate=projection_pointers(None if gate is None else gate.gate),
            input_projection=projection_pointers(None if gate is None else gate.projection),
            input_norm=norm_pointers(layer.input_norm),
            attention_post_norm=norm_pointers(after_attention),
            mlp_norm=norm_pointers(layer.mlp_norm),
            mlp_post_norm=norm_pointers(after_mlp),
            input_post_norm=norm_pointers(None if gate is None else gate.norm),
            altup=None if self._altup is None else ctypes.pointer(self._altup.pointers),
            number=number,
            intermediate=self.num_features,
            gate_deviations=0.0 if mlp is None else mlp.deviations,
            scale_of_result=1.0 if layer.scale_1 is None else float(layer.scale_1),
        )
