"""Sequence parallelism: Ulysses attention (Jacobs et al. 2023, arXiv:2309.14509).

Owns the division of tokens over ranks, and attention over all of them: outside attention a rank
computes its own tokens, inside it some heads of all tokens, with an exchange before and after. The
model's own forward, or that of its blocks, runs on fewer tokens. Knows no model: a family names the
arguments that have tokens.

Shapes: B rows, H heads, T tokens, D a head's width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import override

from triptych.core.runtime.layers.attention_mode import AttentionMode
from triptych.core.runtime.layers.shards import Shard, even_shard

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup


@dataclass(frozen=True, slots=True)
class TokenAxis:
    """The dimension of a tensor that counts tokens, and whether they are text or image tokens."""

    of: Literal["text", "image"]
    dim: int = -2


TEXT, IMAGE = TokenAxis("text"), TokenAxis("image")
TokenAxes: TypeAlias = TokenAxis | tuple[TokenAxis, ...]
"""The token axes of an argument: a tensor, or several."""


class SequenceParallel:
    """Divides one run at a time, of text and image tokens that attend to each other.

    `tokens`: the arguments that have tokens, of the model, or with `is_in_blocks` of its blocks;
    then every rank has all tokens before and after the blocks.
    """

    def __init__(
        self, group: RankGroup, tokens: Mapping[str, TokenAxes], *, is_in_blocks: bool = False
    ) -> None:
        self.group = group
        self.is_in_blocks = is_in_blocks
        self.is_local = False
        self.shards: list[tuple[Shard, Shard]] = []
        self._tokens = tokens

    def split(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of the arguments of a run, or of its first block.

        A run with fewer tokens than ranks is not divided: each rank computes all of it.
        """
        num_text, num_image = counts = [self._count(arguments, of) for of in ("text", "image")]
        ranks = range(self.group.num_ranks)
        self.shards = [(self._shard(num_text, r), self._shard(num_image, r)) for r in ranks]
        if any(0 < count < len(ranks) for count in counts):
            self.shards = []
        return self.narrow(arguments)

    def narrow(self, arguments: Mapping[str, Any], besides: Collection[str] = ()) -> dict[str, Any]:
        """This rank's part of another block's arguments, except those already divided."""
        if not self.shards:
            return dict(arguments)
        return {
            name: self._part(value, self._tokens[name])
            if name in self._tokens and name not in besides and value is not None
            else value
            for name, value in arguments.items()
        }

    def gather(self, output_BTC: Tensor) -> Tensor:
        """Gather all tokens of the image, in order."""
        if not self.shards:
            return output_BTC
        rows, _, width = output_BTC.shape
        shapes = [(rows, image.length, width) for _, image in self.shards]
        parts = self.group.exchange([output_BTC] * len(shapes), shapes)
        return torch.cat(parts, dim=IMAGE.dim)

    def attending(self) -> AbstractContextManager[object]:
        """A context in which divided attention covers the tokens of all ranks."""
        if self.is_in_blocks:
            self.shards = []  # those of the previous run
        return _UlyssesAttention(self)

    def sum(self, parts: Tensor) -> Tensor:
        """The sum over the ranks, the same on all."""
        return self.group.sum(parts)

    def _shard(self, total: int, rank: int) -> Shard:
        return even_shard(total, rank, self.group.num_ranks)

    def _count(self, arguments: Mapping[str, Any], of: str) -> int:
        counts = {
            tensor.shape[axis.dim]
            for name, axes in self._tokens.items()
            for tensor, axis in _pairs(arguments.get(name), axes)
            if axis.of == of
        }
        assert len(counts) < 2, f"arguments differ in the number of {of} tokens"
        return int(counts.pop()) if counts else 0

    def _part(self, value: Any, axes: TokenAxes) -> Any:
        text, image = self.shards[self.group.rank]
        parts = []
        for tensor, axis in _pairs(value, axes):
            shard = text if axis.of == "text" else image
            parts.append(tensor.narrow(axis.dim, shard.first, shard.length))
        return tuple(parts) if isinstance(axes, tuple) else parts[0]


def _pairs(value: Any, axes: TokenAxes) -> Iterator[tuple[Tensor, TokenAxis]]:
    if isinstance(axes, TokenAxis):
        value, axes = None if value is None else (value,), (axes,)
    if value is not None:
        yield from zip(value, axes, strict=True)


class LocalAttention(nn.Module):
    """Attention whose keys every rank has in full: each rank attends for its own tokens."""

    def __init__(self, attention: nn.Module, sequence: SequenceParallel) -> None:
        super().__init__()
        self.attention = attention
        self._sequence = sequence

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped attention without an exchange."""
        self._sequence.is_local = True
        try:
            return self.attention(*args, **kwargs)
        finally:
            self._sequence.is_local = False


class _UlyssesAttention(AttentionMode):
    """Attention over all ranks' tokens, from this rank's queries, keys and values."""

    def __init__(self, sequence: SequenceParallel) -> None:
        super().__init__()
        self._sequence = sequence
        self._group = sequence.group

    @override
    def attend(
        self,
        compute: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """The attention of this rank's tokens, if they are divided.

        `attn_mask` is over all tokens in their order, text before image.
        """
        if not self._sequence.shards or self._sequence.is_local:
            return compute(query, key, value, attn_mask, **options)
        assert query.shape == key.shape == value.shape, "tokens attend to each other"
        rows, num_heads, num_tokens, width = query.shape
        num_ranks, rank = self._group.num_ranks, self._group.rank
        heads = [even_shard(num_heads, other, num_ranks) for other in range(num_ranks)]
        own, lengths = heads[rank].length, self._lengths(num_tokens)
        qkv = torch.stack((query, key, value))
        sent = [qkv[:, :, shard.slice] for shard in heads]
        shapes = [(3, rows, own, length, width) for length in lengths]
        q_BHTD, k_BHTD, v_BHTD = torch.cat(self._group.exchange(sent, shapes), dim=3)
        if attn_mask is not None:
            order = _order(self._sequence.shards).to(attn_mask.device)
            attn_mask = attn_mask.index_select(-1, order).index_select(-2, order)
        attended = compute(q_BHTD, k_BHTD, v_BHTD, attn_mask, **options)
        back = [(rows, shard.length, num_tokens, width) for shard in heads]
        return torch.cat(self._group.exchange(attended.split(lengths, dim=2), back), dim=1)

    def _lengths(self, num_tokens: int) -> list[int]:
        """Tokens per rank: of text and image, or in some layers of the image alone."""
        text, image = self._sequence.shards[self._group.rank]
        is_joint = num_tokens == text.length + image.length
        assert is_joint or num_tokens == image.length, "tokens of both, or of the image"
        return [is_joint * text.length + image.length for text, image in self._sequence.shards]


def _order(shards: list[tuple[Shard, Shard]]) -> Tensor:
    """The positions among all tokens, in the order of the ranks."""
    parts = []
    for text, image in shards:
        parts += [torch.arange(text.first, text.first + text.length)]
        first = text.total + image.first
        parts += [torch.arange(first, first + image.length)]
    return torch.cat(parts)
