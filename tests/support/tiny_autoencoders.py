"""Tiny autoencoders of diffusers with random weights."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import nn


def randomized(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(len(list(module.parameters())))
    with torch.no_grad():
        for weight in module.parameters():
            scale = 0.3 if weight.ndim < 2 else weight[0].numel() ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    return module.eval()


def vae(shift: float | None = None, channels: int = 4, **extra: Any) -> nn.Module:
    return randomized(
        diffusers.AutoencoderKL(
            block_out_channels=(4, 4, 4, 4),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=channels,
            norm_num_groups=2,
            scaling_factor=0.4,
            shift_factor=shift,
            **extra,
        )
    )


def flux2_vae() -> nn.Module:
    module: Any = randomized(
        diffusers.AutoencoderKLFlux2(
            block_out_channels=(4, 4, 4, 4), latent_channels=4, norm_num_groups=2
        )
    )
    module.bn.running_mean.copy_(torch.linspace(-0.5, 0.5, 16))
    module.bn.running_var.copy_(torch.linspace(0.5, 2.0, 16))
    return module


def hunyuan_vae() -> nn.Module:
    return randomized(
        diffusers.AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            block_out_channels=(32, 32, 32),
            layers_per_block=1,
            spatial_compression_ratio=4,
            sample_size=64,
            scaling_factor=0.4,
        )
    )


def video_vae(kind: Any = diffusers.AutoencoderKLQwenImage, **extra: Any) -> nn.Module:
    config: dict[str, Any] = {
        "base_dim": 4,
        "z_dim": 4,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.1, -0.2, 0.3, 0.0],
        "latents_std": [1.0, 2.0, 0.5, 1.5],
    }
    return randomized(kind(**config | extra))


def alpha_vae() -> nn.Module:
    return randomized(
        diffusers.AutoencoderKLQwenImage21(
            base_dim=4,
            decoder_base_dim=6,
            z_dim=4,
            dim_mult=[1, 1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.0, 2.0, 0.5, 1.5],
        )
    )


def deep_vae() -> nn.Module:
    return randomized(
        diffusers.AutoencoderDC(
            latent_channels=4,
            attention_head_dim=2,
            encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"),
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            encoder_qkv_multiscales=((), (5,)),
            decoder_qkv_multiscales=((), (5,)),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            scaling_factor=0.4,
        )
    )
