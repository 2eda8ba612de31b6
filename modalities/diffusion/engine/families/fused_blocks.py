"""FLUX's blocks with fewer passes over memory.

Owns their replacements, which share all parameters and keep attribute names: queries, keys and
values are one product, their norm and rotation one operation; a GELU is part of the product before
it, or of the quantization after it; gates are added in one operation, with the norm that follows if
there is one. Attention is torch's.

A layer that is not plain, such as one with an adapter's hook, runs by itself as before.

Shapes: R rows, T tokens, C features, E outputs, H heads, D a head's width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from diffusers.models import activations as of_diffusers
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers import transformer_flux as flux
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from triptych.core.runtime.kernels.adaln import gated_modulated_norm
from triptych.core.runtime.kernels.norm_rotary import norm_rotary
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.native_linear import HeldLinear, is_plain

_Rotation = tuple[Tensor, Tensor]
_FLOAT16_MAX = 65504


def fuse_blocks(module: nn.Module) -> int:
    """Replace FLUX's blocks, and its attention and GELUs wherever they are; returns how many."""
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) in _KINDS and getattr(child, "approximate", "tanh") == "tanh"
    ]
    for parent, name, child in found:
        setattr(parent, name, _KINDS[type(child)](child))
    attentions: list[Any] = [each for each in module.modules() if _is_attention(each)]
    for attention in attentions:
        attention.set_processor(_AttentionProcessor(attention))
    return len(found) + len(attentions)


def _is_attention(module: Any) -> bool:
    is_own = type(module) is flux.FluxAttention
    return is_own and type(module.processor) is flux.FluxAttnProcessor


class _Fused(nn.Module):
    """Has the modules of another under their names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, child in module.named_children():
            self.add_module(name, child)


class _Gelu(_Fused):
    """A linear layer and GELU of the tanh kind."""

    proj: Any

    def forward(self, hidden_states: Tensor) -> Tensor:
        return gelu_linear(self.proj, hidden_states)


class _DoubleBlock(_Fused):
    """Text and image tokens, each with weights of their own, and attention over both."""

    norm1: Any
    norm1_context: Any
    attn: Any
    norm2: Any
    norm2_context: Any
    ff: Any
    ff_context: Any

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: _Rotation | None = None,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        normed, *modulation = self.norm1(hidden_states, emb=temb)
        normed_text, *text_modulation = self.norm1_context(encoder_hidden_states, emb=temb)
        attended, attended_text = self.attn(
            hidden_states=normed,
            encoder_hidden_states=normed_text,
            image_rotary_emb=image_rotary_emb,
            **(joint_attention_kwargs or {}),
        )
        image = _feed_forward((hidden_states, attended), modulation, self.norm2, self.ff)
        text = _feed_forward(
            (encoder_hidden_states, attended_text),
            text_modulation,
            self.norm2_context,
            self.ff_context,
        )
        return _clipped(text), image


class _SingleBlock(_Fused):
    """All tokens together; attention and MLP run on the same input."""

    norm: Any
    attn: Any
    proj_mlp: Any
    proj_out: Any

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: _Rotation | None = None,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        num_text = encoder_hidden_states.shape[1]
        joint_RTC = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        normed, gate = self.norm(joint_RTC, emb=temb)
        attended = self.attn(
            hidden_states=normed,
            image_rotary_emb=image_rotary_emb,
            **(joint_attention_kwargs or {}),
        )
        projected = _project_gelu(self.proj_out, self.proj_mlp, normed, attended)
        joint_RTC = _clipped(torch.addcmul(joint_RTC, gate[:, None], projected))
        return joint_RTC[:, :num_text], joint_RTC[:, num_text:]


class _Projection:
    """Linear layers of one input as one product; their weights become views of its weight."""

    def __init__(self, *layers: Any) -> None:
        self._layers = layers
        self._product: Callable[[Tensor], Tensor] | None = None
        if all(map(_is_linear, layers)):
            bias = None if layers[0].bias is None else _shared("bias", layers)
            self._product = partial(linear, weight=_shared("weight", layers), bias=bias)
        elif all(map(_is_held, layers)):
            self._product = Linear.joining([layer.held for layer in layers])

    def __call__(self, x_RTC: Tensor) -> Sequence[Tensor]:
        """The layers' outputs, which may be views of one tensor."""
        if self._product is None or not all(is_plain(each, type(each)) for each in self._layers):
            return [layer(x_RTC) for layer in self._layers]
        y_TE = self._product(x_RTC.flatten(0, 1))
        sizes = [layer.out_features for layer in self._layers]
        parts: Sequence[Tensor] = y_TE.view(*x_RTC.shape[:2], -1).split(sizes, dim=2)
        return parts


class _AttentionProcessor:
    """Implements diffusers' processor of `FluxAttention`."""

    def __init__(self, attn: Any) -> None:
        self._project = _Projection(attn.to_q, attn.to_k, attn.to_v)
        if attn.added_kv_proj_dim is not None:
            self._project_text = _Projection(attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: _Rotation | None = None,
    ) -> Any:
        assert image_rotary_emb is not None, "FLUX rotates its queries and keys"
        projected, num_text = [self._project(hidden_states)], 0
        norms_q, norms_k = [attn.norm_q], [attn.norm_k]
        if encoder_hidden_states is not None:
            projected.insert(0, self._project_text(encoder_hidden_states))
            norms_q.insert(0, attn.norm_added_q)
            norms_k.insert(0, attn.norm_added_k)
            num_text = encoder_hidden_states.shape[1]
        queries, keys, values = (
            [part_RTE.unflatten(2, (-1, attn.head_dim)) for part_RTE in parts]
            for parts in zip(*projected, strict=True)
        )
        attended_RTE = dispatch_attention_fn(
            _rotated(queries, norms_q, image_rotary_emb),
            _rotated(keys, norms_k, image_rotary_emb),
            torch.cat(values, dim=1) if len(values) > 1 else values[0],
            attn_mask=attention_mask,
        ).flatten(2)
        if encoder_hidden_states is None:
            return attended_RTE
        image = attn.to_out[1](attn.to_out[0](attended_RTE[:, num_text:]))
        return image, attn.to_add_out(attended_RTE[:, :num_text])


