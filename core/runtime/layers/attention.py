"""Self-attention over the paged cache, and the cache's storage.

Owns the projections of one layer and the memory of all layers' keys and values. Knows nothing of
leases: a page is a number.

Shapes: T tokens, C hidden, H query heads, K key-value heads, D head dim, N pages, P page size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import TYPE_CHECKING

import torch

from triptych.core.kv.parts import PartKind
from triptych.core.runtime.kernels.kv_pages import KvPages, LatentPages, head_bytes
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.paged_attention import (
    AttentionBatch,
    AttentionRule,
    paged_attention,
)
from triptych.core.runtime.kernels.rope_write import HeadNorm, HeadRules, Rotation, rope_write
from triptych.core.runtime.layers.hidden_rows import HiddenShape
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.norm import NormKind
from triptych.core.runtime.layers.parallel import row_parallel
from triptych.core.runtime.layers.shards import HeadShards, head_shards
from triptych.core.runtime.layers.states import LayerState, RowStates, StateBatch, state_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triptych.core.runtime.devices.rank_group import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """The cells of one layer: `num_heads` query heads read them.

    No layer reads further back than `window` tokens, itself included; `None`: all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = field(default=None, repr=False)

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
    """The shape of one model's cache: `shapes` has an entry for each kind of cells of a layer.

    `states` has one for each recurrent layer. If it is `read_by_torch`, CPU kernels do not choose
    the order of values in a page. Layers with a window may have `num_window_pages` of their own
    (`core.kv.windows`): `page_bytes` then counts the other layers, `window_bytes` these. With
    `hidden` a page also holds a row of hidden states for each token.
    """

    shapes: tuple[KvShape, ...]
    page_size: int
    dtype: torch.dtype
    states: tuple[LayerState, ...] = ()
    read_by_torch: bool = False
    num_window_pages: int = 0
    hidden: HiddenShape | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys and values of all its layers, and rows of hidden states."""
        row_bytes = 0 if self.hidden is None else self.hidden.token_bytes
        return self._bytes(in_window=False) + self.page_size * row_bytes

    @property
    def window_bytes(self) -> int:
        """Bytes of one page of the layers with a window; 0 if they have none of their own."""
        return self._bytes(in_window=True)

    def _bytes(self, *, in_window: bool) -> int:
        shapes = [shape for shape in self.shapes if self.is_windowed(shape) == in_window]
        return self.page_size * sum(shape.token_bytes(self.dtype) for shape in shapes)

    def is_windowed(self, shape: KvShape) -> bool:
        """Whether the cells of a layer are in pages of the layers with a window."""
        return self.num_window_pages > 0 and shape.window is not None

    @property
    def longest_window(self) -> int:
        """The longest window of a layer that has one; 0 without any."""
        return max((shape.window or 0 for shape in self.shapes), default=0)

    @property
    def state_bytes(self) -> int:
        """Bytes of a row's state: of a slot, or of a snapshot."""
        return state_bytes(self.states)

    @property
    def part_bytes(self) -> dict[PartKind, int]:
        """Bytes of each kind of a page's parts, of those that the model has."""
        sizes = {
            PartKind.FULL: self.page_bytes,
            PartKind.WINDOW: self.window_bytes,
            PartKind.STATE: self.state_bytes,
        }
        return {kind: num_bytes for kind, num_bytes in sizes.items() if num_bytes}

    @property
    def widest(self) -> KvShape:
        """The layer with the most values."""
        return max(self.shapes, key=lambda shape: shape.num_kv_heads * shape.head_dim)

    def __str__(self) -> str:
        """The same text for equal layouts: runs of layers that are alike are counted."""
        runs = (f"{len(list(run))} x {kind}" for kind, run in groupby(self.shapes + self.states))
        windows = f"; {self.longest_window} seen of windows" if self.num_window_pages else ""
        hidden = "" if self.hidden is None else f"; rows of {self.hidden.size} {self.hidden.dtype}"
        return f"{', '.join(runs)}; pages of {self.page_size} {self.dtype}{windows}{hidden}"


