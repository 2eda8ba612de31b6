"""How a tiny model is described, and settings that several share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

TEXT, WIDTH = 5, 16  # tokens of a prompt, and their width


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """`rows`: shapes of a row's tensors; integer tensors and constants in `fixed`."""

    config: Mapping[str, Any]
    sample: tuple[int, ...]
    rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Tensor] = field(default_factory=dict)
    shared: Callable[[], Mapping[str, Any]] = dict


def ids(height: int, width: int, axes: int = 3) -> Tensor:
    grid = torch.zeros(height, width, axes)
    grid[..., axes - 2] = torch.arange(height)[:, None]
    grid[..., axes - 1] = torch.arange(width)[None]
    return grid.view(-1, axes)


HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
PROMPT = {"encoder_hidden_states": (TEXT, WIDTH)}
PACKED = {**HEADS, "in_channels": 4, "num_layers": 2, "num_single_layers": 2}
PACKED |= {"joint_attention_dim": WIDTH, "axes_dims_rope": [2, 2, 4]}
MASK = torch.ones(TEXT, dtype=torch.long)
WAN = {
    **HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": WIDTH,
    "freq_dim": 16,
    "ffn_dim": 24,
    "num_layers": 3,
    "rope_max_seq_len": 32,
}


def flux_ids(axes: int = 3) -> dict[str, Tensor]:
    return {"img_ids": ids(4, 4, axes), "txt_ids": torch.zeros(TEXT, axes)}
