"""Tiny image models on disk, in the layouts that people keep them in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fakes_pipelines import SCHEDULERS, components, their_pipeline

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
