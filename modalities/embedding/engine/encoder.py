"""BERT and its descendants, and loading the encoder of any family.

Owns the network and its loading. All layers except attention process one packed run of tokens;
attention batches texts of similar length (`packed_texts`). Devlin et al. 2018; relative positions
as in MPNet, after Raffel et al. 2020.

Shape suffixes: those of `packed_texts`; E intermediate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from triptych.core.runtime.devices.transfer import to_device
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.loading import TensorTarget, load_tensors
from triptych.core.weights.library_errors import library_errors
from triptych.modalities.embedding.architecture import EncoderSizes, is_cross_encoder
from triptych.modalities.embedding.engine.blueprint import EncoderBlueprint
from triptych.modalities.embedding.engine.packed_texts import (
    ACTIVATION_FUNCTIONS,
    Bools,
    Int64s,
    PackedEncoder,
    TextGroup,
    grouped_attention,
    layer_targets,
)
from triptych.modalities.embedding.engine.rotary_encoder import RotaryEncoder
from triptych.modalities.embedding.engine.score_head import load_score_head

_GPU_PADDING = 1.2
_NUM_EXACT_BUCKETS = 2  # one half of each direction's buckets counts single positions
_MAX_DISTANCE = 128


class Layer(nn.Module):
    """Attention, then two projections, each added to its input and normed."""

    def __init__(self, sizes: EncoderSizes) -> None:
        super().__init__()
        hidden, inner = sizes.hidden_size, sizes.intermediate_size
        self.num_heads = sizes.num_heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)
        self.output_norm = nn.LayerNorm(hidden, sizes.norm_eps)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)
        self.down_norm = nn.LayerNorm(hidden, sizes.norm_eps)
        self.activation = ACTIVATION_FUNCTIONS[sizes.activation]

    def forward(self, hidden_TC: Tensor, groups: Sequence[TextGroup], biases: _Biases) -> Tensor:
        """The states after this layer, `[T, C]`."""

        def weigh(query: Tensor, key: Tensor, value: Tensor, group: TextGroup) -> Tensor:
            mask = biases.add(group.mask_G11S, query.shape[2])
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

        qkv_THD = self.qkv(hidden_TC).unflatten(-1, (3 * self.num_heads, -1))
        attended_TC = grouped_attention(qkv_THD, groups, weigh)
        hidden_TC = self.output_norm(self.output(attended_TC).add_(hidden_TC))
        inner_TE = self.activation(self.up(hidden_TC))
        normed: Tensor = self.down_norm(self.down(inner_TE).add_(hidden_TC))
        return normed


class _Biases:
    """Attention biases by distance, for families that have them."""

    def __init__(self, table: Tensor | None, num_buckets: int) -> None:
        self._table = table  # [buckets, H]
        self._num_buckets = num_buckets
        self._made: dict[int, Tensor] = {}

    def add(self, mask_G11S: Tensor | None, length: int) -> Tensor | None:
        """The mask with the bias of texts of this length, `[G, H, S, S]`."""
        if self._table is None:
            return mask_G11S
        if length not in self._made:
            buckets_SS = to_device(_buckets(length, self._num_buckets), self._table.device)
            self._made[length] = self._table[buckets_SS].permute(2, 0, 1)[None].contiguous()
        bias_1HSS = self._made[length]
        return bias_1HSS if mask_G11S is None else mask_G11S + bias_1HSS


class Encoder(PackedEncoder):
    """Implements `PackedEncoder` for BERT's descendants."""

    def __init__(self, sizes: EncoderSizes, *, max_padding: float = 1.0) -> None:
        super().__init__(sizes, max_padding=max_padding)
        self.positions = nn.Embedding(sizes.num_positions, sizes.hidden_size)
        self.segments = (
            nn.Embedding(sizes.num_segments, sizes.hidden_size) if sizes.num_segments else None
        )
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.num_layers))
        self.distances = (
            nn.Embedding(sizes.num_buckets, sizes.num_heads) if sizes.num_buckets else None
        )

    def embed(self, ids_T: Int64s, places_T: Int64s, is_second_T: Bools) -> Tensor:
        """Words, positions and segments, normed."""
        places = self.sent(places_T + self.sizes.first_position)
        hidden_TC = self.words(self.sent(ids_T)) + self.positions(places)
        if self.sizes.num_segments > 1 and self.segments is not None and is_second_T.any():
            hidden_TC += self.segments(self.sent(is_second_T.astype(np.int64)))
        elif self.segments is not None:
            hidden_TC += self.segments.weight[0]
        normed: Tensor = self.norm(hidden_TC)
        return normed

    def run(self, hidden_TC: Tensor, groups: Sequence[TextGroup]) -> Tensor:
        """The states after the last layer."""
        table = None if self.distances is None else self.distances.weight
        biases = _Biases(table, self.sizes.num_buckets)
        for layer in self.layers:
            hidden_TC = layer(hidden_TC, groups, biases)
        return hidden_TC

    def targets(self, checkpoint: Checkpoint) -> Iterator[TensorTarget]:
        """The parameters to fill from a checkpoint's tensors."""
        names = self.sizes.names
        prefix = self.prefix_of(checkpoint)
        yield TensorTarget(f"{prefix}embeddings.word_embeddings.weight", self.words.weight)
        yield TensorTarget(f"{prefix}embeddings.position_embeddings.weight", self.positions.weight)
        if self.segments is not None:
            yield TensorTarget(
                f"{prefix}embeddings.token_type_embeddings.weight", self.segments.weight
            )
        yield from layer_targets(f"{prefix}embeddings.LayerNorm", self.norm)
        if self.distances is not None:
            yield TensorTarget(f"{prefix}{names.relative_bias}", self.distances.weight)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            place = f"{prefix}{names.layer.format(number)}."
            for part, whole in (("weight", layer.qkv.weight), ("bias", layer.qkv.bias)):
                three = (names.query, names.key, names.value)
                for name, value in zip(three, whole.chunk(3), strict=True):
                    yield TensorTarget(f"{place}{name}.{part}", value)
            for name in ("output", "output_norm", "up", "down", "down_norm"):
                yield from layer_targets(place + getattr(names, name), getattr(layer, name))


