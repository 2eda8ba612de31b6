"""ModernBERT: rotary positions, gated projections, and windows in most layers.

Owns the network. Warner et al. 2024, arXiv:2412.13663; rotary positions after Su et al. 2021.

Shape suffixes: those of `packed_texts`; W keys that a block of queries attends to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.loading import TensorTarget
from triptych.modalities.embedding.architecture import EncoderSizes, LayerWindow
from triptych.modalities.embedding.engine.packed_texts import (
    ACTIVATION_FUNCTIONS,
    Bools,
    Int64s,
    PackedEncoder,
    TextGroup,
    grouped_attention,
    layer_targets,
)

_BLOCK: Final = 256
"""Queries per block in windowed attention, which share a mask."""


class _Rotation:
    """Rotary positions of the texts of a step."""

    def __init__(self, head_dim: int, device: torch.device) -> None:
        self._halves = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
        self._made: dict[tuple[float, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, heads_GHSD: Tensor, theta: float) -> Tensor:
        """Rotate queries or keys by their positions."""
        key = theta, heads_GHSD.shape[2]
        if key not in self._made:
            steps_S = torch.arange(key[1], device=self._halves.device, dtype=torch.float32)
            angles_SD = (steps_S[:, None] * (1.0 / theta**self._halves)).repeat(1, 2)
            dtype = heads_GHSD.dtype
            self._made[key] = angles_SD.cos().to(dtype), angles_SD.sin().to(dtype)
        cos_SD, sin_SD = self._made[key]
        plain = heads_GHSD.float()
        first, second = plain.chunk(2, dim=-1)
        turned = plain * cos_SD + torch.cat((-second, first), dim=-1) * sin_SD
        return turned.to(heads_GHSD.dtype)


class RotaryLayer(nn.Module):
    """Attention and a gated projection, both with pre-normalization and a residual."""

    def __init__(self, sizes: EncoderSizes, reach: LayerWindow, *, is_first: bool) -> None:
        super().__init__()
        hidden, inner = sizes.hidden_size, sizes.intermediate_size
        norm_bias, mlp_bias = sizes.has_norm_bias, sizes.has_mlp_bias
        self.num_heads = sizes.num_heads
        self.reach = reach
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=sizes.has_attention_bias)
        self.output = nn.Linear(hidden, hidden, bias=sizes.has_attention_bias)
        self.attention_norm: nn.LayerNorm | None = (
            None  # the first layer uses the norm of the embeddings
        )
        if not is_first:
            self.attention_norm = nn.LayerNorm(hidden, sizes.norm_eps, bias=norm_bias)
        self.mlp_norm = nn.LayerNorm(hidden, sizes.norm_eps, bias=norm_bias)
        self.up = nn.Linear(hidden, 2 * inner, bias=mlp_bias)
        self.down = nn.Linear(inner, hidden, bias=mlp_bias)
        self.activation = ACTIVATION_FUNCTIONS[sizes.activation]

    def forward(self, hidden_TC: Tensor, groups: Sequence[TextGroup], turn: _Rotation) -> Tensor:
        """The states after this layer, `[T, C]`."""

        def weigh(query: Tensor, key: Tensor, value: Tensor, group: TextGroup) -> Tensor:
            theta = self.reach.theta
            return self._weigh(turn(query, theta), turn(key, theta), value, group.mask_G11S)

        normed_TC = hidden_TC if self.attention_norm is None else self.attention_norm(hidden_TC)
        qkv_THD = self.qkv(normed_TC).unflatten(-1, (3 * self.num_heads, -1))
        hidden_TC = hidden_TC + self.output(grouped_attention(qkv_THD, groups, weigh))
        inner_TE, gate_TE = self.up(self.mlp_norm(hidden_TC)).chunk(2, dim=-1)
        added_TC: Tensor = self.down(self.activation(inner_TE) * gate_TE)
        return hidden_TC + added_TC

    def _weigh(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention, in blocks of queries with the keys in reach if the layer has a window."""
        length, window = query.shape[2], self.reach.window
        if not window or length <= window + 1:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        found = []
        for start in range(0, length, _BLOCK):
            end = min(start + _BLOCK, length)
            first, last = max(0, start - window), min(length, end + window)
            near = _window_mask(start, end, first, last, window, query)
            found.append(
                F.scaled_dot_product_attention(
                    query[:, :, start:end],
                    key[:, :, first:last],
                    value[:, :, first:last],
                    attn_mask=near if mask is None else near + mask[..., first:last],
                )
            )
        return torch.cat(found, dim=2)


def _window_mask(start: int, end: int, first: int, last: int, window: int, like: Tensor) -> Tensor:
    """The mask of queries `start` to `end` on keys `first` to `last` for a window, `[S, W]`."""
    queries = torch.arange(start, end, device=like.device)
    keys = torch.arange(first, last, device=like.device)
    is_far = (queries[:, None] - keys[None]).abs() > window
    return torch.zeros(is_far.shape, dtype=like.dtype, device=like.device).masked_fill_(
        is_far, -math.inf
    )


class RotaryEncoder(PackedEncoder):
    """Implements `PackedEncoder` for ModernBERT."""

    def __init__(self, sizes: EncoderSizes, *, max_padding: float = 1.0) -> None:
        super().__init__(sizes, max_padding=max_padding)
        self.layers = nn.ModuleList(
            RotaryLayer(sizes, reach, is_first=not number)
            for number, reach in enumerate(sizes.layer_windows)
        )
        self.final_norm = nn.LayerNorm(sizes.hidden_size, sizes.norm_eps, bias=sizes.has_norm_bias)

    def embed(self, ids_T: Int64s, places_T: Int64s, is_second_T: Bools) -> Tensor:
        """Normed word embeddings; there are no segments."""
        normed: Tensor = self.norm(self.words(self.sent(ids_T)))
        return normed

    def run(self, hidden_TC: Tensor, groups: Sequence[TextGroup]) -> Tensor:
        """The states after the last layer, normed."""
        turn = _Rotation(self.sizes.hidden_size // self.sizes.num_heads, hidden_TC.device)
        for layer in self.layers:
            hidden_TC = layer(hidden_TC, groups, turn)
        normed: Tensor = self.final_norm(hidden_TC)
        return normed

    def targets(self, checkpoint: Checkpoint) -> Iterator[TensorTarget]:
        """The parameters to fill from a checkpoint's tensors."""
        prefix = self.prefix_of(checkpoint)
        names = self.sizes.names
        yield TensorTarget(f"{prefix}embeddings.tok_embeddings.weight", self.words.weight)
        yield from layer_targets(f"{prefix}embeddings.norm", self.norm)
        yield from layer_targets(f"{prefix}final_norm", self.final_norm)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, RotaryLayer)
            place = f"{prefix}{names.layer.format(number)}."
            if layer.attention_norm is not None:
                yield from layer_targets(f"{place}attn_norm", layer.attention_norm)
            yield from layer_targets(f"{place}{names.query}", layer.qkv)
            yield from layer_targets(f"{place}{names.output}", layer.output)
            yield from layer_targets(f"{place}{names.output_norm}", layer.mlp_norm)
            yield from layer_targets(f"{place}{names.up}", layer.up)
            yield from layer_targets(f"{place}{names.down}", layer.down)
