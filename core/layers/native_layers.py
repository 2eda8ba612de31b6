"""All layers of a decoder in one native call: on a CPU, Python between operations costs too much.

Owns the addresses the call needs. The arithmetic is that of `core.layers.decoder`, in
core/kernels/native/decoder.c; intermediate results are rounded less often there.

Shapes: T tokens, C hidden, R rotated dims.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from triptych.core.kernels.native.library import (
    LayerPointers,
    NativeKernels,
    StepArguments,
    attention_arguments,
    can_read_pages,
    pointer,
)
from triptych.core.kernels.paged_attention import AttentionBatch
from triptych.core.layers.attention import KvCache

if TYPE_CHECKING:
    from triptych.core.layers.decoder import DecoderLayer, DecoderStack


def can_fuse(decoder: DecoderStack) -> bool:
    """Whether the layers of a prepared decoder are alike, and all their weights packed."""
    configs = decoder.config.attention
    linears = (
        linear
        for layer in decoder.layers
        for linear in (
            layer.attention.qkv,
            layer.attention.out,
            layer.mlp.gate_up,
            layer.mlp.down,
        )
    )
    config = decoder.config
    is_plain = config.activation == "silu" and not (
        config.has_centred_norms or config.has_post_norms or config.local_rope
    )
    heads = {(c.num_heads, c.num_kv_heads, c.head_dim, c.qk_norm_eps) for c in configs}
    return is_plain and len(heads) == 1 and all(linear.is_native for linear in linears)


class NativeLayers:
    """Runs a decoder's layers and its final norm."""

    def __init__(self, decoder: DecoderStack, native: NativeKernels) -> None:
        config, first = decoder.config, decoder.config.attention[0]
        self._native = native
        self._config, self._norm_C = config, decoder.norm.weight_C
        self._owners = tuple(decoder.layers)  # the pointers live no longer than these
        self._layers = (LayerPointers * len(self._owners))(*map(_pointers, self._owners))
        self._num_heads, self._head_dim = first.num_heads, first.head_dim
        num_heads = 2 * first.num_heads + 2 * first.num_kv_heads
        mlp_size = 3 * config.intermediate_size
        self._scratch_size = config.hidden_size + num_heads * first.head_dim + mlp_size

    def can_read(self, kv: KvCache) -> bool:
        """Whether the cache is within the kernels' limits."""
        return can_read_pages(kv.k_pages[0], self._num_heads)

    def __call__(
        self,
        x_TC: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        kv: KvCache,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """The normalised hidden state; `x_TC` is overwritten by it."""
        config, (cos_T1R, sin_T1R) = self._config, cos_sin
        num_tokens = len(x_TC)
        for layer, k_pages, v_pages in zip(self._layers, kv.k_pages, kv.v_pages, strict=True):
            layer.k_pages, layer.v_pages = k_pages.data_ptr(), v_pages.data_ptr()
        shape = (num_tokens, self._num_heads, self._head_dim)
        attention = attention_arguments(batch, kv.k_pages[0], shape, x_TC.dtype)
        attention.scale = self._head_dim**-0.5
        scratch = x_TC.new_empty(num_tokens * self._scratch_size)
        self._native.decoder_step(
            StepArguments(
                layers=ctypes.cast(self._layers, ctypes.POINTER(LayerPointers)),
                x=x_TC.data_ptr(),
                scratch=scratch.data_ptr(),
                final_norm=self._norm_C.data_ptr(),
                cos=cos_T1R.data_ptr(),
                sin=sin_T1R.data_ptr(),
                write_slots=batch.write_slots_T.data_ptr(),
                num_layers=len(self._layers),
                hidden=config.hidden_size,
                intermediate=config.intermediate_size,
                num_rotated=cos_T1R.shape[2],
                eps=config.norm_eps,
                qk_eps=config.attention[0].qk_norm_eps or 0.0,
                attention=attention,
            )
        )
        return x_TC


def _pointers(layer: DecoderLayer) -> LayerPointers:
    attention, mlp = layer.attention, layer.mlp
    return LayerPointers(
        input_norm=pointer(layer.input_norm.weight_C),
        qkv=pointer(attention.qkv.packed),
        qkv_bias=pointer(attention.qkv.bias_O),
        qk_norm=pointer(attention.qk_norm_2D),
        out=pointer(attention.out.packed),
        out_bias=pointer(attention.out.bias_O),
        mlp_norm=pointer(layer.mlp_norm.weight_C),
        gate_up=pointer(mlp.gate_up.packed),
        gate_up_bias=pointer(mlp.gate_up.bias_O),
        down=pointer(mlp.down.packed),
        down_bias=pointer(mlp.down.bias_O),
        window=attention.config.window or 0,
        uses_rope=attention.config.uses_rope,
    )
