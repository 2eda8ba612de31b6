"""Self-attention over the paged cache, and the cache's storage.

Owns the projections of one layer and the memory of all layers' keys and values. Knows nothing of
leases: a page is a number.

Shapes: T tokens, C hidden, H query heads, K key-value heads, D head dim, N pages, P page size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import TYPE_CHECKING

import torch

from triptych.core.runtime.kernels.kv_pages import KvPages, LatentPages, head_bytes
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.paged_attention import (
    AttentionBatch,
    AttentionRule,
    paged_attention,
)
from triptych.core.runtime.kernels.rope_write import HeadNorm, Rotation, rope_write
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.parallel import row_parallel
from triptych.core.runtime.layers.shards import HeadShards, head_shards
from triptych.core.runtime.layers.states import LayerState, RowStates, StateBatch, state_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triptych.core.runtime.devices.rank_group import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """The cells of one layer: `num_heads` query heads read them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a token's key and value."""
        return 2 * self.num_kv_heads * head_bytes(self.head_dim, dtype)

    def new_pages(
        self, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> KvPages:
        """Allocate pages of such cells, uninitialized."""
        shape = num_pages, page_size, self.num_kv_heads, self.head_dim
        return KvPages.empty(shape, dtype, device)

    def fits(self, native: NativeKernels, layout: KvLayout) -> bool:
        """Whether the kernels read and write such cells."""
        shape = layout.page_size, self.num_kv_heads, self.head_dim
        return native.can_hold(self.num_heads, shape, layout.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape(KvShape):
    """The cells of a layer whose heads all read one row of `head_dim` values for each token.

    The first `value_dim` of them are also the token's value.
    """

    num_kv_heads: int = 1
    value_dim: int

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a token's row."""
        return head_bytes(self.head_dim, dtype)

    def new_pages(
        self, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> LatentPages:
        """Allocate pages of such rows, uninitialized."""
        shape = num_pages, page_size, self.head_dim
        return LatentPages.of_rows(shape, self.value_dim, dtype, device)

    def fits(self, native: NativeKernels, layout: KvLayout) -> bool:
        """Whether the kernels read and write such rows."""
        return native.can_hold_latents(self.head_dim, layout.page_size, layout.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The shape of one model's cache: `shapes` has an entry for each layer that stores cells.

    `states` has one for each recurrent layer. If it is `read_by_torch`, CPU kernels do not choose
    the order of values in a page.
    """

    shapes: tuple[KvShape, ...]
    page_size: int
    dtype: torch.dtype
    states: tuple[LayerState, ...] = ()
    read_by_torch: bool = False

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys and values of all layers."""
        return self.page_size * sum(shape.token_bytes(self.dtype) for shape in self.shapes)

    @property
    def state_bytes(self) -> int:
        """Bytes of a row's state: of a slot, or of a snapshot."""
        return state_bytes(self.states)

    @property
    def widest(self) -> KvShape:
        """The layer with the most values."""
        return max(self.shapes, key=lambda shape: shape.num_kv_heads * shape.head_dim)

    def __str__(self) -> str:
        """The same text for equal layouts: runs of layers that are alike are counted."""
        runs = (f"{len(list(run))} x {kind}" for kind, run in groupby(self.shapes + self.states))
        return f"{', '.join(runs)}; pages of {self.page_size} {self.dtype}"


class KvCache:
    """Keys and values of all layers, allocated once: `pages` has an entry for each shape.

    Holds one page more than requested: the null page (see `core.runtime.kernels.paged_attention`).
    On a CPU, `native` are the kernels that read and write it, if it is within their limits: a page
    then has the order of native/pages.h. With `None` torch does. The states of recurrent layers
    lie in `states`, for rows in `num_slots` batch slots, and `num_snapshots` more.
    """

    __slots__ = ("layout", "native", "pages", "states")

    def __init__(
        self,
        layout: KvLayout,
        num_pages: int,
        device: torch.device,
        native: NativeKernels | None = None,
        *,
        num_slots: int = 0,
        num_snapshots: int = 0,
    ) -> None:
        self.layout = layout
        self.states: RowStates | None = None
        if layout.states:
            self.states = RowStates(layout.states, num_slots, num_snapshots, device)
        self.native = native if native is not None and _can_hold(native, layout) else None
        self.pages = [
            shape.new_pages(num_pages + 1, layout.page_size, layout.dtype, device)
            for shape in layout.shapes
        ]
        for tensor in self.tensors:
            tensor[-1].zero_()

    @property
    def num_pages(self) -> int:
        """The number of pages, including the null page."""
        return len(self.pages[0].k_NPKD)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that store the pages, along their first axis."""
        return tuple(chain.from_iterable(pages.tensors for pages in self.pages))


def _can_hold(native: NativeKernels, layout: KvLayout) -> bool:
    """Whether the kernels read and write the cells of every layer."""
    fits = all(shape.fits(native, layout) for shape in set(layout.shapes))
    return fits and not layout.read_by_torch


@dataclass(slots=True)
class PagedStep:
    """A step's input to the layers: the cache, and the places of tokens and states in it.

    `states` are those of a model with recurrent layers.
    """

    kv: KvCache
    batch: AttentionBatch
    states: StateBatch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """One layer's attention. `window` counts the tokens seen, itself included; `None`: all.

    `scale` is that of the scores, 1 / sqrt(head_dim) unless given. Weights of head norms may be
    centred (see `core.runtime.layers.norm`). `uses_local_rope`: see `DecoderConfig`. In a model
    that is divided over ranks, head counts are this rank's, and `shards` says which heads of all
    they are.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    qk_norm_eps: float | None = None
    window: int | None = None
    uses_rope: bool = True
    uses_local_rope: bool = False
    has_centred_qk_norm: bool = False
    scale: float | None = None
    shards: HeadShards | None = None

    @property
    def shape(self) -> KvShape:
        """The cells of the layer."""
        return KvShape(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )

    @property
    def position_values(self) -> int:
        """The most values that the layer holds for each position, beside the residual stream."""
        return (2 * self.num_heads + 4 * self.num_kv_heads) * self.head_dim

    @property
    def gathered_values(self) -> int:
        """The values that attention by torch gathers for each key."""
        return 2 * self.num_kv_heads * self.head_dim

    def of_rank(self, rank: int, num_ranks: int) -> AttentionConfig:
        """The part of a rank."""
        shards = head_shards(self.num_heads, self.num_kv_heads, rank, num_ranks)
        num_heads, num_kv_heads = shards.queries.length, shards.keys.length
        return replace(self, num_heads=num_heads, num_kv_heads=num_kv_heads, shards=shards)


class Attention:
    """Fused query-key-value projection, per-head norm, rotation, paged attention, output."""

    def __init__(
        self,
        config: AttentionConfig,
        *,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
    ) -> None:
        self.config = config
        self.layer = layer
        num_heads, head_dim = config.num_heads, config.head_dim
        scale = head_dim**-0.5 if config.scale is None else config.scale
        self._rule = AttentionRule(scale=scale, window=config.window)
        num_outputs = (num_heads + 2 * config.num_kv_heads) * head_dim
        self.qkv = Linear(
            config.hidden_size,
            num_outputs,
            has_bias=config.has_qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.out = row_parallel(
            group,
            (num_heads * head_dim, config.hidden_size),
            has_bias=config.has_out_bias,
            dtype=dtype,
            device=device,
        )
        self.qk_norm_2D: torch.Tensor | None = None
        self._head_norm: HeadNorm | None = None
        if config.qk_norm_eps is not None:
            kept = torch.float32 if config.has_centred_qk_norm else dtype
            self.qk_norm_2D = torch.empty(2, head_dim, dtype=kept, device=device)

    def linears(self) -> Iterator[Linear]:
        """Iterate over its projections."""
        yield from (self.qkv, self.out)

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        self.qkv.prepare(native)
        self.out.prepare(native)
        config = self.config
        if self.qk_norm_2D is not None and config.qk_norm_eps is not None:
            repeats = (config.num_heads, config.num_kv_heads)
            counts = torch.tensor(repeats, device=self.qk_norm_2D.device)
            weight_XD = self.qk_norm_2D.repeat_interleave(counts, dim=0, output_size=sum(repeats))
            weight_XD += config.has_centred_qk_norm
            self._head_norm = HeadNorm(weight_XD, config.qk_norm_eps)

    def __call__(
        self,
        x_TC: torch.Tensor,
        residual_TC: torch.Tensor | None,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        step: PagedStep,
    ) -> torch.Tensor:
        """Attend, writing this step's keys and values first. Adds to the residual where given."""
        config, batch = self.config, step.batch
        is_ready = config.qk_norm_eps is None or self._head_norm is not None
        assert is_ready, "call prepare() before the first step"
        qkv_TXD = self.qkv(x_TC).unflatten(1, (-1, config.head_dim))
        rotation = Rotation(*cos_sin) if config.uses_rope else None
        pages = step.kv.pages[self.layer]
        q_THD = rope_write(qkv_TXD, self._head_norm, rotation, pages, batch)
        out_THD = paged_attention(q_THD, pages, batch, self._rule)
        return self.out(out_THD.flatten(1), residual_TC)
