"""The transformer's arithmetic in forms that compile to fast code on CPUs, for training.

Owns them and their exchange. They compute what diffusers' own do, on the same parameters, so that
nothing of them is in an exported model.

Shapes: B images, S tokens, H heads, D channels of a head.
"""

from __future__ import annotations

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn
from torch.nn import functional


def use_cpu_forms(transformer: FluxTransformer2DModel) -> None:
    """Exchange activations and attention of all blocks."""
    for block in transformer.transformer_blocks:
        for layers in (block.ff, block.ff_context):
            layers.net[0].gelu = gelu
        block.attn.set_processor(Attention(block.attn.head_dim))
    for block in transformer.single_transformer_blocks:
        block.act_mlp = _Gelu()
        block.attn.set_processor(Attention(block.attn.head_dim))


def gelu(values: Tensor) -> Tensor:
    """GELU in its approximation by tanh (arXiv:1606.08415), for any shape.

    As a sigmoid, since (1 + tanh y) / 2 is one of 2 y, it costs a third.
    """
    wide = values.float()
    inner = wide * (1 + 0.044715 * wide * wide)
    return (wide * torch.sigmoid(1.5957691216057308 * inner)).to(values.dtype)


class _Gelu(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return gelu(values)


class Attention:
    """FLUX's attention, whose rotation of pairs is a product with a matrix.

    Code that takes every second value runs one value at a time.
    """

    def __init__(self, head_size: int) -> None:
        quarter = torch.tensor(((0.0, 1.0), (-1.0, 0.0)))
        self._quarter_turn = torch.block_diag(*[quarter] * (head_size // 2))

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The states of the image `[B, S, H D]`, and of the words if they have layers of their own.

        Without such layers `hidden_states` are those of the words, then those of the image.
        """
        assert attention_mask is None
        assert image_rotary_emb is not None
        query, key, value = (
            _heads(layer(hidden_states), attn) for layer in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = attn.norm_q(query), attn.norm_k(key)
        words = encoder_hidden_states
        if words is not None:
            said = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            said_query, said_key, said_value = (_heads(layer(words), attn) for layer in said)
            query = torch.cat((attn.norm_added_q(said_query), query), 1)
            key = torch.cat((attn.norm_added_k(said_key), key), 1)
            value = torch.cat((said_value, value), 1)
        turned = (*(self._turned(part, image_rotary_emb) for part in (query, key)), value)
        found = functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in turned))
        states: Tensor = found.transpose(1, 2).flatten(2)
        if words is None:
            return states
        length = words.shape[1]
        return attn.to_out[0](states[:, length:]), attn.to_add_out(states[:, :length])

    def _turned(self, states_BSHD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Pairs of channels turned by the angles of cosines and sines `[S, D]`."""
        cosine, sine = (part[None, :, None] for part in rotary)
        across = states_BSHD @ self._quarter_turn.to(states_BSHD.dtype)
        turned = states_BSHD.float() * cosine + across.float() * sine
        return turned.to(states_BSHD.dtype)


def _heads(states: Tensor, attn: nn.Module) -> Tensor:
    return states.unflatten(-1, (-1, attn.head_dim))
