"""Latent attention: keys and values of all heads are made from one short row for each token.

Owns the projections of one layer. The cache has the row (`LatentShape`): the normalized compressed
values, and one rotated key that all heads share. The matrices that make a head's key and value from
the row are applied to its query and to its result instead, so that nothing is expanded ("absorbed":
DeepSeek-V2, arXiv:2405.04434, section 2.1.2). Decode rows and prompts run alike, so that a token's
result does not depend on the chunks of its prompt. An index may choose the rows that tokens read
(`core.runtime.layers.key_index`), for its own layer and for later ones without an index.

Shapes: T tokens, C hidden, H heads, N values of a head's key without position, P rotated values,
L compressed values of a row, D = L + P of a whole row, V values of a head, X outputs of a
projection.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from triptych.core.runtime.kernels.key_index import attend_chosen
from triptych.core.runtime.kernels.kv_pages import LatentPages
from triptych.core.runtime.kernels.latent_attention import (
    RowRules,
    latent_attention,
    write_latents,
)
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.paged_attention import AttentionRule
from triptych.core.runtime.kernels.rope_write import Rotation
from triptych.core.runtime.kernels.rotary import rotary
from triptych.core.runtime.layers.attention import LatentShape, PagedStep, StepPositions
from triptych.core.runtime.layers.head_linear import HeadLinear
from triptych.core.runtime.layers.key_index import KeyIndex, KeyIndexConfig
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.norm import RMSNorm
from triptych.core.runtime.layers.parallel import row_parallel
from triptych.core.runtime.layers.shards import Shard, even_shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triptych.core.runtime.devices.rank_group import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """One layer's latent attention, in the terms of model configurations.

    A head's key has `nope_dim` values made from the row and `rope_dim` rotated ones. Queries pass
    through `q_rank` values, or directly where that is `None`. Compressed queries and rows have
    norms. `scale` is that of the scores; an `index` reads compressed queries. In a model that is
    divided over ranks, `num_heads` are this rank's, and `heads` says which of all they are; every
    rank has the whole rows, and the whole index. `scales_queries`: see `StepPositions`.
    """

    hidden_size: int
    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    kv_rank: int
    q_rank: int | None
    scale: float
    norm_eps: float = 1e-6
    has_bias: bool = False
    is_interleaved: bool = True
    scales_queries: bool = False
    index: KeyIndexConfig | None = None
    heads: Shard | None = None
    reads_layer: ClassVar[int | None] = None

    @property
    def has_out_bias(self) -> bool:
        """Whether the last projection has a bias."""
        return self.has_bias

    @property
    def key_dim(self) -> int:
        """The values of a head's query, and of its key."""
        return self.nope_dim + self.rope_dim

    @property
    def row_dim(self) -> int:
        """The values of a token's row in the cache."""
        return self.kv_rank + self.rope_dim

    @property
    def query_inputs(self) -> int:
        """The values from which queries are made, or the queries themselves."""
        return self.num_heads * self.key_dim if self.q_rank is None else self.q_rank

    @property
    def shape(self) -> LatentShape:
        """The cells of the layer."""
        return LatentShape(num_heads=self.num_heads, head_dim=self.row_dim, value_dim=self.kv_rank)

    @property
    def shapes(self) -> tuple[LatentShape, ...]:
        """The cells of the layer, and those of its index."""
        return (self.shape,) if self.index is None else (self.shape, self.index.shape)

    @property
    def position_values(self) -> int:
        """The most values of a position that the layer holds, apart from the residual stream."""
        absorbed = self.num_heads * (self.key_dim + self.row_dim + self.kv_rank)
        of_index = 0 if self.index is None else self.index.position_values
        return self.query_inputs + 2 * self.row_dim + absorbed + of_index

    @property
    def gathered_values(self) -> int:
        """The values that attention by torch gathers for each key: the row, and its copy."""
        return self.row_dim + self.kv_rank

    def of_rank(self, rank: int, num_ranks: int) -> LatentConfig:
        """The part of a rank."""
        heads = even_shard(self.num_heads, rank, num_ranks)
        return replace(self, num_heads=heads.length, heads=heads)


