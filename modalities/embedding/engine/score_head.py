"""The head of a cross-encoder of our own families: from a pair's state to a score."""

from __future__ import annotations

import torch
from torch import nn

from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.loading import load_tensors
from triptych.modalities.embedding.architecture import EncoderSizes
from triptych.modalities.embedding.engine.packed_texts import layer_targets
from triptych.modalities.embedding.engine.runner import PROJECTIONS


def load_score_head(checkpoint: Checkpoint, sizes: EncoderSizes, device: torch.device) -> nn.Module:
    """A cross-encoder's projections from a pair's state to a score, in float32."""
    names, hidden = sizes.names, sizes.hidden_size
    dense = nn.Linear(hidden, hidden, bias=sizes.has_score_bias, device=device)
    output = nn.Linear(hidden, 1, device=device)
    named: list[tuple[str, nn.Linear | nn.LayerNorm]] = [(names.score_dense, dense)]
    layers: list[nn.Module] = [dense, PROJECTIONS[sizes.score_activation]()]
    if names.score_norm:
        norm = nn.LayerNorm(hidden, sizes.norm_eps, bias=sizes.has_norm_bias, device=device)
        named.append((names.score_norm, norm))
        layers.append(norm)
    named.append((names.score_output, output))
    targets = [target for name, layer in named for target in layer_targets(name, layer)]
    load_tensors(checkpoint, targets, ignored=lambda name: True)
    return nn.Sequential(*layers, output).requires_grad_(False)
