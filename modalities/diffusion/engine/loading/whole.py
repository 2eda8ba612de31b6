"""Converts a whole checkpoint in one file to a folder in the hub's layout.

Owns the split into parts. Configurations and tokenizers, which such files lack, are those of the
base model, which diffusers infers from tensor shapes.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from diffusers.loaders.single_file_utils import (
    DIFFUSERS_DEFAULT_PIPELINE_PATHS,
    infer_diffusers_model_type,
)
from safetensors.torch import save_file

from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.weights.hub import download_snapshot
from triptych.core.weights.layout import read_header
from triptych.core.weights.pipeline_index import (
    PIPELINE_INDEX,
    PipelineComponent,
    prefix_errors,
    read_pipeline,
)
from triptych.modalities.diffusion.engine.loading.classes import class_of
from triptych.modalities.diffusion.engine.loading.modules import (
    is_of_diffusers,
    sketch,
    transformers_config,
)
from triptych.modalities.diffusion.engine.loading.originals import (
    in_diffusers_names,
    text_in_transformers_names,
)
from triptych.modalities.diffusion.engine.loading.weights import Weights, open_weights

_CONFIGS = (PIPELINE_INDEX, "*/*.json", "*/*.txt", "*/*.model")


def split_checkpoint(file: Path, folder: Path, options: ModelOptions) -> None:
    """Write the parts in `file` into `folder`. Raises `WeightsError` naming what is missing."""
    kind = infer_diffusers_model_type(read_header(file))
    repository = DIFFUSERS_DEFAULT_PIPELINE_PATHS[kind]["pretrained_model_name_or_path"]
    base = download_snapshot(repository, replace(options, revision=""), _CONFIGS)
    shutil.copyfile(base / PIPELINE_INDEX, folder / PIPELINE_INDEX)
    for part in read_pipeline(base).parts.values():
        (folder / part.name).mkdir()
        for small in sorted((base / part.name).iterdir()):
            if small.suffix in (".json", ".txt", ".model") and ".index." not in small.name:
                shutil.copyfile(small, folder / part.name / small.name)
        if part.has_weights:
            with prefix_errors(part.name), open_weights(base / part.name, file) as weights:
                _write(part, weights, file, folder / part.name)


def _write(part: PipelineComponent, weights: Weights, file: Path, folder: Path) -> None:
    try:
        found, stem = _convert_part(part, weights)
    except WeightsError as error:
        raise WeightsError(
            f"{file.name} does not hold a whole model ({error.message}) Give its base model as"
            f" --model, and the file as --model-override PART.weight_path={file.name}."
        ) from error
    tensors = {name: _unshared(found.read(name)) for name in list(found.tensors)}
    save_file(tensors, folder / f"{stem}.safetensors", metadata={"format": "pt"})


def _convert_part(part: PipelineComponent, weights: Weights) -> tuple[Weights, str]:
    """The part's tensors under its own names, and the stem of its file name."""
    kind = class_of(part)
    if is_of_diffusers(kind):
        module = sketch(kind, weights.config)
        found = in_diffusers_names(module, weights)
        lacking = module.state_dict().keys() - found.tensors.keys()
        stem = "diffusion_pytorch_model"
    else:
        found = text_in_transformers_names(transformers_config(kind, weights.config), weights)
        lacking = {part.name} if found is weights else set()
        stem = "model"
    if lacking:
        raise WeightsError(f"it has no {min(lacking)}.")
    return found, stem


def _unshared(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its own memory, which a slice shares with another tensor."""
    is_alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_alone else tensor.clone(memory_format=torch.contiguous_format)
