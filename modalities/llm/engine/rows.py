"""Models of transformers that keep their own attention, over our paged cache.

Owns a cache of transformers' interface whose layers are our pages. Each row of a step runs by
itself, with the masks, biases and positions that its class derives from the length of that cache,
so any class that keeps its keys and values in such a cache can run. Slower than `bridge`, where all
rows are one sequence: a layer copies the row's keys and values from their pages. Knows neither
configurations nor checkpoints.

Shapes: T tokens of a row, S of its keys, K key-value heads, D head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicIndexedLayer

from triptych.core.errors import WeightsError
from triptych.core.runtime.kernels.kv_pages import LatentPages, read_cells
from triptych.core.runtime.kernels.latent_attention import write_latents
from triptych.core.runtime.kernels.paged_attention import AttentionBatch, write_pages
from triptych.core.runtime.layers.attention import KvShape, LatentShape, PagedStep
from triptych.modalities.llm.engine.bridge import CachePlan, LayerPlan, refusal, widened

MAX_TOKENS = 128
"""Tokens of a row that run at once: scores of all heads are kept for each."""
_OTHER_TOKENS = "its class caches other tokens than those that it is given"


def cache_argument(model: Any, body: Any) -> str:
    """The name by which a class takes its cache. Raises `WeightsError` if it takes none."""
    taken = [name for kind in (body, model) for name in inspect.signature(kind.forward).parameters]
    names = [name for name in ("cache", "past_key_values") if name in taken]
    if not names:
        raise WeightsError(refusal("its class keeps no keys and values between steps"))
    return names[0]


def plan_of_cache(cache: Cache, argument: str, num_tokens: int) -> CachePlan:
    """The plan of a cache that one forward pass of a class over some tokens has filled."""
    shapes, layers = list[KvShape](), dict[int, LayerPlan]()
    for index, layer in enumerate(cache.layers):
        if not layer.is_initialized:
            continue
        keys, values = layer.keys, layer.values
        if keys.dim() != 4 or keys.shape[:3] != values.shape[:3]:
            raise WeightsError(refusal("its layers cache keys and values of different shapes"))
        if keys.shape[2] != num_tokens:
            raise WeightsError(refusal(_OTHER_TOKENS))
        cells, index_cells = len(shapes), None
        shapes.append(_shape(keys.shape[1], keys.shape[3], values.shape[3]))
        if layer.is_indexer_initialized:
            index_cells = len(shapes)
            shapes.append(_shape(1, layer.indexer_keys.shape[2], 0))
        layers[index] = LayerPlan(cells, stores=True, index_cells=index_cells)
    if not layers:
        raise WeightsError(refusal("it keeps no keys and values"))
    return CachePlan(layers, tuple(shapes), argument)


def _shape(num_heads: int, key_dim: int, value_dim: int) -> KvShape:
    """Cells of keys and values; one row of both where a single head has different sizes."""
    if num_heads == 1 and key_dim != value_dim:
        return LatentShape(num_heads=1, head_dim=key_dim + value_dim, value_dim=0)
    head_dim = max(key_dim, value_dim)
    return KvShape(num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim)


def new_cache() -> Cache:
    """An empty cache that keeps all that a class puts into it."""
    return Cache(layer_class_to_replicate=DynamicIndexedLayer)


def row_values(plan: CachePlan, num_heads: int, max_length: int) -> int:
    """The most values that attention holds apart from a step: a layer's keys, and scores twice."""
    cells = max(shape.num_kv_heads * shape.head_dim for shape in plan.shapes)
    return max_length * (4 * cells + 4 * num_heads * MAX_TOKENS)


RunRow = Callable[[slice, Mapping[str, Any]], Any]
"""Runs some tokens of a step, all of one row, with arguments for its cache: the body's output."""


def run_rows(run: RunRow, step: PagedStep, plan: CachePlan) -> torch.Tensor:
    """Run a model on each row of a step: `hidden_TC` of all rows."""
    hidden = []
    for row in _rows(step):
        cache = {plan.cache_argument: _cache_of(row, plan), "use_cache": True}
        hidden.append(run(slice(row.start, row.stop), cache).last_hidden_state[0])
    return torch.cat(hidden)


