"""The denoiser: two text encoders and a transformer, as FLUX combines them.

Owns its size and how it begins. Knows nothing of training.

Shapes: B pictures, T tokens, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from codec_training import LATENT_CHANNELS
from diffusers import FluxTransformer2DModel
from text import POOLED_SIZE, WORDS_SIZE, Readers
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Heads of 64 channels, and blocks of both kinds."""

    num_heads: int = 4
    num_double: int = 2
    num_single: int = 8


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
        words, whole = self.readers(ids)
        side = round(noisy.shape[1] ** 0.5)
        places = noisy.new_zeros(side, side, 3)
        places[..., 1] = torch.arange(side)[:, None]
        places[..., 2] = torch.arange(side)[None]
        velocity: Tensor = self.transformer(
            noisy,
            encoder_hidden_states=words,
            pooled_projections=whole,
            timestep=level,
            img_ids=places.view(-1, 3),
            txt_ids=noisy.new_zeros(ids.shape[1], 3),
            return_dict=False,
        )[0]
        return velocity


def is_modulation(name: str) -> bool:
    """Whether a parameter of the transformer belongs to a modulation by time and text."""
    return (".norm" in name and ".linear." in name) or name.startswith("norm_out.")
