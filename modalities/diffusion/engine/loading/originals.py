"""Converts weights from a model's published names to those of diffusers and transformers.

Owns the choice of conversion. Denoisers and autoencoders use diffusers' conversions, which are
functions from tensors to tensors; text encoders are found in whole checkpoints by prefix.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint
from torch import Tensor

from triptych.core.errors import WeightsError
from triptych.core.weights.library_errors import library_errors
from triptych.modalities.diffusion.engine.loading.weights import (
    HeldWeights,
    Weights,
    read_rows,
)

_UNPROJECTED = (
    "text_encoders.clip_l.transformer."  # SD3 uses the pooled vector without a projection
)
_OPEN_CLIPS = ("cond_stage_model.model.", "conditioner.embedders.1.model.")  # SD 2, SDXL's second
_TEXT_PREFIXES = (
    "cond_stage_model.transformer.",  # SD 1
    "conditioner.embedders.0.transformer.",  # SDXL's first
    _UNPROJECTED,
    "text_encoders.clip_g.transformer.",
    "text_encoders.t5xxl.transformer.",
    *_OPEN_CLIPS,
)


def in_diffusers_names(module: Any, weights: Weights) -> Weights:
    """The weights under the names of `module`, a sketch. Raises `WeightsError` if unknown."""
    kind = type(module).__name__
    known = SINGLE_FILE_LOADABLE_CLASSES.get(kind)
    if known is None:
        raise WeightsError(f"{_file(weights)} has tensor names unknown for {kind}.")
    tensors = {name: read_rows(weights, name) for name in weights.tensors}
    convert = known["checkpoint_mapping_fn"]
    problem = f"{_file(weights)} holds no known {kind}"
    with library_errors(problem):
        converted = convert(checkpoint=tensors, config=dict(module.config))
    if not converted:
        raise WeightsError(f"{problem}.")
    return HeldWeights(converted, weights)


def text_in_transformers_names(config: Any, weights: Weights) -> Weights:
    """A text encoder's weights from a whole checkpoint; those of a separate file unchanged."""
    names = weights.tensors
    width = getattr(config, "hidden_size", None) or config.d_model
    for prefix in _TEXT_PREFIXES:
        own = [name for name in names if name.startswith(prefix)]
        if own and _width(weights, own) == width:
            tensors = {name: read_rows(weights, name) for name in own}
            return HeldWeights(_converted_text(config, prefix, tensors), weights)
    return weights


def _converted_text(config: Any, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if prefix in _OPEN_CLIPS:
        holder = SimpleNamespace(config=config)
        return dict(convert_open_clip_checkpoint(holder, tensors, prefix=prefix))
    named = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if prefix == _UNPROJECTED:
        named.setdefault("text_projection.weight", torch.eye(config.hidden_size))
    return named


def _width(weights: Weights, names: list[str]) -> int:
    """The width of embeddings, from the token table."""
    tables = [n for n in names if n.endswith(("token_embedding.weight", "shared.weight"))]
    return weights.tensors[tables[0]].shape[-1] if tables else 0


def _file(weights: Weights) -> str:
    return next((info.file for info in weights.tensors.values()), "The file")