@dataclass(frozen=True, slots=True)
class _Row:
    """Tokens `start .. stop - 1` of a step, all of one row, after `num_past` others of it.

    `slots_S` are the places of its keys, those of these tokens last.
    """

    step: PagedStep
    start: int
    stop: int
    num_past: int
    slots_S: torch.Tensor

    @property
    def num_keys(self) -> int:
        return len(self.slots_S)

    def extend(
        self, cells: int, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values; returns all of the row, `[1, K, S, D]`."""
        pages, batch = self.step.kv.pages[cells], self._batch
        if isinstance(pages, LatentPages):
            write_latents(torch.cat((k_TKD, v_TKD), dim=2).squeeze(1), pages, batch)
            rows_1KSD = self._read(pages.k_NPKD, pages.k_scale_NPK, k_TKD.dtype)
            k_1KSD, v_1KSD = rows_1KSD.tensor_split((k_TKD.shape[2],), dim=3)
            return k_1KSD, v_1KSD
        head_dim = pages.k_NPKD.shape[-1]
        write_pages(widened(k_TKD, head_dim), widened(v_TKD, head_dim), pages, batch)
        k_1KSD = self._read(pages.k_NPKD, pages.k_scale_NPK, k_TKD.dtype)
        v_1KSD = self._read(pages.v_NPKD, pages.v_scale_NPK, k_TKD.dtype)
        return k_1KSD[..., : k_TKD.shape[2]], v_1KSD[..., : v_TKD.shape[2]]

    @property
    def _batch(self) -> AttentionBatch:
        assert self.step.batch.native is None, "these cells are in torch's order"
        return replace(self.step.batch, write_slots_T=self.slots_S[self.num_past :])

    def _read(
        self, cells: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        x_SKD = read_cells(cells, scale, self.slots_S, dtype)
        return x_SKD.transpose(0, 1).unsqueeze(0)


def _rows(step: PagedStep) -> Iterator[_Row]:
    """The rows of a step, in pieces."""
    batch, start = step.batch, 0
    page_size = step.kv.layout.page_size
    sizes = zip(batch.host_query_lengths_B.tolist(), batch.host_context_lengths_B, strict=True)
    for row, (num_tokens, num_keys) in enumerate(sizes):
        positions_S = torch.arange(int(num_keys), device=batch.page_table_BM.device)
        slots_S = batch.page_table_BM[row][positions_S // page_size] * page_size
        slots_S += positions_S % page_size
        end, num_past = start + num_tokens, int(num_keys) - num_tokens
        for first in range(start, end, MAX_TOKENS):
            stop, num_before = min(first + MAX_TOKENS, end), num_past + first - start
            yield _Row(step, first, stop, num_before, slots_S[: num_before + stop - first])
        start = end


def _cache_of(row: _Row, plan: CachePlan) -> Cache:
    layers = [_PagedLayer(row, plan.layers.get(i)) for i in range(max(plan.layers) + 1)]
    return Cache(layers=layers)


class _PagedLayer(DynamicIndexedLayer):  # type: ignore[misc]  # transformers has no types
    """One layer's keys and values of a row, in pages."""

    def __init__(self, row: _Row, plan: LayerPlan | None) -> None:
        super().__init__()
        self._row, self._plan = row, plan

    @property
    def _known(self) -> LayerPlan:
        if self._plan is None:
            raise WeightsError(refusal("its layers are not those of its first pass"))
        return self._plan

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add this step's keys and values, `[1, K, T, D]`; returns all."""
        k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (keys, values))
        if len(k_TKD) != self._row.stop - self._row.start:
            raise WeightsError(refusal(_OTHER_TOKENS))
        self.keys, self.values = self._row.extend(self._known.cells, k_TKD, v_TKD)
        self.is_initialized = True
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Add this step's keys of the index, `[1, T, D]`; returns all."""
        cells = self._known.index_cells
        assert cells is not None
        keys_T1D = indexer_key_states[0].unsqueeze(1)
        self.indexer_keys = self._row.extend(cells, keys_T1D, keys_T1D[..., :0])[0][:, 0]
        self.is_indexer_initialized = True
        return self.indexer_keys

    def get_seq_length(self) -> int:
        """The keys that the layer holds."""
        return self._row.num_keys if self.is_initialized else self._row.num_past
