"""The bridge from transformers' attention interface to our paged cache.

Owns the name of our attention in transformers' registry, the plan of a model's layers (which cells
each of them reads and stores), and how that plan is found: the class's own forward runs once on the
meta device, and its attention calls are recorded. Knows neither configurations nor checkpoints.

Cells are as wide as the wider of key and value; the other is padded with zeros, which change no
product. Those of latent attention are rows (`latents`). Layers that hand on the keys of an earlier
layer read that layer's cells.

Shapes: T tokens, H heads, K key-value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.nn.functional import pad

from triptych.core.errors import WeightsError
from triptych.core.runtime.kernels.kv_pages import LatentPages
from triptych.core.runtime.kernels.latent_attention import latent_attention, write_latents
from triptych.core.runtime.kernels.paged_attention import (
    AttentionBatch,
    AttentionRule,
    paged_attention,
    write_pages,
)
from triptych.core.runtime.layers.attention import KvLayout, KvShape, PagedStep
from triptych.modalities.llm.engine.latents import RowExpansion, expansion_of
from triptych.modalities.llm.engine.recurrence import RECURRENT, RecurrentModule

if TYPE_CHECKING:
    from triptych.modalities.llm.engine.own_cache import OwnCache

ATTENTION = "triptych_paged"
"""The name of our attention in transformers' registry."""
OWN_ATTENTION = "eager"
"""The attention of a class that all of them have, written out."""
STEP = "triptych_step"
"""The argument of the model's forward that reaches every attention call."""

_UNSUPPORTED = ("position_bias", "indices", "head_mask")


def problem(reason: str) -> str:
    """The beginning of a message on a model of transformers, without a full stop."""
    return f"This model cannot run on the paged cache: {reason}"


def refusal(reason: str) -> str:
    """The message that refuses a model of transformers."""
    return f"{problem(reason)}. Choose a model of another family."


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The cells of one layer: their index in `CachePlan.shapes`, and whether it stores them.

    `mask_window` is the window of a layer whose class has it in its mask alone. `index_cells` are
    those of the keys by which a layer chooses what it attends to. Unless it `sees_blocks`, the
    batch's blocks do not hold in the layer.
    """

    cells: int
    stores: bool
    mask_window: int | None = None
    index_cells: int | None = None
    sees_blocks: bool = True


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The layers of a model by their index, the cells that they share, and recurrent modules.

    With a `cache_argument`, each row of a step runs by itself with the class's own attention, which
    takes its cache by that name (`rows`). With an `own` cache, so it does with the class's own
    cache, of which cells and states hold the parts (`own_rows`).
    """

    layers: Mapping[int, LayerPlan]
    shapes: tuple[KvShape, ...]
    cache_argument: str = ""
    recurrent: tuple[RecurrentModule, ...] = ()
    own: OwnCache | None = None

    @property
    def by_rows(self) -> bool:
        """Whether each row runs by itself."""
        return bool(self.cache_argument) or self.own is not None

    @property
    def has_states(self) -> bool:
        """Whether a row has a state."""
        return bool(self.recurrent) or self.own is not None

    @property
    def recurrent_parts(self) -> list[tuple[int, int]]:
        """The states of recurrences, by their layer in a cache's states and number there."""
        if self.own is not None:
            return [(0, number) for number in self.own.recurrent_parts]
        return [
            (layer, number)
            for layer, module in enumerate(self.recurrent)
            for number, (key, _) in enumerate(module.states)
            if key.kind == RECURRENT
        ]

    def layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The shape of the model's cache."""
        shapes: tuple[KvShape, ...] = self.shapes
        states = tuple(module.layer_state for module in self.recurrent)
        if self.own is not None:
            shapes, states = self.own.shapes(page_size, dtype), (self.own.line,)
        return KvLayout(
            shapes=shapes,
            page_size=page_size,
            dtype=dtype,
            read_by_torch=self.by_rows,
            states=states,
        )

    def with_mask_windows(self, windows: Mapping[int, int]) -> CachePlan:
        """The plan with windows, by layer, that only masks have."""
        changed = {
            layer: replace(self.layers[layer], mask_window=window)
            for layer, window in windows.items()
        }
        return replace(self, layers={**self.layers, **changed})

    def with_blocks_in(self, layers: Collection[int]) -> CachePlan:
        """The plan in which these layers alone see blocks."""
        changed = {
            layer: replace(plan, sees_blocks=layer in layers) for layer, plan in self.layers.items()
        }
        return replace(self, layers=changed)

    @classmethod
    def of_own(cls, own: OwnCache) -> CachePlan:
        """The plan of a class with its own cache."""
        return cls({}, (), own=own)

    @classmethod
    def of_shapes(cls, shapes: Mapping[int, KvShape]) -> CachePlan:
        """The plan of layers that all store cells of their own, by layer."""
        layers = {layer: LayerPlan(cells, stores=True) for cells, layer in enumerate(shapes)}
        return cls(layers, tuple(shapes.values()))


