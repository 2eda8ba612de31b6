"""BERT's descendants over texts laid end to end: no row is ever filled up with padding.

Owns the network and its loading. All but attention sees one long run of tokens; attention takes
texts of like length together. On a CPU that is the same length, and with our projection kernel a
text's states are the same beside any others; elsewhere they differ by rounding.
Devlin et al. 2018; relative positions as in MPNet, after Raffel et al. 2020.

Shape suffixes: T tokens of all texts, G texts of a group, S its longest text, H heads, D head dim,
C hidden, E intermediate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)
from transformers.activations import ACT2FN

from triptych.core.devices.transfer import sent
from triptych.core.weights.tensors.checkpoint import Checkpoint
from triptych.core.weights.tensors.loading import TensorTarget, load_tensors
from triptych.modalities.embedding.architecture import EncoderSizes

_Int64s = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]
_GPU_PADDING = 1.2
_NUM_EXACT_BUCKETS = 2  # one half of each direction's buckets counts single positions
_MAX_DISTANCE = 128


@dataclass(frozen=True, slots=True)
class _TextGroup:
    """Texts whose attention is computed together. `padded_GS` are their tokens, -1 past an end."""

    padded_GS: Tensor
    mask_G11S: Tensor | None
    places_T: Tensor
    rows: slice


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
        self.activation = ACT2FN[sizes.activation]

    def forward(self, hidden_TC: Tensor, groups: Sequence[_TextGroup], biases: _Biases) -> Tensor:
        """The states after this layer, `[T, C]`."""
        qkv_THD = self.qkv(hidden_TC).unflatten(-1, (3 * self.num_heads, -1))
        attended_TC = torch.empty_like(hidden_TC)
        for group in groups:
            attended_TC[group.rows] = self._attend(qkv_THD[group.rows], group, biases)
        hidden_TC = self.output_norm(self.output(attended_TC).add_(hidden_TC))
        inner_TE = self.activation(self.up(hidden_TC))
        normed: Tensor = self.down_norm(self.down(inner_TE).add_(hidden_TC))
        return normed

    def _attend(self, qkv_THD: Tensor, group: _TextGroup, biases: _Biases) -> Tensor:
        qkv_GSHD = qkv_THD[group.padded_GS]
        query, key, value = qkv_GSHD.transpose(1, 2).chunk(3, dim=1)
        mask = biases.add(group.mask_G11S, group.padded_GS.shape[1])
        attended_GHSD = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return attended_GHSD.transpose(1, 2).flatten(0, 1).flatten(1)[group.places_T]


class _Biases:
    """What a family adds to attention by distance; nothing for most."""

    def __init__(self, table: Tensor | None, num_buckets: int) -> None:
        self._table = table  # [buckets, H]
        self._num_buckets = num_buckets
        self._made: dict[int, Tensor] = {}

    def add(self, mask_G11S: Tensor | None, length: int) -> Tensor | None:
        """The mask with the bias of texts of this length, `[G, H, S, S]`."""
        if self._table is None:
            return mask_G11S
        if length not in self._made:
            buckets_SS = sent(_buckets(length, self._num_buckets), self._table.device)
            self._made[length] = self._table[buckets_SS].permute(2, 0, 1)[None].contiguous()
        bias_1HSS = self._made[length]
        return bias_1HSS if mask_G11S is None else mask_G11S + bias_1HSS


class Encoder(nn.Module):
    """Token ids in, hidden states out.

    `max_padding`: how many padded tokens there may be for a real one in a group's attention.
    """

    def __init__(self, sizes: EncoderSizes, *, max_padding: float = 1.0) -> None:
        super().__init__()
        self.max_padding = max_padding
        self.sizes = sizes
        self.words = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.positions = nn.Embedding(sizes.num_positions, sizes.hidden_size)
        self.segments = (
            nn.Embedding(sizes.num_segments, sizes.hidden_size) if sizes.num_segments else None
        )
        self.norm = nn.LayerNorm(sizes.hidden_size, sizes.norm_eps)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.num_layers))
        self.distances = (
            nn.Embedding(sizes.num_buckets, sizes.num_heads) if sizes.num_buckets else None
        )

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        report: Callable[[float], None] | None = None,
    ) -> Encoder:
        """The network of a folder. Raises `WeightsError` when a tensor is missing or unknown."""
        with torch.device("meta"):
            encoder = cls(
                EncoderSizes.read(checkpoint.config),
                max_padding=1.0 if device.type == "cpu" else _GPU_PADDING,
            )
        encoder.to(dtype).to_empty(device=device)
        targets = list(encoder._targets(checkpoint))
        load_tensors(checkpoint, targets, ignored=_is_head, report=report)
        return encoder.eval().requires_grad_(False)

    @staticmethod
    def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
        """Bytes the weights will take."""
        with torch.device("meta"):
            sketch = Encoder(EncoderSizes.read(checkpoint.config))
        return sum(value.numel() for value in sketch.parameters()) * dtype.itemsize

    def forward(
        self, texts: Sequence[Sequence[int]], second_starts: Sequence[int] = ()
    ) -> list[Tensor]:
        """The states of each text's tokens, `[its length, C]`, in the order of the texts.

        From its place in `second_starts` on a text is of the second segment.
        """
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        lengths = [len(texts[index]) for index in order]
        ids_T = np.concatenate([np.asarray(texts[index], np.int64) for index in order])
        places_T = np.concatenate([np.arange(length) for length in lengths])
        starts = [second_starts[index] for index in order] if second_starts else lengths
        is_second_T = places_T >= np.repeat(starts, lengths)
        hidden_TC = self._embed(ids_T, places_T, is_second_T)
        groups = [self._group(first, each) for first, each in _grouped(lengths, self.max_padding)]
        table = None if self.distances is None else self.distances.weight
        biases = _Biases(table, self.sizes.num_buckets)
        for layer in self.layers:
            hidden_TC = layer(hidden_TC, groups, biases)
        states: list[Tensor] = [hidden_TC] * len(texts)
        for index, of_text in zip(order, hidden_TC.split(lengths), strict=True):
            states[index] = of_text
        return states

    def _embed(self, ids_T: _Int64s, places_T: _Int64s, is_second_T: _Bools) -> Tensor:
        places = self._tensor(places_T + self.sizes.first_position)
        hidden_TC = self.words(self._tensor(ids_T)) + self.positions(places)
        if self.sizes.num_segments > 1 and self.segments is not None and is_second_T.any():
            hidden_TC += self.segments(self._tensor(is_second_T.astype(np.int64)))
        elif self.segments is not None:
            hidden_TC += self.segments.weight[0]
        normed: Tensor = self.norm(hidden_TC)
        return normed

    def _group(self, first: int, lengths: Sequence[int]) -> _TextGroup:
        lengths_G1 = np.asarray(lengths)[:, None]
        starts_G1 = np.cumsum(lengths_G1, axis=0) - lengths_G1
        steps_1S = np.arange(max(lengths))[None]
        is_real_GS = steps_1S < lengths_G1
        padded_GS = np.where(is_real_GS, starts_G1 + steps_1S, 0)
        mask = None
        if not is_real_GS.all():
            mask = torch.zeros(is_real_GS.shape, dtype=self.norm.weight.dtype)
            mask.masked_fill_(torch.from_numpy(~is_real_GS), -math.inf)
            mask = sent(mask[:, None, None], self.norm.weight.device)
        return _TextGroup(
            padded_GS=self._tensor(padded_GS),
            mask_G11S=mask,
            places_T=self._tensor(np.flatnonzero(is_real_GS)),
            rows=slice(first, first + sum(lengths)),
        )

    def _tensor(self, array: _Int64s) -> Tensor:
        return sent(torch.from_numpy(array), self.norm.weight.device)

    def _targets(self, checkpoint: Checkpoint) -> Iterator[TensorTarget]:
        names = self.sizes.names
        has_prefix = any(name.startswith(names.prefix) for name in checkpoint.tensors)
        prefix = names.prefix if has_prefix else ""
        yield TensorTarget(f"{prefix}embeddings.word_embeddings.weight", self.words.weight)
        yield TensorTarget(f"{prefix}embeddings.position_embeddings.weight", self.positions.weight)
        if self.segments is not None:
            yield TensorTarget(
                f"{prefix}embeddings.token_type_embeddings.weight", self.segments.weight
            )
        yield from _both(f"{prefix}embeddings.LayerNorm", self.norm)
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
                yield from _both(place + getattr(names, name), getattr(layer, name))


def _both(name: str, module: nn.Linear | nn.LayerNorm) -> Iterator[TensorTarget]:
    yield TensorTarget(f"{name}.weight", module.weight)
    yield TensorTarget(f"{name}.bias", module.bias)


def _is_head(name: str) -> bool:
    """What stands on top of an encoder for other tasks, and buffers that are computed here."""
    heads = ("pooler.", "cls.", "lm_head.", "vocab_", "classifier.", "pre_classifier.")
    return any(head in name for head in heads) or name.endswith("position_ids")


def _grouped(lengths: Sequence[int], max_padding: float) -> Iterator[tuple[int, Sequence[int]]]:
    """Runs of ascending lengths that waste little when padded, each with its first token."""
    first, begin = 0, 0
    total = 0
    for index, length in enumerate(lengths):
        count = index - begin + 1
        if index > begin and length * count > max_padding * (total + length):
            yield first, lengths[begin:index]
            first, begin, total = first + total, index, 0
        total += length
    yield first, lengths[begin:]


def _buckets(length: int, num_buckets: int) -> Tensor:
    """Which learned bias each pair of positions has, `[S, S]`: T5's bidirectional buckets."""
    steps = torch.arange(length)
    distance_SS = steps[:, None] - steps[None]  # how far back the key is
    half = num_buckets // 2
    exact = half // _NUM_EXACT_BUCKETS
    far = distance_SS.abs()
    scale = (half - exact) / math.log(_MAX_DISTANCE / exact)
    coarse = exact + ((far.clamp(min=1).float() / exact).log() * scale).long()
    bucket = torch.where(far < exact, far, coarse.clamp(max=half - 1))
    return bucket + half * (distance_SS < 0)
