"""The tokens of a run divided over ranks: Ulysses attention (Jacobs et al. 2023, arXiv:2309.14509).

Owns which tokens are whose, and attention over all of them: outside it a rank computes its own
tokens, inside it some heads of all tokens, and the two exchange before and after. The model's own
forward runs, on fewer tokens. Knows no model: a family names the arguments that have tokens.

Shapes: B rows, H heads, T tokens, D a head's width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from triptych.core.layers.shards import Shard, even_shard

if TYPE_CHECKING:
    from triptych.core.devices.rank_group import RankGroup

_TOKENS = -2
"""The dimension of tokens: last but one in hidden states and in lists of positions alike."""


class SequenceParallel:
    """Divides one run at a time, of a text and a picture that attend to each other.

    `text` and `picture` are the arguments that have the tokens of either.
    """

    def __init__(self, group: RankGroup, *, text: frozenset[str], picture: frozenset[str]) -> None:
        self._group = group
        self._text, self._picture = text, picture
        self._shards: list[tuple[Shard, Shard]] = []

    def split(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of the arguments of a run."""
        num_text, num_picture = (self._count(arguments, n) for n in (self._text, self._picture))
        ranks = range(self._group.num_ranks)
        self._shards = [(self._shard(num_text, r), self._shard(num_picture, r)) for r in ranks]
        text, picture = self._shards[self._group.rank]
        parts = dict(arguments)
        for names, shard in ((self._text, text), (self._picture, picture)):
            for name in names & parts.keys():
                parts[name] = parts[name].narrow(_TOKENS, shard.first, shard.length)
        return parts

    def gather(self, output_BTC: Tensor) -> Tensor:
        """Every rank's tokens of the picture, in their order."""
        rows, _, width = output_BTC.shape
        shapes = [(rows, picture.length, width) for _, picture in self._shards]
        parts = self._group.exchange([output_BTC] * len(shapes), shapes)
        return torch.cat(parts, dim=_TOKENS)

    def attending(self) -> AbstractContextManager[object]:
        """While inside, attention is over the tokens of all ranks."""
        return _UlyssesAttention(self._group, self._shards)

    def sum(self, parts: Tensor) -> Tensor:
        """The sum over the ranks, the same on all."""
        return self._group.sum(parts)

    def _shard(self, total: int, rank: int) -> Shard:
        return even_shard(total, rank, self._group.num_ranks)

    @staticmethod
    def _count(arguments: Mapping[str, Any], names: frozenset[str]) -> int:
        counts = {arguments[name].shape[_TOKENS] for name in names & arguments.keys()}
        assert len(counts) == 1, f"{sorted(names)} differ in tokens"
        return int(counts.pop())


class _UlyssesAttention(TorchFunctionMode):
    """Attention whose queries, keys and values are of this rank's tokens, the text's first."""

    def __init__(self, group: RankGroup, shards: list[tuple[Shard, Shard]]) -> None:
        super().__init__()
        self._group = group
        self._lengths = [text.length + picture.length for text, picture in shards]
        self._order = _order(shards)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(func, *args, **(kwargs or {}))

    def _attend(
        self,
        attend: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """As `attend`, of this rank's tokens. `attn_mask` is of all of them, in their own order."""
        assert query.shape == key.shape == value.shape, "tokens attend to each other"
        rows, num_heads, num_tokens, width = query.shape
        num_ranks, rank = self._group.num_ranks, self._group.rank
        heads = [even_shard(num_heads, other, num_ranks) for other in range(num_ranks)]
        own = heads[rank].length
        qkv = torch.stack((query, key, value))
        sent = [qkv[:, :, shard.slice] for shard in heads]
        shapes = [(3, rows, own, length, width) for length in self._lengths]
        q_BHTD, k_BHTD, v_BHTD = torch.cat(self._group.exchange(sent, shapes), dim=3)
        if attn_mask is not None:
            order = self._order.to(attn_mask.device)
            attn_mask = attn_mask.index_select(-1, order).index_select(-2, order)
        attended = attend(q_BHTD, k_BHTD, v_BHTD, attn_mask, **options)
        back = [(rows, shard.length, num_tokens, width) for shard in heads]
        return torch.cat(self._group.exchange(attended.split(self._lengths, dim=2), back), dim=1)


def _order(shards: list[tuple[Shard, Shard]]) -> Tensor:
    """The places, among all tokens, of those of one rank after the other."""
    parts = []
    for text, picture in shards:
        parts += [torch.arange(text.first, text.first + text.length)]
        first = text.total + picture.first
        parts += [torch.arange(first, first + picture.length)]
    return torch.cat(parts)
