"""The codec: images to latents of an eighth of their size, and back.

Owns its size and how it begins. Knows nothing of training.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderDC
from torch import nn

LATENT_CHANNELS = 8


def new_codec() -> AutoencoderDC:
    """An untrained codec, whose blocks start as the identity, so the rest is nearly linear.

    The decoder is the larger part: it knows the drawings that latents remind it of.
    """
    codec = AutoencoderDC(
        latent_channels=LATENT_CHANNELS,
        encoder_block_out_channels=(16, 32, 64, 128),
        decoder_block_out_channels=(32, 64, 128, 256),
        encoder_layers_per_block=(0, 1, 2, 2),
        decoder_layers_per_block=(0, 2, 3, 4),
        encoder_qkv_multiscales=((),) * 4,
        decoder_qkv_multiscales=((),) * 4,
    )
    for name, parameter in codec.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.zeros_(parameter)
    return codec


def open_codec(folder: Path) -> AutoencoderDC:
    """The trained codec."""
    codec = new_codec()
    state = torch.load(folder / "codec.pt", weights_only=True, map_location="cpu")
    codec.load_state_dict(state["codec"])
    return codec.eval()