class LatentAttention:
    """Compression, norms, rotation, absorbed attention over rows, output.

    `down` makes the inputs of queries, and the row: one projection. `kv_up` is loaded, and split by
    `prepare` into a matrix for queries and one for results.
    """

    def __init__(
        self,
        config: LatentConfig,
        *,
        cells: int,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
    ) -> None:
        self.config, self.cells = config, cells
        self.heads = config.heads or Shard.whole(config.num_heads)
        hidden, bias, num_heads = config.hidden_size, config.has_bias, config.num_heads
        new = partial(Linear, has_bias=False, dtype=dtype, device=device)
        new_norm = partial(RMSNorm, eps=config.norm_eps, dtype=dtype, device=device)
        self.down = new(hidden, config.query_inputs + config.row_dim, has_bias=bias)
        if config.q_rank is None and self.down.bias_O is not None:
            self.down.bias_O[: config.query_inputs].zero_()  # which files do not have
        self.q_up: Linear | None = None
        self.q_norm: RMSNorm | None = None
        if config.q_rank is not None:
            self.q_up = new(config.q_rank, num_heads * config.key_dim)
            self.q_norm = new_norm(config.q_rank)
        self.kv_norm = new_norm(config.kv_rank)
        self.kv_up: Linear | None = new(
            config.kv_rank, num_heads * (config.nope_dim + config.value_dim)
        )
        sizes = num_heads * config.value_dim, hidden
        self.out = row_parallel(group, sizes, has_bias=bias, dtype=dtype, device=device)
        self.heads_of_keys: HeadLinear | None = None
        self.heads_of_values: HeadLinear | None = None
        self.index: KeyIndex | None = None
        if config.index is not None:
            sizes = hidden, config.query_inputs
            self.index = KeyIndex(
                config.index, sizes=sizes, cells=cells + 1, dtype=dtype, device=device
            )

    def linears(self) -> Iterator[Linear]:
        """Iterate over its projections, without `kv_up` once it is split."""
        ups = (linear for linear in (self.q_up, self.kv_up) if linear is not None)
        yield from (self.down, *ups, self.out)
        if self.index is not None:
            yield from self.index.linears()

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        config, kv_up = self.config, self.kv_up
        assert kv_up is not None
        self.kv_up = None
        for linear in self.linears():
            linear.prepare(native)
        sizes = config.num_heads, config.nope_dim + config.value_dim, config.kv_rank
        keys_HNL, values_HVL = kv_up.weight_OI.view(sizes).split(
            (config.nope_dim, config.value_dim), dim=1
        )
        new = partial(HeadLinear, kernels=native, is_deterministic=kv_up.is_deterministic)
        self.heads_of_keys, self.heads_of_values = new(keys_HNL.mT), new(values_HVL)

    def __call__(
        self,
        x_TC: torch.Tensor,
        residual_TC: torch.Tensor | None,
        positions: StepPositions,
        step: PagedStep,
    ) -> torch.Tensor:
        """Attend, writing this step's rows first. Adds to the residual where given."""
        assert self.heads_of_keys is not None, "call prepare() before the first step"
        assert self.heads_of_values is not None
        rotation = Rotation(*positions.full, self.config.is_interleaved)
        pages, config = step.kv.pages[self.cells], self.config
        assert isinstance(pages, LatentPages)
        q_TX, row_TD = self.down(x_TC).split((config.query_inputs, config.row_dim), dim=1)
        rules = RowRules(self.kv_norm.weight_C, self.kv_norm.eps, rotation)
        write_latents(row_TD, pages, step.batch, rules)
        if self.q_norm is not None:
            q_TX = self.q_norm(q_TX.contiguous())
        if self.index is not None:
            self.index(x_TC, q_TX, positions.full, step)
        scale_T = positions.query_scale_T if config.scales_queries else None
        q_THD, rule = self._queries(q_TX, rotation, scale_T), AttentionRule(scale=config.scale)
        if step.chosen is None:
            out_THL = latent_attention(q_THD, pages, step.batch, rule)
        else:
            out_THL = attend_chosen(q_THD, pages, step.chosen, rule)
        return self.out(self.heads_of_values(out_THL).flatten(1), residual_TC)

    def _queries(
        self, q_TX: torch.Tensor, rotation: Rotation, scale_T: torch.Tensor | None
    ) -> torch.Tensor:
        """The queries in the space of rows, `[T, H, D]`, from normalized inputs."""
        config = self.config
        if self.q_up is not None:
            q_TX = self.q_up(q_TX)
        q_THX = q_TX.unflatten(1, (config.num_heads, config.key_dim))
        nope_THN, rope_THP = q_THX.split((config.nope_dim, config.rope_dim), dim=2)
        rope_THP = rotary(
            rope_THP,
            rotation.cos_T1R,
            rotation.sin_T1R,
            is_interleaved=rotation.is_interleaved,
        )
        if scale_T is not None:
            scale_T11 = scale_T.to(rope_THP.dtype).view(-1, 1, 1)
            nope_THN, rope_THP = nope_THN * scale_T11, rope_THP * scale_T11
        assert self.heads_of_keys is not None
        return torch.cat((self.heads_of_keys(nope_THN), rope_THP), dim=2)
