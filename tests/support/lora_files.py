"""Tiny LoRA files with random weights, under the names that different programs give them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


def pair(layer: Any, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`down` and `up` for a linear or a convolution, as strong as its own weights."""
    kernel = layer.weight.shape[2:]
    down = torch.randn((rank, layer.weight.shape[1], *kernel), generator=generator)
    up = torch.randn((len(layer.weight), rank, *[1] * len(kernel)), generator=generator)
    return down * layer.weight[0].numel() ** -0.5, up * 0.3


def layers(module: nn.Module, *ends: str) -> list[str]:
    """Paths of the linear and convolution layers that end so."""
    return [
        path
        for path, layer in module.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d) and path.endswith(ends)
    ]


def peft_keys(
    part: str, module: nn.Module, paths: Sequence[str], *, rank: int = 4, seed: int = 0
) -> dict[str, Tensor]:
    """As diffusers saves an adapter: `transformer.a.b.lora_A.weight`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path in paths:
        down, up = pair(module.get_submodule(path), rank, generator)
        tensors |= {f"{part}.{path}.lora_A.weight": down, f"{part}.{path}.lora_B.weight": up}
    return tensors


def kohya_keys(
    prefix: str,
    module: nn.Module,
    paths: Sequence[str],
    *,
    rank: int = 4,
    alpha: float = 2.0,
    seed: int = 0,
) -> dict[str, Tensor]:
    """As kohya's scripts save one: `lora_unet_a_b.lora_down.weight`, with an alpha each."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path in paths:
        down, up = pair(module.get_submodule(path), rank, generator)
        name = f"{prefix}_{path.replace('.', '_')}"
        tensors |= {
            f"{name}.lora_down.weight": down,
            f"{name}.lora_up.weight": up,
            f"{name}.alpha": torch.tensor(alpha),
        }
    return tensors


def save_adapter(file: Path, tensors: dict[str, Tensor], **metadata: Any) -> Path:
    """The tensors as a safetensors file; `metadata` as diffusers keeps an adapter's."""
    packed = {"lora_adapter_metadata": json.dumps(metadata)} if metadata else {}
    save_file(tensors, file, metadata={"format": "pt", **packed})
    return file
