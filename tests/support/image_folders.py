"""Tiny image models on disk, in the layouts that people keep them in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from support.diffusers_pipelines import SCHEDULERS, components, their_pipeline

FLUX = "FluxPipeline"


def save_pipeline(folder: Path, name: str = FLUX) -> dict[str, Any]:
    """The folder that diffusers' own `save_pretrained` makes; returns the parts it was made of."""
    torch.manual_seed(0)
    parts = components(name)
    their_pipeline(name, parts, SCHEDULERS[name][0]).save_pretrained(folder)
    return parts


def keep(dtype: torch.dtype) -> torch.dtype:
    """A device that is good at every type."""
    return dtype


def states_equal(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], tensor) for name, tensor in theirs.items()
    )


def ldm_checkpoint(parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The parts of an SD 1.5 in one file, under the names it was published with."""
    text = {
        f"cond_stage_model.transformer.text_model.{name}": tensor
        for name, tensor in parts["text_encoder"].state_dict().items()
    }
    unet = {
        f"model.diffusion_model.{_ldm_unet_name(parts['unet'], name)}": tensor
        for name, tensor in parts["unet"].state_dict().items()
    }
    vae = {
        f"first_stage_model.{_ldm_vae_name(parts['vae'], name)}": _as_kernel(name, tensor)
        for name, tensor in parts["vae"].state_dict().items()
    }
    found = {**text, **unet, **vae, "model_ema.num_updates": torch.ones(1)}
    return {name: tensor.contiguous() for name, tensor in found.items()}


_RENAMED = {
    "conv_in.": "input_blocks.0.0.",
    "conv_norm_out.": "out.0.",
    "conv_out.": "out.2.",
    "time_embedding.linear_1.": "time_embed.0.",
    "time_embedding.linear_2.": "time_embed.2.",
}
_IN_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.+)")


def _ldm_unet_name(unet: Any, name: str) -> str:  # noqa: PLR0911 - a case each
    for ours, theirs in _RENAMED.items():
        if name.startswith(ours):
            return name.replace(ours, theirs)
    if name.startswith("mid_block"):
        _, kind, index, rest = name.split(".", 3)
        if kind == "attentions":
            return f"middle_block.1.{rest}"
        return f"middle_block.{2 * int(index)}.{_in_resnet(rest)}"
    match = _BLOCK.fullmatch(name)
    assert match
    way, block, kind, layer, rest = match.groups()
    num_layers = unet.config.layers_per_block + (way == "up")
    per_block = num_layers + (way == "down")
    if kind.endswith("samplers"):
        layer = str(num_layers - (way == "up"))
    index = int(block) * per_block + int(layer) + (way == "down")
    where = f"{'input' if way == 'down' else 'output'}_blocks.{index}"
    match kind:
        case "resnets":
            return f"{where}.0.{_in_resnet(rest)}"
        case "attentions":
            return f"{where}.1.{rest}"
        case "downsamplers":
            return f"{where}.0.op.{rest.removeprefix('conv.')}"
    has_attention = hasattr(unet.up_blocks[int(block)], "attentions")
    return f"{where}.{2 if has_attention else 1}.{rest}"


def _in_resnet(rest: str) -> str:
    layer, end = rest.split(".", 1)
    return f"{_IN_RESNET[layer]}.{end}"


_IN_VAE = (
    ("conv_norm_out", "norm_out"),
    ("conv_shortcut", "nin_shortcut"),
    ("mid_block.attentions.0", "mid.attn_1"),
    ("mid_block.resnets.0", "mid.block_1"),
    ("mid_block.resnets.1", "mid.block_2"),
    ("group_norm", "norm"),
    ("to_q", "q"),
    ("to_k", "k"),
    ("to_v", "v"),
    ("to_out.0", "proj_out"),
)


def _ldm_vae_name(vae: Any, name: str) -> str:
    for ours, theirs in _IN_VAE:
        name = name.replace(ours, theirs)
    last = len(vae.config.up_block_types) - 1
    name = re.sub(r"up_blocks\.(\d+)", lambda m: f"up.{last - int(m[1])}", name)
    name = name.replace("down_blocks", "down").replace("resnets", "block")
    return re.sub(r"(down|up)samplers\.0", r"\1sample", name)


def _as_kernel(name: str, tensor: torch.Tensor) -> torch.Tensor:
    is_projection = ".attentions." in name and "norm" not in name and name.endswith("weight")
    return tensor[:, :, None, None] if is_projection else tensor
