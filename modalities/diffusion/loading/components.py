"""The parts of an image model, brought onto the device from a folder with model_index.json.

Owns which file becomes which part, and in what type. How a module is made and filled is
`modules.py`, which classes there may be `classes.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from triptych.core.config import ModelOptions
from triptych.core.weights.checkpoint import Checkpoint
from triptych.core.weights.layout import read_json
from triptych.core.weights.pipeline_index import naming, read_pipeline
from triptych.modalities.diffusion.loading.classes import class_of
from triptych.modalities.diffusion.loading.modules import (
    Report,
    open_diffusers_module,
    open_transformers_module,
)
from triptych.modalities.diffusion.loading.readers import open_reader

DtypeOf = Callable[[torch.dtype], torch.dtype]
"""From the type that weights are stored in to the one to hold and compute in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """A loaded image model: `pipeline` is the class that model_index.json names.

    `parts` are by their names there: modules in evaluation mode on the device, tokenizers, and as
    `scheduler` the mapping in its scheduler_config.json; beside them the file's plain facts, such
    as `is_distilled`. A part that the model leaves empty is absent.
    """

    pipeline: str
    parts: Mapping[str, Any]


def open_components(
    folder: str | Path,
    options: ModelOptions,
    *,
    device: torch.device,
    dtype: DtypeOf,
    report: Report,
) -> Components:
    """Load every part of the model in `folder`; `report` hears the share of bytes done, 0 to 1.

    Raises `WeightsError` naming part, file and tensor where anything is missing, damaged, of an
    unknown class, or left over. Nothing is loaded before every class is known.
    """
    index = read_pipeline(Path(folder))
    kinds = {name: class_of(part) for name, part in index.parts.items() if name != "scheduler"}
    sizes = component_bytes(folder, options, dtype=dtype)
    parts: dict[str, Any] = dict(index.facts)
    total = max(sum(sizes.values()), 1)
    done = 0
    for name, part in index.parts.items():
        place = Path(folder) / name
        with naming(name):
            if part.has_weights:
                progress = _share_of(report, done / total, sizes[name] / total)
                parts[name] = _open_module(kinds[name], place, device, dtype, progress)
                done += sizes[name]
            elif name == "scheduler":
                parts[name] = read_json(place / "scheduler_config.json")
            else:
                parts[name] = open_reader(kinds[name], place)
    return Components(pipeline=index.pipeline, parts=parts)


def component_bytes(folder: str | Path, options: ModelOptions, *, dtype: DtypeOf) -> dict[str, int]:
    """Bytes that each part with weights takes on the device, by its name. Reads headers alone."""
    sizes = {}
    for name, part in read_pipeline(Path(folder)).parts.items():
        if part.has_weights:
            with naming(name), Checkpoint.open(Path(folder) / name) as checkpoint:
                num_values = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
                sizes[name] = num_values * _held_in(checkpoint, dtype).itemsize
    return sizes


def _open_module(
    kind: Any, place: Path, device: torch.device, dtype: DtypeOf, report: Report
) -> Any:
    is_of_diffusers = kind.__module__.startswith("diffusers.")
    build = open_diffusers_module if is_of_diffusers else open_transformers_module
    with Checkpoint.open(place) as checkpoint:
        held = _held_in(checkpoint, dtype)
        return build(kind, checkpoint, device=device, dtype=held, report=report)


def _held_in(checkpoint: Checkpoint, dtype: DtypeOf) -> torch.dtype:
    """The type of a part; an autoencoder that overflows in float16 says so, and is spared it."""
    held = dtype(checkpoint.dtype)
    overflows = held is torch.float16 and checkpoint.config.get("force_upcast")
    return torch.float32 if overflows else held


def _share_of(report: Report, begin: float, length: float) -> Report:
    """Reports of a part as reports of the whole."""
    return lambda share: report(begin + length * share)