@dataclass(slots=True)
class BridgedStep:
    """A step on its way through the model. `windows`, if given, receives those of attention."""

    step: PagedStep
    plan: CachePlan
    windows: dict[int, int | None] | None = None
    _plain_batch: AttentionBatch | None = None

    def attend(
        self,
        layer: int,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """Store the step's keys and values, and attend to the row's pages: `out_THD`."""
        plan = self._plan_of(layer)
        pages, (q_THD, k_TKD, v_TKD) = self.step.kv.pages[plan.cells], qkv
        head_dim, value_dim = pages.k_NPKD.shape[-1], v_TKD.shape[-1]
        if k_TKD.shape[1] != pages.k_NPKD.shape[2] or max(q_THD.shape[2], value_dim) > head_dim:
            raise WeightsError(refusal("its layers cache keys and values of different shapes"))
        if plan.stores:
            keys, values = widened(k_TKD, head_dim), widened(v_TKD, head_dim)
            write_pages(keys, values, pages, self.step.batch)
        rule = self._rule(layer, plan, q_THD.shape[2], options)
        out_THD = paged_attention(widened(q_THD, head_dim), pages, self._batch_for(plan), rule)
        return out_THD[..., :value_dim]

    def attend_to_rows(
        self,
        layer: int,
        expansion: RowExpansion,
        inputs: tuple[torch.Tensor, torch.Tensor],
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """Store the step's compressed rows, and attend to the row's pages: `out_THD`.

        `inputs` are the queries `[T, H, D]` and the rows `[T, D]`.
        """
        plan, (q_THD, rows_TD) = self._plan_of(layer), inputs
        pages = self.step.kv.pages[plan.cells]
        assert isinstance(pages, LatentPages)
        write_latents(rows_TD, pages, self.step.batch)
        rule = self._rule(layer, plan, q_THD.shape[2], options)
        queries_THD = expansion.queries(q_THD)
        return expansion.results(latent_attention(queries_THD, pages, self._batch_for(plan), rule))

    def _plan_of(self, layer: int) -> LayerPlan:
        plan = self.plan.layers.get(layer)
        if plan is None:
            raise WeightsError(refusal("its layers are not those of its first pass"))
        return plan

    def _rule(
        self, layer: int, plan: LayerPlan, head_dim: int, options: Mapping[str, Any]
    ) -> AttentionRule:
        window = options.get("sliding_window")
        if self.windows is not None:
            self.windows[layer] = window
        scale: float | None = options.get("scaling")
        return AttentionRule(
            scale=head_dim**-0.5 if scale is None else scale,
            window=window or plan.mask_window,
            soft_cap=options.get("softcap"),
            sinks_H=options.get("s_aux"),
        )

    def _batch_for(self, plan: LayerPlan) -> AttentionBatch:
        """The step's batch, without blocks for a layer that sees none."""
        batch = self.step.batch
        if batch.blocks_2T is None or plan.sees_blocks:
            return batch
        if self._plain_batch is None:
            self._plain_batch = replace(batch, blocks_2T=None, groups={})
        return self._plain_batch


def widened(x_TXD: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Heads padded with zeros to `head_dim`."""
    missing = head_dim - x_TXD.shape[-1]
    return pad(x_TXD, (0, missing)) if missing else x_TXD


@dataclass(slots=True)
class Tracing:
    """The attention calls of one forward pass on the meta device, in order of layers."""

    _layers: dict[int, LayerPlan] = field(default_factory=dict)
    _shapes: list[KvShape] = field(default_factory=list)
    _keys: list[torch.Tensor] = field(default_factory=list)

    def record(
        self,
        layer: int,
        key_1KTD: torch.Tensor,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """Record a call. Returns an output of the right shape."""
        q_THD, k_TKD, v_TKD = qkv
        shape = KvShape(
            num_heads=q_THD.shape[1],
            num_kv_heads=k_TKD.shape[1],
            head_dim=max(q_THD.shape[2], v_TKD.shape[2]),
        )
        if q_THD.shape[2] != k_TKD.shape[2] or shape.num_heads % shape.num_kv_heads:
            raise WeightsError(refusal("its queries do not fit its keys"))
        self._store(layer, key_1KTD, shape)
        return q_THD.new_empty((*q_THD.shape[:2], v_TKD.shape[2]))

    def record_rows(
        self, layer: int, key_1KTD: torch.Tensor, expansion: RowExpansion
    ) -> torch.Tensor:
        """Record a call of latent attention. Returns an output of the right shape."""
        self._store(layer, key_1KTD, expansion.shape)
        sizes = key_1KTD.shape[2], expansion.shape.num_heads, expansion.value_dim
        return key_1KTD.new_empty(sizes)

    def _store(self, layer: int, key_1KTD: torch.Tensor, shape: KvShape) -> None:
        if layer in self._layers:
            raise WeightsError(refusal("a layer of it attends twice in a step"))
        owners = [index for index, key in enumerate(self._keys) if key is key_1KTD]
        if owners:
            self._share(owners[0], shape)
        else:
            self._shapes.append(shape)
            self._keys.append(key_1KTD)
        cells = owners[0] if owners else len(self._shapes) - 1
        self._layers[layer] = LayerPlan(cells, stores=not owners)

    def _share(self, cells: int, shape: KvShape) -> None:
        """Let one more layer read some cells."""
        owner = self._shapes[cells]
        self._shapes[cells] = replace(owner, num_heads=max(owner.num_heads, shape.num_heads))

    def plan(self, num_layers: int, recurrent: tuple[RecurrentModule, ...]) -> CachePlan:
        """The plan; raises `WeightsError` unless every layer attends once, or some are recurrent.

        A model with recurrent modules may have layers without a cache, too.
        """
        if not recurrent and sorted(self._layers) != list(range(num_layers)):
            raise WeightsError(refusal("not every layer of it is attention over its own cache"))
        return CachePlan(self._layers, tuple(self._shapes), recurrent=recurrent)


def _attend(
    module: torch.nn.Module,
    query_1HTD: torch.Tensor,
    key_1KTD: torch.Tensor,
    value_1KTD: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface on our pages; the batch defines what a row sees.

    No mask is built for our attention, so any mask is the model's own.
    """
    step = options.get(STEP)
    if not isinstance(step, (BridgedStep, Tracing)):
        raise WeightsError(refusal("it does not hand its arguments down to attention"))
    is_biased = any(options.get(name) is not None for name in _UNSUPPORTED)
    if is_biased or attention_mask is not None:
        raise WeightsError(refusal("its attention has biases"))
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # every attention module has one
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
    expansion = expansion_of(module)
    if isinstance(step, Tracing) and expansion is not None:
        out_THD = step.record_rows(layer, key_1KTD, expansion)
    elif isinstance(step, Tracing):
        out_THD = step.record(layer, key_1KTD, (q_THD, k_TKD, v_TKD), options)
    elif expansion is not None:
        out_THD = step.attend_to_rows(layer, expansion, (q_THD, k_TKD[:, 0]), options)
    else:
        out_THD = step.attend(layer, (q_THD, k_TKD, v_TKD), options)
    return out_THD.unsqueeze(0), None


# transformers looks attention up by name, and builds no mask for an implementation without a mask
# function.
transformers.AttentionInterface.register(ATTENTION, _attend)
