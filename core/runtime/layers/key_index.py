"""An index of keys: it chooses the keys that a layer of latent attention reads.

Owns the projections of one layer's index. The cache has its key as one more row for each token
(`KeyIndexConfig.shape`), in the type of all cells. The choice is `core.runtime.kernels.key_index`.

Shapes: T tokens, C hidden, X compressed query values, H heads, D their values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from triptych.core.runtime.kernels.key_index import ChoiceRule, choose_keys
from triptych.core.runtime.kernels.kv_pages import LatentPages
from triptych.core.runtime.kernels.latent_attention import write_latents
from triptych.core.runtime.kernels.rotary import rotary
from triptych.core.runtime.layers.attention import LatentShape, PagedStep
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.norm import LayerNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyIndexConfig:
    """`num_heads` of `head_dim` values choose `num_chosen` keys for each token.

    Their first values are rotated as those of the layer, in pairs that are adjacent if it
    `is_interleaved`.
    """

    num_heads: int
    head_dim: int
    num_chosen: int
    is_interleaved: bool = False
    norm_eps: float = 1e-6

    @property
    def shape(self) -> LatentShape:
        """The cells of the index."""
        return LatentShape(num_heads=self.num_heads, head_dim=self.head_dim, value_dim=0)

    @property
    def rule(self) -> ChoiceRule:
        """The choice; the weights of heads are divided by the root of their number."""
        return ChoiceRule(self.num_chosen, (self.head_dim * self.num_heads) ** -0.5)

    @property
    def position_values(self) -> int:
        """The most values of a position that the index holds; slots count as four each."""
        return 2 * (1 + self.num_heads) * self.head_dim + 4 * self.num_chosen


class KeyIndex:
    """Keys and weights of heads from the layer's input, queries from its compressed queries.

    `sizes` are those of both inputs; `cells` is the place of its pages in the cache. The layer
    prepares its projections.
    """

    def __init__(
        self,
        config: KeyIndexConfig,
        *,
        sizes: tuple[int, int],
        cells: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config, self.cells = config, cells
        hidden, num_queries = sizes
        new = partial(Linear, has_bias=False, dtype=dtype, device=device)
        self.key = new(hidden, config.head_dim)
        self.queries = new(num_queries, config.num_heads * config.head_dim)
        self.weights = new(hidden, config.num_heads)
        self.norm = LayerNorm(
            config.head_dim, eps=config.norm_eps, dtype=dtype, device=device, has_bias=True
        )

    def linears(self) -> Iterator[Linear]:
        """Iterate over its projections."""
        yield from (self.key, self.queries, self.weights)

    def __call__(
        self,
        x_TC: torch.Tensor,
        q_TX: torch.Tensor,
        turned: tuple[torch.Tensor, torch.Tensor],
        step: PagedStep,
    ) -> None:
        """Write this step's keys, and choose the keys of its tokens where there are too many."""
        turn = partial(
            rotary,
            cos_T1R=turned[0],
            sin_T1R=turned[1],
            is_interleaved=self.config.is_interleaved,
        )
        pages, rule = step.kv.pages[self.cells], self.config.rule
        assert isinstance(pages, LatentPages)
        key_TD = turn(self.norm(self.key(x_TC)).unsqueeze(1)).squeeze(1)
        write_latents(key_TD, pages, step.batch)
        step.chosen = None
        if rule.is_needed(step.batch):
            q_THD = turn(self.queries(q_TX).unflatten(1, (-1, self.config.head_dim)))
            weights_TH = self.weights(x_TC, out_dtype=torch.float32)
            step.chosen = choose_keys(q_THD, weights_TH, pages, step.batch, rule)
