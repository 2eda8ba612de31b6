"""Packed texts through an encoder of any family, without padding.

Owns concatenating texts into one run of tokens, and grouping them by length for attention. On a CPU
a group has a single length, and with our projection kernel a text's states do not depend on the
other texts; elsewhere they differ by rounding.

Shape suffixes: T tokens of all texts, G texts of a group, S its longest text, H heads, D head dim,
C hidden.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from triptych.core.runtime.devices.transfer import to_device
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.loading import TensorTarget
from triptych.modalities.embedding.architecture import EncoderSizes

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_gelu_tanh = partial(functional.gelu, approximate="tanh")

ACTIVATION_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": functional.gelu,
        "gelu_new": _gelu_tanh,
        "gelu_pytorch_tanh": _gelu_tanh,
        "relu": functional.relu,
        "silu": functional.silu,
    }
)
"""Activations by their names in configurations; `architecture` lists these."""


@dataclass(frozen=True, slots=True)
class TextGroup:
    """Texts whose attention is computed together. `padded_GS` indexes their tokens."""

    padded_GS: Tensor
    mask_G11S: Tensor | None
    places_T: Tensor
    rows: slice


Weigh = Callable[[Tensor, Tensor, Tensor, TextGroup], Tensor]
"""Attention of a group's queries, keys and values, each `[G, H, S, D]`."""


def grouped_attention(qkv_THD: Tensor, groups: Sequence[TextGroup], weigh: Weigh) -> Tensor:
    """Attention within each group of texts, `[T, C]`."""
    num_tokens, num_three_heads, head_dim = qkv_THD.shape
    attended_TC = qkv_THD.new_empty(num_tokens, num_three_heads // 3 * head_dim)
    for group in groups:
        qkv_GSHD = qkv_THD[group.rows][group.padded_GS]
        query, key, value = qkv_GSHD.transpose(1, 2).chunk(3, dim=1)
        found_GSHD = weigh(query, key, value, group).transpose(1, 2)
        attended_TC[group.rows] = found_GSHD.flatten(0, 1).flatten(1)[group.places_T]
    return attended_TC


class PackedEncoder(nn.Module):
    """An encoder from token ids to hidden states.

    `max_padding` bounds the ratio of padded to real tokens in a group's attention.
    """

    def __init__(self, sizes: EncoderSizes, *, max_padding: float = 1.0) -> None:
        super().__init__()
        self.max_padding = max_padding
        self.sizes = sizes
        self.words = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.norm = nn.LayerNorm(sizes.hidden_size, sizes.norm_eps, bias=sizes.has_norm_bias)

    @abstractmethod
    def targets(self, checkpoint: Checkpoint) -> Iterator[TensorTarget]:
        """The parameters to fill from a checkpoint's tensors."""

    @abstractmethod
    def embed(self, ids_T: Int64s, places_T: Int64s, is_second_T: Bools) -> Tensor:
        """The states before the first layer, `[T, C]`."""

    @abstractmethod
    def run(self, hidden_TC: Tensor, groups: Sequence[TextGroup]) -> Tensor:
        """The states after the last layer, `[T, C]`."""

    def forward(
        self, texts: Sequence[Sequence[int]], second_starts: Sequence[int] = ()
    ) -> list[Tensor]:
        """The states of each text's tokens, `[its length, C]`, in the order of the texts.

        From its index in `second_starts` on, a text belongs to the second segment.
        """
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        lengths = [len(texts[index]) for index in order]
        ids_T = np.concatenate([np.asarray(texts[index], np.int64) for index in order])
        places_T = np.concatenate([np.arange(length) for length in lengths])
        starts = [second_starts[index] for index in order] if second_starts else lengths
        is_second_T = places_T >= np.repeat(starts, lengths)
        groups = [
            self._group(first, each) for first, each in group_lengths(lengths, self.max_padding)
        ]
        hidden_TC = self.run(self.embed(ids_T, places_T, is_second_T), groups)
        states: list[Tensor] = [hidden_TC] * len(texts)
        for index, of_text in zip(order, hidden_TC.split(lengths), strict=True):
            states[index] = of_text
        return states

    def sent(self, array: Int64s) -> Tensor:
        """Integers on the device."""
        return to_device(torch.from_numpy(array), self.norm.weight.device)

    def prefix_of(self, checkpoint: Checkpoint) -> str:
        """The prefix of tensor names; empty if the encoder was saved alone."""
        prefix = self.sizes.names.prefix
        return prefix if any(name.startswith(prefix) for name in checkpoint.tensors) else ""

    def _group(self, first: int, lengths: Sequence[int]) -> TextGroup:
        lengths_G1 = np.asarray(lengths)[:, None]
        starts_G1 = np.cumsum(lengths_G1, axis=0) - lengths_G1
        steps_1S = np.arange(max(lengths))[None]
        is_real_GS = steps_1S < lengths_G1
        padded_GS = np.where(is_real_GS, starts_G1 + steps_1S, 0)
        mask = None
        if not is_real_GS.all():
            mask = torch.zeros(is_real_GS.shape, dtype=self.norm.weight.dtype)
            mask.masked_fill_(torch.from_numpy(~is_real_GS), -math.inf)
            mask = to_device(mask[:, None, None], self.norm.weight.device)
        return TextGroup(
            padded_GS=self.sent(padded_GS),
            mask_G11S=mask,
            places_T=self.sent(np.flatnonzero(is_real_GS)),
            rows=slice(first, first + sum(lengths)),
        )


def layer_targets(name: str, module: nn.Linear | nn.LayerNorm) -> Iterator[TensorTarget]:
    """The targets of a layer's weight, and its bias if it has one."""
    for part, value in module.named_parameters():
        yield TensorTarget(f"{name}.{part}", value)


def group_lengths(
    lengths: Sequence[int], max_padding: float
) -> Iterator[tuple[int, Sequence[int]]]:
    """Split ascending lengths into groups within `max_padding`, each with its first token."""
    first, begin = 0, 0
    total = 0
    for index, length in enumerate(lengths):
        count = index - begin + 1
        if index > begin and length * count > max_padding * (total + length):
            yield first, lengths[begin:index]
            first, begin, total = first + total, index, 0
        total += length
    yield first, lengths[begin:]
