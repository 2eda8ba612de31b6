"""Latents as the autoencoder has them, as the model has them, and as a picture.

Legend: C channels, H height, W width of the latents; T tokens of 2 x 2 latents each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def pack(latents_CHW: Tensor) -> Tensor:
    """Patches of 2 x 2 as tokens, `[T, 4 C]`: FLUX, Chroma, Qwen-Image."""
    channels, height, width = latents_CHW.shape
    patches = latents_CHW.view(channels, height // 2, 2, width // 2, 2)
    return patches.permute(1, 3, 0, 2, 4).reshape(-1, 4 * channels)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `pack`, to `[C, height, width]`."""
    patches = tokens.view(height // 2, width // 2, -1, 2, 2)
    latents: Tensor = patches.permute(2, 0, 3, 1, 4).reshape(-1, height, width)
    return latents


def position_ids(height: int, width: int) -> Tensor:
    """FLUX's `(0, row, column)` of each token, `[T, 3]`, for latents of this size."""
    ids = torch.zeros(height // 2, width // 2, 3)
    ids[..., 1] = torch.arange(height // 2)[:, None]
    ids[..., 2] = torch.arange(width // 2)[None]
    return ids.view(-1, 3)


@torch.no_grad()
def decode_latents(vae: Any, latents_CHW: Tensor) -> Tensor:
    """The picture, `[3, height, width]` in 0..1, float32.

    Latents are put back on the autoencoder's own scale first, by channel where it says so.
    """
    weight = next(vae.parameters())
    latents = latents_CHW[None].to(weight.device, weight.dtype)
    config = vae.config
    mean, deviation = config.get("latents_mean"), config.get("latents_std")
    scale = config.get("scaling_factor") or 1.0
    if mean is not None and deviation is not None:
        per_channel = (1, -1, 1, 1)
        latents = latents / scale * latents.new_tensor(deviation).view(per_channel)
        latents = latents + latents.new_tensor(mean).view(per_channel)
    else:
        latents = latents / scale + (config.get("shift_factor") or 0.0)
    if "temperal_downsample" in config:  # a video autoencoder: one frame in, one frame out
        picture: Tensor = vae.decode(latents.unsqueeze(2), return_dict=False)[0][0, :, 0]
    else:
        picture = vae.decode(latents, return_dict=False)[0][0]
    return (picture.float() / 2 + 0.5).clamp(0, 1)


def downscale_of(vae: Any) -> int:
    """How many pixels a side one latent stands for."""
    config = vae.config
    if "temperal_downsample" in config:
        return int(2 ** len(config["temperal_downsample"]))
    channels = config.get("encoder_block_out_channels") or config["block_out_channels"]
    return int(2 ** (len(channels) - 1))