class KvCache:
    """Keys and values of all layers, allocated once: `pages` has an entry for each shape.

    Holds one page more than requested: the null page (see `core.runtime.kernels.paged_attention`).
    So it does of the pages of layers with a window, if they have pages of their own: the layers of
    `windowed`.
    On a CPU, `native` are the kernels that read and write it, if it is within their limits: a page
    then has the order of native/pages.h. With `None` torch does. The states of recurrent layers
    lie in `states`, for rows in `num_slots` batch slots, and `num_snapshots` more; rows of hidden
    states, if the layout has any, in `hidden`, `[N, P, W]`.
    """

    __slots__ = (
        "hidden",
        "layout",
        "native",
        "num_pages",
        "num_window_pages",
        "pages",
        "states",
        "windowed",
    )

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
        self.num_pages = num_pages + 1
        """The number of pages, including the null page."""
        self.num_window_pages = layout.num_window_pages + 1
        self.windowed = tuple(map(layout.is_windowed, layout.shapes))
        self.states: RowStates | None = None
        if layout.states:
            self.states = RowStates(layout.states, num_slots, num_snapshots, device)
        self.native = native if native is not None and _can_hold(native, layout) else None
        self.pages = [
            shape.new_pages(
                self.num_window_pages if is_windowed else self.num_pages,
                *(layout.page_size, layout.dtype, device),
            )
            for shape, is_windowed in zip(layout.shapes, self.windowed, strict=True)
        ]
        self.hidden: torch.Tensor | None = None
        if layout.hidden is not None:
            self.hidden = layout.hidden.new_pages(self.num_pages, layout.page_size, device)
        for tensor in self.tensors:
            tensor[-1].zero_()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that store the pages, along their first axis."""
        hidden = () if self.hidden is None else (self.hidden,)
        return (*chain.from_iterable(pages.tensors for pages in self.pages), *hidden)


def _can_hold(native: NativeKernels, layout: KvLayout) -> bool:
    """Whether the kernels read and write the cells of every layer."""
    fits = all(shape.fits(native, layout) for shape in set(layout.shapes))
    return fits and not layout.read_by_torch


@dataclass(slots=True)
class PagedStep:
    """A step's input to the layers: the cache, and the places of tokens and states in it.

    `states` are those of a model with recurrent layers. `chosen` are the keys that the last layer
    with an index has chosen, if there are more (`core.runtime.kernels.key_index`).
    """

    kv: KvCache
    batch: AttentionBatch
    states: StateBatch | None = None
    chosen: AttentionBatch | None = None

    def batch_of(self, cells: int) -> AttentionBatch:
        """The batch with the pages of the layer that stores these cells."""
        windowed = self.batch.windowed
        return windowed if windowed is not None and self.kv.windowed[cells] else self.batch


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNormConfig:
    """The norm of query and key heads, before their rotation or after it.

    Each head is normalized by the same weights, by its own (`own_weights`), or all query heads as
    one row and all key heads as another (`is_joint`). There may be no weights, or centred ones (see
    `core.runtime.layers.norm`).
    """

    eps: float
    kind: NormKind = "rms"
    has_weights: bool = True
    has_own_weights: bool = False
    is_joint: bool = False
    is_after_rotation: bool = False
    is_centred: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """One layer's attention. `window` counts the tokens seen, itself included; `None`: all.

    `is_chunked`, `soft_cap` and sinks are those of `AttentionRule`. `scale` is that of the
    scores, 1 / sqrt(head_dim) unless given. A layer with `reads_layer` stores no keys: it reads
    those of that earlier layer. `value_norm_eps` normalizes values without weights;
    `values_are_keys`: they are the keys before norm and rotation. With a `has_output_gate` the
    result of a head is multiplied by the sigmoid of as many more outputs of the first
    projection, and all results by `out_scale`. `uses_local_rope` and `scales_queries`: see
    `DecoderConfig`. In a model that is divided over ranks, head counts are this rank's, and
    `shards` says which heads of all they are.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    head_norm: HeadNormConfig | None = None
    value_norm_eps: float | None = None
    values_are_keys: bool = False
    window: int | None = None
    is_chunked: bool = False
    uses_rope: bool = True
    uses_local_rope: bool = False
    has_interleaved_rope: bool = False
    scales_queries: bool = False
    scale: float | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    has_output_gate: bool = False
    out_scale: float = 1.0
    reads_layer: int | None = None
    shards: HeadShards | None = None

    @property
    def num_stored_heads(self) -> int:
        """The key-value heads that the layer projects and stores."""
        return self.num_kv_heads if self.reads_layer is None else 0

    @property
    def num_outputs(self) -> int:
        """The outputs of the projection of queries, keys and values, and of the gate."""
        num_queries = (1 + self.has_output_gate) * self.num_heads
        return (num_queries + 2 * self.num_stored_heads) * self.head_dim

    @property
    def shape(self) -> KvShape:
        """The cells that the layer reads."""
        return KvShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            window=self.window,
        )

    @property
    def shapes(self) -> tuple[KvShape, ...]:
        """All cells of the layer."""
        return (self.shape,)

    @property
    def position_values(self) -> int:
        """The most values of a position that the layer holds, apart from the residual stream."""
        num_queries = (2 + 2 * self.has_output_gate) * self.num_heads
        return (num_queries + 4 * self.num_kv_heads) * self.head_dim

    @property
    def gathered_values(self) -> int:
        """The values that attention by torch gathers for each key."""
        return 2 * self.num_kv_heads * self.head_dim

    def of_rank(self, rank: int, num_ranks: int) -> AttentionConfig:
        """The part of a rank."""
        shards = head_shards(self.num_heads, self.num_kv_heads, rank, num_ranks)
        num_heads, num_kv_heads = shards.queries.length, shards.keys.length
        return replace(self, num_heads=num_heads, num_kv_heads=num_kv_heads, shards=shards)


