"""All layers of a decoder in one native call: on a CPU, Python between operations costs too much.

Owns the addresses that the call needs. The arithmetic is that of `core.runtime.layers.decoder`, in
core/runtime/kernels/native/decoder.c; intermediate results are rounded less often there.

Shapes: T tokens, C hidden, R rotated dims.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain

import torch

from triptych.core.runtime.kernels.native.arguments import (
    DTYPES,
    GateArguments,
    LayerPointers,
    StepArguments,
    point_to_pages,
    pointer,
)
from triptych.core.runtime.kernels.native.library import NativeKernels, attention_arguments
from triptych.core.runtime.layers.attention import (
    Attention,
    AttentionConfig,
    KvCache,
    PagedStep,
)
from triptych.core.runtime.layers.decoder_layer import DecoderConfig, DecoderLayer, LateInputs
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.moe import MoeMlp
from triptych.core.runtime.layers.native_mixture import NativeMixture, projection
from triptych.core.runtime.layers.norm import RMSNorm


def can_fuse(layers: Sequence[DecoderLayer]) -> bool:
    """Whether the attention of prepared layers is alike, and all weights are packed."""
    kinds = [layer.attention.config for layer in layers]
    heads = {
        (c.num_heads, c.num_kv_heads, c.head_dim, c.qk_norm_eps, c.scale, c.has_centred_qk_norm)
        for c in kinds
        if isinstance(c, AttentionConfig)
    }
    if len(heads) != 1 or not all(isinstance(c, AttentionConfig) for c in kinds):
        return False
    linears = chain.from_iterable(map(_projections, layers))
    mixtures = (layer.mlp for layer in layers if isinstance(layer.mlp, MoeMlp))
    is_packed = all(linear.native is not None for linear in linears)
    return is_packed and all(moe.fused is not None for moe in mixtures)


def _projections(layer: DecoderLayer) -> list[Linear]:
    """The projections of a layer, except those of a mixture."""
    attention = _attention(layer)
    dense = [] if isinstance(layer.mlp, MoeMlp) else layer.mlp.linears()
    return [attention.qkv, attention.out, *dense]


class NativeLayers:
    """Runs a decoder's layers and its final norm."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        native: NativeKernels,
    ) -> None:
        first = _attention(layers[0]).config
        self._native = native
        self._config, self._norm_C = config, norm.weight_C
        self._norms_2D = [_head_norms(layer, self._norm_C.dtype) for layer in layers]
        self._owners = tuple(layers)  # the pointers live no longer than these
        pointers = map(_pointers, self._owners, self._norms_2D)
        self._layers = (LayerPointers * len(self._owners))(*pointers)
        mixtures = [mixture for layer in self._owners if (mixture := _mixture(layer)) is not None]
        self._largest_mixture = max(  # they differ in the form of their weights alone
            mixtures, key=lambda each: bool(each.pointers.has_blocks), default=None
        )
        self._kv: KvCache | None = None
        self._num_heads, self._head_dim = first.num_heads, first.head_dim
        self._scale = first.head_dim**-0.5 if first.scale is None else first.scale
        num_heads = 2 * first.num_heads + 2 * first.num_kv_heads
        mlp_size = 3 * config.intermediate_size
        linears = chain.from_iterable(map(_projections, self._owners))
        blocks = [linear.num_inputs for linear in linears if linear.has_blocks]
        self._widest_blocks = max(blocks, default=0)
        self._scratch_size = config.hidden_size + num_heads * first.head_dim + mlp_size

    def __call__(
        self,
        x_TC: torch.Tensor,
        cos_sins: Sequence[tuple[torch.Tensor, torch.Tensor]],
        paged: PagedStep,
        late: LateInputs | None = None,
    ) -> torch.Tensor:
        """The normalized hidden state; `x_TC` is overwritten by it.

        `cos_sins` are the rotations of most layers, and of layers with local ones.
        """
        if paged.kv is not self._kv:
            self._bind(paged.kv)
        step, kept_alive = self._arguments(x_TC, cos_sins, paged)
        num_late = 0 if late is None else len(late.values_LFC)
        for index in range(num_late):
            self._run(step, index, index + 1)
            assert late is not None
            x_TC.index_add_(0, late.index_F, late.values_LFC[index])
        self._run(step, num_late, len(self._layers), self._norm_C)
        del kept_alive
        return x_TC

    def _bind(self, kv: KvCache) -> None:
        """Point the layers at a cache; usually it stays the same."""
        for layer, pages in zip(self._layers, kv.pages, strict=True):
            point_to_pages(layer, pages)
        self._kv = kv

    def _run(
        self, step: StepArguments, first: int, end: int, norm_C: torch.Tensor | None = None
    ) -> None:
        """Layers [first, end), and the final norm where one is given."""
        size = ctypes.sizeof(LayerPointers)
        address = ctypes.addressof(self._layers) + first * size
        step.layers = ctypes.cast(address, ctypes.POINTER(LayerPointers))
        step.num_layers = end - first
        step.final_norm = pointer(norm_C)
        self._native.decoder_step(step)

    def _arguments(
        self,
        x_TC: torch.Tensor,
        cos_sins: Sequence[tuple[torch.Tensor, torch.Tensor]],
        paged: PagedStep,
    ) -> tuple[StepArguments, tuple[torch.Tensor | None, ...]]:
        """The arguments that all layers share, and the memory that they point into."""
        config, num_tokens = self._config, len(x_TC)
        assert x_TC.is_contiguous()
        shape = (num_tokens, self._num_heads, self._head_dim)
        attention = attention_arguments(paged.batch, paged.kv.pages[0], shape, x_TC.dtype)
        attention.scale = self._scale
        scratch = x_TC.new_empty(num_tokens * self._scratch_size)
        quantized = self._native.quantized(num_tokens, self._widest_blocks)
        mixture = self._largest_mixture
        mixture_scratch = None if mixture is None else mixture.scratch(x_TC)
        cos_pair, sin_pair = zip(*cos_sins, strict=True)
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
            write_slots=paged.batch.write_slots_T.data_ptr(),
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_rotated=tuple(cos.shape[2] for cos in cos_pair),
            gate=GateArguments.of(config.activation),
            norm_dtype=DTYPES[self._norm_C.dtype],
            eps=config.norm_eps,
            qk_eps=_attention(self._owners[0]).config.qk_norm_eps or 0.0,
            attention=attention,
        ), (scratch, quantized, mixture_scratch)