def load_encoder(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    report: Callable[[float], None] | None = None,
) -> PackedEncoder:
    """The network of a folder. Raises `WeightsError` if a tensor is missing or unknown."""
    encoder = _sketch(checkpoint, max_padding=1.0 if device.type == "cpu" else _GPU_PADDING)
    encoder.to(dtype).to_empty(device=device)
    load_tensors(checkpoint, list(encoder.targets(checkpoint)), ignored=_is_head, report=report)
    return encoder.eval().requires_grad_(False)


class PackedBlueprint(EncoderBlueprint):
    """An encoder of our own families."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        super().__init__(checkpoint, dtype)
        self.sizes: EncoderSizes = EncoderSizes.read(checkpoint.config)

    def weight_bytes(self) -> int:
        """Bytes of weights."""
        sketch = _sketch(self._checkpoint)
        return sum(value.numel() for value in sketch.parameters()) * self._dtype.itemsize

    def activation_bytes(self, num_tokens: int) -> int:
        """Bytes of one layer's activations."""
        return activation_bytes(self.sizes, num_tokens, self._dtype)

    def build(self, device: torch.device, report: Callable[[float], None]) -> PackedEncoder:
        """Load the encoder."""
        return load_encoder(self._checkpoint, dtype=self._dtype, device=device, report=report)

    def build_head(self, device: torch.device) -> nn.Module | None:
        """Load the head of a cross-encoder."""
        if not is_cross_encoder(self._checkpoint.config):
            return None
        return load_score_head(self._checkpoint, self.sizes, device)


def activation_bytes(sizes: EncoderSizes, num_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of one layer's activations in a step of `num_tokens`, or for the longest text."""
    most = max(num_tokens, sizes.max_length)
    values = most * (8 * sizes.hidden_size + 2 * sizes.intermediate_size)
    scores = sizes.num_heads * sizes.max_length**2 if sizes.num_buckets else 0
    return (values + scores) * dtype.itemsize


def _sketch(checkpoint: Checkpoint, *, max_padding: float = 1.0) -> PackedEncoder:
    """The network without its weights."""
    sizes = EncoderSizes.read(checkpoint.config)
    kind = RotaryEncoder if sizes.layer_windows else Encoder
    with library_errors("config.json is not usable"), torch.device("meta"):
        return kind(sizes, max_padding=max_padding)


def _is_head(name: str) -> bool:
    """Whether a tensor is a head for another task, or a buffer that is computed here."""
    heads = ("pooler.", "cls.", "lm_head.", "vocab_", "classifier.", "pre_classifier.")
    is_head = any(head in name for head in heads) or name.startswith(("head.", "decoder."))
    return is_head or name.endswith("position_ids")


def _buckets(length: int, num_buckets: int) -> Tensor:
    """The bias index of each pair of positions, `[S, S]`: T5's bidirectional buckets."""
    steps = torch.arange(length)
    distance_SS = steps[:, None] - steps[None]  # how far back the key is
    half = num_buckets // 2
    exact = half // _NUM_EXACT_BUCKETS
    far = distance_SS.abs()
    scale = (half - exact) / math.log(_MAX_DISTANCE / exact)
    coarse = exact + ((far.clamp(min=1).float() / exact).log() * scale).long()
    bucket = torch.where(far < exact, far, coarse.clamp(max=half - 1))
    return bucket + half * (distance_SS < 0)
