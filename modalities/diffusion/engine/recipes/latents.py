"""Conversion of latents between the autoencoder's layout, the model's layout, and images.

Legend: C channels, H height, W width of the latents; T tokens of 2 x 2 latents each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d, interpolate

from triptych.core.engine_api.pixels import Pixels
from triptych.core.runtime.devices.transfer import to_device, to_device_like
from triptych.modalities.diffusion.wire import ImageRequest


def pack(latents_CHW: Tensor) -> Tensor:
    """Pack patches of 2 x 2 into tokens, `[T, 4 C]`: FLUX, Chroma, Qwen-Image."""
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


def image_tensor(pixels: Pixels) -> Tensor:
    """Convert a wire image to `[3, H, W]` in 0..1."""
    rows = torch.frombuffer(bytearray(pixels.rgb), dtype=torch.uint8)
    return rows.view(pixels.height, pixels.width, 3).permute(2, 0, 1).float() / 255


def mask_tensor(request: ImageRequest) -> Tensor:
    """The request's mask, `[1, H, W]`: 1 where the first image may change."""
    first = request.sources[0]
    rows = torch.frombuffer(bytearray(request.mask), dtype=torch.uint8)
    return rows.view(1, first.height, first.width).float() / 255


def cell_mask(mask_1HW: Tensor, height: int, width: int, mode: str = "nearest") -> Tensor:
    """Scale a mask to a grid of cells, `[1, height, width]`, 1 where a cell may change.

    Scaled as in diffusers. A mask too small to mark any cell marks the cells it touches.
    """
    whole = (mask_1HW >= 0.5).float()[None]
    cells = interpolate(whole, size=(height, width), mode=mode)
    return torch.where(cells.any(), cells, adaptive_max_pool2d(whole, (height, width)))[0]


def resize(image_CHW: Tensor, height: int, width: int) -> Tensor:
    """Resize an image in 0..1, without keeping its aspect."""
    if image_CHW.shape[1:] == (height, width):
        return image_CHW
    resized = interpolate(image_CHW[None], (height, width), mode="bicubic", antialias=True)
    return resized[0].clamp(0, 1)


@torch.no_grad()
def decode_latents(vae: Any, latents_NCHW: Tensor) -> Tensor:
    """Decode latents to images of one size, `[N, 3 or 4, height, width]` in 0..1, float32."""
    latents = latents_NCHW.to(_like(vae))
    offset, factor = _scales(vae.config, latents)
    latents = latents / factor + offset
    if _is_video(vae):  # one frame in, one frame out
        images: Tensor = vae.decode(latents.unsqueeze(2), return_dict=False)[0][:, :, 0]
    else:
        images = vae.decode(latents, return_dict=False)[0]
    return (images.float() / 2 + 0.5).clamp(0, 1)


@torch.no_grad()
def encode_image(vae: Any, image_3HW: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Encode an image in 0..1 to latents on the model's scale, `[C, height, width]`, float32.

    An autoencoder of four channels gets it as opaque.

    Sampled with `generator` from the autoencoder's distribution, or its mode without one. The
    image's sides must be multiples of the autoencoder's downscaling.
    """
    if has_alpha(vae.config):
        image_3HW = torch.cat([image_3HW, torch.ones_like(image_3HW[:1])])
    pixels = to_device_like((image_3HW * 2 - 1)[None], _like(vae))
    encoded = vae.encode(pixels.unsqueeze(2) if _is_video(vae) else pixels)
    if hasattr(encoded, "latent_dist"):
        found = encoded.latent_dist
        latents = found.mode() if generator is None else _sample(found, generator)
    else:
        latents = encoded.latent
    if _is_video(vae):
        latents = latents[:, :, 0]
    offset, factor = _scales(vae.config, latents)
    result: Tensor = ((latents - offset) * factor)[0].float()
    return result


def has_alpha(config: Any) -> bool:
    """Whether an autoencoder of this configuration takes and makes images with an alpha channel."""
    return 4 in (config.get("in_channels"), config.get("input_channels"))


def _sample(found: Any, generator: torch.Generator) -> Tensor:
    """Sample as the distribution's own `sample` does, without waiting for the device."""
    like: Tensor = found.mean
    noise = torch.randn(like.shape, generator=generator, dtype=like.dtype)
    sampled: Tensor = like + found.std * to_device(noise, like.device)
    return sampled


def _scales(config: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """The offset and factor of latents, per channel if configured."""
    mean, deviation = config.get("latents_mean"), config.get("latents_std")
    if mean is None or deviation is None:
        mean, deviation = [config.get("shift_factor") or 0.0], [1.0]
    by_channel = (1, -1, 1, 1)
    scale = config.get("scaling_factor") or 1.0
    offset, spread = (
        to_device(torch.tensor(values, dtype=like.dtype), like.device).view(by_channel)
        for values in (mean, deviation)
    )
    return offset, scale / spread


def _is_video(vae: Any) -> bool:
    return "temperal_downsample" in vae.config


def _like(vae: Any) -> Tensor:
    weight: Tensor = next(vae.parameters())
    return weight