class QueryKeyNorm:
    """The weights of a norm of query and key heads: fill `query` and `key`, then `prepare`."""

    def __init__(
        self, config: AttentionConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert config.head_norm is not None
        self.config = config.head_norm
        self._counts = config.num_heads, config.num_stored_heads
        kept = torch.float32 if self.config.is_centred else dtype
        is_shared = not (self.config.has_own_weights or self.is_joint)
        self.query, self.key = (
            torch.empty(
                (config.head_dim,) if is_shared and count else (count, config.head_dim),
                dtype=kept,
                device=device,
            )
            for count in (self._counts if self.config.has_weights else (0, 0))
        )

    @property
    def is_joint(self) -> bool:
        """Whether all heads are normalized as one row."""
        return self.config.is_joint

    def prepare(self) -> HeadNorm:
        """The norm with a row of weights for each head."""
        if self.config.has_weights:
            pairs = zip((self.query, self.key), self._counts, strict=True)
            rows = [weight.expand(count, weight.shape[-1]) for weight, count in pairs]
            weight_XD = torch.cat(rows) + self.config.is_centred
        else:
            weight_XD = self.query.new_ones(sum(self._counts), self.query.shape[1])
        kind, eps = self.config.kind, self.config.eps
        return HeadNorm(weight_XD, eps, kind, self.is_joint, self.config.is_after_rotation)


@dataclass(frozen=True, slots=True)
class StepPositions:
    """The positions of a step as layers use them: rows of rotations, and scales of queries.

    `local` rotates the layers with local frequencies. `query_scale_T` is float32.
    """

    full: tuple[torch.Tensor, torch.Tensor]
    local: tuple[torch.Tensor, torch.Tensor]
    query_scale_T: torch.Tensor | None = None

    def rotation(self, config: AttentionConfig) -> Rotation | None:
        """The rotation of a layer."""
        rows = self.local if config.uses_local_rope else self.full
        return Rotation(*rows, config.has_interleaved_rope) if config.uses_rope else None


class Attention:
    """Fused query-key-value projection, per-head norm, rotation, paged attention, output.

    `cells` is the index of the layer's pages in the cache.
    """

    def __init__(
        self,
        config: AttentionConfig,
        *,
        cells: int,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
    ) -> None:
        self.config, self.cells = config, cells
        num_heads, head_dim = config.num_heads, config.head_dim
        self.qkv = Linear(
            config.hidden_size,
            config.num_outputs,
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
        self.norm: QueryKeyNorm | None = None
        if config.head_norm is not None:
            self.norm = QueryKeyNorm(config, dtype=dtype, device=device)
        self.sinks_H: torch.Tensor | None = None
        if config.has_sinks:
            self.sinks_H = torch.empty(num_heads, dtype=dtype, device=device)
        self.rules: HeadRules | None = None
        self.rule = AttentionRule(
            scale=head_dim**-0.5 if config.scale is None else config.scale,
            window=config.window,
            is_chunked=config.is_chunked,
            soft_cap=config.soft_cap,
            sinks_H=self.sinks_H,
        )

    def linears(self) -> Iterator[Linear]:
        """Iterate over its projections."""
        yield from (self.qkv, self.out)

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        self.qkv.prepare(native)
        self.out.prepare(native)
        norm = None if self.norm is None else self.norm.prepare()
        stores = self.config.reads_layer is None
        self.rules = HeadRules(norm, self.config.value_norm_eps, stores)

    def __call__(
        self,
        x_TC: torch.Tensor,
        residual_TC: torch.Tensor | None,
        positions: StepPositions,
        step: PagedStep,
    ) -> torch.Tensor:
        """Attend, writing this step's keys and values first. Adds to the residual where given."""
        config, batch = self.config, step.batch_of(self.cells)
        q_THD, gate_THD = self.write(x_TC, positions, step)
        if config.scales_queries:
            assert positions.query_scale_T is not None
            q_THD = q_THD * positions.query_scale_T.to(q_THD.dtype).view(-1, 1, 1)
        out_THD = paged_attention(q_THD, step.kv.pages[self.cells], batch, self.rule)
        if gate_THD is not None:
            out_THD = out_THD * gate_THD.sigmoid()
        if config.out_scale != 1.0:
            out_THD = out_THD * config.out_scale
        return self.out(out_THD.flatten(1), residual_TC)

    def write(
        self, x_TC: torch.Tensor, positions: StepPositions, step: PagedStep
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Write keys and values without attending; returns queries, and the gate if there is one.

        Both are `[T, H, D]`.
        """
        config, batch = self.config, step.batch_of(self.cells)
        assert self.rules is not None, "call prepare() before the first step"
        qkv_TXD = self.qkv(x_TC).unflatten(1, (-1, config.head_dim))
        gate_THD: torch.Tensor | None = None
        if config.has_output_gate:
            qkv_TXD, gate_THD = qkv_TXD.tensor_split((-config.num_heads,), dim=1)
            qkv_TXD = qkv_TXD.contiguous()
        pages = step.kv.pages[self.cells]
        q_THD = rope_write(qkv_TXD, self.rules, positions.rotation(config), pages, batch)
        return q_THD, gate_THD
