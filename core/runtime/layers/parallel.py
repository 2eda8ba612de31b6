"""Projections of a model that is divided over ranks.

Owns the communication of ranks within a step: sums of products whose inputs are divided, embedded
tokens and logits of a divided vocabulary. `shards` assigns the parts to ranks.

Shapes: T tokens, I inputs, O outputs of this rank, V of all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.shards import Shard, even_shard

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup


class RowParallelLinear(Linear):
    """Each rank has a part of the inputs; products are summed over the ranks.

    With our kernels the sum is in float32, and rounded once. The bias is rank 0's.
    """

    __slots__ = ("_group",)

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup,
    ) -> None:
        super().__init__(num_inputs, num_outputs, has_bias=has_bias, dtype=dtype, device=device)
        self._group = group

    def prepare(self, native: NativeKernels | None = None, *, keeps_rows: bool = False) -> None:
        """Prepare the projection as `Linear.prepare` does."""
        super().prepare(native, keeps_rows=keeps_rows)
        if self.bias_O is not None and self._group.rank:
            self.bias_O.zero_()

    def __call__(
        self,
        x_TI: torch.Tensor,
        residual_TO: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Project and sum over the ranks; the result is the same on all."""
        partial_dtype = None if self.native is None else torch.float32
        y_TO = self._group.sum(super().__call__(x_TI, out_dtype=partial_dtype))
        if residual_TO is not None:
            y_TO = y_TO + residual_TO
        return y_TO.to(out_dtype or x_TI.dtype)


def row_parallel(
    group: RankGroup | None,
    sizes: tuple[int, int],
    *,
    has_bias: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Linear:
    """Create a projection between such sizes; its inputs are divided where there is a group."""
    if group is None:
        return Linear(*sizes, has_bias=has_bias, dtype=dtype, device=device)
    return RowParallelLinear(*sizes, has_bias=has_bias, dtype=dtype, device=device, group=group)


def vocab_parallel(
    group: RankGroup | None,
    num_inputs: int,
    shard: Shard,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Linear:
    """Create an embedding or language head; its outputs are divided where there is a group."""
    if group is None:
        return Linear(num_inputs, shard.length, has_bias=False, dtype=dtype, device=device)
    return VocabParallelLinear(num_inputs, shard, dtype=dtype, device=device, group=group)


class VocabParallelLinear(Linear):
    """Each rank has a part of the vocabulary. Logits are gathered on rank 0."""

    __slots__ = ("_group", "_shard")

    def __init__(
        self,
        num_inputs: int,
        shard: Shard,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup,
    ) -> None:
        super().__init__(num_inputs, shard.length, has_bias=False, dtype=dtype, device=device)
        self._shard, self._group = shard, group

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The weights of any outputs; each is on one rank."""
        local = ids - self._shard.first
        is_elsewhere = (local < 0) | (local >= self._shard.length)
        found = super().rows(local.masked_fill(is_elsewhere, 0))
        return self._group.sum(found.masked_fill(is_elsewhere.unsqueeze(1), 0))

    def __call__(
        self,
        x_TI: torch.Tensor,
        residual_TO: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """All outputs on rank 0, `[T, V]`; other ranks get an uninitialized view of that shape."""
        assert residual_TO is None
        num_ranks, total = self._group.num_ranks, self._shard.total
        y_TO = super().__call__(x_TI, out_dtype=out_dtype)
        widest = even_shard(total, 0, num_ranks).length
        parts = self._group.gather(pad(y_TO, (0, widest - self._shard.length)))
        if parts is None:
            return y_TO.new_zeros(()).expand(len(x_TI), total)
        lengths = [even_shard(total, rank, num_ranks).length for rank in range(num_ranks)]
        return torch.cat([part[:, :n] for part, n in zip(parts, lengths, strict=True)], dim=1)