def _attention(layer: DecoderLayer) -> Attention:
    assert isinstance(layer.attention, Attention)
    return layer.attention


def _mixture(layer: DecoderLayer) -> NativeMixture | None:
    return layer.mlp.fused if isinstance(layer.mlp, MoeMlp) else None


def _pointers(layer: DecoderLayer, norms_2D: torch.Tensor | None) -> LayerPointers:
    mixture = _mixture(layer)
    config = _attention(layer).config
    post_norms = layer.post_norms
    after_attention, after_mlp = (
        (None, None) if post_norms is None else (norm.weight_C for norm in post_norms)
    )
    return LayerPointers(
        *map(projection, _projections(layer)),
        input_norm=pointer(layer.input_norm.weight_C),
        qk_norm=pointer(norms_2D),
        attention_post_norm=pointer(after_attention),
        mlp_norm=pointer(layer.mlp_norm.weight_C),
        mlp_post_norm=pointer(after_mlp),
        mixture=None if mixture is None else ctypes.pointer(mixture.pointers),
        window=config.window or 0,
        rotation=-1 if not config.uses_rope else int(config.uses_local_rope),
    )


def _head_norms(layer: DecoderLayer, dtype: torch.dtype) -> torch.Tensor | None:
    """The complete weights of a layer's head norms, in the type of the other norms."""
    attention = _attention(layer)
    norms_2D, is_centred = attention.qk_norm_2D, attention.config.has_centred_qk_norm
    return None if norms_2D is None else (norms_2D + 1 if is_centred else norms_2D).to(dtype)