def gelu_linear(layer: Any, x_RTC: Tensor) -> Tensor:
    """GELU of the tanh kind of a linear layer's output."""
    if not (x_RTC.is_cuda and _is_linear(layer) and layer.bias is not None):
        return gelu(layer(x_RTC), approximate="tanh")
    # On a CPU this operation is the exact GELU.
    x_TC, weight_CE = x_RTC.flatten(0, 1), layer.weight.t()
    activated_TE = torch._addmm_activation(layer.bias, x_TC, weight_CE, use_gelu=True)
    return activated_TE.view(*x_RTC.shape[:2], -1)


def _project_gelu(layer: Any, before: Any, x_RTC: Tensor, left_RTC: Tensor | None = None) -> Tensor:
    """A linear layer on GELU of the one before it, with other inputs to its left."""
    if _is_held(layer) and layer.held.takes_gelu(x_RTC.flatten(0, 1)):
        left_TC = None if left_RTC is None else left_RTC.flatten(0, 1)
        projected_TE: Tensor = layer.held.of_gelu(before(x_RTC).flatten(0, 1), left_TC)
        return projected_TE.view(*x_RTC.shape[:2], -1)
    activated_RTC = gelu_linear(before, x_RTC)
    if left_RTC is not None:
        return _joined_linear(layer, left_RTC, activated_RTC)
    projected_RTE: Tensor = layer(activated_RTC)
    return projected_RTE


def _joined_linear(layer: Any, first_RTC: Tensor, second_RTC: Tensor) -> Tensor:
    """A linear layer on two inputs side by side, without a copy that has both."""
    if not _is_linear(layer):
        joined: Tensor = layer(torch.cat([first_RTC, second_RTC], dim=2))
        return joined
    sizes = [first_RTC.shape[2], second_RTC.shape[2]]
    of_first_EC, of_second_EC = layer.weight.split(sizes, dim=1)
    out_RTE = linear(first_RTC, of_first_EC, layer.bias)
    out_RTE.flatten(0, 1).addmm_(second_RTC.flatten(0, 1), of_second_EC.t())
    return out_RTE


def _feed_forward(
    residual: tuple[Tensor, Tensor], modulation: Sequence[Tensor], norm: Any, mlp: Any
) -> Tensor:
    """Add the gated output of attention, then that of the MLP. `residual`: what it is added to."""
    gate, shift, scale, mlp_gate = modulation
    x_RTC, y_RTC = residual
    normed_RTC, x_RTC = gated_modulated_norm(x_RTC, (y_RTC, gate), scale, shift, eps=norm.eps)
    projected_RTC = _project_gelu(mlp.net[2], mlp.net[0].proj, normed_RTC)
    return torch.addcmul(x_RTC, mlp_gate[:, None], projected_RTC)


def _rotated(parts: Sequence[Tensor], norms: Sequence[Any], rotation: _Rotation) -> Tensor:
    """The parts' heads normed and rotated, `[R, T, H, D]` with the tokens of all parts in order."""
    sizes = [part.shape[1] for part in parts]
    num_rows, _, num_heads, head_dim = parts[0].shape
    joint_RTHD = parts[0].new_empty(num_rows, sum(sizes), num_heads, head_dim)
    cos, sin = (angles_TD.split(sizes) for angles_TD in rotation)
    outs = joint_RTHD.split(sizes, dim=1)
    for part, norm, cos_TD, sin_TD, out in zip(parts, norms, cos, sin, outs, strict=True):
        norm_rotary(part, norm.weight, cos_TD, sin_TD, out, eps=norm.eps)
    return joint_RTHD


def _shared(name: str, layers: Sequence[Any]) -> Tensor:
    """The layers' weights, or biases, as one tensor that has theirs as views."""
    joined = torch.cat([getattr(layer, name) for layer in layers])
    parts = joined.split([layer.out_features for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        setattr(layer, name, nn.Parameter(part, requires_grad=False))
    return joined


def _clipped(x_RTC: Tensor) -> Tensor:
    """Keep float16 finite, as diffusers does."""
    return x_RTC.clip(-_FLOAT16_MAX, _FLOAT16_MAX) if x_RTC.dtype is torch.float16 else x_RTC


def _is_held(layer: nn.Module) -> bool:
    return isinstance(layer, HeldLinear) and is_plain(layer, type(layer))


def _is_linear(layer: nn.Module) -> bool:
    return is_plain(layer, nn.Linear)


_KINDS: Mapping[type[nn.Module], Callable[[nn.Module], nn.Module]] = MappingProxyType(
    {
        flux.FluxTransformerBlock: _DoubleBlock,
        flux.FluxSingleTransformerBlock: _SingleBlock,
        of_diffusers.GELU: _Gelu,
    }
)
