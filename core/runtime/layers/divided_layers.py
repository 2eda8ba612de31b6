"""Layers of other libraries' models, divided over ranks as our decoder's are.

Owns the replacement layers and the walk that finds the divided ones: heads of attention and
features of MLPs (Shoeybi et al. 2019, arXiv:1909.08053), by the usual names of projections in
vision towers. A module's own forward runs unchanged: outputs that a rank does not compute are zero
and never read, except where a norm reads all of them; these are gathered from the ranks. Knows no
model and no file.

Shapes: I inputs, O outputs, B rows, H heads, T tokens, D a head's width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from triptych.core.runtime.layers.attention_mode import AttentionMode
from triptych.core.runtime.layers.shards import Shard, even_shard, feature_shard

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup

_ATTENTION = tuple(
    (inputs, output)
    for inputs in (("q_proj", "k_proj", "v_proj"), ("qkv",))
    for output in ("out_proj", "o_proj", "projection_layer", "proj")
)
_MLPS = (
    (("fc1",), "fc2"),
    (("linear_fc1",), "linear_fc2"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("linear_1",), "linear_2"),
)
_NORMS = {"q_proj": ("q_norm",), "k_proj": ("k_norm",), "qkv": ("q_norm", "k_norm")}


@dataclass(frozen=True, slots=True)
class _Pair:
    """Projections with divided outputs, and the projection that reads them, in `parent`."""

    parent: nn.Module
    inputs: tuple[str, ...]
    output: str
    num_heads: int = 0

    @property
    def features(self) -> int:
        """The number of features to divide."""
        return self._linear(self.output).in_features

    def divide(self, group: RankGroup, unit: int) -> None:
        """Keep only this rank's part."""
        if self.num_heads:
            heads = even_shard(self.num_heads, group.rank, group.num_ranks)
            self.parent.forward = _with_own_heads(self.parent.forward, heads)
            shard = heads.times(self.features // self.num_heads)
        else:
            shard = feature_shard(self.features, group.rank, group.num_ranks, unit)
        for name in self.inputs:
            gather_group = group if self._is_normed(name) else None
            setattr(self.parent, name, DividedOutputs(self._linear(name), shard, gather_group))
        setattr(self.parent, self.output, DividedInputs(self._linear(self.output), shard, group))

    def _is_normed(self, name: str) -> bool:
        """Whether the outputs are normed, which may be over all heads."""
        norms = (getattr(self.parent, norm, nn.Identity()) for norm in _NORMS.get(name, ()))
        return not all(isinstance(norm, nn.Identity) for norm in norms)

    def _linear(self, name: str) -> nn.Linear:
        linear = getattr(self.parent, name)
        assert isinstance(linear, nn.Linear)
        return linear


def divide_layers(module: nn.Module, group: RankGroup, unit: int) -> int:
    """Keep only this rank's part of each pair of projections; returns the number of pairs.

    Features are divided in whole units where possible. Pairs with less than one head or feature for
    each rank stay whole.
    """
    pairs = [
        pair for pair in _pairs(module) if (pair.num_heads or pair.features) >= group.num_ranks
    ]
    for pair in pairs:
        pair.divide(group, unit)
    return len(pairs)


def _pairs(module: nn.Module) -> Iterator[_Pair]:
    for parent in module.modules():
        children = dict(parent.named_children())
        num_heads = getattr(parent, "num_heads", 0)
        if num_heads:
            yield from _pairs_in(parent, children, _ATTENTION, num_heads)
        yield from _pairs_in(parent, children, _MLPS)


def _pairs_in(
    parent: nn.Module,
    children: Mapping[str, nn.Module],
    known: Sequence[tuple[tuple[str, ...], str]],
    num_heads: int = 0,
) -> Iterator[_Pair]:
    for inputs, output in known:
        if all(type(children.get(name)) is nn.Linear for name in (*inputs, output)):
            yield _Pair(parent, inputs, output, num_heads)


class DividedOutputs(nn.Module):
    """A projection of which this rank computes some outputs; the others are zeros.

    With a `group` they are gathered from the other ranks. Where queries, keys and values are one
    projection, a rank has the same part of each.
    """

    def __init__(self, linear: nn.Linear, shard: Shard, group: RankGroup | None = None) -> None:
        super().__init__()
        self._group = group
        assert linear.out_features % shard.total == 0, "they are a multiple of those read"
        self.out_features = linear.out_features
        firsts = range(shard.first, linear.out_features, shard.total)
        self._slices = [slice(first, first + shard.length) for first in firsts]
        weight, bias = _joined(linear.weight, self._slices), None
        if linear.bias is not None:
            bias = _joined(linear.bias, self._slices)
        self.part = _linear(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Compute all outputs, `[..., O]`."""
        parts = self.part(x).split([part.stop - part.start for part in self._slices], dim=-1)
        y = x.new_zeros(*x.shape[:-1], self.out_features)
        for place, part in zip(self._slices, parts, strict=True):
            y[..., place] = part
        return y if self._group is None else self._group.sum(y)


class DividedInputs(nn.Module):
    """A projection that reads this rank's part of the inputs; outputs are summed over the ranks."""

    def __init__(self, linear: nn.Linear, shard: Shard, group: RankGroup) -> None:
        super().__init__()
        self.part = _linear(linear.weight[:, shard.slice], None if group.rank else linear.bias)
        self._slice, self._group = shard.slice, group

    def forward(self, x: Tensor) -> Tensor:
        """Compute the outputs, the same on all ranks."""
        return self._group.sum(self.part(x[..., self._slice]))


def _joined(tensor: Tensor, slices: Sequence[slice]) -> Tensor:
    return torch.cat([tensor[each] for each in slices])


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Create a linear layer that holds no reference to the whole weight."""
    num_outputs, num_inputs = weight.shape
    linear = nn.Linear(num_inputs, num_outputs, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return linear


def _with_own_heads(forward: Callable[..., Any], shard: Shard) -> Callable[..., Any]:
    """The forward of an attention layer in which only these heads attend."""

    def attend(*args: Any, **kwargs: Any) -> Any:
        with _OwnHeads(shard):
            return forward(*args, **kwargs)

    return attend


class _OwnHeads(AttentionMode):
    """Attention of some of the heads; the output of the others is zero."""

    def __init__(self, shard: Shard) -> None:
        super().__init__()
        self._shard = shard

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
        heads = self._shard
        assert query.shape[1] == key.shape[1] == heads.total, "each head has its own keys"
        if attn_mask is not None and attn_mask.dim() == 4 and attn_mask.shape[1] > 1:
            attn_mask = attn_mask[:, heads.slice]
        own = (each[:, heads.slice] for each in (query, key, value))
        y_BHTD = query.new_zeros(*query.shape[:-1], value.shape[-1])
        y_BHTD[:, heads.slice] = compute(*own, attn_mask, **options)
        return y_BHTD
