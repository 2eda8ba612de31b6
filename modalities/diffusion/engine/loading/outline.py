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
LIVE_WIDTHS = 24
"""Live widths per token in a block: heads, MLP, both residuals."""
_MATERIALIZE_SCORES = frozenset({"t5", "umt5"})
_NUM_SCORES = 3  # with the bias of positions, before and after the softmax
_POOLING = frozenset({"BertModel", "CLIPTextModel"})


def outline(kind: Any, config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """Build a part of this class from its config.json, in `dtype`. Raises `WeightsError`."""
    if not is_of_diffusers(kind):
        return TextOutline(kind, transformers_config(kind, config), dtype)
    module: nn.Module = sketch(kind, config)
    allocate(module, _META, dtype)
    return module


class TextOutline(nn.Module):
    """Stands in for a text encoder: its outputs have shapes but no values.

    `live_bytes`: an estimate, on the large side, of the activations of its latest run.
    """

    live_bytes = 0

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
        self.live_bytes = self._bytes_of_run(
            input_ids, image_inputs, num_kept=self._num_layers + 1 if output_hidden_states else 1
        )
        hidden = self._like.new_empty(*input_ids.shape, self._width)
        pooled = self._like.new_empty(len(input_ids), self._num_pooled)
        return BaseModelOutputWithPooling(
            last_hidden_state=hidden,
            pooler_output=pooled if self._num_pooled else None,
            hidden_states=(hidden,) * (self._num_layers + 1) if output_hidden_states else None,
        )

    def _bytes_of_run(
        self, input_ids: Tensor, image_inputs: Mapping[str, Tensor], *, num_kept: int
    ) -> int:
        """Bytes of the widths that a layer holds at once, of kept hidden states, and of scores."""
        num_widths = input_ids.numel() * self._width * (LIVE_WIDTHS + num_kept)
        if (patches := image_inputs.get("pixel_values")) is not None:
            num_widths += len(patches) * self.config.vision_config.hidden_size * LIVE_WIDTHS
        num_bytes = num_widths * self._like.dtype.itemsize
        if self.config.model_type in _MATERIALIZE_SCORES:
            num_scores = self.config.num_heads * input_ids.numel() * input_ids.shape[-1]
            num_bytes += _NUM_SCORES * num_scores * torch.float32.itemsize
        return int(num_bytes)
