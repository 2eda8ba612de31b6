"""Tiles of paged attention: the one table of the numbers that only a device can judge.

Owns how many queries and keys a program takes at a time, its warps and its loading stages, by the
kind of rows, the matrix units of the device, and the type and size of a head. Knows no kernel. To
measure other numbers, replace `TILES`: launches read it each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from triptych.core.runtime.kernels.triton.units import MatrixUnits, matrix_units

Rows = Literal["decode", "prefill"]
Heads = Literal["narrow", "wide", "widest", "float32", "latent", "latent_float32"]
"""Heads of 16 bits up to 128 values, up to 256 or wider ones, and all heads of float32; rows of
latents."""


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """`num_queries` (times heads; of prompts and latents only) against blocks of `num_keys` keys.

    Loads of keys are issued `num_stages - 1` blocks ahead.
    """

    num_queries: int
    num_keys: int
    num_warps: int
    num_stages: int


TILES: dict[tuple[Rows, MatrixUnits, Heads], AttentionTile] = {
    ("decode", "wgmma", "narrow"): AttentionTile(1, 64, 4, 3),
    ("decode", "wgmma", "wide"): AttentionTile(1, 32, 4, 3),
    ("decode", "wgmma", "float32"): AttentionTile(1, 16, 4, 3),
    ("prefill", "wgmma", "narrow"): AttentionTile(128, 64, 8, 3),
    ("prefill", "wgmma", "wide"): AttentionTile(64, 32, 8, 3),
    ("decode", "wgmma", "widest"): AttentionTile(1, 16, 4, 3),
    ("prefill", "wgmma", "widest"): AttentionTile(32, 16, 8, 2),
    ("prefill", "wgmma", "float32"): AttentionTile(32, 16, 8, 2),
    ("decode", "mma", "narrow"): AttentionTile(1, 64, 4, 3),
    ("decode", "mma", "wide"): AttentionTile(1, 32, 4, 3),
    ("decode", "mma", "float32"): AttentionTile(1, 16, 4, 3),
    ("prefill", "mma", "narrow"): AttentionTile(128, 32, 8, 3),
    ("prefill", "mma", "wide"): AttentionTile(64, 16, 8, 3),
    ("decode", "mma", "widest"): AttentionTile(1, 16, 4, 3),
    ("prefill", "mma", "widest"): AttentionTile(32, 16, 8, 2),
    ("prefill", "mma", "float32"): AttentionTile(32, 16, 8, 2),
    ("decode", "mfma", "narrow"): AttentionTile(1, 64, 4, 2),
    ("decode", "mfma", "wide"): AttentionTile(1, 32, 4, 2),
    ("decode", "mfma", "float32"): AttentionTile(1, 16, 4, 2),
    ("prefill", "mfma", "narrow"): AttentionTile(128, 32, 8, 2),
    ("prefill", "mfma", "wide"): AttentionTile(64, 32, 8, 2),
    ("decode", "mfma", "widest"): AttentionTile(1, 16, 4, 2),
    ("prefill", "mfma", "widest"): AttentionTile(32, 16, 8, 2),
    ("prefill", "mfma", "float32"): AttentionTile(32, 16, 8, 2),
    ("decode", "wgmma", "latent"): AttentionTile(16, 32, 4, 2),
    ("decode", "wgmma", "latent_float32"): AttentionTile(16, 16, 8, 2),
    ("prefill", "wgmma", "latent"): AttentionTile(32, 32, 8, 2),
    ("prefill", "wgmma", "latent_float32"): AttentionTile(16, 16, 8, 2),
    ("decode", "mma", "latent"): AttentionTile(16, 32, 4, 2),
    ("decode", "mma", "latent_float32"): AttentionTile(16, 16, 8, 1),
    ("prefill", "mma", "latent"): AttentionTile(32, 16, 8, 2),
    ("prefill", "mma", "latent_float32"): AttentionTile(16, 16, 8, 1),
    ("decode", "mfma", "latent"): AttentionTile(16, 32, 4, 2),
    ("decode", "mfma", "latent_float32"): AttentionTile(16, 16, 8, 1),
    ("prefill", "mfma", "latent"): AttentionTile(16, 32, 4, 2),
    ("prefill", "mfma", "latent_float32"): AttentionTile(16, 16, 8, 1),
}


def tile_on(device: torch.device, rows: Rows, head_dim: int, dtype: torch.dtype) -> AttentionTile:
    """Look up the tile of a launch."""
    return TILES[rows, _units_of(device), heads_of(head_dim, dtype)]


def latent_tile_on(device: torch.device, rows: Rows, dtype: torch.dtype) -> AttentionTile:
    """Look up the tile of a launch over latents."""
    return TILES[rows, _units_of(device), latents_of(dtype)]


def latents_of(dtype: torch.dtype) -> Heads:
    """Classify rows of latents by their type."""
    return "latent_float32" if dtype is torch.float32 else "latent"


def heads_of(head_dim: int, dtype: torch.dtype) -> Heads:
    """Classify heads by the registers that they take."""
    if dtype is torch.float32:  # matrix units would round them
        return "float32"
    return "narrow" if head_dim <= 128 else "wide" if head_dim <= 256 else "widest"


@cache
def _units_of(device: torch.device) -> MatrixUnits:
    if device.type != "cuda":
        return "wgmma"  # interpreted
    if torch.version.hip:
        return matrix_units("hip", torch.cuda.get_device_properties(device).gcnArchName)
    major, minor = torch.cuda.get_device_capability(device)
    return matrix_units("cuda", f"{major}{minor}")
