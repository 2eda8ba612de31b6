"""Parts without weights, from which the memory of generation can be estimated.

Owns the output shapes of text encoders, from their configuration. Modules of diffusers are built on
torch's meta device. Knows no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from triptych.modalities.diffusion.engine.loading.modules import (
    allocate,
    is_of_diffusers,
    sketch,
    transformers_config,
)

_META = torch.device("meta")
_POOLING = frozenset({"BertModel", "CLIPTextModel"})


def outline(kind: Any, config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """Build a part of this class from its config.json, in `dtype`. Raises `WeightsError`."""
    if not is_of_diffusers(kind):
        return TextOutline(kind, transformers_config(kind, config), dtype)
    module: nn.Module = sketch(kind, config)
    allocate(module, _META, dtype)
    return module


class TextOutline(nn.Module):
    """Stands in for a text encoder: its outputs have shapes but no values."""

    def __init__(self, kind: Any, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        text = config.get_text_config()
        self._width, self._num_layers = text.hidden_size, text.num_hidden_layers
        self._num_pooled = self._width if kind.__name__ in _POOLING else 0
        if kind.__name__.endswith("WithProjection"):
            self._num_pooled = config.projection_dim
        self._like = nn.Parameter(torch.empty(0, dtype=dtype, device=_META), requires_grad=False)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool = False,
        **image_inputs: Tensor,
    ) -> BaseModelOutputWithPooling:
        """Hidden states of tokens `[B, T]`, which include those of `image_inputs`."""
        hidden = self._like.new_empty(*input_ids.shape, self._width)
        pooled = self._like.new_empty(len(input_ids), self._num_pooled)
        return BaseModelOutputWithPooling(
            last_hidden_state=hidden,
            pooler_output=pooled if self._num_pooled else None,
            hidden_states=(hidden,) * (self._num_layers + 1) if output_hidden_states else None,
        )
