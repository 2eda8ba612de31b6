"""The denoiser: two text encoders and a transformer, as FLUX combines them.

Owns its size and how it begins. Knows nothing of training.

Shapes: B pictures, T tokens, C channels, D of a hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from codec import LATENT_CHANNELS
from diffusers import FluxTransformer2DModel
from text import POOLED_SIZE, WORDS_SIZE, Readers
from torch import Tensor, nn

SHOWN_BLOCKS = (1, 2, 4)
"""Counted over both kinds: the blocks whose hidden states are shown to the aligner."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Heads of 64 channels, and blocks of both kinds."""

    num_heads: int = 4
    num_double: int = 2
    num_single: int = 6


class Model(nn.Module):
    """Text encoders and transformer, as FLUX combines them."""

    def __init__(self, embeddings: Tensor, size: ModelSize) -> None:
        super().__init__()
        self.readers = Readers(embeddings)
        self.transformer = FluxTransformer2DModel(
            in_channels=4 * LATENT_CHANNELS,
            num_layers=size.num_double,
            num_single_layers=size.num_single,
            attention_head_dim=64,
            num_attention_heads=size.num_heads,
            joint_attention_dim=WORDS_SIZE,
            pooled_projection_dim=POOLED_SIZE,
            guidance_embeds=False,
            axes_dims_rope=(16, 24, 24),
        )
        for name, parameter in self.transformer.named_parameters():
            if is_modulation(name) or name.startswith("proj_out."):
                nn.init.zeros_(parameter)

    def forward(self, noisy: Tensor, level: Tensor, ids: Tensor) -> Tensor:
        """Velocities `[B, T, C]` at noise levels `[B]` in 0..1."""
        return self.look(noisy, level, ids)[0]

    def look(self, noisy: Tensor, level: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        """Velocities `[B, T, C]`, and hidden states `[B, T, D]` of `SHOWN_BLOCKS`."""
        words, whole = self.readers(ids)
        return self.run(noisy, level, words, whole)

    def run(self, noisy: Tensor, level: Tensor, words: Tensor, whole: Tensor) -> tuple[Tensor, ...]:
        """The transformer as diffusers runs it, which does not show its hidden states."""
        flux = self.transformer
        side = round(noisy.shape[1] ** 0.5)
        places = noisy.new_zeros(side, side, 3)
        numbers = torch.arange(side, device=noisy.device)
        places[..., 1], places[..., 2] = numbers[:, None], numbers[None]
        beside = noisy.new_zeros(words.shape[1], 3)
        given = {
            "temb": flux.time_text_embed(level * 1000, whole),
            "image_rotary_emb": flux.pos_embed(torch.cat((beside, places.view(-1, 3)))),
        }
        hidden, words = flux.x_embedder(noisy), flux.context_embedder(words)
        blocks = (*flux.transformer_blocks, *flux.single_transformer_blocks)
        shown = []
        for number, block in enumerate(blocks):
            words, hidden = block(hidden, words, **given)
            if number in SHOWN_BLOCKS:
                shown.append(hidden)
        return flux.proj_out(flux.norm_out(hidden, given["temb"])), *shown


def is_modulation(name: str) -> bool:
    """Whether a parameter of the transformer belongs to a modulation by time and text."""
    return (".norm" in name and ".linear." in name) or name.startswith("norm_out.")
